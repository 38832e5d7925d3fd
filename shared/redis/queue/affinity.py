"""Preferred workers of a sequence: the one that computed its prompt's beginning lately, or one that has its adapter.

Workers note what they claim: marks (hashes of prompt beginnings of 128, 256, 512, ... tokens, with the adapter) ->
worker id. Who enqueues looks the longest mark up and prefers that worker; without one, those that have the adapter.

Invariants. All of it is hints: `SequenceQueue.enqueue` passes over workers that are busy, leaving or dead, and what
waits for one worker is stolen by any other that is free, so a stale hint costs STEAL_AFTER_MS at most. Notes live for
one to two epochs, MAX_NOTES an epoch at most.
"""

import hashlib
import time
from array import array
from collections.abc import Sequence

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import ask_all
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.sequences import SequenceSpec

SHORTEST = 128  # tokens of the shortest mark; recomputing less is cheaper than unbalancing the workers
MAX_NOTES = 50_000
LOOK_AGAIN_S = 1.0  # how old the view of the workers may be


class WarmNotes:
    """Written by a worker: which prompts it computes."""

    def __init__(self, redis: Redis, model: str, worker_id: str) -> None:
        self._redis = redis
        self._model = model
        self._worker_id = worker_id
        self._epoch = 0
        self._noted: set[bytes] = set()
        self._full = False

    async def note(self, specs: Sequence[SequenceSpec]) -> None:
        """Note that this worker computes these prompts."""
        if (epoch := _epoch()) != self._epoch:
            self._epoch, self._noted, self._full = epoch, set(), False
        fresh = {mark for spec in specs for mark in marks(spec.kv_prompt, spec.adapter)} - self._noted
        if not fresh or self._full:
            return
        key = keys.warm_prefixes(self._model, epoch)
        noted = [word for mark in fresh for word in (mark, self._worker_id)]
        commands = [("HSET", key, *noted), ("EXPIRE", key, 2 * keys.WARM_EPOCH_S), ("HLEN", key)]
        *_, notes = await ask_all(self._redis, commands)
        self._noted |= fresh
        self._full = int(notes) >= MAX_NOTES


class Affinity:
    """The workers to prefer, for enqueueing."""

    def __init__(self, redis: Redis, registry: WorkerRegistry) -> None:
        self._redis = redis
        self._registry = registry
        self._seen: dict[str, tuple[float, list[WorkerStatus]]] = {}

    async def preferred(self, specs: Sequence[SequenceSpec]) -> tuple[str, ...]:
        """Workers to prefer for sequences that are enqueued together; none: any worker."""
        (workers,) = await self.preferences([specs])
        return workers

    async def preferences(self, groups: Sequence[Sequence[SequenceSpec]]) -> list[tuple[str, ...]]:
        """Workers to prefer for each of several groups of sequences of one model."""
        ready = [worker for worker in await self._workers(groups[0][0].model) if worker.state == "ready"]
        if len(ready) < 2:
            return [()] * len(groups)
        warm = await _warm(self._redis, [_beginning_marks(group) for group in groups], groups[0][0].model)
        ids = {worker.id for worker in ready}
        return [
            (worker,) if worker in ids else _holders(group[0].adapter, ready)
            for worker, group in zip(warm, groups, strict=True)
        ]

    async def _workers(self, model: str) -> list[WorkerStatus]:
        at, seen = self._seen.get(model, (float("-inf"), []))
        if time.monotonic() - at > LOOK_AGAIN_S:
            self._seen[model] = (time.monotonic(), seen)  # one looks; meanwhile the others go by what was seen last
            seen = await self._registry.workers(model)
            self._seen[model] = (time.monotonic(), seen)
        return seen


async def holders(redis: Redis, model: str, specs: Sequence[SequenceSpec]) -> dict[str, str]:
    """By sequence, the worker that last computed its prompt's beginning, where one is known."""
    workers = await _warm(redis, [marks(spec.kv_prompt, spec.adapter) for spec in specs], model)
    return {spec.id: worker for spec, worker in zip(specs, workers, strict=True) if worker}


async def _warm(redis: Redis, groups: Sequence[list[bytes]], model: str) -> list[str]:
    """The worker of each group's longest known mark, "" where none is known."""
    epoch = _epoch()
    wanted = sorted({mark for group in groups for mark in group})
    if not wanted:
        return [""] * len(groups)
    names = [keys.warm_prefixes(model, each) for each in (epoch - 1, epoch)]
    older, newer = await ask_all(redis, [("HMGET", name, *wanted) for name in names])
    known = {mark: (new or old) for mark, old, new in zip(wanted, older, newer, strict=True)}
    return [next((known[mark].decode() for mark in group if known[mark]), "") for group in groups]


def marks(prompt_ids: Sequence[int], adapter: str) -> list[bytes]:
    """Hashes of a prompt's (`kv_prompt`) beginnings of SHORTEST, twice as many, ... tokens; the longest first."""
    hashes: list[bytes] = []
    packed = array("q", prompt_ids)
    chain = hashlib.blake2b(adapter.encode(), digest_size=12)
    done, length = 0, SHORTEST
    while length <= len(packed):
        chain.update(packed[done:length].tobytes())
        hashes.append(chain.copy().digest())
        done, length = length, 2 * length
    return hashes[::-1]


def _beginning_marks(group: Sequence[SequenceSpec]) -> list[bytes]:
    """Marks of what all prompts of a group begin with."""
    first, *others = {(spec.prompt_ids, spec.images): marks(spec.kv_prompt, spec.adapter) for spec in group}.values()
    return [mark for mark in first if all(mark in other for other in others)]


def _holders(adapter: str, ready: Sequence[WorkerStatus]) -> tuple[str, ...]:
    """The workers that have an adapter version; none when all or none of them have it.

    A bare name means the latest version, which every worker loads as soon as it is published.
    """
    have = [worker.id for worker in ready if adapter in worker.versions]
    return tuple(have) if len(have) < len(ready) else ()


def _epoch() -> int:
    return int(time.time() // keys.WARM_EPOCH_S)
