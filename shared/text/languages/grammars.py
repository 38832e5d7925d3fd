"""Grammars of completions that may begin with reasoning."""

from shared.text import grammar
from shared.text.codec import TextCodec
from shared.text.languages.families import CHANNEL, MESSAGE, START, Reasoning, Thinking


def after_reasoning(text: str, thinking: Thinking, reasoning: Reasoning, codec: TextCodec) -> str:
    """The grammar `text`, before which the model may reason."""
    if not text or not thinking:
        return text
    thought = grammar.until("thought", reasoning.end, codec)
    if reasoning.channels:
        lark = f"start: {_to_final(thinking, codec)} @body\n{thought}"
        return grammar.compose(lark, {"body": text})
    opening = "thought BLANK" if thinking == "open" else f"({grammar.mark(reasoning.start, codec)} thought BLANK)?"
    return grammar.compose(f"start: {opening} @body\nBLANK: /\\n{{0,2}}/\n{thought}", {"body": text})


def _to_final(thinking: Thinking, codec: TextCodec) -> str:
    """Lark for what is before the message on the channel `final`."""
    channel, message, start = (grammar.mark(mark, codec) for mark in (CHANNEL, MESSAGE, START))
    final = f'{channel} "final" {message}'
    if thinking == "open":
        return f'thought {start} "assistant" {final}'
    return f'({channel} "analysis" {message} thought {start} "assistant")? {final}'
