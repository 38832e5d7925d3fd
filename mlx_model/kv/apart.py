"""KV of rows that lie apart, read by one query at a time: a row's bits then depend on the row alone.

`--batch-invariant` computes every token, of a prompt or of a completion, in a forward of `PLACES` places, which may be
rows of a batch or consecutive ids of one row. All products then have one shape, whatever else is computed; a place
without a token computes some id and is dropped. What a shape does not settle is attention, since its sums are as long
as a row. So each place's query has an attention of its own, over the positions of its row up to its own, without
padding and masks. Whether an id stands in a prompt that is fed, in a completion that is drawn, scored or continued
elsewhere, or comes from a cache, its keys and values are the same.

A place's slot in the products is the one thing that depends on others. All kernels that were met add up each row of a
product in the same order; places.py tries that at start, with the model itself.

A leaf holds any number of rows; one of a single row is also what a model's new caches are. Packed KV is unpacked as a
whole, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self, cast

import mlx.core as mx

from mlx_model.kv.quantised import Packing

PLACES = 16  # of each forward; on a CPU a product of 16 rows takes about twice as long as one of a single row
STEP = 256  # positions by which arrays grow
Arrays = tuple[mx.array, mx.array]  # keys and values; of MLA latents and rotary keys
Portion = list[tuple[int, int]]  # rows, and how many consecutive ids of each: the places of a forward


@dataclass
class RowKv:
    """Keys and values [1, H, room, D] of one row. Copies of it may share arrays, which are never written in place."""

    arrays: Arrays | None = None
    end: int = 0  # positions read
    first: int = 0  # the position at index 0, where earlier ones have been dropped

    def write(self, new: Arrays, window: int) -> None:
        """Append positions [1, H, N, D]; of those before them the last `window` - 1 stay, all if it is 0."""
        count = new[0].shape[2]
        at = self.end - self.first
        if self.arrays is None or at + count > self.arrays[0].shape[2]:
            low = max(0, at - window + 1) if window else 0
            room = -(-(at - low + count) // STEP) * STEP
            self.arrays = cast(Arrays, tuple(self._moved(which, each, low, at, room) for which, each in enumerate(new)))
            self.first, at = self.first + low, at - low
        written = []
        for old, each in zip(self.arrays, new, strict=True):
            array = copy(old)  # another row may have the same object; no operation
            array[:, :, at : at + count] = each
            written.append(array)
        self.arrays = cast(Arrays, tuple(written))
        self.end += count

    def _moved(self, which: int, like: mx.array, low: int, high: int, room: int) -> mx.array:
        """Positions at these indices, and room after them."""
        _, heads, _, size = like.shape
        empty = mx.zeros((1, heads, room - (high - low), size), like.dtype)
        return empty if self.arrays is None else mx.concatenate([self.arrays[which][:, :, low:high], empty], axis=2)

    def latest(self, count: int = 0) -> Arrays:
        """The last `count` positions, all if it is 0."""
        assert self.arrays is not None, "a row that has read something"
        high = self.end - self.first
        low = high - count if count else 0
        return cast(Arrays, tuple(each[:, :, low:high] for each in self.arrays))


class ApartKVCache:
    """KV of some rows in one layer. As a model's new cache it has one row, which has read nothing."""

    slack = None  # no row ends apart from what was counted

    def __init__(self, packing: Packing | None = None, form: str = "keys", rows: Sequence[RowKv] = ()) -> None:
        self.packing, self.form = packing, form
        self.rows = list(rows) or [RowKv()]

    @property
    def window(self) -> int:
        """Positions that a query sees at most; 0: all."""
        return 0

    def with_rows(self, rows: Sequence[RowKv]) -> Self:
        """A leaf like this one of other rows."""
        leaf = copy(self)
        leaf.rows = [copy(row) for row in rows]
        return leaf

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """The rows of several leaves."""
        return caches[0].with_rows([row for cache in caches for row in cache.rows])

    def extend(self, other: Self) -> None:
        """Append the rows of another leaf."""
        self.rows += other.rows

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows at these indices."""
        self.rows = [self.rows[at] for at in keep]

    def prepare(self, **_: Any) -> None:
        """Rows are fed without padding."""

    def finalize(self) -> None:
        """Rows are fed without padding."""

    @property
    def end(self) -> int:
        """Positions of the longest row."""
        return max(row.end for row in self.rows)

    @property
    def offset(self) -> mx.array:
        """Positions that each row has read, [B]."""
        return mx.array([row.end for row in self.rows])

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated."""
        return [array for row in self.rows if row.arrays is not None for array in row.arrays]

    def whole(self, rows: Sequence[int], starts: Sequence[int]) -> tuple[Any, Any, list[int], int]:
        """Keys and values of these rows, [rows, H, positions, D]; where each begins, and where all end."""
        longest = max(self.rows[at].end for at in rows)
        if not longest:
            return None, None, list(starts), 0
        keys, values = self.latest(rows, longest)
        return keys, values, [longest - self.rows[at].end for at in rows], longest

    def latest(self, rows: Sequence[int], width: int) -> Arrays:
        """The last positions of these rows, `width` of the longest, padded on the left."""
        found = [self.rows[at].latest(min(width, self.rows[at].end)) for at in rows]
        both = []
        for each in zip(*found, strict=True):
            padded = [mx.pad(array, [(0, 0), (0, 0), (width - array.shape[2], 0), (0, 0)]) for array in each]
            both.append(padded[0] if len(padded) == 1 else mx.concatenate(padded))
        return both[0], both[1]

    def at(self, portion: Portion, offset: mx.array) -> _Places:
        """The leaf as a forward's places see it; `offset` [PLACES]: positions before each."""
        return _Places(self, portion, offset)

    def written(self, row: RowKv, new: Arrays) -> list[Arrays]:
        """Append a row's next positions; what the query at each of them reads."""
        packing, count = self.packing, new[0].shape[2]
        row.write(new if packing is None else (packing.pack(new[0]), packing.pack(new[1])), self.window)
        read = row.latest()
        if packing is not None:
            read = (packing.unpack(read[0], new[0].shape[3]), packing.unpack(read[1], new[1].shape[3]))
        length, window = row.end - row.first, self.window
        ends = range(length - count + 1, length + 1)
        lows = [max(0, end - window) if window else 0 for end in ends]
        return [(read[0][:, :, low:end], read[1][:, :, low:end]) for low, end in zip(lows, ends, strict=True)]


class ApartWindowKVCache(ApartKVCache):
    """The same of a layer whose queries see the last positions only."""

    def __init__(self, max_size: int, rows: Sequence[RowKv] = ()) -> None:
        super().__init__(rows=rows)
        self.max_size = max_size

    @property
    def window(self) -> int:
        return self.max_size


class _Places:
    """The object that a layer gets as its cache: of each place one batch row."""

    def __init__(self, leaf: ApartKVCache, portion: Portion, offset: mx.array) -> None:
        self._leaf, self._portion = leaf, portion
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[ApartRead, mx.array]:
        """Write each place's position [PLACES, H, 1, D]; what attention gets in place of keys and values."""
        reads, at = list[Arrays](), 0
        for row, count in self._portion:
            new = [each[at : at + count, :, 0].swapaxes(0, 1)[None] for each in (keys, values)]
            reads += self._leaf.written(self._leaf.rows[row], (new[0], new[1]))
            at += count
        read = ApartRead(tuple(reads), is_latent=self._leaf.form == "latents")
        if not read.is_latent:
            return read, values
        size = values.shape[3]  # the model's rotary scores are then its rotary queries, as in shared.py
        return read, mx.broadcast_to(mx.eye(size, dtype=values.dtype), (keys.shape[0], 1, size, size))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any) -> None:
        """None: what a place may not see is not read."""
        if window_size is not None and window_size != self._leaf.window:
            raise NotImplementedError("a window that is not the cache's own")


@dataclass(frozen=True, eq=False)
class ApartRead:
    """The object that attention gets in place of keys: what each place reads."""

    reads: tuple[Arrays, ...]
    is_latent: bool

    def attended(
        self, fused: Callable[..., mx.array], queries: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Output of MLX's attention `fused`, [PLACES, heads, 1, D], one place at a time; 0 of places without a token.

        `mask`: None, or MLA's rotary queries [PLACES, heads, 1, D].
        """
        if (mask is None) == self.is_latent:
            raise NotImplementedError("a mask of the model's own")
        outputs = []
        for at, (keys, values) in enumerate(self.reads):
            query, own_mask = queries[at : at + 1], None
            if self.is_latent:
                own_mask, values = mask[at : at + 1] @ values.swapaxes(-1, -2), keys
            outputs.append(fused(query, keys, values, scale=scale, mask=own_mask, sinks=sinks))
        if left := queries.shape[0] - len(outputs):
            outputs.append(mx.zeros((left, *outputs[0].shape[1:]), queries.dtype))
        return mx.concatenate(outputs)
