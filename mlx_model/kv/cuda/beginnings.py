"""Which block of `tiles.cu` reads what, where rows have beginnings in common (`kv/shared.py`).

One launch reads all: each row's own positions as for any rows, and each beginning once for up to 16 queries at a time
of all rows that have it. What a block makes of its stretch of positions has a slot of its own in each of its rows, and
`join.cu` adds up a row's slots, whatever they are of. So a step has no more operations than over copies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from mlx_model.kv.cuda.attention import TILED_BLOCKS, TILED_QUERIES
from mlx_model.kv.shared import Groups, SharedKVCache

_STEP = 64  # blocks, and members
_STRETCHES = (512, 256, 128)  # positions that a block reads of a beginning


class Blocks(NamedTuple):
    """Each block of a launch reads what is listed here; all layers of a batch have the same blocks."""

    slots: int  # of each row, some of which may stay empty
    begun_B: mx.array  # positions of each row that are beginnings
    arrays: tuple[mx.array, mx.array]  # blocks [N, 8], as `tiles.cu` has them; rows of each beginning in turn


def blocks_of(leaf: SharedKVCache, own: int, queries: int) -> Blocks:
    """Blocks of a batch with this leaf. `own`: room for own positions; `queries`: of a row, that share a KV head."""
    lengths = tuple(int(leaf.beginnings[key][0].shape[2]) for key in leaf.groups.keys)
    return _blocks(leaf.groups, lengths, own, queries, leaf.keys.shape[1])


@lru_cache(16)
def _blocks(groups: Groups, lengths: tuple[int, ...], own: int, queries: int, kv_heads: int) -> Blocks:
    """`lengths` of the beginnings in the order in which they lie, that of `groups.keys`."""
    sizes = dict(zip(groups.keys, lengths, strict=True))
    starts = dict(zip(groups.keys, accumulate(lengths, initial=0), strict=False))
    of_keys = {key: of for level in groups.levels for key, of in level.rows.items()}
    many = {key: -(-len(of) * queries // TILED_QUERIES) for key, of in of_keys.items()}

    def stretches(length: int) -> dict[Hashable, int]:
        return {key: -(-size // length) for key, size in sizes.items()}

    found = (
        each for each in _STRETCHES if kv_heads * sum(many[k] * n for k, n in stretches(each).items()) >= TILED_BLOCKS
    )
    length = next(found, _STRETCHES[-1])
    parts, own_parts = stretches(length), max(1, own // _STRETCHES[0])
    slots_B = [own_parts + sum(parts[key] for key in chain) for chain in groups.chains]
    slots = max(slots_B)
    members, blocks = list[int](), list[Sequence[int]]()

    def add(of: Sequence[int], reads: Sequence[Sequence[int]], slot: int) -> None:
        first = len(members)
        members.extend(of)
        for query in range(0, len(of) * queries, TILED_QUERIES):
            blocks.extend((*each, first, len(of), query, slot + at, slots) for at, each in enumerate(reads))

    for key, of in of_keys.items():
        chain, start, size = groups.chains[of[0]], starts[key], sizes[key]
        slot = own_parts + sum(parts[each] for each in chain[: chain.index(key)])
        add(of, [(0, start + at, start + min(size, at + length)) for at in range(0, size, length)], slot)
    for row, used in enumerate(slots_B):
        add([row], [(own_parts, part, 0) for part in range(own_parts)], 0)
        add([row], [(0, 0, 0)] * (slots - used), used)
    # Few shapes: what is compiled for one is not forgotten before its key is (`DecodeStep`).
    blocks += [(0,) * 8] * (-len(blocks) % _STEP)
    members += [0] * (-len(members) % _STEP)
    begun_B = mx.array([sum(sizes[key] for key in chain) for chain in groups.chains])
    return Blocks(slots, begun_B, (mx.array(blocks), mx.array(members)))
