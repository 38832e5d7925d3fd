"""What a head learns from: JSON lines of one form, as token ids.

**pairs** `{"prompt"?, "chosen", "rejected"}`: a scalar head, the chosen answer above the rejected one (Bradley-Terry).
**scores** `{"prompt"?, "completion", "score"}`: a scalar head, squared error. **labels** `{"prompt"?, "completion",
"label"}`: a head of labels, cross entropy. `prompt` is a text or messages; an answer is a text, or a whole conversation
of messages that ends with it. What is read of them is what the reward `model` reads (shared/text/answered.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from shared.errors import InvalidRequestError, SetupError
from shared.jobs import Message
from shared.text.answered import answered
from shared.text.codec import TextCodec
from trainer.datasets.lines import exchange, read_lines

Form = Literal["pairs", "scores", "labels"]


class Text(NamedTuple):
    """A prompt with its answer."""

    prompt: str | list[Message] | None
    answer: str
    ids: tuple[int, ...]


class Example(NamedTuple):
    """One line: one text, or the chosen one and the rejected one; its score, or the index of its label."""

    texts: tuple[Text, ...]
    target: float = 0.0


class Examples(NamedTuple):
    """A data set."""

    form: Form
    items: tuple[Example, ...]
    labels: tuple[str, ...] = ()
    too_long: int = 0  # left out


class _Line(msgspec.Struct, frozen=True):
    prompt: str | list[Message] | None = None
    chosen: str | list[Message] | None = None
    rejected: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    score: float | None = None
    label: str | None = None

    @property
    def form(self) -> Form:
        """Which one it is; ValueError when it is none."""
        if self.chosen is not None and self.rejected is not None:
            return "pairs"
        if self.completion is not None and self.score is not None:
            return "scores"
        if self.completion is not None and self.label:
            return "labels"
        raise ValueError("neither 'chosen' and 'rejected', nor 'completion' with 'score' or 'label'")


_line = msgspec.json.Decoder(_Line)


def read_examples(path: Path, codec: TextCodec, longest: int, labels: Sequence[str] = ()) -> Examples:
    """The examples of a file; SetupError names the line. `labels`: those that there may be; none: those of the file."""
    lines = read_lines(path, _line)
    try:
        form = lines[0][1].form
    except ValueError as error:
        raise SetupError(f"{path}, line {lines[0][0]}: {error}") from error
    known = tuple(labels) or tuple(sorted({line.label for _, line in lines if line.label}))
    items: list[Example] = []
    for number, line in lines:
        try:
            if line.form != form:
                raise ValueError(f"one of {line.form} among {form}")
            items.append(_example(line, codec, known))
        except (ValueError, InvalidRequestError) as error:
            raise SetupError(f"{path}, line {number}: {error}") from error
    fitting = tuple(item for item in items if all(0 < len(text.ids) <= longest for text in item.texts))
    if not fitting:
        if all(any(not text.ids for text in item.texts) for item in items):
            raise SetupError(f"{path}: each example has a text without tokens")
        raise SetupError(f"{path}: no text has at most {longest} tokens, which is the model's context")
    return Examples(form, fitting, known if form == "labels" else (), len(items) - len(fitting))


def _example(line: _Line, codec: TextCodec, labels: Sequence[str]) -> Example:
    if line.form == "pairs":
        return Example((_text(line.prompt, line.chosen, codec), _text(line.prompt, line.rejected, codec)))
    text = _text(line.prompt, line.completion, codec)
    if line.form == "scores":
        return Example((text,), float(line.score or 0.0))
    if line.label not in labels:
        raise ValueError(f"label {line.label!r} is none of {', '.join(labels)}")
    return Example((text,), float(labels.index(line.label)))


def _text(prompt: str | list[Message] | None, answer: Any, codec: TextCodec) -> Text:
    asked, said = exchange(prompt, answer)
    return Text(asked, said, tuple(answered(codec, asked, said)))
