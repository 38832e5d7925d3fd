"""Pieces that a completion is taken apart into, and the plan by which that is done."""

import msgspec

from shared.text.languages.families import REASONINGS, Reasoning, Thinking
from shared.text.languages.tool_forms import form_of


class SplitPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Marks and tools that a splitter looks for in a completion. It is stored in Redis with the plan."""

    format: str = ""  # of tool calls; "": none are looked for
    tools: bytes = b""  # JSON of their definitions: some forms are read with their types
    parallel: bool = True  # else only the first call counts
    sure: bool = False  # a grammar leaves nothing but calls
    named: bool = False  # the request named the function: OpenAI's finish_reason is then "stop"
    older: bool = False  # a call is shown in OpenAI's older form, `function_call`
    custom: tuple[str, ...] = ()  # names of tools that take free text, whose calls are shown with it
    thinking: Thinking = ""  # open: the prompt ended inside; may: the completion may begin with it
    think_start: str = ""  # "" with reasoning that is not looked for
    think_end: str = ""
    show_thinking: bool = True
    reasoning: str = ""  # marks around reasoning and the answer, by name

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must be visible to be found, even as special tokens."""
        written = self.written
        marks = [self.think_start, self.think_end]
        marks += [*written.tokens, *written.hidden] if written is not None else []
        marks += form_of(self.format).shown if self.format else ()
        return tuple(dict.fromkeys(filter(None, marks)))

    @property
    def written(self) -> Reasoning | None:
        """The marks around reasoning and the answer."""
        return REASONINGS.get(self.reasoning)


class CallPart(msgspec.Struct):
    """New parts of one tool call."""

    index: int  # of the call in the choice
    name: str = ""  # in its first part
    arguments: str = ""  # the next letters of the JSON
    complete: bool = False  # nothing more of it comes
    custom: bool = False  # `arguments` are the text of a tool that takes free text

    def followed_by(self, later: "CallPart") -> "CallPart":
        """This part and the one that came right after it, as one."""
        name, arguments = self.name + later.name, self.arguments + later.arguments
        return CallPart(self.index, name, arguments, later.complete, self.custom)


class ReplyPiece(msgspec.Struct):
    """New reasoning, content and tool calls of one choice."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = []

    def add(self, later: "ReplyPiece") -> None:
        """Take in what came right after."""
        self.content += later.content
        self.reasoning += later.reasoning
        for part in later.calls:
            self.add_part(part)

    def add_part(self, part: CallPart) -> None:
        """Take in more of a call, or the next one."""
        if self.calls and self.calls[-1].index == part.index:
            self.calls = [*self.calls[:-1], self.calls[-1].followed_by(part)]
        else:
            self.calls = [*self.calls, part]
