"""A data set of JSON lines: read with the number of each line, divided, and drawn from."""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from shared.errors import SetupError
from shared.jobs import Message

T = TypeVar("T")

HELD_OUT = 0.1  # of the data, where there is none of its own
MOST_HELD_OUT = 512
_HOLD_OUT = 1  # number in the seed of the order, so that other draws of the run differ


class Data(NamedTuple, Generic[T]):
    """Data of a run: what it learns from, and what it is measured on."""

    learned: Sequence[T]
    held_out: Sequence[T]
    too_long: int = 0  # left out of what is learned
    form: str = ""  # of the lines, for the log


def read_lines(path: Path, decoder: msgspec.json.Decoder[T]) -> list[tuple[int, T]]:
    """Each line with its number, empty ones left out; SetupError names the line that is none."""
    if not path.is_file():
        raise SetupError(f"no data set {path}")
    lines: list[tuple[int, T]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                lines.append((number, decoder.decode(line)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise SetupError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise SetupError(f"{path} is empty")
    return lines


def hold_out(items: Sequence[T], seed: int) -> tuple[list[T], list[T]]:
    """Divide items at random into those that are learned from and those that are held out; SetupError for fewer than
    two.
    """
    held_out = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(items))))
    if len(items) - held_out < 1:
        raise SetupError("one example is too few: some are learned from, and some held out")
    order = np.random.default_rng((seed, _HOLD_OUT)).permutation(len(items))
    shuffled = [items[at] for at in order]
    return shuffled[held_out:], shuffled[:held_out]


def batch_of(items: Sequence[T], count: int, step: int, seed: int) -> list[T]:
    """The items of train step `step`, from 0: each once in each pass over the data, in an order of its own."""
    size = len(items)
    places = range(step * count, (step + 1) * count)
    orders = {at: np.random.default_rng((seed, at)).permutation(size) for at in {place // size for place in places}}
    return [items[orders[place // size][place % size]] for place in places]


class Exchange(NamedTuple):
    """A prompt, a text or a chat, and an answer to it."""

    prompt: str | list[Message] | None
    answer: str


def exchange(prompt: str | list[Message] | None, answer: Any) -> Exchange:
    """Exchange that ends with `answer`, a text or a whole conversation; ValueError when it ends otherwise."""
    if isinstance(answer, list):
        before = prompt if isinstance(prompt, list) else []
        if isinstance(prompt, str):
            before = [{"role": "user", "content": prompt}]
        whole = answer if answer[: len(before)] == before else [*before, *answer]
        if not whole or not isinstance(whole[-1].get("content"), str):
            raise ValueError("a conversation ends with a message whose 'content' is a text")
        prompt, answer = whole[:-1], whole[-1]["content"]
    return Exchange(prompt or None, answer)
