"""Prompts that are fed in one forward, until they join the batch.

A group joins the batch as it is: its KV is appended in one piece per layer. Taken out of a larger batch row by row, as
mlx-lm's `BatchGenerator` does it, that is thousands of small operations.

Invariants. Rows of a group that is fed in pieces have equal prompts; others are fed at once, padded to the longest. The
host knows each row's padding, so nobody waits for the device to tell it (plain `KVCache`; others have no need).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from worker.engine.batch.row import Row, RowTag
from worker.engine.batch.row_model import RowModel


@dataclass(eq=False)
class Entry:
    """Rows that all feed `ids` next, after `kv` if there is any."""

    rows: list[Row]
    ids: list[int]
    kv: list[Any] | None = None


class PromptGroup:
    """KV of some rows while their prompts are fed; all but the last token of each."""

    def __init__(self, model: RowModel, entries: Sequence[Entry]) -> None:
        self._model = model
        self._left = [entry.ids for entry in entries for _ in entry.rows]
        self._tag = RowTag(tuple(row for entry in entries for row in entry.rows))
        lengths = [end_of(entry.kv or ()) for entry in entries for _ in entry.rows]
        self.padding = [max(lengths) - length for length in lengths]  # positions before each row's first
        self.cache: list[Any] = [*_merged(model, entries), self._tag]
        self.fed_at = 0  # the turn in which it was fed last

    @property
    def rows(self) -> tuple[Row, ...]:
        """In the order of their KV."""
        return self._tag.rows

    @property
    def left(self) -> int:
        """Tokens that are still to be fed before the last ones."""
        return max(map(len, self._left)) - 1

    @property
    def last_ids(self) -> mx.array:
        """Each row's last token [B], once nothing else is left."""
        assert self.left == 0, "a prompt that is not through"
        return mx.array([ids[0] for ids in self._left])

    @property
    def state(self) -> list[Any]:
        """The arrays that the latest piece computes."""
        return [cache.state for cache in self.cache]

    def feed(self, chunk: int) -> int:
        """Say what computes the next `chunk` tokens of each prompt (`state`); positions, padding included."""
        parts = [ids[: min(chunk, len(ids) - 1)] for ids in self._left]
        self._left = [ids[len(part) :] for ids, part in zip(self._left, parts, strict=True)]
        lengths = [len(part) for part in parts]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            for cache in self.cache:
                cache.prepare(lengths=lengths, right_padding=padding)
        padded = [part + [0] * pad for part, pad in zip(parts, padding, strict=True)]
        self._model(mx.array(padded), cache=self.cache)
        if any(padding):
            for cache in self.cache:
                cache.finalize()
            self.padding = [before + pad for before, pad in zip(self.padding, padding, strict=True)]
        return len(parts) * longest

    def remove(self, gone: set[Row]) -> None:
        """Forget some of the rows, not all."""
        keep = [at for at, row in enumerate(self.rows) if row not in gone]
        self._left = [self._left[at] for at in keep]
        self.padding = keep_rows(self.cache, keep, self.padding)


def end_of(caches: Sequence[Any]) -> int:
    """Positions of KV; 0 where no cache is a plain one."""
    for cache in caches:
        if type(cache) is KVCache or type(cache) is BatchKVCache:
            return int(cache.size())
    return 0


def keep_rows(caches: Sequence[Any], keep: list[int], padding: Sequence[int]) -> list[int]:
    """Keep these rows of batched caches, of which the last one is the tag; the padding of those kept.

    mlx-lm's own `filter` reads the padding back from the device, layer by layer, and so waits for the step under way.
    """
    left = [padding[at] for at in keep]
    shift = min(left)
    index = mx.array(keep)
    for cache in caches:
        if type(cache) is not BatchKVCache:
            cache.filter(keep)
            continue
        if cache.keys is not None:
            cache.keys = cache.keys[..., shift:, :][index]
            cache.values = cache.values[..., shift:, :][index]
            cache._idx -= shift
        cache.offset = cache.offset[index]
        cache.left_padding = cache.left_padding[index] - shift
    return [each - shift for each in left]


def _merged(model: RowModel, entries: Sequence[Entry]) -> list[Any]:
    """Batched caches, one per layer."""
    first, *others = entries
    if others and any(entry.kv is not None for entry in entries):
        new = model.new_kv()
        each = [entry.kv or new for entry in entries for _ in entry.rows]
        return [layer[0].merge(layer) for layer in zip(*each, strict=True)]
    rows = sum(len(entry.rows) for entry in entries)
    kv = model.new_kv() if first.kv is None else first.kv
    return [_copies(cache, rows) for cache in kv]


def _copies(cache: Any, rows: int) -> Any:
    """The same KV for each row; as a view, where that can be: whoever writes behind it makes it a copy."""
    if type(cache) is not KVCache or cache.keys is None:
        return cache.merge([cache] * rows)
    batch = BatchKVCache([0] * rows)
    keys, values = cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]
    batch.keys = mx.broadcast_to(keys, (rows, *keys.shape[1:]))
    batch.values = mx.broadcast_to(values, (rows, *values.shape[1:]))
    batch.offset = batch.offset + cache.offset
    batch._idx = cache.offset
    return batch
