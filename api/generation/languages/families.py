"""How the models of a family write: which marks surround reasoning and calls, and how their chat template names things.

A family is one entry of `FAMILIES`, and its chat template gives it away. The form of its calls is read in
`tool_formats.py`; `splitter.py` and `channels.py` take its completions apart.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from api.generation.languages.tool_formats import HERMES
from shared.text import grammar
from shared.text.codec import TextCodec

Thinking = Literal["", "open", "may"]  # how a completion begins: not with reasoning, inside it, or perhaps with it
Marks = tuple[str, str]

MESSAGE = "<|message|>"  # Harmony's: a header ends, and its message begins
CHANNEL = "<|channel|>"
START = "<|start|>"
END = "<|end|>"

_THOUGHTS: tuple[Marks, ...] = (  # of families that share the form of their calls, but not these
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True)
class Family:
    """How one family of models writes reasoning and tool calls."""

    name: str
    signs: tuple[tuple[str, ...], ...]  # its chat template has all the texts of one of these
    calls: str = ""  # the form of its calls, by name; "": the family's own
    thoughts: Marks | None = None  # marks of reasoning; None: the usual ones that the template has, if any
    thinks_again: bool = False  # reasoning may come after content, too
    channels: bool = False  # a completion is several messages, each on a channel
    thought_tokens: tuple[str, ...] = ()  # tokens within the marks of reasoning: decoding must not hide them
    call_tokens: tuple[str, ...] = ()  # and within calls
    thought_field: str = "reasoning_content"  # of an earlier turn, as the template calls it

    @property
    def form(self) -> str:
        """Name of the form of its calls."""
        return self.calls or self.name

    def thinking_after(self, prompt: str, marks: Marks) -> Thinking:
        """How a completion of this prompt begins: in reasoning, perhaps with reasoning, or without."""
        if self.channels:
            header, begun, said = prompt[prompt.rfind(START) + 1 :].partition(MESSAGE)
            return "may" if not begun or END in said else "open" if f"{CHANNEL}analysis" in header else ""
        start, end = marks
        written = prompt.rstrip()
        if written.endswith(start):
            return "open"
        return "" if written.endswith(end) else "may"

    def grammar_after_thinking(self, text: str, thinking: Thinking, marks: Marks, codec: TextCodec) -> str:
        """The grammar `text`, before which the model may reason."""
        if not text or not thinking:
            return text
        thought = grammar.until("thought", marks[1], codec)
        if self.channels:
            lark = f"start: {self._to_final(thinking, codec)} @body\n{thought}"
            return grammar.compose(lark, {"body": text})
        opening = "thought BLANK" if thinking == "open" else f"({grammar.mark(marks[0], codec)} thought BLANK)?"
        return grammar.compose(f"start: {opening} @body\nBLANK: /\\n{{0,2}}/\n{thought}", {"body": text})

    def _to_final(self, thinking: Thinking, codec: TextCodec) -> str:
        """Lark for what is before the message on the channel `final`."""
        channel, message, start = (grammar.mark(mark, codec) for mark in (CHANNEL, MESSAGE, START))
        final = f'{channel} "final" {message}'
        if thinking == "open":
            return f'thought {start} "assistant" {final}'
        return f'({channel} "analysis" {message} thought {start} "assistant")? {final}'


# In the order of `mlx_lm.tokenizer_utils._infer_tool_parser`, families that it does not know after those.
FAMILIES: tuple[Family, ...] = (
    Family("minimax_m2", (("<minimax:tool_call>",),)),
    Family(
        "gemma4",
        (("<|tool_call>", "<tool_call|>"),),
        thoughts=("<|channel>thought", "<channel|>"),
        thinks_again=True,
        thought_tokens=("<|channel>",),
        call_tokens=('<|"|>',),
    ),
    Family("function_gemma", (("<start_function_call>",),), call_tokens=("<escape>",)),
    Family("longcat", (("<longcat_tool_call>",),)),
    Family("glm47", (("<arg_key>",),), call_tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    Family("pythonic", (("<|tool_list_start|>",), ("<|tool_call_start|>",))),
    Family("qwen3_coder", (("<tool_call>\\n<function=",), ("<tool_call>\n<function=",))),
    Family(
        "kimi_k2",
        (("<|tool_calls_section_begin|>",),),
        call_tokens=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Family("minicpm5", (('<function name="', '<param name="'),)),
    Family("mistral", (("[TOOL_CALLS]",),), call_tokens=("[CALL_ID]", "[ARGS]")),
    Family("muse_spark", (("<atem:function_calls>",),)),
    Family(
        "harmony",
        (("<|channel|>analysis<|message|>", "<|start|>assistant"),),
        thoughts=("<|channel|>analysis<|message|>", END),
        channels=True,
        thought_tokens=(START, CHANNEL, MESSAGE, "<|constrain|>", "<|call|>", "<|return|>"),
        thought_field="thinking",
    ),
    Family("hermes", (("<tool_call>",),)),
    Family("llama3", (('{"name": function name, "parameters":',),), call_tokens=("<|python_tag|>",)),
)
_BY_NAME = {family.name: family for family in FAMILIES}
_PLAIN = Family("", (), calls=HERMES)  # a template that says nothing: calls are asked for in Hermes' words


@lru_cache(maxsize=64)
def family_of(template: str) -> Family:
    """The family of a model with this chat template, with the marks that the template has around reasoning."""
    family = next((each for each in FAMILIES if any(all(sign in template for sign in s) for s in each.signs)), _PLAIN)
    usual = next((marks for marks in _THOUGHTS if marks[1] in template), None)
    return replace(family, thoughts=family.thoughts or usual)


def named(name: str) -> Family:
    """A family by its name; "" for none."""
    return _BY_NAME.get(name, _PLAIN)
