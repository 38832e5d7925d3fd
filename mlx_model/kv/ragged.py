"""KV of a batch whose rows end at different positions: after a step with drafts of which unequally much was accepted.

mlx-lm's batched caches write what all rows read next at one position. To let rows that have fallen behind end there
again would mean to copy all their KV. Here each row's next keys and values are written where that row ends, and what
lies after is masked; so a row is taken back by counting. Rows that end together are written as mlx-lm does it.

A window is kept the same way: as keys and values in order, of which the oldest are dropped now and then, and the mask
hides what a row has left behind. A ring, as mlx-lm has it, has one place where all rows are written.

How far a row ends before the one that ends last is its *slack*, which is the same in all leaves of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from mlx_model.kv.quantised import BatchQuantisedKVCache, Packing


class Slack:
    """Unused positions at the end of each row of a batch."""

    def __init__(self, before_B: mx.array, positions: Sequence[int] | None = None) -> None:
        """`positions`: the same numbers, if the host knows them."""
        self.before_B = before_B
        self.positions = positions
        self._before_B1 = before_B[:, None]
        # Leaves of one kind ask for the same ones.
        self._places: dict[tuple[int, int], mx.array] = {}
        self._written_at: dict[tuple[int, tuple[int, ...]], mx.array] = {}

    @classmethod
    def of(cls, positions: Sequence[int]) -> Slack:
        """A slack whose numbers the host knows."""
        return cls(mx.array(list(positions)), list(positions))

    @property
    def on_host(self) -> Sequence[int]:
        """The numbers as the host knows them."""
        assert self.positions is not None, "a step that checks drafts has not been read"
        return self.positions

    def more(self, unused_B: mx.array) -> Slack:
        """The slack after rows are shortened by `unused_B`, which only the device knows."""
        return Slack(self.before_B + unused_B)

    def less(self, positions: int) -> Slack:
        """The slack of the same rows when the longest one ends `positions` earlier."""
        return Slack(self.before_B - positions) if positions else self

    def of_rows(self, keep: Sequence[int]) -> Slack:
        """The slack of the rows at these indices."""
        return Slack(self.before_B[mx.array(list(keep))])

    def and_rows(self, count: int) -> Slack:
        """The slack with `count` rows appended that end where the longest one does."""
        return Slack(mx.concatenate([self.before_B, mx.zeros(count, self.before_B.dtype)]))

    def places(self, end: int, count: int) -> mx.array:
        """The next `count` places [B, N] of each row, in a leaf that is written up to `end`."""
        places_BN = self._places.get((end, count))
        if places_BN is None:
            places_BN = self._places[end, count] = mx.arange(end, end + count)[None] - self._before_B1
        return places_BN

    def written_at(self, end: int, new: mx.array) -> mx.array:
        """The place of each number of such keys or values [B, H, N, D] in a leaf that is written up to `end`."""
        key = end, tuple(new.shape)
        places = self._written_at.get(key)
        if places is None:
            places = mx.broadcast_to(self.places(end, new.shape[2])[:, None, :, None], new.shape)
            self._written_at[key] = places
        return places


class RaggedKVCache(BatchKVCache):  # type: ignore[misc]
    """KV of plain layers whose rows end at different positions."""

    keys: Any
    values: Any
    offset: mx.array
    left_padding: mx.array
    _idx: int
    slack: Slack | None = None  # None: all rows end together

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write these positions where each row ends; all positions."""
        if self.slack is None:
            return cast(tuple[mx.array, mx.array], super().update_and_fetch(keys, values))
        count = keys.shape[2]
        end = self._idx + count
        self.keys = _written(self.keys, self.slack.written_at(self._idx, keys), keys, end, self.step)
        self.values = _written(self.values, self.slack.written_at(self._idx, values), values, end, self.step)
        self.offset = self.offset + count
        self._idx = end
        return self.keys[..., : self._idx, :], self.values[..., : self._idx, :]

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> mx.array:
        """Positions that each row's next `N` queries may see, [B, 1, N, positions]."""
        if self.slack is None:
            mask: mx.array = super().make_mask(N, return_array, **options)
            return mask
        window = options.get("window_size")
        own_B1N1 = self.slack.places(self._idx, N)[:, None, :, None]
        seen = mx.arange(self._idx + N)
        mask = (seen <= own_B1N1) & (seen >= self.left_padding[:, None, None, None])
        return mask if window is None else mask & (seen > own_B1N1 - window)

    def end_apart(self, least: int, slack: Slack | None) -> None:
        """Let all rows end `least` positions earlier, and each by its slack; `offset` counts so already."""
        self._idx -= least
        self.slack = slack

    def align(self) -> None:
        """Let all rows end together."""
        if self.slack is None:
            return
        places_BN = mx.maximum(self.slack.places(0, self._idx), 0)  # what comes before a row's first one is padding
        self.keys, self.values = _of_places(self.keys, places_BN), _of_places(self.values, places_BN)
        self.left_padding = self.left_padding + self.slack.before_B
        self.slack = None


def _written(old: mx.array, places: mx.array, new: mx.array, end: int, step: int) -> mx.array:
    """Keys or values with these positions at their places; longer by whole steps where they end after the last one."""
    short = end - old.shape[2]
    if short > 0:
        old = mx.pad(old, [(0, 0), (0, 0), (0, -(-short // step) * step), (0, 0)])
    return mx.put_along_axis(old, places, new, axis=2) if new.shape[3] else old


def _of_places(old: mx.array, places_BN: mx.array) -> mx.array:
    """Gather these positions, [B, H, N, D], by one index: a GPU has a kernel for that."""
    rows, heads, length, size = old.shape
    if not size:
        return old[:, :, : places_BN.shape[1]]
    first_BH1 = length * mx.arange(rows * heads).reshape(rows, heads, 1)
    return old.reshape(-1, size)[first_BH1 + places_BN[:, None]]


def may_be_in_place(caches: Sequence[Any], kind: type | None = None) -> bool:
    """True if a decode step may write into these caches in place: plain KV, or packed KV that it reads packed.

    `kind`: of another plain one.
    """
    first = packing_of(caches)
    if first is not None and first.read != "packed":
        return False
    kinds: tuple[type, ...] = (BatchKVCache, RaggedKVCache) if kind is None else (kind,)
    if first is not None:
        kinds = (BatchQuantisedKVCache, RaggedQuantisedKVCache)
    return all(type(each) in kinds and each.keys is not None and packing_of([each]) == first for each in caches)


def packing_of(caches: Sequence[Any]) -> Packing | None:
    """How the first of these packs its KV; None: it is plain, or of another kind."""
    packing: Packing | None = getattr(caches[0], "packing", None)
    return packing


def with_room(caches: Sequence[Any], count: int) -> list[tuple[mx.array, mx.array]]:
    """Keys and values [B, H, positions, D] of such caches, in which the next `count` positions may be written.

    They are whole steps long, lest what is compiled for their lengths pile up. Arrays with room after what is written
    are a cache's own and lie in order: a copy of rows contains what is written.
    """
    for cache in caches:
        end, length = cache._idx + count, cache.keys.shape[2]
        if length < end or length % cache.step:
            room = -(-end // cache.step) * cache.step - cache._idx
            parts = [each[..., : cache._idx, :] for each in (cache.keys, cache.values)]
            cache.keys, cache.values = (mx.pad(each, [(0, 0), (0, 0), (0, room), (0, 0)]) for each in parts)
    return [(cache.keys, cache.values) for cache in caches]


def have_written(caches: Sequence[Any], count: int) -> None:
    """It has been: so many positions of each row, where it ends."""
    offset_B = caches[0].offset + count
    for cache in caches:
        cache.offset = offset_B
        cache._idx += count


class RaggedQuantisedKVCache(BatchQuantisedKVCache, RaggedKVCache):
    """Packed KV of layers whose rows end at different positions."""


class RaggedWindowKVCache(RaggedKVCache):
    """KV of layers that see the last `max_size` positions."""

    step = 64  # positions that it grows by, before the oldest are dropped

    def __init__(self, max_size: int, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self.max_size = max_size

    @classmethod
    def of(cls, other: BatchRotatingKVCache) -> RaggedWindowKVCache:
        """A ragged cache with the content of `other`."""
        cache = cls(other.max_size, [])
        cache.offset, cache.left_padding = other.offset, other.left_padding
        if other.keys is not None:
            cache.keys, cache.values = in_order(other)
            cache._idx = cache.keys.shape[2]
        return cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write these positions where each row ends; all that rows still see, and maybe more."""
        self._make_room(keys.shape[2])
        return super().update_and_fetch(keys, values)

    def _make_room(self, count: int) -> None:
        """Drop what no row will see any more, where so many positions have no room; before or after their mask."""
        if self.keys is None or self._idx + count <= self.keys.shape[2]:
            return
        most = 0 if self.slack is None else max(self.slack.on_host)
        more = self._idx - most - self.max_size + 1
        if more > 0:
            self.keys, self.values = (each[..., more : self._idx, :] for each in (self.keys, self.values))
            self.left_padding = self.left_padding - more
            self._idx -= more

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> mx.array:
        """Positions that each row's next `N` queries may see within the window."""
        self._make_room(N)  # else the mask would be as wide as before
        window = options.pop("window_size", None) or self.max_size
        return super().make_mask(N, return_array, window_size=window, **options)

    def latest(self, rows: list[int], width: int) -> tuple[mx.array, ...]:
        """Keys and values of these rows' last positions."""
        if self.slack is None:
            index, part = mx.array(rows), slice(self._idx - width, self._idx)
            return self.keys[index, :, part], self.values[index, :, part]
        index = mx.array(rows)
        places_RW = mx.maximum(self.slack.places(self._idx - width, width)[index], 0)
        return tuple(_of_places(each[index], places_RW) for each in (self.keys, self.values))

    def filter(self, batch_indices: Any) -> None:
        """Keep the rows at these indices."""
        if self.keys is not None:
            self.keys, self.values = self.keys[batch_indices], self.values[batch_indices]
        self.offset, self.left_padding = self.offset[batch_indices], self.left_padding[batch_indices]

    def extend(self, other: Any) -> None:
        """Append the rows of another batch, in whichever form."""
        super().extend(self.of(other) if isinstance(other, BatchRotatingKVCache) else other)


def in_order(cache: BatchRotatingKVCache) -> tuple[mx.array, ...]:
    """Keys and values of a window, from the oldest position to the newest."""
    if cache.rotated:
        return tuple(mx.roll(each, -cache._idx, 2) for each in (cache.keys, cache.values))
    return cache.keys[..., : cache._idx, :], cache.values[..., : cache._idx, :]
