"""Completions of sequences, shared by the workers of a ring: the one drafts from what the other has finished.

A prompt is looked up in Redis when a sequence of it is claimed, while it goes into the engine, and what it wrote is
put there after its end. Both go in batches, in a task of their own.

Invariants. Nothing waits for this: what Redis does not take or give in time is forgotten, and costs drafts alone. What
comes from there is checked, since a draft must be token ids of the model.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.process.worker_settings import WorkerSettings
from shared.redis.connection.faults import reason
from shared.redis.processes.completion_store import (
    COMPLETION_IDS,
    MOST_COMPLETIONS,
    PROMPT_BYTES,
    Bounds,
    Completion,
    CompletionStore,
)
from shared.sequences import ModelCard, SequenceResult, SequenceSpec
from worker.engine.orders import Remember
from worker.engine.speculation.lookup import Ids
from worker.engine.speculation.memory import Completions, Key, Mark, key_of, mark_of
from worker.engine.thread import EngineThread

log = structlog.get_logger()

WORTH_SHARING = 2  # tokens
FRESH_S = 1.0  # what was looked up so lately is not looked up again
LOOKED_UP = 4096  # prompts of which that is known
WAITING = 1024  # sequences that wait to be looked up, or to be written; more push out the oldest
AT_ONCE = 16  # prompts in one call
WITHIN_S = 5.0  # for a call
QUIET_S = 30.0  # between two words about trouble


class RingMemory:
    """Shares completions between one worker's engine and the ring."""

    def __init__(
        self, store: CompletionStore | None, vocab_size: int, remember: Callable[[list[Completions]], None]
    ) -> None:
        """`remember` gives the engine what was found. Without a store nothing is shared."""
        self._store = store
        self._vocab_size = vocab_size
        self._remember = remember
        self._claimed: deque[SequenceSpec] = deque(maxlen=WAITING)
        self._ended: deque[tuple[SequenceSpec, tuple[int, ...]]] = deque(maxlen=WAITING)
        self._looked_up: OrderedDict[Key, float] = OrderedDict()  # monotonic
        self._ready = asyncio.Event()
        self._silent_until = 0.0

    def claimed(self, specs: Iterable[SequenceSpec]) -> None:
        """Look up what was written after these prompts."""
        if self._store is not None:
            self._claimed.extend(spec for spec in specs if spec.kind == "generate")
            self._ready.set()

    def ended(self, spec: SequenceSpec, result: SequenceResult) -> None:
        """Let others know what a sequence has written to its end."""
        is_over = spec.kind == "generate" and result.finish.reason in ("stop", "length")
        if self._store is not None and spec.cache and is_over and len(result.completion_ids) >= WORTH_SHARING:
            self._ended.append((spec, result.completion_ids[:COMPLETION_IDS]))
            self._ready.set()

    async def run(self) -> None:
        """Read and write until cancelled."""
        while True:
            await self._ready.wait()
            assert self._store is not None
            self._ready.clear()
            claimed, ended = list(self._claimed), list(self._ended)
            self._claimed.clear()
            self._ended.clear()
            try:
                await self._look_up(self._store, claimed)
                await self._write(self._store, ended)
            except (RedisError, OSError) as error:  # TimeoutError is an OSError
                if time.monotonic() > self._silent_until:
                    self._silent_until = time.monotonic() + QUIET_S
                    log.warning("memory.not_shared", error=reason(error))

    async def _look_up(self, store: CompletionStore, specs: Sequence[SequenceSpec]) -> None:
        by_key = await asyncio.to_thread(_by_key, specs)
        now = time.monotonic()
        wanted = [key for key in by_key if now - self._looked_up.get(key, -FRESH_S) >= FRESH_S]
        for at in range(0, len(wanted), AT_ONCE):
            part = wanted[at : at + AT_ONCE]
            async with asyncio.timeout(WITHIN_S):
                found = await store.read(part)
            self._note(part, now)
            pairs = [(key, by_key[key], some) for key, some in zip(part, found, strict=True) if some]
            for pair in pairs:  # one by one: the engine takes them in between two steps
                self._remember([await asyncio.to_thread(self._checked, *pair)])

    def _note(self, keys: Iterable[Key], now: float) -> None:
        for key in keys:
            self._looked_up[key] = now
            self._looked_up.move_to_end(key)
        while len(self._looked_up) > LOOKED_UP:
            self._looked_up.popitem(last=False)

    def _checked(self, key: Key, spec: SequenceSpec, found: Sequence[Completion]) -> Completions:
        texts: list[tuple[Mark, Ids]] = []
        for each in found:
            ids = np.frombuffer(each.packed, "<i4")
            if len(ids) and ids.min() >= 0 and ids.max() < self._vocab_size:
                texts.append((each.mark, ids.astype(np.int32)))
        return Completions(key, spec.prompt_ids, texts)

    async def _write(self, store: CompletionStore, ended: Sequence[tuple[SequenceSpec, tuple[int, ...]]]) -> None:
        for key, completions in (await asyncio.to_thread(_by_prompt, ended)).items():
            async with asyncio.timeout(WITHIN_S):
                await store.add(key, completions)


def ring_memory(settings: WorkerSettings, redis: Redis, engine: EngineThread, card: ModelCard) -> RingMemory:
    """As the settings say; nothing is shared where nothing would be drafted from it."""
    share = settings.spec_decode == "auto" and settings.spec_decode_ring_memory_mb > 0
    bounds = Bounds(settings.spec_decode_ring_memory_ttl_s, settings.spec_decode_ring_memory_mb << 20)
    store = CompletionStore(redis, bounds) if share and engine.stats().speculation.is_on else None
    return RingMemory(store, card.vocab_size, lambda completions: engine.send(Remember(completions)))


def _by_key(specs: Iterable[SequenceSpec]) -> dict[Key, SequenceSpec]:
    by_key: dict[Key, SequenceSpec] = {}
    for spec in specs:
        try:
            by_key[key_of(spec)] = spec
        except (
            OverflowError,
            ValueError,
        ):  # ids that are none: the engine has not looked at it yet, and will refuse it
            continue
    return by_key


def _by_prompt(ended: Sequence[tuple[SequenceSpec, tuple[int, ...]]]) -> dict[Key, list[Completion]]:
    written: dict[Key, list[Completion]] = {}
    for spec, ids in ended:
        written.setdefault(key_of(spec), []).append(Completion(mark_of(spec.id), np.array(ids, "<i4").tobytes()))
    return {key: _latest(completions) for key, completions in written.items()}


def _latest(completions: Sequence[Completion]) -> list[Completion]:
    """As many of one prompt as are kept."""
    sizes = accumulate(len(each.packed) for each in reversed(completions))
    kept = sum(1 for size in sizes if size <= PROMPT_BYTES)
    return list(completions[-min(kept, MOST_COMPLETIONS) :])
