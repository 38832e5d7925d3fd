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
import numpy as np

from shared.errors import InvalidRequestError, SetupError
from shared.jobs import Message
from shared.text.answered import answered
from shared.text.codec import TextCodec

Form = Literal["pairs", "scores", "labels"]

HELD_OUT = 0.1  # of the data, where there is none of its own
MOST_HELD_OUT = 512
_SHUFFLED = 1  # what the order of a split is drawn for, beside the seed


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
    lines = _lines(path)
    form = lines[0][1].form
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


def split(examples: Examples, seed: int) -> tuple[Examples, Examples]:
    """What is learned from, and what is held out; SetupError when there is not enough for both."""
    count = len(examples.items)
    held_out = min(MOST_HELD_OUT, max(1, round(HELD_OUT * count)))
    if count - held_out < 1:
        raise SetupError("one example is too few: some are learned from, and some held out")
    order = np.random.default_rng((seed, _SHUFFLED)).permutation(count)
    items = [examples.items[at] for at in order]
    return (
        examples._replace(items=tuple(items[held_out:])),
        examples._replace(items=tuple(items[:held_out]), too_long=0),
    )


def batch_of(examples: Examples, count: int, step: int, seed: int) -> list[Example]:
    """The examples of train step `step`, from 0: each once in each pass over the data, in an order of its own."""
    size = len(examples.items)
    places = range(step * count, (step + 1) * count)
    orders = {at: np.random.default_rng((seed, at)).permutation(size) for at in {place // size for place in places}}
    return [examples.items[orders[place // size][place % size]] for place in places]


def _lines(path: Path) -> list[tuple[int, _Line]]:
    if not path.is_file():
        raise SetupError(f"no data set {path}")
    lines: list[tuple[int, _Line]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                lines.append((number, _line.decode(line)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise SetupError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise SetupError(f"{path} is empty")
    try:
        _ = lines[0][1].form
    except ValueError as error:
        raise SetupError(f"{path}, line {lines[0][0]}: {error}") from error
    return lines


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
    if isinstance(answer, list):
        before = prompt if isinstance(prompt, list) else []
        if isinstance(prompt, str):
            before = [{"role": "user", "content": prompt}]
        whole = answer if answer[: len(before)] == before else [*before, *answer]
        if not whole or not isinstance(whole[-1].get("content"), str):
            raise ValueError("a conversation ends with a message whose 'content' is a text")
        prompt, answer = whole[:-1], whole[-1]["content"]
    return Text(prompt or None, answer, tuple(answered(codec, prompt or None, answer)))
