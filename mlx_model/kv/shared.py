"""KV of a batch whose rows begin alike: a beginning is stored and read once, what follows is a row's own.

A leaf holds the rows' own positions as any ragged leaf does (ragged.py), and the keys and values of each beginning,
[1, H, positions, D]. Attention has two parts: all queries of the rows that begin alike against their beginning, as one
product, and each row's queries against its own positions. Softmax over both is the mean of the two parts, weighted by
what their scores sum to:

    o = sigmoid(lse_beginning - lse_own) * o_beginning + (1 - the same) * o_own

Scores and weights are float32. mlx-lm's attention calls its quantised form where a cache has `bits`; so it comes here
(`install`), and every model that uses that attention and plain masks can have such leaves (`kinds.can_share`).

Invariants. A beginning lies before all that its rows write, so a step takes back own positions only. A row has one
beginning or none. `offset` counts both parts; padding, slack and `_idx` are those of the own part.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache

from mlx_model.cuda import fused
from mlx_model.kv.quantised import Packing
from mlx_model.kv.ragged import RaggedKVCache, RaggedQuantisedKVCache

MOST_SCORES = 1 << 26  # numbers that exist at one time: more rows of a beginning are read in several products
Pair = tuple[mx.array, mx.array]  # keys and values


@dataclass(frozen=True, eq=False)
class Groups:
    """Which of a batch's rows have which beginning; one object for all leaves of a batch."""

    rows: dict[Hashable, tuple[int, ...]]
    count: int  # rows of the batch

    def of_rows(self, keep: Sequence[int]) -> Groups:
        """The rows at these indices."""
        made = self._kept.get(kept := tuple(keep))
        if made is None:
            places = {row: place for place, row in enumerate(kept)}
            rows = {key: tuple(places[row] for row in of if row in places) for key, of in self.rows.items()}
            made = self._kept[kept] = Groups({key: of for key, of in rows.items() if of}, len(kept))
        return made

    def and_rows(self, other: Groups) -> Groups:
        """These rows, then those of `other`."""
        made = self._joined.get(other)
        if made is None:
            rows = dict(self.rows)
            for key, of in other.rows.items():
                rows[key] = (*rows.get(key, ()), *(self.count + row for row in of))
            made = self._joined[other] = Groups(rows, self.count + other.count)
        return made

    @cached_property
    def _kept(self) -> dict[tuple[int, ...], Groups]:
        return {}  # all leaves ask for the same ones

    @cached_property
    def _joined(self) -> dict[Groups, Groups]:
        return {}

    @cached_property
    def places(self) -> mx.array | None:
        """Where each row [B] is found among the rows of the first beginning, then of the next; None: in order."""
        order = [row for of in self.rows.values() for row in of]
        order += sorted(set(range(self.count)).difference(order))  # rows without a beginning
        if order == list(range(self.count)):
            return None
        return mx.array(sorted(range(self.count), key=order.__getitem__))

    @cached_property
    def bare(self) -> int:
        """Number of rows without a beginning."""
        return self.count - sum(map(len, self.rows.values()))

    def index(self, key: Hashable) -> slice | mx.array:
        """The rows of a beginning."""
        index = self._indices.get(key)
        if index is None:
            rows = self.rows[key]
            dense = rows == tuple(range(rows[0], rows[0] + len(rows)))
            index = self._indices[key] = slice(rows[0], rows[0] + len(rows)) if dense else mx.array(rows)
        return index

    @cached_property
    def _indices(self) -> dict[Hashable, slice | mx.array]:
        return {}


class SharedKVCache(RaggedKVCache):
    """Plain KV of rows of which some begin alike."""

    bits = group_size = 0  # mlx-lm's attention calls its quantised form

    def __init__(self, like: RaggedKVCache, groups: Groups, beginnings: dict[Hashable, Pair]) -> None:
        """`like`: the rows' own positions, in a leaf that is not used any more."""
        BatchKVCache.__init__(self, [])
        self.state, self.slack = like.state, like.slack
        self.groups, self.beginnings = groups, beginnings

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write these positions; what attention reads."""
        sizes = keys.shape[3], values.shape[3]
        own = RaggedKVCache.update_and_fetch(self, *self._stored(keys, values))
        return _Read(self, sizes, self.readable(own, sizes)), own[1]

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> mx.array:
        """Own positions that each row's next `N` queries may see; of a beginning they see all."""
        if options.get("window_size") is not None:
            raise NotImplementedError("a window over positions that rows share")
        return super().make_mask(N, return_array, **options)

    def _stored(self, keys: mx.array, values: mx.array) -> Pair:
        return keys, values

    def readable(self, stored: Pair, sizes: tuple[int, int]) -> Pair:
        """Keys and values as numbers, of heads of these sizes."""
        return stored

    def keep_rows(self, keep: Sequence[int]) -> None:
        """Keep the beginnings of the rows at these indices."""
        self.groups = self.groups.of_rows(keep)
        self.beginnings = {key: self.beginnings[key] for key in self.groups.rows if key in self.beginnings}

    def extend(self, other: Any) -> None:
        """Append the rows of a leaf like this one; a beginning that both have is held once."""
        super().extend(other)
        self.groups = self.groups.and_rows(other.groups)
        self.beginnings = other.beginnings | self.beginnings

    def whole(self, rows: Sequence[int], starts: Sequence[int]) -> tuple[Any, Any, list[int], int]:
        """Keys and values of these rows from their first position on, [rows, H, positions, D]; where each begins.

        `starts`: where the own positions of each begin. All end where the leaf ends, which is the last number.
        """
        if self.keys is None:
            return None, None, list(starts), 0
        keys = {row: key for key, of in self.groups.rows.items() for row in of}
        lengths = [self._idx - start for start in starts]
        before = [self.beginnings[keys[row]] if row in keys else None for row in rows]
        lengths = [n if pair is None else n + pair[0].shape[2] for n, pair in zip(lengths, before, strict=True)]
        longest = max(lengths)
        wholes: list[mx.array] = []
        for at, own in enumerate((self.keys, self.values)):
            parts = []
            for row, start, pair, length in zip(rows, starts, before, lengths, strict=True):
                part = own[row : row + 1, :, start : self._idx]
                if pair is not None:
                    part = mx.concatenate([pair[at], part], axis=2)
                parts.append(mx.pad(part, [(0, 0), (0, 0), (longest - length, 0), (0, 0)]))
            wholes.append(mx.concatenate(parts))
        return wholes[0], wholes[1], [longest - length for length in lengths], longest


class SharedQuantisedKVCache(SharedKVCache, RaggedQuantisedKVCache):
    """The same of packed KV, which is read unpacked."""

    def __init__(self, like: RaggedQuantisedKVCache, groups: Groups, beginnings: dict[Hashable, Pair]) -> None:
        SharedKVCache.__init__(self, like, groups, beginnings)
        self.packing: Packing = like.packing

    def _stored(self, keys: mx.array, values: mx.array) -> Pair:
        return self._packed(keys, values)

    def readable(self, stored: Pair, sizes: tuple[int, int]) -> Pair:
        keys, values = (self.packing.unpack(each, size) for each, size in zip(stored, sizes, strict=True))
        return keys, values


class _Read:
    """The object that attention gets in place of keys."""

    def __init__(self, cache: SharedKVCache, sizes: tuple[int, int], own: Pair) -> None:
        self._groups, self._beginnings = cache.groups, cache.beginnings
        self._readable, self._sizes, self._own = cache.readable, sizes, own

    def attended(self, queries: mx.array, scale: float, mask: mx.array | None) -> mx.array:
        """Attention output [B, heads, L, D] of queries like it; `mask` [B, 1, L, own positions]."""
        rows, heads, count, size = queries.shape
        keys, values = self._own
        each = heads // keys.shape[1]
        # Heads that share keys lie one after another: [B, KV heads, N, D], N = heads of each x L.
        queries_BHND = queries.astype(mx.float32).reshape(rows, keys.shape[1], each * count, size) * scale
        scores = _scores(queries_BHND, keys)
        if mask is not None:
            scores_BHRLS = scores.reshape(rows, keys.shape[1], each, count, -1)
            mask = mask[:, :, None]
            hidden = mx.where(mask, scores_BHRLS, -mx.inf) if mask.dtype == mx.bool_ else scores_BHRLS + mask
            scores = hidden.reshape(scores.shape)
        own, own_lse = _part(scores, values)
        if self._groups.rows:
            own = _mean(own, own_lse, *self._of_beginnings(queries_BHND, own, own_lse))
        return own.astype(queries.dtype).reshape(rows, heads, count, values.shape[3])

    def _of_beginnings(self, queries_BHND: mx.array, own: mx.array, own_lse: mx.array) -> Pair:
        """Output and log of the sum of scores of each row's part that is its beginning."""
        groups, parts = self._groups, list[Pair]()
        for key in groups.rows:
            parts += self._of(queries_BHND[groups.index(key)], *self._readable(self._beginnings[key], self._sizes))
        if groups.bare:
            parts.append((own[: groups.bare], mx.full((groups.bare, *own_lse.shape[1:]), -mx.inf)))
        if len(parts) == 1 and groups.places is None:
            return parts[0]
        outputs, sums = (mx.concatenate(list(each)) for each in zip(*parts, strict=True))
        return (outputs, sums) if groups.places is None else (outputs[groups.places], sums[groups.places])

    @staticmethod
    def _of(queries_RHND: mx.array, keys: mx.array, values: mx.array) -> list[Pair]:
        rows, heads, count, size = queries_RHND.shape
        most = max(1, MOST_SCORES // (heads * count * keys.shape[2]))
        parts = []
        for start in range(0, rows, most):
            some = queries_RHND[start : start + most]
            queries_1HMD = some.swapaxes(0, 1).reshape(1, heads, -1, size)
            output, lse = _part(_scores(queries_1HMD, keys), values)
            output, lse = (each.reshape(heads, len(some), count, -1).swapaxes(0, 1) for each in (output, lse))
            parts.append((output, lse[..., 0]))
        return parts


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    """In float32, where products of 16-bit numbers are exact: rounded scores would move the weights by percents."""
    return queries @ keys.astype(mx.float32).swapaxes(-1, -2)


def _part(scores: mx.array, values: mx.array) -> Pair:
    """Output [..., N, D] over some positions, and the log of the sum of exponentials [..., N]."""
    weights = mx.softmax(scores, axis=-1)
    output = weights.astype(values.dtype) @ values
    # The largest weight is 1 / sum(exp(score - largest score)). Exponentials are most of the time on a CPU.
    return output, mx.max(scores, axis=-1) - mx.log(mx.max(weights, axis=-1))


@fused
def _mean(own: mx.array, own_lse: mx.array, other: mx.array, other_lse: mx.array) -> mx.array:
    share = mx.sigmoid(other_lse - own_lse)[..., None]
    return own + share * (other - own)


def install() -> None:
    """Put this attention before mlx-lm's quantised one, in this process; once."""
    quantised = base.quantized_scaled_dot_product_attention
    if getattr(quantised, "reads_shared", False):
        return

    def attention(queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, **packing: int) -> mx.array:
        if isinstance(keys, _Read):
            return keys.attended(queries, scale, mask)
        return cast(mx.array, quantised(queries, keys, values, scale=scale, mask=mask, **packing))

    attention.reads_shared = True  # type: ignore[attr-defined]
    base.quantized_scaled_dot_product_attention = attention
