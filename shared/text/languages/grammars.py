"""Grammars of completions in a model's own language: its calls, what stands around an answer, and reasoning before.

A budget of reasoning is a grammar, too: at most so many tokens, and then the mark that ends it. So it holds wherever
grammars hold: in a batch, with drafts, and on the worker that goes on with a sequence.
"""

from collections.abc import Sequence

from shared.errors import UnsupportedParameterError
from shared.text import grammar
from shared.text.codec import TextCodec
from shared.text.grammar import Spelling
from shared.text.languages.families import CHANNEL, MESSAGE, START, Language, Reasoning, Thinking
from shared.text.languages.tool_form import Signature
from shared.text.languages.tool_forms import form_of

MAX_CALLS = 16  # of one completion that is nothing else: a weak model would call for ever
_ANY = "/(.|\\n)*/"


class CallGrammar:
    """Calls of some functions as a model writes them."""

    def __init__(self, language: Language, functions: Sequence[Signature], parallel: bool, spelled: Spelling) -> None:
        self._form = form_of(language.calls)
        self._reasoning = language.reasoning
        self._parallel = parallel and not self._channels
        self._spelled = spelled
        self._rules: list[str] = []
        names = []
        for at, function in enumerate(functions):
            self._rules.append(f"f{at}: {self._form.rule(function, at, spelled, self._rules)}")
            names.append(f"f{at}")
        self._rules.append(f"one: {' | '.join(names)}")

    @property
    def _channels(self) -> bool:
        return self._reasoning is not None and self._reasoning.channels

    def only(self) -> str:
        """A grammar of calls and nothing else."""
        return grammar.of_lark(f"start: calls\n{self._calls()}")

    def otherwise(self, answer: str) -> str:
        """A grammar of calls or an answer."""
        return grammar.compose(f"start: @answer | calls\n{self._calls()}", {"answer": answer})

    def anywhere(self) -> str:
        """Text in which every call is well formed; "" where a call has no mark that could be waited for."""
        if not self._form.marks or self._channels:
            return ""
        words = self._spelled.until("words", self._form.marks[0][0])
        if (
            self._reasoning is not None and self._reasoning.calls_after_answer
        ):  # the marks of calls are those of answers
            (opening, closing), (_, end) = self._reasoning.answer[:2]
            marks = [f"({self._spelled(mark)})?" for mark in (opening, closing, end)]
            return grammar.of_lark(
                f"start: {marks[0]} TAIL {marks[1]} calls? {marks[2]}\nTAIL: {_ANY}\n{self._calls()}"
            )
        return grammar.of_lark(f"start: (words {self._begun()})* TAIL\nTAIL: {_ANY}\n{words}\n{self._calls()}")

    def _begun(self) -> str:
        """A run of calls without its opening mark, blanks free."""
        self._rules.append(f"begun: {self._run(begun=True)}")
        return "begun"

    def _calls(self) -> str:
        form, reasoning, lead = self._form, self._reasoning, ""
        if reasoning is not None and reasoning.calls_after_answer:
            opening, closing = reasoning.answer[0]
            lead = f"(({self._spelled(opening)})? {self._spelled(closing)})? "
        rules = [f"calls: {lead}{self._run()}"]
        if not form.many and self._parallel:
            rules = [f"calls: {lead}run ({self._text(form.joint)} run){{0,{MAX_CALLS - 1}}}", f"run: {self._run()}"]
        return "\n".join([*rules, *self._rules])

    def _run(self, begun: bool = False) -> str:
        """The text from an opening mark to its closing one, with both."""
        form = self._form
        start, end = form.marks[0] if form.marks else ("", "")
        more = f"({self._text(form.joint)} one){{0,{MAX_CALLS - 1}}}" if form.many and self._parallel else ""
        head = "/\\n?/" if begun and form.head == "\n" else self._text(form.head)
        foot = "/\\n?/" if begun and form.foot == "\n" else self._text(form.foot)
        return " ".join([*([] if begun else [self._text(start)]), head, "one", more, foot, self._text(end)])

    def _text(self, text: str) -> str:
        return self._spelled(text) if text else ""


def framed(answer: str, thinking: Thinking, reasoning: Reasoning | None, spelled: Spelling) -> str:
    """The grammar of an answer with the marks that the model writes around it."""
    if not answer or reasoning is None:
        return answer
    if reasoning.channels:
        lark = f'start: {spelled(CHANNEL)} "final" {spelled(MESSAGE)} @body'
        return grammar.compose(lark, {"body": answer}) if thinking else answer
    if not reasoning.answer or not (thinking or reasoning.calls_after_answer):
        return answer
    opening, closing = reasoning.answer[0]
    end = reasoning.answer[1][1] if reasoning.calls_after_answer else ""
    after = f"({spelled(closing)}{f' ({spelled(end)})?' if end else ''})?"
    return grammar.compose(f"start: ({spelled(opening)})? @body {after}", {"body": answer})


def after_reasoning(
    text: str, thinking: Thinking, reasoning: Reasoning, codec: TextCodec, most: int | None = None
) -> str:
    """The grammar `text`, before which the model may reason, for `most` tokens if a number is given."""
    if not text:
        return "" if most is None else _bounded(thinking, reasoning, codec, most)
    if not thinking:
        return text
    spelled = Spelling(codec)
    if most is None:
        thought = spelled.until("thought", reasoning.end)
    else:
        thought = _thought(reasoning, codec, most, without=codec.bundle.eos_token_ids)
    blank, opening = "BLANK", spelled(reasoning.start)
    rules = f"BLANK: /\\n{{0,2}}/\n{thought}"
    if reasoning.channels:  # the next message begins
        blank = f'{spelled(START)} "assistant"'
        opening = f'{spelled(CHANNEL)} "analysis" {spelled(MESSAGE)}'
        rules = thought
    before = f"thought {blank}" if thinking == "open" else f"({opening} thought {blank})?"
    return grammar.compose(f"start: {before} @body\n{rules}", {"body": text})


def can_bound(reasoning: Reasoning, codec: TextCodec) -> bool:
    """True if the mark that ends reasoning begins with a token of its own, so that no other text is taken for it."""
    ids = codec.encode(reasoning.end, False)
    return bool(ids) and codec.added_token(codec.token(ids[0]) or "") == ids[0]


def _bounded(thinking: Thinking, reasoning: Reasoning, codec: TextCodec, most: int) -> str:
    """Any tokens, of which each piece of reasoning has a bound."""
    if not thinking and not reasoning.again:
        return ""
    piece = "thought"
    for token in reversed(codec.encode(reasoning.start, False)):
        piece = f"(<[^{token}]> | <[{token}]> {piece})"
    begun = "thought " if thinking == "open" else ""
    return grammar.of_lark(f"start: {begun}piece*\npiece: {piece}\n{_thought(reasoning, codec, most)}")


def _thought(reasoning: Reasoning, codec: TextCodec, most: int, without: tuple[int, ...] = ()) -> str:
    """A rule of Lark: at most so many tokens, and the mark that ends reasoning."""
    if not can_bound(reasoning, codec):
        raise UnsupportedParameterError(
            f"this model's reasoning cannot be bounded: {reasoning.end!r}, its end, is no token of its vocabulary",
            param="max_reasoning_tokens",
        )
    first, *rest = codec.encode(reasoning.end, False)
    others = ",".join(map(str, sorted({first, *without})))
    text = f"<[^{others}]>{{0,{most}}}" if most else ""
    return f"thought: {text} <[{first}]> {' '.join(f'<[{token}]>' for token in rest)}"
