"""How each kind of layer keeps what it has read; everything else asks here and is blind to the kind.

A model's caches come as a list of mlx-lm's (mlx_lm/models/cache.py), some of them `CacheList`s of several. A *leaf* is
one cache that holds arrays itself, of one row or of a batch:

- plain: keys and values of every position; can be cut at any length. A batch pads its rows on the left. Quantised, they
  are packed (quantised.py) and otherwise the same. Rows of a batch that begin alike may share their beginnings
  (shared.py); or rows lie apart, each without padding (apart.py).
- window: keys and values of the last `max_size` positions.
- recurrent: a state of fixed size, which is replaced with every token.

The last two cannot be cut: what they hold belongs to one position, and is kept as a *state* of that position. Of any
other class nothing is kept; its own methods put it into a batch and filter it.

Rows of a batch are *taken back* when they have read more than they should: plain leaves and windows by counting
(ragged.py), recurrent ones by the state that they had before, from which they read again.

A new kind is a class with these methods and an entry in `_KINDS`; what is cut at any length may hold any number of
arrays, with positions on axis 2.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from mlx_model.kv.apart import ApartKVCache, ApartWindowKVCache, RowKv
from mlx_model.kv.quantised import BatchQuantisedKVCache, QuantisedKVCache
from mlx_model.kv.ragged import RaggedKVCache, RaggedQuantisedKVCache, RaggedWindowKVCache, Slack, in_order
from mlx_model.kv.shared import Form, Parts, SharedKVCache, SharedQuantisedKVCache, groups_of, install, part_of

Arrays = tuple[mx.array, ...]
_CLOSE = 0.02  # of the largest logit: how far two ways to read the same KV may be apart


class Kind:
    """A class of caches that we do not know: nothing of it is kept, so only `copies` and `filter` are called."""

    is_known = False
    is_cut = False  # at any length
    has_ends = False  # rows of a batch that are counted, so that each can end earlier

    def end(self, cache: Any) -> int:
        """Positions of a cut leaf, padding included."""
        raise NotImplementedError

    def arrays(self, cache: Any) -> Arrays:
        """Arrays of a cut leaf for all rows and positions; () while it is empty."""
        raise NotImplementedError

    def state(self, cache: Any, rows: list[int], lengths: list[int]) -> Arrays:
        """State of these rows of a leaf that is not cut, after `lengths` ids; () while it is empty."""
        raise NotImplementedError

    def restored(self, new: Any, arrays: Arrays, length: int) -> Any:
        """A leaf of one row that has read `length` ids; `new` is an empty one of the same model."""
        raise NotImplementedError

    def copies(self, cache: Any, rows: int) -> Any:
        """A batch of equal rows; as views, where that can be: a write after them makes a copy."""
        return cache.merge([cache] * rows)

    def filter(self, cache: Any, keep: list[int], index: mx.array, shift: int) -> None:
        """Keep these rows of a batch, of which none needs the first `shift` positions of padding."""
        cache.filter(keep)

    def window(self, cache: Any) -> int:
        """Positions that a leaf holds at most; 0: it holds none."""
        return 0

    def shed(self, cache: Any) -> None:
        """Drop what a leaf of a batch holds beyond what its rows still read."""

    def ragged(self, cache: Any) -> Any:
        """A leaf of a batch in the form in which rows may end apart."""
        return cache


class _Plain(Kind):
    is_known = is_cut = has_ends = True

    def end(self, cache: Any) -> int:
        return int(cache.size())

    def arrays(self, cache: Any) -> Arrays:
        return () if cache.keys is None else (cache.keys, cache.values)

    def restored(self, new: Any, arrays: Arrays, length: int) -> Any:
        cache = self._row(new)
        cache.keys, cache.values = arrays
        cache.offset = length
        return cache

    def copies(self, cache: Any, rows: int) -> Any:
        batch = self._batch(cache, [0] * rows)
        if cache.keys is not None:
            batch.keys, batch.values = (_repeated(each, rows) for each in cache.keys_and_values())
            batch.offset = batch.offset + cache.offset
            batch._idx = cache.offset
        return batch

    def filter(self, cache: Any, keep: list[int], index: mx.array, shift: int) -> None:
        # mlx-lm's own `filter` reads the padding back from the device, and so waits for the step under way.
        if cache.keys is not None:
            cache.keys = cache.keys[..., shift:, :][index]
            cache.values = cache.values[..., shift:, :][index]
            cache._idx -= shift
        cache.offset = cache.offset[index]
        cache.left_padding = cache.left_padding[index] - shift

    def ragged(self, cache: Any) -> Any:
        if isinstance(cache, RaggedKVCache):
            return cache
        leaf = self._ragged(cache)
        leaf.state = cache.state
        return leaf

    def _row(self, like: Any) -> Any:
        """An empty cache for one row."""
        return KVCache()

    def _batch(self, like: Any, padding: list[int]) -> Any:
        return BatchKVCache(padding)

    def _ragged(self, like: Any) -> Any:
        return RaggedKVCache([])


class _Quantised(_Plain):
    def _row(self, like: Any) -> Any:
        return QuantisedKVCache(like.packing)

    def _batch(self, like: Any, padding: list[int]) -> Any:
        return BatchQuantisedKVCache(like.packing, padding)

    def _ragged(self, like: Any) -> Any:
        return RaggedQuantisedKVCache(like.packing, [])


class _Shared(_Plain):
    """Rows that begin alike; what is asked of all positions of a row is asked of `whole` ones."""

    def filter(self, cache: Any, keep: list[int], index: mx.array, shift: int) -> None:
        super().filter(cache, keep, index, shift)
        cache.keep_rows(keep)

    def arrays(self, cache: Any) -> Arrays:
        raise TypeError("beginnings lie apart from what follows")


class _Apart(Kind):
    """Rows that lie apart; what is asked of positions of several rows is asked of `whole` ones."""

    is_known = is_cut = True

    def end(self, cache: Any) -> int:
        return int(cache.end)

    def arrays(self, cache: Any) -> Arrays:
        raise TypeError("rows lie apart")

    def restored(self, new: Any, arrays: Arrays, length: int) -> Any:
        return new.with_rows([RowKv((arrays[0], arrays[1]), length)])

    def copies(self, cache: Any, rows: int) -> Any:
        return cache.with_rows(cache.rows * rows)


class _ApartWindow(_Apart):
    is_cut = False

    def state(self, cache: Any, rows: list[int], lengths: list[int]) -> Arrays:
        width = max(min(length, cache.window) for length in lengths)
        return cache.latest(rows, width) if cache.state else ()

    def restored(self, new: Any, arrays: Arrays, length: int) -> Any:
        width = min(length, new.window)
        keys, values = (each[..., each.shape[2] - width :, :] for each in arrays)
        return new.with_rows([RowKv((keys, values), length, length - width)])

    def window(self, cache: Any) -> int:
        return int(cache.window)


class _Window(Kind):
    is_known = has_ends = True

    def state(self, cache: Any, rows: list[int], lengths: list[int]) -> Arrays:
        if cache.keys is None:
            return ()
        width = max(min(length, cache.max_size) for length in lengths)
        if type(cache) is RaggedWindowKVCache:
            return cache.latest(rows, width)
        return tuple(_rows(each[..., each.shape[2] - width :, :], rows) for each in _in_order(cache))

    def restored(self, new: Any, arrays: Arrays, length: int) -> Any:
        cache = RotatingKVCache(new.max_size)
        width = min(length, new.max_size)
        cache.keys, cache.values = (each[..., each.shape[2] - width :, :] for each in arrays)
        cache.offset, cache._idx = length, width
        return cache

    def copies(self, cache: Any, rows: int) -> Any:
        batch = BatchRotatingKVCache(cache.max_size, [0] * rows)
        if cache.keys is not None:
            width = cache.size()
            ordered = (each[..., each.shape[2] - width :, :] for each in _in_order(cache))
            batch.keys, batch.values = (_repeated(each, rows) for each in ordered)
            batch.offset = batch.offset + cache.offset
            batch._idx = batch._offset = width
        return batch

    def ragged(self, cache: Any) -> Any:
        return cache if type(cache) is RaggedWindowKVCache else RaggedWindowKVCache.of(cache)

    def window(self, cache: Any) -> int:
        return int(cache.max_size)

    def shed(self, cache: Any) -> None:
        # mlx-lm does so with the next token; until then all rows of a batch would be padded to a long prompt's piece.
        more = 0 if cache.keys is None else cache.keys.shape[2] - cache.max_size
        if more > 0:
            cache.keys, cache.values = (mx.contiguous(each[..., more:, :]) for each in (cache.keys, cache.values))
            cache.left_padding = cache.left_padding - more
            cache._idx = cache.max_size


def _in_order(cache: Any) -> Arrays:
    """Keys and values from the oldest position to the newest, of one row or of a batch."""
    if type(cache) is RotatingKVCache:
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    return in_order(cache)


class _Recurrent(Kind):
    is_known = True

    def state(self, cache: Any, rows: list[int], lengths: list[int]) -> Arrays:
        return () if any(each is None for each in cache.cache) else tuple(_rows(each, rows) for each in cache.cache)

    def restored(self, new: Any, arrays: Arrays, length: int) -> Any:
        cache = ArraysCache(len(new.cache))
        cache.cache = list(arrays)
        return cache

    def copies(self, cache: Any, rows: int) -> Any:
        if any(each is None for each in cache.cache):
            return cache.merge([cache] * rows)
        batch = ArraysCache(len(cache.cache))
        batch.cache = [_repeated(each, rows) for each in cache.cache]
        return batch


_OTHER, _APART, _APART_WINDOW = Kind(), _Apart(), _ApartWindow()
_PLAIN, _QUANTISED, _SHARED, _WINDOW, _RECURRENT = _Plain(), _Quantised(), _Shared(), _Window(), _Recurrent()
_KINDS: dict[type, Kind] = {
    KVCache: _PLAIN,
    BatchKVCache: _PLAIN,
    QuantisedKVCache: _QUANTISED,
    BatchQuantisedKVCache: _QUANTISED,
    RaggedKVCache: _PLAIN,
    RaggedQuantisedKVCache: _QUANTISED,
    SharedKVCache: _SHARED,
    SharedQuantisedKVCache: _SHARED,
    RotatingKVCache: _WINDOW,
    BatchRotatingKVCache: _WINDOW,
    RaggedWindowKVCache: _WINDOW,
    ArraysCache: _RECURRENT,
    ApartKVCache: _APART,
    ApartWindowKVCache: _APART_WINDOW,
}


def kind_of(leaf: Any) -> Kind:
    """How it keeps what it has read."""
    if getattr(leaf, "keep", 0):
        return _OTHER  # a window that holds on to the first positions: mlx-lm has no batch of these
    return _KINDS.get(type(leaf), _OTHER)


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Those that hold arrays themselves, in order."""
    for cache in caches:
        if type(cache) is CacheList:
            yield from leaves(cache.caches)
        else:
            yield cache


def end_of(caches: Sequence[Any]) -> int:
    """Positions, padding included, where a leaf is plain; else 0."""
    return next((kind_of(leaf).end(leaf) for leaf in leaves(caches) if kind_of(leaf).is_cut), 0)


def window_of(caches: Sequence[Any]) -> int:
    """Positions that a row holds at most; 0: a leaf holds all, or none holds any."""
    each = list(leaves(caches))
    if any(not kind_of(leaf).is_known or kind_of(leaf).is_cut for leaf in each):
        return 0
    return max((kind_of(leaf).window(leaf) for leaf in each), default=0)


def shed(caches: Sequence[Any]) -> None:
    """Drop what leaves of a batch hold beyond what their rows still read."""
    for leaf in leaves(caches):
        kind_of(leaf).shed(leaf)


def keep_rows(caches: Sequence[Any], keep: list[int], padding: Sequence[int]) -> list[int]:
    """Keep these rows of batched caches; the padding of those kept."""
    left = [padding[at] for at in keep]
    shift = min(left)
    index = mx.array(keep)
    for leaf in leaves(caches):
        kind_of(leaf).filter(leaf, keep, index, shift)
    return [each - shift for each in left]


def may_be_taken_back(caches: Sequence[Any]) -> bool:
    """True if rows can be shortened: the kind of every leaf is known."""
    return all(kind_of(leaf).is_known for leaf in leaves(caches))


def are_cut(caches: Sequence[Any]) -> bool:
    """True if all leaves can be cut at any length."""
    return all(kind_of(leaf).is_cut for leaf in leaves(caches))


def ragged(caches: Sequence[Any]) -> list[Any]:
    """Batched caches in the form in which rows may end apart."""
    return mapped(caches, lambda leaf: kind_of(leaf).ragged(leaf))


def take_back(caches: Sequence[Any], unused: Sequence[int], slack: Sequence[int]) -> list[int]:
    """Forget the last so many positions of each row, but for recurrent leaves; the rows' slack after that.

    `slack` is what it was; the caches are `ragged`.
    """
    after = [before + each for before, each in zip(slack, unused, strict=True)]
    least = min(after)
    after = [each - least for each in after]
    share_offsets(caches, mx.array(list(unused)))
    end_apart(caches, least, Slack.of(after) if any(after) else None)
    return after


def end_apart(caches: Sequence[Any], least: int, slack: Slack | None) -> None:
    """All rows end `least` positions earlier than was counted, and each by its slack; `share_offsets` counts, too."""
    for leaf in _with_ends(caches):
        leaf.end_apart(least, slack)


def share_offsets(caches: Sequence[Any], unused_B: mx.array | None = None) -> None:
    """After a batch has read: let all leaves have one leaf's count [B] of what each row has read, for it is the same.

    Each leaf has counted by itself, lazily. What is no longer referenced is never computed: an operation a layer.
    `unused_B`: so many positions each row has read in vain.
    """
    counted = [leaf for leaf in _with_ends(caches) if isinstance(leaf.offset, mx.array)]
    if not counted:
        return
    offset_B = counted[0].offset if unused_B is None else counted[0].offset - unused_B
    for leaf in counted:
        leaf.offset = copy(offset_B)  # an object of its own, since some leaves count in place; no operation


def _with_ends(caches: Sequence[Any]) -> list[Any]:
    """Leaves of a batch whose rows are counted."""
    return [leaf for leaf in leaves(caches) if kind_of(leaf).has_ends]


def align(caches: Sequence[Any]) -> None:
    """Let the rows of ragged caches end together, which copies all that they hold."""
    for leaf in _with_ends(caches):
        leaf.align()


def has_windows(caches: Sequence[Any]) -> bool:
    """True if a leaf keeps positions that a row no longer needs while another row has fewer."""
    return any(kind_of(leaf).has_ends and not kind_of(leaf).is_cut for leaf in leaves(caches))


def lie_apart(caches: Sequence[Any]) -> bool:
    """True if rows lie apart from one another, or beginnings from what follows."""
    return any(kind_of(leaf) in (_SHARED, _APART) for leaf in leaves(caches))


def have_beginnings(caches: Sequence[Any]) -> bool:
    """True if beginnings lie apart from what follows."""
    return any(kind_of(leaf) is _SHARED for leaf in leaves(caches))


def shared(
    caches: Sequence[Any],
    chains: Sequence[Parts],
    padding: Sequence[int],
    form: Form = "keys",
) -> tuple[list[Any], list[int]]:
    """Batched caches in which the first positions of rows lie apart, once for all rows of one key; their padding.

    `chains`: of each row, the keys of its beginnings in order, with the positions of each.
    """
    firsts: dict[Hashable, tuple[int, slice]] = {}
    starts = []
    for row, (chain, start) in enumerate(zip(chains, padding, strict=True)):
        for key, length in chain:
            firsts.setdefault(key, (row, slice(start, start + length)))
            start += length
        starts.append(start)
    shift = min(starts)
    groups, left = groups_of(chains), mx.array([start - shift for start in starts])

    def leaf_of(leaf: Any) -> Any:
        if not kind_of(leaf).is_cut:
            return leaf
        plain = kind_of(leaf).ragged(leaf)
        made = SharedQuantisedKVCache if hasattr(leaf, "packing") else SharedKVCache
        pair = plain.keys, plain.values
        if plain.keys is None:  # prompts of one id, which is still to be fed
            return made(plain, groups, {}, form)
        held = {key: part_of(pair, row, of) for key, (row, of) in firsts.items()}
        # Without the room behind: a kernel writes in place only where arrays lie in order (ragged.with_room).
        plain.keys, plain.values = (each[..., shift : plain._idx, :] for each in pair)
        plain.left_padding, plain._idx = left + 0, plain._idx - shift
        return made(plain, groups, held, form)

    return mapped(caches, leaf_of), [start - shift for start in starts]


def begun(caches: Sequence[Any], chain: Parts, read: Sequence[Any]) -> list[Any] | None:
    """Caches of one row that begins with these parts of a batch, which it reads where they are; None: it cannot.

    `read`: caches of one row, which may hold more positions: of these it gets those after the parts.
    """
    if not all(kind_of(leaf) is _SHARED for leaf in leaves(caches)):
        return None
    groups, start, known = groups_of([chain]), sum(length for _, length in chain), leaves(read)

    def leaf_of(leaf: Any) -> Any:
        had = next(known, None)
        if had is None or (end := end_of([had])) <= start:
            return leaf.begun(chain, groups)
        keys, values = (each[:, :, start:end] for each in kind_of(had).arrays(had))
        return leaf.begun(chain, groups, (keys, values))

    return mapped(caches, leaf_of)


def divide(caches: Sequence[Any], chains: Sequence[Parts]) -> None:
    """Store the beginnings of rows in these parts, into which those that there are have to be divided."""
    groups = groups_of(chains)
    for leaf in leaves(caches):
        if kind_of(leaf) is _SHARED:
            leaf.divide(groups, chains)


def whole(caches: Sequence[Any], rows: Sequence[int], starts: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Plain leaves of some rows, in the place of those with beginnings; the rows' padding before (`starts`) and now."""
    index, after = mx.array(list(rows)), list(starts)

    def leaf_of(leaf: Any) -> Any:
        nonlocal after
        if kind_of(leaf) not in (_SHARED, _APART):
            return leaf
        plain = RaggedQuantisedKVCache(leaf.packing, []) if getattr(leaf, "packing", None) else RaggedKVCache([])
        keys, values, after, end = leaf.whole(rows, starts)
        plain.state = keys, values, leaf.offset[index], mx.array(after), end
        plain.slack = leaf.slack and leaf.slack.of_rows(rows)
        return plain

    return mapped(caches, leaf_of), after


def can_share(model: Any, new_kv: Sequence[Any]) -> Form | None:
    """The form in which this model's attention reads beginnings that rows share, by a trial; None: it does not."""
    if not any(kind_of(leaf).is_cut for leaf in leaves(new_kv)):
        return None
    install()
    model(mx.array([[1, 2, 3]]), cache=list(new_kv))
    forms: tuple[Form, ...] = ("keys", "latents")
    return next((form for form in forms if _reads_shared(model, new_kv, form)), None)


def _reads_shared(model: Any, begun_kv: Sequence[Any], form: Form) -> bool:
    try:
        together = shared(copies(begun_kv, 2), [[("", 3)]] * 2, [0, 0], form)[0]
        apart = copies(begun_kv, 2)
        for ids in ([[4], [5]], [[6, 7], [8, 9]]):
            one, other = (model(mx.array(ids), cache=each)[:, -1].astype(mx.float32) for each in (together, apart))
            if not (mx.max(mx.abs(one - other)) < _CLOSE * mx.max(mx.abs(other))).item():
                return False
    except Exception:  # masks and attention of the model's own
        return False
    return True


def states(caches: Sequence[Any]) -> list[Arrays]:
    """Arrays that recurrent leaves hold now."""
    return [tuple(leaf.cache) for leaf in _recurrent(caches)]


def go_back(caches: Sequence[Any], to: Sequence[Arrays]) -> None:
    """Let recurrent leaves hold again what they held."""
    for leaf, state in zip(_recurrent(caches), to, strict=True):
        leaf.cache = list(state)


def expect(caches: Sequence[Any], lengths: Sequence[int]) -> None:
    """Announce that the next input has `lengths` ids per row, then padding that recurrent leaves must not read."""
    for leaf in _recurrent(caches):
        leaf.prepare(lengths=lengths)


def have_read(caches: Sequence[Any]) -> None:
    """End what `expect` began, after the forward."""
    for leaf in _recurrent(caches):
        leaf.finalize()


def _recurrent(caches: Sequence[Any]) -> list[Any]:
    return [leaf for leaf in leaves(caches) if kind_of(leaf) is _RECURRENT]


def copies(caches: Sequence[Any], rows: int) -> list[Any]:
    """Batched caches of equal rows."""
    return mapped(caches, lambda leaf: kind_of(leaf).copies(leaf, rows))


def restored(new_kv: Sequence[Any], cut: Sequence[Arrays], states: Sequence[Arrays], length: int) -> list[Any]:
    """Caches of one row that has read `length` ids, from the arrays of its leaves; `new_kv` are empty ones."""
    cuts, others = iter(cut), iter(states)

    def leaf_of(new: Any) -> Any:
        kind = kind_of(new)
        return kind.restored(new, next(cuts if kind.is_cut else others), length)

    return mapped(new_kv, leaf_of)


def mapped(caches: Sequence[Any], leaf_of: Callable[[Any], Any]) -> list[Any]:
    """Caches with other leaves, made of these in order."""
    return [
        CacheList(*mapped(cache.caches, leaf_of)) if type(cache) is CacheList else leaf_of(cache) for cache in caches
    ]


def _rows(array: mx.array, rows: list[int]) -> mx.array:
    return array if len(rows) == array.shape[0] and rows == list(range(len(rows))) else array[mx.array(rows)]


def _repeated(array: mx.array, rows: int) -> mx.array:
    return mx.broadcast_to(array, (rows, *array.shape[1:]))  # never the same object: a write would change both
