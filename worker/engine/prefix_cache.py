"""Automatic prefix cache: the KV of prompts, found again by the hashes of their blocks.

A prompt is cut into blocks. A block's key is a chain hash: of the key before it and of its own ids; the first one
starts from the base model's hash and the adapter version. So an equal key means an equal prefix, computed with equal
weights.

What a prompt adds to the cache is one *segment*: the KV of those blocks that nobody stored before it. A prompt that
shares some blocks of a segment hits as far as they go. MLX arrays never change: whoever writes behind a prefix
writes into a copy, so hits share the stored arrays.

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

from worker.engine.messages import PrefixStats

Layers = list[tuple[mx.array, mx.array]]  # keys and values [1, heads, positions, dim] of each layer


@dataclass
class Prefix:
    """KV of a prompt's first `length` ids, one cache per layer; `kv` is empty when nothing is cached."""

    length: int = 0
    kv: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class _Segment:
    """Blocks that were stored together."""

    keys: list[bytes]  # of its blocks
    layers: Layers

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


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
        return Prefix(length, _joined(list(runs.items()), self._block_size, length))

    def lacks(self, ids: Sequence[int], version: str) -> bool:
        """Whether `store` would add anything."""
        return bool(self._limit) and any(key not in self._blocks for key in self._keys(ids, version))

    def store(self, ids: Sequence[int], version: str, kv: Sequence[Any]) -> None:
        """Keep the whole blocks of `ids`; `kv` covers them all, and was computed with `version` from end to end."""
        if not self._limit:
            return
        keys = list(self._keys(ids, version))
        parents = self._find(iter(keys))
        known = sum(parents.values())
        if known == len(keys):
            return
        start, end = known * self._block_size, len(keys) * self._block_size
        assert all(cache.offset >= end for cache in kv), "KV that is shorter than its ids"
        cut = [(cache.keys[..., start:end, :], cache.values[..., start:end, :]) for cache in kv]
        segment = _Segment(keys[known:], cut)
        if segment.nbytes > self._limit:
            return
        segment.layers = [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in cut]
        # Copies: a slice would keep the whole batch's KV alive. Nobody waits for them, nor do first tokens.
        mx.async_eval(segment.layers)  # type: ignore[no-untyped-call]
        self._blocks.update(dict.fromkeys(segment.keys, segment))
        self._segments[segment.keys[0]] = segment
        self._bytes += segment.nbytes
        self._touch([*parents, segment])
        while self._bytes > self._limit:
            self._evict()

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
        self._bytes -= segment.nbytes
        self._evicted += len(segment.keys)


def _joined(runs: list[tuple[_Segment, int]], block_size: int, length: int) -> list[Any]:
    """Caches of the first `length` positions of consecutive runs of blocks."""
    caches = []
    for layer in range(len(runs[0][0].layers)):
        cache = KVCache()
        parts = [(segment.layers[layer], blocks * block_size) for segment, blocks in runs]
        cache.keys = _concatenated([keys[..., :end, :] for (keys, _), end in parts])[..., :length, :]
        cache.values = _concatenated([values[..., :end, :] for (_, values), end in parts])[..., :length, :]
        cache.offset = length
        caches.append(cache)
    return caches


def _concatenated(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
