"""Grammars of completions whose reasoning has a bound.

A budget is a grammar, too: at most so many tokens, and then the mark that ends reasoning. So it holds wherever grammars
hold: in a batch, with drafts, and on the worker that goes on with a sequence.
"""

from shared.errors import UnsupportedParameterError
from shared.text import grammar
from shared.text.codec import TextCodec
from shared.text.grammar import Spelling
from shared.text.languages.families import Reasoning, Thinking
from shared.text.languages.grammars import after_reasoning


def within_budget(text: str, thinking: Thinking, reasoning: Reasoning, codec: TextCodec, most: int) -> str:
    """The grammar `text`, or anything without one, before which the model may reason for `most` tokens."""
    if not text:
        return _bounded(thinking, reasoning, codec, most)
    thought = _thought(reasoning, codec, most, without=codec.bundle.eos_token_ids)
    return after_reasoning(text, thinking, reasoning, Spelling(codec), thought)


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
