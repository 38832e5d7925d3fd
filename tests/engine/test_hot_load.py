"""From a publish in Redis to tokens of the new version: engine threads, adapter sync and a real server."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.loader import LoadedModel
from mlx_model.lora import reader as adapter_reader
from shared.adapter_files.config import mlx_config
from shared.adapter_files.formats import prepare
from shared.errors import AdapterRejectedError, ConflictError, UnknownAdapterError
from shared.frames import TokenEvent
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.sequences import SequenceSpec
from tests.engine.adapter_bench import make_versions, row
from tests.engine.adapter_models import MadeAdapter
from tests.engine.conftest import prompt_of
from tests.engine.small_models import LLAMA, write_model
from tests.waiting import HANG_S, wait_until
from worker.adapters.cache import DiskCache
from worker.adapters.sync import AdapterSync
from worker.engine.batch.adapters import AdapterStats
from worker.engine.messages import RowRequest, StepOutput
from worker.engine.orders import Cancel, KeepOnDisk, Order, Submit
from worker.engine.thread import EngineThread

Made = dict[str, MadeAdapter]
ENDLESS = 100_000


@pytest.fixture(scope="session")
def made(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_versions(llama, tmp_path_factory.mktemp("adapters"))


class Worker:
    """An engine thread with its adapter sync, as worker/process.py joins them."""

    def __init__(self, model: Path, redis: Redis, events: Redis, cache: Path, name: str) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.events: dict[str, list[TokenEvent]] = {}
        self.engine = EngineThread(
            EngineConfig(str(model), max_rows=8), self._on_step, self._on_death, SlotConfig(slots=2), self._on_stats
        )
        card = self.engine.start().card
        self.base_sha256 = card.base_sha256
        self.sync = AdapterSync(
            redis,
            events,
            self.engine,
            DiskCache(cache, 1 << 30),
            worker_id=name,
            base_sha256=card.base_sha256,
            slots=2,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Worker":
        self._tasks = [asyncio.create_task(self.sync.run()), asyncio.create_task(self.sync.acknowledge())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.sync.close()
        assert await asyncio.to_thread(self.engine.stop)

    async def submit(self, spec: SequenceSpec, prior: tuple[TokenEvent, ...] = (), attempt: int = 1) -> None:
        self.engine.send(Submit([RowRequest(await self.sync.prepare(spec, prior), attempt, prior)]))

    def tokens(self, seq: str) -> list[int]:
        return [token for event in self.events.get(seq, []) for token in event.tokens]

    def versions(self, seq: str) -> list[str]:
        return [event.version for event in self.events.get(seq, []) for _ in event.tokens]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def finished(self, seq: str) -> None:
        await self.until(lambda: seq in self.events and self.events[seq][-1].finish is not None)

    def _on_step(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._take, output.events)

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events.setdefault(event.seq, []).append(event)
        self._changed.set()

    def _on_stats(self, stats: AdapterStats) -> None:
        self._loop.call_soon_threadsafe(self.sync.on_stats)
        self._loop.call_soon_threadsafe(self._changed.set)

    def _on_death(self, error: BaseException) -> None:
        raise AssertionError("the engine died") from error


class Ring:
    """A store, workers on it, and adapters to publish."""

    def __init__(self, url: str, model: Path, made: Made, folder: Path, stack: AsyncExitStack) -> None:
        self._url, self._model, self._made, self._folder, self._stack = url, model, made, folder, stack
        self.redis = connect(url)
        self.events = connect(url, blocking=True)
        self.store = AdapterStore(self.redis)

    async def worker(self, name: str) -> Worker:
        return await self._stack.enter_async_context(self.new_worker(name))

    def new_worker(self, name: str) -> Worker:
        return Worker(self._model, self.redis, self.events, self._folder / name, name)

    async def publish(self, name: str, source: str, base: str, **fields: Any) -> int:
        """The next version of `name`, with the weights of the made adapter `source`."""
        manifest = self._made[source].manifest
        config = mlx_config(manifest.kind, manifest.rank, manifest.scale, manifest.modules)
        adapter = prepare(config, self._made[source].path, self._folder)
        return (await self.store.publish(name, adapter, base_sha256=base, **fields)).version

    async def acknowledged(self, name: str, version: int, workers: set[str]) -> None:
        async def done() -> bool:
            acks = await self.store.acks(name)
            return {worker for worker, ack in acks.items() if ack.version == version} == workers

        await wait_until(done)


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, and rows that do not end while a test waits for something to reach them on a slow machine."""
    return write_model(tmp_path_factory.mktemp("long") / "llama", LLAMA | {"max_position_embeddings": 1 << 20})


@pytest.fixture
async def ring(redis_url: str, long_llama: Path, made: Made, tmp_path: Path) -> AsyncIterator[Ring]:
    async with AsyncExitStack() as stack:
        ring = Ring(redis_url, long_llama, made, tmp_path, stack)
        stack.push_async_callback(ring.redis.aclose)
        stack.push_async_callback(ring.events.aclose)
        yield ring


@pytest.mark.long
async def test_two_workers_load_and_acknowledge_what_is_published(ring: Ring, made: Made) -> None:
    first, second = await ring.worker("w1"), await ring.worker("w2")
    base = first.base_sha256
    assert await ring.publish("math", "a@1", base) == 1
    await ring.acknowledged("math", 1, {"w1", "w2"})
    specs = [row("f", prompt_of(6), "math", adapter_policy="follow", max_tokens=ENDLESS)]
    specs.append(row("p", prompt_of(6), "math", max_tokens=ENDLESS))
    for worker in (first, second):
        for spec in specs:
            await worker.submit(spec)
        await worker.until(lambda worker=worker: len(worker.tokens("f")) >= 5)
    assert await ring.publish("math", "a@2", base) == 2
    await ring.acknowledged("math", 2, {"w1", "w2"})
    for worker in (first, second):
        await worker.until(lambda worker=worker: "math@2" in worker.versions("f"))
        at = len(worker.tokens("p"))
        await worker.until(lambda worker=worker, at=at: len(worker.tokens("p")) > at)
        for seq in ("f", "p"):
            worker.engine.send(Cancel(seq))
            await worker.finished(seq)
        assert list(dict.fromkeys(worker.versions("f"))) == ["math@1", "math@2"]
        assert set(worker.versions("p")) == {"math@1"}
        assert worker.sync.loaded == {"math": 2}
    both = min(len(first.tokens("p")), len(second.tokens("p")))
    assert both > 5 and first.tokens("p")[:both] == second.tokens("p")[:both]


async def test_the_engine_hears_whose_kv_lasts(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await ring.worker("w1")
    heard: list[dict[str, str]] = []
    send = worker.engine.send

    def noting(order: Order) -> None:
        heard.extend([order.versions] if isinstance(order, KeepOnDisk) else ())
        send(order)

    monkeypatch.setattr(worker.engine, "send", noting)
    for version, source in enumerate(("a@1", "a@2", "a@1"), start=1):
        await ring.publish("math", source, worker.base_sha256)
        await ring.acknowledged("math", version, {"w1"})
        await worker.sync.send_lasting(["w1"], "float32")
        await worker.sync.send_lasting(["w1"], "float32")
    assert [list(each) for each in heard] == [["math@1"], ["math@2"], ["math@3"]], "told once, and of the latest"
    digests = [digest for each in heard for digest in each.values()]
    assert digests[0] == digests[2] != digests[1], "of the weights, whatever they are called"
    await ring.store.set_best("math", 1, 0.9)
    await ring.store.pin("math", 2, "a job", 60)
    await worker.sync.send_lasting(["w1"], "float32")
    assert set(heard[-1]) == {"math@1", "math@2", "math@3"}


async def test_a_version_that_is_loaded_while_another_one_is_acknowledged_is_acknowledged_next(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await ring.worker("w1")
    acknowledge, begun, go = AdapterStore.acknowledge, asyncio.Event(), asyncio.Event()

    async def slow(store: AdapterStore, worker_id: str, name: str, version: int) -> None:
        begun.set()
        await go.wait()
        await acknowledge(store, worker_id, name, version)

    monkeypatch.setattr(AdapterStore, "acknowledge", slow)
    await ring.publish("math", "a@1", worker.base_sha256)
    await begun.wait()
    await ring.publish("math", "a@2", worker.base_sha256)
    await wait_until(lambda: worker.sync.loaded == {"math": 2})
    await asyncio.sleep(0)  # its news is here
    go.set()
    await ring.acknowledged("math", 2, {"w1"})


async def test_a_rollback_reaches_the_rows(ring: Ring) -> None:
    worker = await ring.worker("w1")
    for source in ("a@1", "a@2"):
        await ring.publish("math", source, worker.base_sha256)
    await ring.acknowledged("math", 2, {"w1"})
    await worker.submit(row("f", prompt_of(6), "math", adapter_policy="follow", max_tokens=ENDLESS))
    await worker.until(lambda: len(worker.tokens("f")) >= 5)
    await ring.store.rollback("math")
    await worker.until(lambda: "math@1" in worker.versions("f"))
    await worker.submit(row("n", prompt_of(6), "math", max_tokens=3))
    await worker.finished("n")
    assert set(worker.versions("n")) == {"math@1"}


async def test_what_was_published_before_the_start_is_served(ring: Ring) -> None:
    base = ring.new_worker("gone")
    await asyncio.to_thread(base.engine.stop)
    await ring.publish("math", "a@1", base.base_sha256)
    worker = await ring.worker("w1")
    await worker.submit(row("s", prompt_of(5), "math@1"))
    await worker.finished("s")
    assert set(worker.versions("s")) == {"math@1"}


@pytest.mark.long
async def test_a_worker_that_ends_in_mid_load_serves_the_version_after_a_restart(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go = threading.Event(), threading.Event()
    read = adapter_reader.read_adapter

    def slow_read(*arguments: Any) -> Any:
        reading.set()
        assert go.wait(HANG_S)
        return read(*arguments)

    monkeypatch.setattr(adapter_reader, "read_adapter", slow_read)
    worker = ring.new_worker("w1")
    async with worker:
        await ring.publish("math", "a@1", worker.base_sha256)
        assert await asyncio.to_thread(reading.wait, HANG_S)
        threading.Timer(0.2, go.set).start()  # the engine is told to stop before that
    monkeypatch.undo()
    again = await ring.worker("w1")
    await ring.acknowledged("math", 1, {"w1"})
    await again.submit(row("s", prompt_of(5), "math", adapter_policy="follow"))
    await again.finished("s")
    assert set(again.versions("s")) == {"math@1"}


async def test_a_taken_over_row_keeps_its_version_though_a_newer_one_is_out(ring: Ring) -> None:
    worker = await ring.worker("w1")
    for source in ("a@1", "a@2"):
        await ring.publish("math", source, worker.base_sha256)
    prior = (TokenEvent("s", 1, 0, [7, 8], [-1.0, -1.0], version="math@1"),)
    await worker.submit(row("s", prompt_of(5), "math"), prior, attempt=2)
    await worker.finished("s")
    assert set(worker.versions("s")) == {"math@1"}


async def test_more_adapters_than_slots_are_fetched_when_they_are_needed(ring: Ring) -> None:
    worker = await ring.worker("w1")
    for name in ("n1", "n2", "n3", "n4"):
        await ring.publish(name, "b@1", worker.base_sha256)
    for name in ("n4", "n1", "n3", "n2"):
        await worker.submit(row(name, prompt_of(5), name, max_tokens=4))
    for name in ("n1", "n2", "n3", "n4"):
        await worker.finished(name)
        assert set(worker.versions(name)) == {f"{name}@1"}


async def test_a_version_in_use_is_pinned_against_deletion(ring: Ring) -> None:
    worker = await ring.worker("w1")
    for source in ("a@1", "a@2"):
        await ring.publish("math", source, worker.base_sha256)
    await worker.submit(row("s", prompt_of(5), "math@1", max_tokens=3))
    with pytest.raises(ConflictError, match="w1"):
        await ring.store.delete("math", 1)


async def test_what_cannot_be_had_is_said_before_the_engine_sees_it(ring: Ring) -> None:
    worker = await ring.worker("w1")
    await ring.publish("other", "a@1", "another base")
    await ring.publish("math", "a@1", worker.base_sha256, set_latest=False)
    await ring.store.reject("math", 1, [])
    for adapter, error in (
        ("nobody", UnknownAdapterError),
        ("math@7", UnknownAdapterError),
        ("math", UnknownAdapterError),
        ("math@1", ConflictError),
        ("other", AdapterRejectedError),
    ):
        with pytest.raises(error):
            await worker.sync.prepare(row("s", [1], adapter))
