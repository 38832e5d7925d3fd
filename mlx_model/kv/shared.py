"""KV of a batch whose rows begin alike: a beginning is stored and read once, what follows is a row's own.

A leaf holds the rows' own positions as any ragged leaf does (ragged.py), and the keys and values of each beginning,
[1, H, positions, D]. Attention has two parts: all queries of the rows that begin alike against their beginning, as one
product, and each row's queries against its own positions. Softmax over both is the mean of the two parts, weighted by
what their scores sum to:

    o = sigmoid(lse_beginning - lse_own) * o_beginning + (1 - the same) * o_own

A beginning may be a chain of several, such as a system prompt and what follows it in one group's prompt. Each is joined
to what has been read in this way, and `lse_own` becomes that of both: the order does not matter.

Scores and weights are float32. In place of keys attention gets an object that knows both parts (`install`), so every
model that uses MLX's attention and plain masks can have such leaves (`kinds.can_share`). Sinks belong to the own part.

MLA's leaves hold latents and rotary keys, and a score is the sum of two products, of which the model computes the
rotary one by itself: `(q_rotary * scale) @ keys.T`. Its queries are needed for the beginnings, too. So the rotary keys
that the model gets end with the rows of an identity matrix, and the last columns of its scores are those queries.

Invariants. A beginning lies before all that its rows write, so a step takes back own positions only. Rows that have a
beginning in common have all before it in common, too. `offset` counts all parts; padding, slack and `_idx` are those of
the own part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, Literal, cast
from weakref import WeakSet

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from mlx_model.cuda import fused
from mlx_model.kv.apart import ApartRead
from mlx_model.kv.padded import PaddedRead, PartsRead
from mlx_model.kv.quantised import Packing
from mlx_model.kv.ragged import RaggedKVCache, RaggedQuantisedKVCache

MOST_SCORES = 1 << 26  # numbers that exist at one time: more rows of a beginning are read in several products
Pair = tuple[mx.array, mx.array]  # keys and values; of MLA latents and rotary keys
Form = Literal["keys", "latents"]  # what a model's leaves hold


Chain = tuple[Hashable, ...]  # keys of a row's beginnings, from its first position on
Parts = Sequence[tuple[Hashable, int]]  # of a chain, each with its positions


@dataclass(frozen=True, eq=False)
class Level:
    """Beginnings at one place of the rows' chains."""

    rows: dict[Hashable, tuple[int, ...]]
    count: int  # rows of the batch

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


@dataclass(frozen=True, eq=False)
class Groups:
    """Which of a batch's rows have which beginnings; one object for all leaves of a batch."""

    chains: tuple[Chain, ...]  # of each row

    def of_rows(self, keep: Sequence[int]) -> Groups:
        """The rows at these indices."""
        made = self._kept.get(kept := tuple(keep))
        if made is None:
            made = self._kept[kept] = Groups(tuple(self.chains[row] for row in kept))
        return made

    def and_rows(self, other: Groups) -> Groups:
        """These rows, then those of `other`."""
        made = self._joined.get(other)
        if made is None:
            made = self._joined[other] = Groups(self.chains + other.chains)
        return made

    @cached_property
    def keys(self) -> tuple[Hashable, ...]:
        """The keys of all beginnings that any of the rows has."""
        return tuple(dict.fromkeys(key for chain in self.chains for key in chain))

    @cached_property
    def levels(self) -> list[Level]:
        """The first beginnings of all rows, then the second ones."""
        levels: list[Level] = []
        for row, chain in enumerate(self.chains):
            levels += [Level({}, len(self.chains)) for _ in range(len(levels), len(chain))]
            for level, key in zip(levels, chain, strict=False):
                level.rows[key] = (*level.rows.get(key, ()), row)
        return levels

    @cached_property
    def _kept(self) -> dict[tuple[int, ...], Groups]:
        return {}  # all leaves ask for the same ones

    @cached_property
    def _joined(self) -> dict[Groups, Groups]:
        return {}


def groups_of(chains: Sequence[Parts]) -> Groups:
    """Groups of rows that have these chains of beginnings."""
    return Groups(tuple(tuple(key for key, _ in chain) for chain in chains))


class SharedKVCache(RaggedKVCache):
    """Plain KV of rows of which some begin alike."""

    def __init__(
        self, like: RaggedKVCache, groups: Groups, beginnings: dict[Hashable, Pair], form: Form = "keys"
    ) -> None:
        """`like`: the rows' own positions, in a leaf that is not used any more."""
        BatchKVCache.__init__(self, [])
        self.state, self.slack = like.state, like.slack
        self.groups, self.beginnings, self.form = groups, beginnings, form
        self._in_line: tuple[tuple[Hashable, ...], Pair] | None = None
        self._begun = WeakSet[SharedKVCache]()  # of prompts under way

    def in_line(self) -> Pair:
        """Keys and values of all beginnings, [1, H, positions, D], one behind another in the order of the groups' keys,
        and room after them.

        That is how they are stored from then on: only a change of what rows begin with copies them.
        """
        order = self.groups.keys
        if self._in_line is None or self._in_line[0] != order:
            ends = list(accumulate(self.beginnings[key][0].shape[2] for key in order))
            keys, values = (self._lined_up([self.beginnings[key][at] for key in order], ends[-1]) for at in range(2))
            parts = (mx.split(each, ends, axis=2)[:-1] for each in (keys, values))
            self.beginnings = dict(zip(order, zip(*parts, strict=True), strict=True))
            self._in_line = order, (keys, values)
            for leaf in self._begun:  # lest they keep the arrays that these were in
                for key, (old, _) in leaf.beginnings.items():
                    new = self.beginnings.get(key)
                    if new is not None and new[0].shape == old.shape:
                        leaf.beginnings[key] = new
        return self._in_line[1]

    def _lined_up(self, arrays: list[mx.array], length: int) -> mx.array:
        """One behind another, and then whole steps long, as own positions are."""
        heads, size = arrays[0].shape[1], arrays[0].shape[3]
        room = mx.zeros((1, heads, -length % self.step, size), arrays[0].dtype)
        return mx.concatenate([*arrays, room], axis=2)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write these positions; what attention reads."""
        sizes = keys.shape[3], values.shape[3]
        stored = RaggedKVCache.update_and_fetch(self, *self._stored(keys, values))
        own = self._readable(stored, sizes)
        if not self.groups.keys:
            return own
        readable = {key: self._readable(self.beginnings[key], sizes) for key in self.groups.keys}
        return read_of(SharedRead(self.groups, readable, own, self.form))

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> mx.array:
        """Own positions that each row's next `N` queries may see; of a beginning they see all."""
        if options.get("window_size") is not None:
            raise NotImplementedError("a window over positions that rows share")
        mask = super().make_mask(N, return_array, **options)
        return mask if self.form == "keys" or not self.groups.keys else with_queries(mask, self._rotary_size)

    @property
    def _rotary_size(self) -> int:
        return cast(int, self.values.shape[3])

    def _stored(self, keys: mx.array, values: mx.array) -> Pair:
        return keys, values

    def _readable(self, stored: Pair, sizes: tuple[int, int]) -> Pair:
        """Keys and values as numbers, of heads of these sizes."""
        return stored

    def begun(self, chain: Parts, groups: Groups, more: Pair | None = None) -> SharedKVCache:
        """A leaf of one row that has read these parts, which it reads where they are here; `groups` of that row.

        `more`: what the row has read after them, keys and values as they are stored.
        """
        held = {key: self.beginnings[key] for key, _ in chain}
        new, (keys, values) = self._empty(), more or (each[:, :, :0] for each in held[chain[0][0]])
        new.keys, new.values, new._idx = mx.contiguous(keys), mx.contiguous(values), keys.shape[2]
        new.offset = mx.array([new._idx + sum(length for _, length in chain)])
        made = type(self)(cast(Any, new), groups, held, self.form)
        self._begun.add(made)
        return made

    def _empty(self) -> RaggedKVCache:
        return RaggedKVCache([0])

    def keep_rows(self, keep: Sequence[int]) -> None:
        """Keep the beginnings of the rows at these indices."""
        self.groups = self.groups.of_rows(keep)
        self.beginnings = {key: self.beginnings[key] for key in self.groups.keys if key in self.beginnings}
        if self._in_line is not None and self._in_line[0] != self.groups.keys:
            self._in_line = None

    def extend(self, other: Any) -> None:
        """Append the rows of a leaf like this one; a beginning that both have is held once."""
        super().extend(other)
        self.groups = self.groups.and_rows(other.groups)
        self.beginnings = other.beginnings | self.beginnings

    def divide(self, groups: Groups, chains: Sequence[Parts]) -> None:
        """Store beginnings in the parts that `chains` have. Each lies in one of the parts that the row had."""
        self.groups = groups
        for chain in chains if self.beginnings else ():
            new: list[tuple[Hashable, int]] = []  # parts that lie at the beginning of the next one
            for key, length in chain:
                if key not in self.beginnings:
                    new.append((key, length))
                    continue
                pair, at = self.beginnings[key], self.beginnings[key][0].shape[2] - length
                if at:
                    self.beginnings[key] = part_of(pair, 0, slice(at, None))
                for before, positions in reversed(new):
                    self.beginnings[before] = part_of(pair, 0, slice(at - positions, at))
                    at -= positions
                new = []

    def whole(self, rows: Sequence[int], starts: Sequence[int]) -> tuple[Any, Any, list[int], int]:
        """Keys and values of these rows from their first position on, [rows, H, positions, D]; where each begins.

        `starts`: where the own positions of each begin. All end where the leaf ends, which is the last number.
        """
        if self.keys is None:
            return None, None, list(starts), 0
        before = [[self.beginnings[key] for key in self.groups.chains[row]] for row in rows]
        lengths = [
            self._idx - start + sum(keys.shape[2] for keys, _ in pairs)
            for start, pairs in zip(starts, before, strict=True)
        ]
        longest = max(lengths)
        wholes: list[mx.array] = []
        for at, own in enumerate((self.keys, self.values)):
            parts = []
            for row, start, pairs, length in zip(rows, starts, before, lengths, strict=True):
                part = own[row : row + 1, :, start : self._idx]
                if pairs:
                    part = mx.concatenate([*(pair[at] for pair in pairs), part], axis=2)
                parts.append(mx.pad(part, [(0, 0), (0, 0), (longest - length, 0), (0, 0)]))
            wholes.append(mx.concatenate(parts))
        return wholes[0], wholes[1], [longest - length for length in lengths], longest


class SharedQuantisedKVCache(SharedKVCache, RaggedQuantisedKVCache):
    """The same of packed KV, which is read unpacked."""

    def __init__(
        self, like: RaggedQuantisedKVCache, groups: Groups, beginnings: dict[Hashable, Pair], form: Form = "keys"
    ) -> None:
        SharedKVCache.__init__(self, like, groups, beginnings, form)
        self.packing: Packing = like.packing

    def _empty(self) -> RaggedQuantisedKVCache:
        return RaggedQuantisedKVCache(self.packing, [0])

    @property
    def _rotary_size(self) -> int:
        return self.packing.size(self.values.shape[3])

    def _stored(self, keys: mx.array, values: mx.array) -> Pair:
        return self._packed(keys, values)

    def _readable(self, stored: Pair, sizes: tuple[int, int]) -> Pair:
        keys, values = (self.packing.unpack(each, size) for each, size in zip(stored, sizes, strict=True))
        return keys, values


@dataclass(frozen=True, eq=False)
class SharedRead:
    """The object that attention gets in place of keys, and of MLA's latents; numbers, not packed ones."""

    groups: Groups
    beginnings: dict[Hashable, Pair]
    own: Pair
    form: Form
    learns: bool = False  # gradients are needed: scores are computed again for them, for they take the most memory

    def attended(self, queries: mx.array, scale: float, mask: mx.array, sinks: mx.array | None = None) -> mx.array:
        """Attention output [B, heads, L, D] of queries like it.

        `mask`: [B, 1, L, own positions]; of MLA its rotary scores [B, heads, L, own positions + rotary size].
        """
        if not self.learns:
            return self._attended(queries, scale, mask, sinks)
        pairs = list(self.beginnings.values())

        def again(queries: mx.array, rotary: mx.array, *arrays: mx.array) -> mx.array:
            own, *others = zip(arrays[::2], arrays[1::2], strict=True)
            read = replace(self, own=own, beginnings=dict(zip(self.beginnings, others, strict=True)))
            return read._attended(queries, scale, mask if mask.dtype == mx.bool_ else rotary, sinks)

        rotary = mx.zeros(0) if mask.dtype == mx.bool_ else mask
        arrays = [array for pair in (self.own, *pairs) for array in pair]
        return mx.checkpoint(again)(queries, rotary, *arrays)

    def _attended(self, queries: mx.array, scale: float, mask: mx.array, sinks: mx.array | None) -> mx.array:
        rows, heads, count, size = queries.shape
        keys, values = self.own
        kv_heads, each = keys.shape[1], heads // keys.shape[1]
        # Heads that share keys lie one after another: [B, KV heads, N, D], N = heads of each x L.
        queries_BHND = queries.astype(mx.float32).reshape(rows, kv_heads, each * count, size) * scale
        if self.form == "latents":
            values, end = keys, keys.shape[2]
            rotary_BHND = mask[..., end:].astype(mx.float32).reshape(rows, kv_heads, each * count, -1)
            mask = mask[..., :end].reshape(rows, kv_heads, each, count, end)
        else:
            rotary_BHND, mask = None, mask[:, :, None]
        scores = _scores(queries_BHND, keys)
        scores_BHRLS = scores.reshape(rows, kv_heads, each, count, -1)
        hidden = mx.where(mask, scores_BHRLS, -mx.inf) if mask.dtype == mx.bool_ else scores_BHRLS + mask
        own, own_lse = self._part(hidden.reshape(scores.shape), values)
        if sinks is not None:
            sinks_HN = mx.repeat(sinks.astype(mx.float32).reshape(kv_heads, each), count, axis=1)
            own, own_lse = _with_sinks(own, own_lse, sinks_HN)
        for level in self.groups.levels:
            other, other_lse = self._of_beginnings(level, queries_BHND, rotary_BHND, own, own_lse)
            own, own_lse = _mean(own, own_lse, other, other_lse), mx.logaddexp(own_lse, other_lse)
        return own.astype(queries.dtype).reshape(rows, heads, count, values.shape[3])

    def _of_beginnings(
        self, level: Level, queries_BHND: mx.array, rotary_BHND: mx.array | None, own: mx.array, own_lse: mx.array
    ) -> Pair:
        """Output and log of the sum of scores of each row's part that is its beginning of this level."""
        parts = list[Pair]()
        for key in level.rows:
            index = level.index(key)
            rotary = None if rotary_BHND is None else rotary_BHND[index]
            parts += self._of(queries_BHND[index], rotary, *self.beginnings[key])
        if level.bare:
            parts.append((own[: level.bare], mx.full((level.bare, *own_lse.shape[1:]), -mx.inf)))
        if len(parts) == 1 and level.places is None:
            return parts[0]
        outputs, sums = (mx.concatenate(list(each)) for each in zip(*parts, strict=True))
        return (outputs, sums) if level.places is None else (outputs[level.places], sums[level.places])

    def _of(self, queries_RHND: mx.array, rotary_RHND: mx.array | None, keys: mx.array, values: mx.array) -> list[Pair]:
        rows, heads, count, _ = queries_RHND.shape
        most = max(1, MOST_SCORES // (heads * count * keys.shape[2]))
        parts = []
        for start in range(0, rows, most):
            some = slice(start, start + most)
            scores = _scores(_together(queries_RHND[some]), keys)
            if rotary_RHND is not None:
                scores = scores + _scores(_together(rotary_RHND[some]), values)
            output, lse = self._part(scores, values if rotary_RHND is None else keys)
            output, lse = (mx.unflatten(each[0], 1, (-1, count)).swapaxes(0, 1) for each in (output, lse))
            parts.append((output, lse))
        return parts

    def _part(self, scores: mx.array, values: mx.array) -> Pair:
        """Output [..., N, D] over some positions, and the log of the sum of exponentials [..., N]."""
        weights = mx.softmax(scores, axis=-1)
        output = weights.astype(values.dtype) @ values
        if self.learns:
            return output, mx.logsumexp(scores, axis=-1)
        # The largest weight is 1 / sum(exp(score - largest score)). Exponentials are most of the time on a CPU.
        return output, mx.max(scores, axis=-1) - mx.log(mx.max(weights, axis=-1))


def part_of(pair: Pair, row: int, positions: slice) -> Pair:
    """A copy of some positions of a row, [1, H, positions, D], which keeps nothing else alive."""
    keys, values = (mx.contiguous(each[row : row + 1, :, positions]) for each in pair)
    return keys, values


def read_of(read: SharedRead) -> tuple[SharedRead, mx.array]:
    """Keys and values as a cache's `update_and_fetch` returns them to a model."""
    rotary = read.own[1]
    if read.form == "keys":
        return read, rotary
    rows, heads, _, size = rotary.shape
    through = mx.broadcast_to(mx.eye(size, dtype=rotary.dtype), (rows, heads, size, size))
    return read, mx.concatenate([rotary, through], axis=2)


def with_queries(mask: mx.array, rotary_size: int) -> mx.array:
    """A mask of own positions, followed by the columns in which MLA hands its rotary queries through."""
    return mx.concatenate([mask, mx.ones((*mask.shape[:3], rotary_size), mx.bool_)], axis=3)


@dataclass(frozen=True, eq=False)
class _Turned:
    """MLA's latents as keys or as values of heads: attention turns queries and outputs instead, which are fewer."""

    linear: Any
    read: SharedRead


def _together(queries_RHND: mx.array) -> mx.array:
    """As the queries of one row, [1, H, R x N, D]."""
    _, heads, _, size = queries_RHND.shape
    return queries_RHND.swapaxes(0, 1).reshape(1, heads, -1, size)


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    """In float32, where products of 16-bit numbers are exact: rounded scores would move the weights by percents."""
    return queries @ keys.astype(mx.float32).swapaxes(-1, -2)


@fused
def _mean(own: mx.array, own_lse: mx.array, other: mx.array, other_lse: mx.array) -> mx.array:
    share = mx.sigmoid(other_lse - own_lse)[..., None]
    return own + share * (other - own)


def _with_sinks(own: mx.array, own_lse: mx.array, sinks: mx.array) -> Pair:
    """The same part with one more position for each head, of this score and without a value."""
    return own * mx.sigmoid(own_lse - sinks)[..., None], mx.logaddexp(own_lse, sinks)


@cache
def install() -> None:
    """Put this attention before MLX's, in this process, and let MLA's layers hand latents through; once."""
    fused_attention = mx.fast.scaled_dot_product_attention

    def attention(q: mx.array, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
        if isinstance(k, SharedRead):
            return k.attended(q, scale, mask, sinks)
        if isinstance(k, (ApartRead, PaddedRead, PartsRead)):
            return k.attended(fused_attention, q, scale, mask, sinks)
        if isinstance(k, _Turned):
            return cast(mx.array, v.linear(k.read.attended(k.linear(q), scale, mask, sinks)))
        return fused_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    mx.fast.scaled_dot_product_attention = attention  # type: ignore[assignment]
    for layer in (MultiLinear, QuantizedMultiLinear):
        layer.__call__ = _turning(layer.__call__)


def _turning(call: Callable[..., Any]) -> Callable[..., Any]:
    def turned(self: Any, x: Any, transpose: bool = True) -> Any:
        return _Turned(self, x) if isinstance(x, SharedRead) and x.form == "latents" else call(self, x, transpose)

    return turned
