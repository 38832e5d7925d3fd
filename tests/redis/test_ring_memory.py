"""What sequences have written, shared by workers: who drafts from it, for how long it is kept, and how much."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from mlx_model.config import EngineConfig, SpeculationConfig
from shared.frames import Finish, TokenEvent
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.redis import keys
from shared.redis.processes.completion_store import (
    COMPLETION_IDS,
    MOST_COMPLETIONS,
    PROMPT_BYTES,
    Bounds,
    Completion,
    CompletionStore,
)
from shared.sequences import ModelCard, SamplingParams, SequenceResult, SequenceSpec
from tests.redis.sequences import MODEL
from tests.waiting import wait_until
from worker.engine.messages import RowRequest, StepOutput
from worker.engine.orders import Order, Remember, Submit
from worker.engine.speculation.memory import Completions, key_of, mark_of
from worker.engine.thread import EngineThread
from worker.ring_memory import RingMemory, ring_memory

VOCAB = 448
BOUNDS = Bounds(600, 1 << 20)
PROMPT = (3, 20, 30, 40)


def spec(seq: str, prompt: tuple[int, ...] = PROMPT, tenant: str = "", seed: int = 5) -> SequenceSpec:
    sampling = SamplingParams(40, seed, temperature=1.0, ignore_eos=True)
    return SequenceSpec(seq, MODEL, prompt, sampling, tenant=tenant)


def result(seq: str, *ids: int, reason: Any = "stop") -> SequenceResult:
    return SequenceResult(seq, Finish(reason), "w", 1, len(PROMPT), ids)


def completion(seq: str, *ids: int) -> Completion:
    return Completion(mark_of(seq), np.array(ids, "<i4").tobytes())


@dataclass
class Worker:
    """The part of a worker that shares."""

    store: CompletionStore
    told: list[Completions] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = RingMemory(self.store, VOCAB, self.told.extend)

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator["Worker"]:
        task = asyncio.create_task(self.memory.run())
        yield self
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def texts(self) -> list[list[int]]:
        """What the engine was told."""
        return [text.tolist() for each in self.told for _, text in each.texts]


async def kept(redis: Redis) -> int:
    """Bytes of values and their names, counted anew."""
    names = [name async for name in redis.scan_iter(match=keys.completions("*"))]
    return sum([len(each) for name in names for each in await redis.lrange(name.decode(), 0, -1)])


async def test_what_one_worker_has_finished_the_other_is_told_and_no_other_tenants_worker(redis: Redis) -> None:
    store = CompletionStore(redis, BOUNDS)
    async with Worker(store).at_work() as one, Worker(store).at_work() as other:
        one.memory.ended(spec("s1", tenant="a"), result("s1", 7, 8, 9))
        one.memory.ended(spec("s2", tenant="a"), result("s2", 7, 9, reason="length"))
        key = key_of(spec("s", tenant="a"))
        await wait_until(lambda: redis.exists(keys.completions(key.hex())))
        other.memory.claimed([spec("s3", tenant="b"), spec("s4", PROMPT[1:], "a"), spec("s5")])
        other.memory.claimed([spec("s6", tenant="a")])
        await wait_until(lambda: bool(other.told))
        assert [each.key for each in other.told] == [key] and other.texts() == [[7, 8, 9], [7, 9]]


@pytest.mark.parametrize("reason", ["cancelled", "error", "deadline", "abort"])
async def test_what_has_not_come_to_its_end_is_not_shared(redis: Redis, reason: str) -> None:
    async with Worker(CompletionStore(redis, BOUNDS)).at_work() as worker:
        worker.memory.ended(spec("cut"), result("cut", 7, 8, 9, reason=reason))
        worker.memory.ended(msgspec.structs.replace(spec("score"), kind="score"), result("score", 7, 8))
        worker.memory.ended(spec("whole", (1,)), result("whole", 7, 8, 9))
        await wait_until(lambda: redis.exists(keys.completions(key_of(spec("s", (1,))).hex())))
        assert await redis.zcard(keys.completion_uses()) == 1


async def test_it_is_kept_for_a_while_after_its_last_use(redis: Redis) -> None:
    store, key = CompletionStore(redis, BOUNDS), key_of(spec("s"))
    name = keys.completions(key.hex())
    await store.add(key, [completion("s", 7, 8)])
    assert 590 < await redis.ttl(name) <= 600
    assert await redis.ttl(keys.completion_uses()) > 600 and await redis.ttl(keys.completion_sizes()) > 600
    await redis.expire(name, 10)
    assert [list(each) for each in await store.read([key, b"unknown"])] == [[completion("s", 7, 8)], []]
    assert 590 < await redis.ttl(name) <= 600, "reading is a use"
    await redis.delete(name)  # its time is over
    await store.add(key, [completion("t", 7)])
    one = int(await redis.hget(keys.completion_sizes(), "all") or 0)
    await redis.delete(name)
    await store.add(key, [completion("u", 7)])
    assert int(await redis.hget(keys.completion_sizes(), "all") or 0) == one, "what has gone counts no more"


async def test_a_write_that_is_repeated_adds_nothing(redis: Redis) -> None:
    store, key = CompletionStore(redis, BOUNDS), key_of(spec("s"))
    for _ in range(3):
        await store.add(key, [completion("s", 7, 8), completion("t", 7, 8)])
    assert await store.read([key]) == [[completion("s", 7, 8), completion("t", 7, 8)]]
    sizes = await redis.hgetall(keys.completion_sizes())
    assert sizes[b"all"] == sizes[key.hex().encode()]


async def test_bytes_are_bounded_for_a_prompt_and_for_all(redis: Redis) -> None:
    store = CompletionStore(redis, Bounds(600, 20_000))
    prompts = [key_of(spec("s", (at,))) for at in range(8)]
    for at, key in enumerate(prompts):
        await store.add(key, [completion(f"{at}-{sample}", *range(200)) for sample in range(6)])
        await redis.zincrby(keys.completion_uses(), at - 1000, key.hex())  # a second ago, one after the other
        await store.read(prompts[:1])  # which is used again and again
        assert await kept(redis) <= int(await redis.hget(keys.completion_sizes(), "all") or 0) <= 20_000
    found = await store.read(prompts)
    assert [bool(each) for each in found] == [True, *[False] * 5, *[True] * 2], "what was used longest ago has gone"
    await store.add(prompts[0], [completion(f"b{sample}", 1) for sample in range(50)])
    (latest,) = await store.read(prompts[:1])
    assert len(latest) == MOST_COMPLETIONS and latest[-1] == completion("b49", 1)
    await store.add(prompts[0], [completion("long", *range(4000))] * 3)
    assert await kept(redis) <= 20_000
    await store.add(prompts[0], [completion("longer", *range(9000))])
    assert await kept(redis) <= 20_000, "what is larger than all is not kept"


MALFORMED = {
    "no msgpack": b"\xc1nonsense",
    "another shape": msgspec.msgpack.encode({"a": 1}),
    "half an id": msgspec.msgpack.encode(Completion(b"12345678", b"12345")),
    "no mark": msgspec.msgpack.encode(Completion(b"", b"1234")),
    "not in the vocabulary": msgspec.msgpack.encode(completion("x", 7, VOCAB)),
    "below zero": msgspec.msgpack.encode(completion("x", -1, 7)),
    "empty": b"",
    "nested": b"\x91" * 5000,
}


@pytest.mark.parametrize("entry", MALFORMED.values(), ids=list(MALFORMED))
async def test_malformed_bytes_are_left_out_and_lose_nothing(redis: Redis, entry: bytes) -> None:
    store, key = CompletionStore(redis, BOUNDS), key_of(spec("s"))
    await store.add(key, [completion("s", 7, 8)])
    await redis.rpush(keys.completions(key.hex()), entry)
    await store.add(key, [completion("t", 9)])
    async with Worker(store).at_work() as worker:
        worker.memory.claimed([spec("again")])
        await wait_until(lambda: bool(worker.told))
        assert worker.texts() == [[7, 8], [9]]


async def test_a_key_of_another_type_costs_its_own_prompt_alone_and_is_written_anew(redis: Redis) -> None:
    store, keys_ = CompletionStore(redis, BOUNDS), [key_of(spec("s", (at,))) for at in range(2)]
    await redis.set(keys.completions(keys_[0].hex()), b"not ours", ex=60)
    await redis.hset(keys.completion_sizes(), "all", "many")
    await store.add(keys_[1], [completion("s", 7)])
    assert await store.read(keys_) == [[], [completion("s", 7)]]
    await store.add(keys_[0], [completion("t", 8)])
    assert await store.read(keys_) == [[completion("t", 8)], [completion("s", 7)]]


async def test_nobody_waits_and_nothing_ends_while_redis_fails(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CompletionStore(redis, BOUNDS)
    failures = 0

    async def read(prompts: object) -> list[list[Completion]]:
        nonlocal failures
        failures += 1
        raise RedisConnectionError("away")

    async with Worker(store).at_work() as worker:
        with monkeypatch.context() as away:
            away.setattr(store, "read", read)
            worker.memory.claimed([spec("s1")])
            await wait_until(lambda: failures == 1)
        await store.add(key_of(spec("s1")), [completion("s", 7)])
        worker.memory.claimed([spec("s2")])
        await wait_until(lambda: bool(worker.told))


async def test_a_prompt_is_looked_up_once_in_a_while(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    store, first, second = CompletionStore(redis, BOUNDS), key_of(spec("s")), key_of(spec("s", (9,)))
    await store.add(first, [completion("s", 7)])
    await store.add(second, [completion("s", 8)])
    monkeypatch.setattr("worker.ring_memory.FRESH_S", 600.0)
    async with Worker(store).at_work() as worker:
        worker.memory.claimed([spec("s1"), spec("s2")])
        await wait_until(lambda: len(worker.told) == 1)
        worker.memory.claimed([spec("s3")])
        worker.memory.claimed([spec("s4", (9,))])
        await wait_until(lambda: len(worker.told) == 2)
        assert [each.key for each in worker.told] == [first, second], "the first was known"
        monkeypatch.setattr("worker.ring_memory.FRESH_S", 0.0)
        worker.memory.claimed([spec("s5")])
        await wait_until(lambda: len(worker.told) == 3)
        assert worker.told[-1].key == first


async def test_a_prompt_of_ids_that_are_none_costs_the_others_nothing(redis: Redis) -> None:
    store = CompletionStore(redis, BOUNDS)
    await store.add(key_of(spec("s")), [completion("s", 7)])
    async with Worker(store).at_work() as worker:
        worker.memory.claimed([spec("bad", (1 << 31,)), spec("good")])
        await wait_until(lambda: bool(worker.told))
        assert worker.texts() == [[7]]


async def test_no_more_is_sent_than_is_kept_of_a_prompt(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CompletionStore(redis, BOUNDS)
    sent: list[list[Completion]] = []
    add = store.add

    async def noted(prompt: bytes, completions: list[Completion]) -> None:
        sent.append(completions)
        await add(prompt, completions)

    monkeypatch.setattr(store, "add", noted)
    async with Worker(store).at_work() as worker:
        for at in range(MOST_COMPLETIONS + 5):
            worker.memory.ended(spec(f"s{at}"), result(f"s{at}", at, 7))
        for at in range(9):
            worker.memory.ended(spec(f"long{at}", (1,)), result(f"long{at}", *[at] * COMPLETION_IDS))
        await wait_until(lambda: len(sent) == 2)
    short, long = sent
    assert short == [completion(f"s{at}", at, 7) for at in range(5, MOST_COMPLETIONS + 5)]
    assert sum(len(each.packed) for each in long) == PROMPT_BYTES and long[-1].mark == mark_of("long8")


# -- with engines


class Drafting:
    """An engine that drafts whenever it can, and the sharing beside it, as a worker's settings make it."""

    def __init__(self, redis: Redis, *flags: str) -> None:
        drafts = SpeculationConfig(adapts_to_rows=False, adapts_to_time=False, memory_bytes=1 << 20)
        config = EngineConfig("models/tiny", max_rows=4, speculation=drafts)
        self.engine = EngineThread(config, self._on_step, lambda error: None)
        self._loop = asyncio.get_running_loop()
        self._ended: dict[str, asyncio.Future[list[TokenEvent]]] = {}
        self._events: dict[str, list[TokenEvent]] = {}
        self.engine.start()
        self.told: list[Completions] = []
        send = self.engine.send

        def noting(order: Order, done: Any = None) -> None:
            self.told += order.completions if isinstance(order, Remember) else ()
            send(order, done)

        self.engine.send = noting  # type: ignore[method-assign]
        card = ModelCard(MODEL, 1000, VOCAB, (2,), "", "", 8, "float32")
        self.memory = ring_memory(load(WorkerSettings, ["--spec-decode", "auto", *flags]), redis, self.engine, card)

    def _on_step(self, output: StepOutput) -> None:
        for event in output.events:
            self._events.setdefault(event.seq, []).append(event)
            if event.finish is not None:
                self._loop.call_soon_threadsafe(self._ended[event.seq].set_result, self._events[event.seq])

    async def write(self, of: SequenceSpec) -> tuple[list[int], int]:
        """The tokens of a sequence, and how many of its drafts were accepted."""
        before = self.engine.stats().speculation.accepted
        self._ended[of.id] = self._loop.create_future()
        self.engine.send(Submit([RowRequest(of)]))
        tokens = [token for event in await self._ended[of.id] for token in event.tokens]
        await wait_until(lambda: self.engine.stats().rows == 0)
        self.memory.ended(of, result(of.id, *tokens))
        return tokens, self.engine.stats().speculation.accepted - before


@pytest.fixture
def new_worker(redis: Redis) -> Iterator[Callable[..., Drafting]]:
    made: list[Drafting] = []

    def make(*flags: str) -> Drafting:
        made.append(Drafting(redis, *flags))
        return made[-1]

    yield make
    for each in made:
        each.engine.stop()


async def test_a_worker_drafts_what_another_one_has_written_for_the_same_tenant_only(
    redis: Redis, new_worker: Callable[..., Drafting]
) -> None:
    one, other = new_worker(), new_worker()
    tasks = [asyncio.create_task(each.memory.run()) for each in (one, other)]
    try:
        tokens, _ = await one.write(spec("first", tenant="a"))
        await wait_until(lambda: redis.exists(keys.completions(key_of(spec("s", tenant="a")).hex())))
        of_a, of_b = spec("of-a", tenant="a"), spec("of-b", tenant="b")
        other.memory.claimed([of_b])
        await wait_until(lambda: key_of(of_b) in other.memory._looked_up)
        same, accepted = await other.write(of_b)
        assert same == tokens and accepted < 25 and not other.told, "another tenant notices nothing"
        other.memory.claimed([of_a])
        await wait_until(lambda: bool(other.told))
        same, accepted = await other.write(of_a)
        assert same == tokens and accepted > 25, "the same tokens sooner"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_nothing_is_written_where_nothing_is_shared(redis: Redis, new_worker: Callable[..., Drafting]) -> None:
    worker = new_worker("--spec-decode-ring-memory-mb", "0")
    task = asyncio.create_task(worker.memory.run())
    worker.memory.claimed([spec("s")])
    await worker.write(spec("s"))
    assert not worker.memory._ready.is_set() and not worker.memory._ended
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_not_to_be_cached_is_not_shared(redis: Redis) -> None:
    async with Worker(CompletionStore(redis, BOUNDS)).at_work() as worker:
        worker.memory.ended(msgspec.structs.replace(spec("private"), cache=False), result("private", 7, 8, 9))
        worker.memory.ended(spec("whole", (1,)), result("whole", 7, 8, 9))
        await wait_until(lambda: redis.exists(keys.completions(key_of(spec("s", (1,))).hex())))
        assert await redis.zcard(keys.completion_uses()) == 1
