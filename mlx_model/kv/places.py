"""Forwards of `PLACES` places each, for `--batch-invariant`; and whether a model and this machine keep its promise.

apart.py says what a place is, and why a row's bits depend on the row alone. What is left to chance is that a product
treats all of its rows alike, and that a model computes places by nothing but such products, attention and what is
elementwise. So `check` tries the model itself: the same row in other slots, beside others, in other pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_model.kv.apart import PLACES, Portion
from mlx_model.kv.kinds import copies, leaves, mapped

Forward = Callable[..., mx.array]  # ids [PLACES, 1] and `cache` -> [PLACES, 1, ...]
_TRIAL = tuple(range(1, PLACES + 8))  # ids of the row that is tried; no more than any vocabulary has
_OTHER = (7, 5, 3)


def portions(lengths: Sequence[int]) -> Iterator[Portion]:
    """The places of consecutive forwards that read so many ids of each row, row by row."""
    portion, left = Portion(), PLACES
    for row, length in enumerate(lengths):
        while length:
            count = min(left, length)
            portion.append((row, count))
            length, left = length - count, left - count
            if not left:
                yield portion
                portion, left = Portion(), PLACES
    if portion:
        yield portion


def forward(
    call: Forward,
    ids_N: mx.array,
    lengths: Sequence[int],
    caches: Sequence[Any],
    enter: Callable[[list[int]], object] = lambda rows: None,
) -> mx.array:
    """Output of `call` at each of the next ids, [N, ...]; `lengths` of them are a row's, in the order of the rows.

    `enter` is called before each forward with the row of each place.
    """
    outputs, at = [], 0
    for portion in portions(lengths):
        rows = [row for row, count in portion for _ in range(count)]
        first = next(iter(leaves(caches)))
        offsets = [first.rows[row].end + ahead for row, count in portion for ahead in range(count)]
        left = PLACES - len(rows)
        enter([*rows, *rows[-1:] * left])
        ids = mx.pad(ids_N[at : at + len(rows)], (0, left))[:, None]
        offset = mx.array([*offsets, *[0] * left])
        views = mapped(caches, lambda leaf, portion=portion, offset=offset: leaf.at(portion, offset))  # type: ignore[misc]
        outputs.append(call(ids, cache=views)[: len(rows), 0])
        at += len(rows)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def check(model: Any, new: Callable[[], list[Any]]) -> str:
    """Where rows of this model depend on others on this machine; "" if nothing was found. `new`: caches of one row."""
    alone, kv = _fed(model, new(), [len(_TRIAL)])
    if _fed(model, new(), [9, len(_TRIAL) - 10, 1])[0] != alone:
        return "a row's bits depend on the pieces of its prompt"
    for before in (6, PLACES - 1):
        if _beside(model, new, before) != _step(model, kv):
            return f"a row's bits depend on {before} rows before it"
    return ""


def _fed(model: Any, caches: list[Any], pieces: Sequence[int]) -> tuple[bytes, list[Any]]:
    """The trial's last logits, bit by bit, and its KV, when its ids are fed in such pieces."""
    at, logits = 0, mx.array(0)
    for count in pieces:
        logits = forward(model, mx.array(_TRIAL[at : at + count]), [count], caches)
        at += count
    return bits_of(logits[-1]), caches


def _step(model: Any, kv: Sequence[Any]) -> bytes:
    """Logits of one more id of the trial, which stays as it is."""
    return bits_of(forward(model, mx.array([1]), [1], copies(kv, 1))[0])


def _beside(model: Any, new: Callable[[], list[Any]], before: int) -> bytes:
    """The same in one forward with `before` rows before it, read after them in one piece, and one after it."""
    ids = mx.array([*_OTHER * before, *_TRIAL, *_OTHER[:1]])
    caches = copies(new(), before + 2)
    forward(model, ids, [*[len(_OTHER)] * before, len(_TRIAL), 1], caches)
    steps = mx.array([*(4 + at for at in range(before)), 1, 3])
    return bits_of(forward(model, steps, [1] * (before + 2), caches)[before])


def bits_of(array: mx.array) -> bytes:
    """All bits of an array."""
    return np.array(mx.view(array, mx.uint8)).tobytes()
