"""The disk cache of adapter files: whole, bounded, fetched once, also by several processes."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from redis.asyncio import Redis

from shared.adapters import AdapterManifest
from shared.errors import AdapterDamagedError
from shared.redis import keys
from shared.redis.adapters import store as store_module
from shared.redis.adapters.store import AdapterStore
from tests.e2e.rings import ROOT
from tests.redis.adapter_versions import publish
from tests.waiting import HANG_S, wait_until
from worker.adapters.cache import DiskCache

HOLD = """
import asyncio, hashlib, sys
from pathlib import Path
import msgspec
from shared.adapters import AdapterManifest
from worker.adapters.cache import DiskCache
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect

async def main():
    url, folder, max_bytes, manifest = sys.argv[1:]
    redis = connect(url)
    async with DiskCache(Path(folder), int(max_bytes)).hold(
        AdapterStore(redis), msgspec.json.decode(manifest, type=AdapterManifest)
    ) as path:
        print(hashlib.sha256(path.read_bytes()).hexdigest(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    await redis.aclose()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 256)


@pytest.fixture
def store(redis: Redis) -> AdapterStore:
    return AdapterStore(redis)


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


async def holder(url: str, folder: Path, manifest: AdapterManifest, max_bytes: int) -> asyncio.subprocess.Process:
    """Another process, which fetches a version, prints its hash and holds it until it reads a line."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLD, url, str(folder), str(max_bytes), msgspec.json.encode(manifest).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


async def printed(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), HANG_S)).decode().strip()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def chunks_read(redis: Redis) -> int:
    return int((await redis.info("commandstats")).get("cmdstat_hget", {}).get("calls", 0))


async def held(cache: DiskCache, store: AdapterStore, manifest: AdapterManifest) -> bytes:
    async with cache.hold(store, manifest) as path:
        return path.read_bytes()


async def test_two_processes_share_one_download(
    store: AdapterStore, redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    manifest = await publish(store)
    before = await chunks_read(redis)
    processes = [await holder(redis_url, tmp_path, manifest, 2**20) for _ in range(2)]
    assert [await printed(process) for process in processes] == [manifest.sha256] * 2
    assert await chunks_read(redis) - before == manifest.chunks
    assert names(tmp_path) == [f"{manifest.sha256}.safetensors"]
    for process in processes:
        await process.communicate(b"\n")
        assert process.returncode == 0


async def test_what_another_process_holds_is_not_evicted(store: AdapterStore, redis_url: str, tmp_path: Path) -> None:
    first, second, third = [await publish(store, seed=seed) for seed in range(3)]
    cache = DiskCache(tmp_path, int(1.5 * first.size))
    process = await holder(redis_url, tmp_path, first, 2**20)
    assert await printed(process) == first.sha256
    await held(cache, store, second)
    assert cache.file(first).exists()
    process.kill()  # its lock ends with it
    await process.communicate()
    await held(cache, store, third)
    assert not cache.file(first).exists()
    assert bytes_in(tmp_path) <= int(1.5 * first.size)


async def test_the_least_recently_used_goes_first(store: AdapterStore, tmp_path: Path) -> None:
    versions = [await publish(store, seed=seed) for seed in range(3)]
    cache = DiskCache(tmp_path, int(2.5 * versions[0].size))
    for age, manifest in ((200, versions[0]), (100, versions[1])):
        await held(cache, store, manifest)
        stat = cache.file(manifest).stat()
        os.utime(cache.file(manifest), (stat.st_atime, stat.st_mtime - age))
    await held(cache, store, versions[0])  # used again
    await held(cache, store, versions[2])
    assert [cache.file(manifest).exists() for manifest in versions] == [True, False, True]


async def test_a_hit_reads_nothing_from_redis(store: AdapterStore, redis: Redis, tmp_path: Path) -> None:
    manifest = await publish(store)
    cache = DiskCache(tmp_path, 2**20)
    await held(cache, store, manifest)
    await store.delete("policy")
    assert hashlib.sha256(await held(cache, store, manifest)).hexdigest() == manifest.sha256


@pytest.mark.parametrize("damage", ["shorter", "altered"])
async def test_a_file_damaged_on_disk_is_fetched_again(store: AdapterStore, tmp_path: Path, damage: str) -> None:
    manifest = await publish(store)
    file = DiskCache(tmp_path, 2**20).file(manifest)
    file.write_bytes(b"\0" * (manifest.size - (damage == "shorter")))
    data = await held(DiskCache(tmp_path, 2**20), store, manifest)
    assert hashlib.sha256(data).hexdigest() == manifest.sha256


async def test_what_a_killed_download_left_is_overwritten(store: AdapterStore, tmp_path: Path) -> None:
    manifest = await publish(store)
    (tmp_path / f"{manifest.sha256}.part").write_bytes(b"half of something")
    data = await held(DiskCache(tmp_path, 2**20), store, manifest)
    assert hashlib.sha256(data).hexdigest() == manifest.sha256
    assert names(tmp_path) == [f"{manifest.sha256}.safetensors"]


async def test_a_waiter_takes_over_a_download_that_failed(store: AdapterStore, redis: Redis, tmp_path: Path) -> None:
    manifest = await publish(store)
    key = keys.adapter_bytes("policy", 1)
    last = str(manifest.chunks - 1)
    chunk = await redis.hget(key, last)
    assert chunk is not None
    await redis.hdel(key, last)
    caches = [DiskCache(tmp_path, 2**20) for _ in range(2)]
    tasks = [asyncio.create_task(held(cache, store, manifest)) for cache in caches]
    await wait_until(lambda: any(task.done() for task in tasks))
    await redis.hset(key, mapping={last: chunk})
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(outcome, AdapterDamagedError) for outcome in outcomes)
    assert all(isinstance(outcome, AdapterDamagedError | bytes) for outcome in outcomes)
    assert hashlib.sha256(await held(caches[0], store, manifest)).hexdigest() == manifest.sha256
    assert not [name for name in names(tmp_path) if name.endswith(".part")]


async def test_a_cancelled_download_leaves_nothing(store: AdapterStore, tmp_path: Path) -> None:
    manifest = await publish(store)
    task = asyncio.create_task(held(DiskCache(tmp_path, 2**20), store, manifest))
    await wait_until(lambda: bool(names(tmp_path)))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not [name for name in names(tmp_path) if name.endswith(".part")]


async def test_a_download_cancelled_while_room_is_made_for_it_leaves_nothing(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def evict(cache: DiskCache, needed: int) -> None:
        begun.set()
        assert go.wait(HANG_S)

    monkeypatch.setattr(DiskCache, "_evict", evict)
    task = asyncio.create_task(held(DiskCache(tmp_path, 2**20), store, await publish(store)))
    await wait_until(begun.is_set)
    task.cancel()
    go.set()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert names(tmp_path) == []


async def test_a_download_elsewhere_is_looked_for_soon_and_then_more_seldom(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, pauses = await publish(store), list[float]()

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(seconds)

    cache = DiskCache(tmp_path, 2**20)
    with (tmp_path / f"{manifest.sha256}.part").open("ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        monkeypatch.setattr("worker.adapters.cache.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": noted}))
        waiting = asyncio.create_task(held(cache, store, manifest))
        await wait_until(lambda: 0.05 in pauses)
        fcntl.flock(part, fcntl.LOCK_UN)
        monkeypatch.undo()
    assert hashlib.sha256(await waiting).hexdigest() == manifest.sha256
    assert {0.001, 0.002, 0.004, 0.05} <= set(pauses)
