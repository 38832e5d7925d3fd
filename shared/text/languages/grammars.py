"""Grammars of completions that may reason: before an answer of a given form, and no longer than a budget.

A budget is a grammar, too: at most so many tokens, and then the mark that ends reasoning. So it holds wherever grammars
hold: in a batch, with drafts, and on the worker that goes on with a sequence.
"""

from shared.errors import UnsupportedParameterError
from shared.text import grammar
from shared.text.codec import TextCodec
from shared.text.languages.families import CHANNEL, MESSAGE, START, Reasoning, Thinking


def after_reasoning(
    text: str, thinking: Thinking, reasoning: Reasoning, codec: TextCodec, most: int | None = None
) -> str:
    """The grammar `text`, before which the model may reason, for `most` tokens if a number is given."""
    if not text:
        return "" if most is None else _bounded(thinking, reasoning, codec, most)
    if not thinking:
        return text
    thought = grammar.until("thought", reasoning.end, codec)
    if most is not None:
        thought = _thought(reasoning, codec, most, without=codec.bundle.eos_token_ids)
    if reasoning.channels:
        lark = f"start: {_to_final(thinking, codec)} @body\n{thought}"
        return grammar.compose(lark, {"body": text})
    opening = "thought BLANK" if thinking == "open" else f"({grammar.mark(reasoning.start, codec)} thought BLANK)?"
    return grammar.compose(f"start: {opening} @body\nBLANK: /\\n{{0,2}}/\n{thought}", {"body": text})


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


def _to_final(thinking: Thinking, codec: TextCodec) -> str:
    """Lark for what is before the message on the channel `final`."""
    channel, message, start = (grammar.mark(mark, codec) for mark in (CHANNEL, MESSAGE, START))
    final = f'{channel} "final" {message}'
    if thinking == "open":
        return f'thought {start} "assistant" {final}'
    return f'({channel} "analysis" {message} thought {start} "assistant")? {final}'
