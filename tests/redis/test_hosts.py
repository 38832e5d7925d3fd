"""A host with workers that load no model: what it offers, loads and unloads, and what it says of workers that fail."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from shared.catalogue import CatalogueEntry, HeldModel, HostStatus
from shared.errors import SetupError
from shared.fit.model_fit import Device
from shared.process.worker_settings import WorkerSettings
from shared.redis.processes.catalogue import CatalogueStore
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_queue import SequenceQueue
from tests.redis.scripted_worker import CARD, bundle
from tests.redis.sequences import spec
from tests.waiting import wait_until
from worker.host import offers, process, workers
from worker.host.describe import Answer, Described
from worker.host.process import HostProcess

GB = 10**9


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "COMMAND", ("-m", "tests.redis.scripted_host_worker"))
    monkeypatch.setattr(process, "LOOK_S", 0.02)
    monkeypatch.setattr(offers, "LOOK_S", 0.02)
    monkeypatch.setattr(process, "BEAT_S", 0.05)


def model(folder: Path, name: str, serves: str = "ready", *, need_gb: int = 2, why: str = "") -> Path:
    """Folder of a model whose worker does what `serves` says; with `why` it cannot be described."""
    path = folder / name
    path.mkdir()
    card = msgspec.structs.replace(CARD, name=name, base_sha256=sha256_of(name))
    described = Described(card, bundle(), "llama", GB, need_gb * GB, Device())
    (path / "answer.json").write_bytes(msgspec.json.encode(Answer(why=why) if why else Answer(described)))
    (path / "serves").write_text(serves)
    return path


def sha256_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class Ring:
    """A host, as others see it."""

    def __init__(self, redis: Redis, host: HostProcess, running: "asyncio.Task[int]") -> None:
        self.redis, self.host, self.store, self._running = redis, host, CatalogueStore(redis), running

    async def status(self) -> HostStatus | None:
        assert not self._running.done() or self._running.result() == 0
        return next((each for each in (await self.store.read()).hosts if each.id == self.host.id), None)

    async def held(self) -> dict[str, HeldModel]:
        status = await self.status()
        return {} if status is None else {held.name: held for held in status.held}

    def becomes(self, **states: str) -> Callable[[], Awaitable[bool]]:
        async def holds() -> bool:
            return {name: held.state for name, held in (await self.held()).items()} == states

        return holds

    async def ask(self, name: str, seq: str = "s") -> None:
        await SequenceQueue(self.redis, name).enqueue([spec(seq)])


@asynccontextmanager
async def hosting(redis: Redis, redis_url: str, *models: Path, **settings: object) -> AsyncIterator[Ring]:
    first, *others = map(str, models)
    given = {"redis": redis_url, "model": first, "models": others, "max_loaded_models": 1, "memory_limit": 10.0}
    host = HostProcess(WorkerSettings(**{**given, "spare_worker": False, **settings}))  # type: ignore[arg-type]
    running = asyncio.create_task(host.run())
    try:
        yield Ring(redis, host, running)
        host.stop()
        assert await running == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def starts(folder: Path) -> list[list[str]]:
    """Memory limit, name, process id and draft model, if any, of each worker that a model has had."""
    return [line.split() for line in (folder / "starts").read_text().splitlines()]


def lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_host_loads_its_first_model_and_offers_the_others(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    a, b = model(tmp_path, "a"), model(tmp_path, "b", need_gb=4)
    async with hosting(redis, redis_url, a, b, spare_worker=True) as ring:
        await wait_until(ring.becomes(a="ready"))
        status, models = await ring.status(), await ring.store.read()
        assert status is not None and status.offers == {"a": 2 * GB, "b": 4 * GB}
        assert (status.memory_bytes, status.free_bytes) == (10 * GB, 8 * GB)
        assert models.entries["b"].size_bytes == GB and models.entries["b"].sha256 == sha256_of("b")
        card = await WorkerRegistry(redis).card("b")
        assert card is not None and card.tokenizer_sha256 == bundle().sha256, "requests for it can be planned"
        assert starts(a)[0][:2] == ["8.0", "a"], "its need, and what the largest model leaves"
        await wait_until(lambda: _no_orders(ring))
    assert not lives(starts(a)[0][2]), "workers end with their host"
    assert await ring.status() is None


async def test_a_request_for_a_model_that_is_not_loaded_takes_an_idle_ones_memory_at_once(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOOK_S", 3600.0)  # so it looks only where it is called, or has changed itself
    a, b = model(tmp_path, "a"), model(tmp_path, "b")
    async with hosting(redis, redis_url, a, b) as ring:
        await wait_until(ring.becomes(a="ready"))
        await ring.ask("b")
        await wait_until(ring.becomes(b="ready"))
        held = (await ring.held())["b"]
        assert held.worker.startswith(f"{ring.host.id}-b-") and held.load_s > 0
        assert not lives(starts(a)[0][2])
        await SequenceQueue(redis, "b").cancel(["s"])
        await ring.store.order("unload", "b")
        await wait_until(ring.becomes())
        await wait_until(lambda: _no_orders(ring))


async def _no_lease(ring: Ring) -> bool:
    return not (await ring.store.read()).loading


async def _no_orders(ring: Ring) -> bool:
    return not (await ring.store.read()).orders


@pytest.mark.parametrize(
    ("serves", "why"), [("refuses", "it does not fit"), ("dies", "its process has ended with exit code 7")]
)
async def test_a_load_that_fails_says_why(redis: Redis, redis_url: str, tmp_path: Path, serves: str, why: str) -> None:
    async with hosting(redis, redis_url, model(tmp_path, "a", serves), model(tmp_path, "b")) as ring:
        await wait_until(ring.becomes(a="failed"))
        assert (await ring.held())["a"].why == why
        await wait_until(lambda: _no_lease(ring))  # so another host may try
        status = await ring.status()
        assert status is not None and status.free_bytes == 10 * GB, "it takes no memory"
        await ring.ask("b")
        await wait_until(ring.becomes(a="failed", b="ready"))
        (tmp_path / "a" / "serves").write_text("ready")
        await SequenceQueue(redis, "b").cancel(["s"])
        await ring.store.order("load", "a")  # it need not wait
        await wait_until(ring.becomes(a="ready"))


async def test_a_load_ends_when_its_model_is_unloaded_or_removed(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    a = model(tmp_path, "a", "loads")
    async with hosting(redis, redis_url, a, model(tmp_path, "b")) as ring:
        await wait_until(ring.becomes(a="loading"))
        await wait_until((a / "starts").exists)
        await ring.store.order("unload", "a")
        await wait_until(ring.becomes())
        await wait_until(lambda: _no_orders(ring))
        await ring.store.order("load", "a")
        await wait_until(ring.becomes(a="loading"))
        await ring.store.remove("a")
        await wait_until(ring.becomes())
        await wait_until(lambda: _no_lease(ring))
        assert not any(lives(each[2]) for each in starts(a))


async def test_a_worker_that_dies_is_replaced_unless_two_in_a_row_have_lived_shortly(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = model(tmp_path, "a")
    async with hosting(redis, redis_url, a, model(tmp_path, "b")) as ring:
        await wait_until(ring.becomes(a="ready"))
        (a / "serves").write_text("dies later")
        await wait_until(ring.becomes())
        assert len(starts(a)) == 1, "nothing waits for it"
        await ring.ask("a")
        await wait_until(ring.becomes(a="failed"))
        assert len(starts(a)) == 2, "what waits has it loaded once more"
        assert "exit code 9" in (await ring.held())["a"].why
    monkeypatch.setattr(process, "STEADY_S", 0.0)
    (a / "serves").write_text("ready")
    async with hosting(redis, redis_url, a, model(tmp_path, "c")) as ring:
        await wait_until(ring.becomes(a="ready"))
        await ring.ask("a")
        os.kill(int(starts(a)[-1][2]), 9)
        await wait_until(lambda: len(starts(a)) == 4)
        await wait_until(ring.becomes(a="ready"))


async def test_an_order_is_carried_out_once_though_its_worker_dies_before_anybody_looks(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOOK_S", 3600.0)  # so it looks only where it is called, or has changed itself
    a = model(tmp_path, "a", "dies later")
    async with hosting(redis, redis_url, a, model(tmp_path, "b")) as ring:
        await wait_until((a / "starts").exists)
        await wait_until(lambda: _no_orders(ring))
        await wait_until(ring.becomes())
        await ring.ask("b")
        await wait_until(ring.becomes(b="ready"))
        assert len(starts(a)) == 1


async def test_models_of_the_catalogue_are_offered_where_their_files_are(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    store = CatalogueStore(redis)
    opened, closed = tmp_path / "opened", tmp_path / "closed"
    opened.mkdir()
    closed.mkdir()
    (opened / "way-out").symlink_to(closed)
    own = {"from_catalogue": True, "catalogue_folders": [opened]}
    async with hosting(redis, redis_url, model(tmp_path, "a"), **own) as ring:
        await wait_until(ring.becomes(a="ready"))
        await store.put(CatalogueEntry("closed", str(model(closed, "closed"))))
        await store.put(CatalogueEntry("linked", str(opened / "way-out" / "closed")))
        await store.put(CatalogueEntry("here", str(model(opened, "here"))))
        await store.put(CatalogueEntry("elsewhere", "/no/such/folder"))
        await store.put(CatalogueEntry("wrong", str(model(opened, "wrong", why="no config.json"))))
        await store.put(CatalogueEntry("others", str(model(opened, "others")), sha256="0" * 64))
        await store.put(CatalogueEntry("group", str(model(opened, "group")), ranks=2))
        await store.put(CatalogueEntry("hub", "an-org/a-model"))
        await store.put(CatalogueEntry("drafted", str(model(opened, "drafted")), options={"draft-model": "here"}))
        await store.put(CatalogueEntry("alone", str(model(opened, "alone")), options={"draft-model": "closed"}))

        async def offered() -> bool:
            status = await ring.status()
            return status is not None and status.offers == {"a": 2 * GB, "here": 2 * GB, "drafted": 2 * GB, "hub": 0}

        await wait_until(offered)
        refused: dict[str, str] = {}

        async def says_why() -> bool:
            status = await ring.status()
            refused.update({} if status is None else status.refuses)
            return set(refused) == {"closed", "elsewhere", "linked", "wrong", "others", "alone"}

        await wait_until(says_why)
        assert "--catalogue-folders" in refused["closed"] and refused["closed"] == refused["elsewhere"]
        assert refused["wrong"] == "no config.json" and "0" * 64 in refused["others"]
        assert "'closed'" in refused["alone"]
        await store.remove("a")
        await wait_until(ring.becomes())
        await store.order("load", "drafted")
        await wait_until(ring.becomes(drafted="ready"))
        assert starts(opened / "drafted")[0][3] == str(opened / "here")


async def test_a_host_sees_when_a_folder_is_gone_or_mended(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    store, broken, gone = CatalogueStore(redis), model(tmp_path, "broken", why="half a file"), model(tmp_path, "gone")
    own = {"from_catalogue": True, "catalogue_folders": [tmp_path]}
    async with hosting(redis, redis_url, model(tmp_path, "a"), gone, **own) as ring:
        await wait_until(ring.becomes(a="ready"))
        await store.put(CatalogueEntry("broken", str(broken)))

        async def refused(*names: str) -> bool:
            status = await ring.status()
            return status is not None and sorted(status.refuses) == sorted(names)

        await wait_until(lambda: refused("broken"))
        gone.rename(tmp_path / "elsewhere")
        await wait_until(lambda: refused("broken", "gone"))
        await ring.ask("gone")
        (broken / "answer.json").write_bytes((tmp_path / "elsewhere" / "answer.json").read_bytes())
        await wait_until(lambda: refused("gone"))
        (tmp_path / "elsewhere").rename(gone)
        await wait_until(ring.becomes(gone="ready"))


async def test_weights_that_were_replaced_are_looked_at_before_they_are_loaded(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "LOOK_S", 3600)
    store, b = CatalogueStore(redis), model(tmp_path, "b")
    await store.put(CatalogueEntry("b", str(b), sha256=sha256_of("b")))
    async with hosting(redis, redis_url, model(tmp_path, "a"), b) as ring:
        await wait_until(ring.becomes(a="ready"))
        (b / "answer.json").write_bytes((model(tmp_path, "other") / "answer.json").read_bytes())
        await store.order("load", "b")
        await wait_until(ring.becomes(b="failed"))
        assert sha256_of("other") in (await ring.held())["b"].why and not (b / "starts").exists()


async def test_a_host_offers_its_models_again_to_a_redis_that_has_lost_them(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    async with hosting(redis, redis_url, model(tmp_path, "a")) as ring:
        await wait_until(ring.becomes(a="ready"))
        await redis.flushdb()

        async def is_back() -> bool:
            return "a" in (await ring.store.read()).entries and await WorkerRegistry(redis).card("a") is not None

        await wait_until(is_back)
        await wait_until(ring.becomes(a="ready"))


async def test_a_process_that_is_killed_amid_a_look_at_files_says_nothing_of_them(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    a, b = model(tmp_path, "a"), model(tmp_path, "b")
    (b / "deadly").touch()
    async with hosting(redis, redis_url, a, b) as ring:
        await wait_until(ring.becomes(a="ready"))
        status = await ring.status()
        assert status is not None and set(status.offers) == {"a", "b"}


async def test_a_given_model_that_cannot_be_loaded_ends_the_start(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    host = HostProcess(
        WorkerSettings(
            redis=redis_url, model=str(model(tmp_path, "a")), models=[str(model(tmp_path, "b", why="no config.json"))]
        )
    )
    with pytest.raises(SetupError, match=r"b: no config\.json"):
        await host.run()


async def test_who_is_cancelled_while_it_kills_a_process_leaves_none_behind() -> None:
    child = await workers.WorkerChild.start()
    killing = asyncio.create_task(child.kill())
    await asyncio.sleep(0)
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing
    assert not child.runs and not lives(str(child.pid))
