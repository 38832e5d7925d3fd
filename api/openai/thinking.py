"""Reasoning: whether a model's template has marks for it, and whether a prompt ends inside them."""

from api.openai.pieces import Thinking
from shared import grammar
from shared.text import TextCodec

_MARKS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
)


def marks_of(codec: TextCodec) -> tuple[str, str] | None:
    """The marks of a model's reasoning; None when its template knows none."""
    template = codec.bundle.chat_template
    return next((marks for marks in _MARKS if marks[1] in template), None)


def thinking_after(prompt: str, marks: tuple[str, str]) -> Thinking:
    """What a completion of this prompt begins with."""
    start, end = marks
    written = prompt.rstrip()
    if written.endswith(start):
        return "open"
    return "" if written.endswith(end) else "may"


def thinking_within(begun: str, marks: tuple[str, str]) -> Thinking:
    """What goes on with a message that has begun so."""
    start, end = marks
    return "open" if begun.rfind(start) > begun.rfind(end) else ""


def behind_thinking(text: str, thinking: Thinking, marks: tuple[str, str], codec: TextCodec) -> str:
    """A grammar that lets the model reason before it begins."""
    if not text or not thinking:
        return text
    thought = grammar.until("thought", marks[1], codec)
    if thinking == "open":
        return grammar.compose(f"start: thought BLANK @body\nBLANK: /\\n{{0,2}}/\n{thought}", {"body": text})
    opening = f"({grammar.mark(marks[0], codec)} thought BLANK)?"
    return grammar.compose(f"start: {opening} @body\nBLANK: /\\n{{0,2}}/\n{thought}", {"body": text})
