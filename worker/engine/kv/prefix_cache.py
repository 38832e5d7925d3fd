"""Automatic prefix cache: the KV of prompts, found again by the hashes of their blocks.

A prompt is cut into blocks. A block's key is a chain hash: of the key before it and of its own ids; the first one
starts from the base model's hash and the adapter version. So an equal key means an equal prefix, computed with equal
weights.

What a prompt adds to the cache is one *segment*: the KV of those blocks that nobody stored before it. A prompt that
shares some blocks of a segment hits as far as they go. MLX arrays never change: whoever writes behind a prefix
writes into a copy, so hits share the stored arrays. Segments that come together lie in one slab (slabs.py), which
lives as long as one of them; the first hit of a segment takes it out, so that few hot prompts do not keep cold ones.

Invariants. Lives in the engine's thread. A segment's first block follows a block of another segment, its parent, or
begins the prompt. A use renews a segment and then its parents, so a parent is always younger in the order of use, and
eviction, oldest first, never leaves blocks that cannot be reached. Only plain `KVCache` can be cut at any length: with
other kinds of cache in the model, or a limit of 0, nothing is stored and nothing is found.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from worker.engine.kv.slabs import Cut, KvRows, Slab, Wanted, copy_rows
from worker.engine.messages import PrefixStats


@dataclass(frozen=True)
class Prompt:
    """Ids whose KV was computed with `version` from end to end."""

    ids: Sequence[int]
    version: str


@dataclass
class Prefix:
    """KV of a prompt's first `length` ids, one cache per layer; `kv` is empty when nothing is cached."""

    length: int = 0
    kv: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class _Segment:
    """Blocks that were stored together."""

    keys: list[bytes]  # of its blocks
    cut: Cut


class PrefixCache:
    """KV of prompts, up to `limit_bytes`. `new_kv` is an example of the model's caches."""

    def __init__(self, limit_bytes: int, block_size: int, base_sha256: str, new_kv: Sequence[Any]) -> None:
        cuttable = all(type(cache) is KVCache for cache in new_kv)
        self._limit = limit_bytes if cuttable else 0
        self._block_size = block_size
        self._base = base_sha256
        self._blocks: dict[bytes, _Segment] = {}
        self._segments: OrderedDict[bytes, _Segment] = OrderedDict()  # by their first block, least recently used first
        self._bytes = self._hits = self._misses = self._hit_tokens = self._evicted = 0

    @property
    def stats(self) -> PrefixStats:
        """Counters and size."""
        return PrefixStats(
            bytes=self._bytes,
            blocks=len(self._blocks),
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._evicted,
        )

    def longest(self, ids: Sequence[int], version: str, at_most: int) -> Prefix:
        """The longest cached prefix, at most `at_most` ids: what comes after it is still to be fed."""
        if not self._limit or at_most < 1 or len(ids) < self._block_size:
            return Prefix()
        runs = self._find(self._keys(ids, version))
        length = min(at_most, self._block_size * sum(runs.values()))
        if not length:
            self._misses += 1
            return Prefix()
        self._hits += 1
        self._hit_tokens += length
        self._touch(list(runs))
        for segment in runs:
            if segment.cut.slab.users > 1:
                self._put(segment, segment.cut.alone())
        prefix = Prefix(length, _joined(list(runs.items()), self._block_size, length))
        self._shrink()
        return prefix

    def worth_sharing(self, ids: Sequence[int], version: str) -> int:
        """Ids of half the prompt, in whole blocks, when they are not cached and could be; else 0."""
        half = len(ids) // 2 // self._block_size or len(ids) // self._block_size
        if not self._limit or sum(self._find(self._keys(ids, version)).values()) >= half:
            return 0
        return half * self._block_size

    def lacks(self, ids: Sequence[int], version: str) -> bool:
        """Whether `store` would add anything."""
        return bool(self._limit) and any(key not in self._blocks for key in self._keys(ids, version))

    def store(self, prompts: Sequence[Prompt], kv: KvRows) -> None:
        """Keep the whole blocks of these prompts, whose KV is in these rows."""
        if not self._limit:
            return
        chains: list[tuple[list[_Segment], list[bytes]]] = []  # what is known of a prompt, and the keys of the rest
        wanted: list[Wanted] = []
        begun: set[bytes] = set()
        for prompt, row, start in zip(prompts, kv.rows, kv.starts, strict=True):
            keys = list(self._keys(prompt.ids, prompt.version))
            parents = self._find(iter(keys))
            known = sum(parents.values())
            if known == len(keys) or keys[known] in begun:  # an equal beginning in the same step: the first one's
                continue
            begun.add(keys[known])
            chains.append((list(parents), keys[known:]))
            wanted.append(Wanted(row, start + known * self._block_size, start + len(keys) * self._block_size))
        fits = [self._bytes_of(kv, part) <= self._limit for part in wanted]
        chains = [chain for chain, fit in zip(chains, fits, strict=True) if fit]
        wanted = [part for part, fit in zip(wanted, fits, strict=True) if fit]
        for (parents_of, keys), cut in zip(chains, copy_rows(kv.layers, wanted), strict=True):
            segment = _Segment(keys, cut)
            self._put(segment, cut)
            self._blocks.update(dict.fromkeys(keys, segment))
            self._segments[keys[0]] = segment
            self._touch([*parents_of, segment])
        self._shrink()

    def _put(self, segment: _Segment, cut: Cut) -> None:
        """Let a segment use this cut; a slab counts while anybody uses it."""
        if not cut.slab.users:
            self._bytes += cut.slab.nbytes
        cut.slab.users += 1
        if segment.cut is not cut:
            self._release(segment.cut.slab)
            segment.cut = cut

    def _release(self, slab: Slab) -> None:
        slab.users -= 1
        if not slab.users:
            self._bytes -= slab.nbytes

    def _shrink(self) -> None:
        while self._bytes > self._limit:
            self._evict()

    def clear(self) -> None:
        """Forget everything."""
        while self._segments:
            self._evict()

    @staticmethod
    def _bytes_of(kv: KvRows, part: Wanted) -> int:
        return Cut(Slab(kv.layers), part.row, part.start, part.length).nbytes

    def _keys(self, ids: Sequence[int], version: str) -> Iterator[bytes]:
        """The chain of hashes of all whole blocks."""
        key = f"{self._base} {self._block_size} {version}".encode()
        packed = array("q", ids)
        for start in range(0, len(packed) - self._block_size + 1, self._block_size):
            block = packed[start : start + self._block_size].tobytes()
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            yield key

    def _find(self, keys: Iterator[bytes]) -> dict[_Segment, int]:
        """The segments along a chain, as far as it is known, and how many blocks of each are shared."""
        runs: dict[_Segment, int] = {}
        for key in keys:
            segment = self._blocks.get(key)
            if segment is None:
                break
            runs[segment] = runs.get(segment, 0) + 1
        return runs

    def _touch(self, chain: list[_Segment]) -> None:
        """Renew the segments of one prompt, parents last."""
        for segment in reversed(chain):
            self._segments.move_to_end(segment.keys[0])

    def _evict(self) -> None:
        _, segment = self._segments.popitem(last=False)
        for key in segment.keys:
            del self._blocks[key]
        self._release(segment.cut.slab)
        self._evicted += len(segment.keys)


def _joined(runs: list[tuple[_Segment, int]], block_size: int, length: int) -> list[Any]:
    """Caches of the first `length` positions of consecutive runs of blocks."""
    caches = []
    parts = [segment.cut.layers(blocks * block_size) for segment, blocks in runs]
    for layers in zip(*parts, strict=True):
        cache = KVCache()
        cache.keys = _concatenated([keys for keys, _ in layers])[..., :length, :]
        cache.values = _concatenated([values for _, values in layers])[..., :length, :]
        cache.offset = length
        caches.append(cache)
    return caches


def _concatenated(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
