"""Files and batches as they are stored."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from shared.errors import InvalidRequestError, ServiceUnavailableError, UnknownBatchError, UnknownFileError
from shared.owners import Asker
from shared.redis import keys
from shared.redis.files.batch_store import READ_AT_ONCE, BatchError, BatchSpec, BatchStore, new_batch_id
from shared.redis.files.file_store import CHUNK_BYTES, LISTED_AT_ONCE, FileStore, StoredFile, new_file_id


def spec() -> BatchSpec:
    now = int(time.time())
    files = (new_file_id(), new_file_id(), new_file_id())
    return BatchSpec(new_batch_id(), "/v1/completions", files[0], "24h", now, now + 86_400, *files[1:], 3_600)


async def test_a_file_is_there_when_it_is_whole_and_writing_it_again_changes_nothing(redis: Redis) -> None:
    store, file_id = FileStore(redis), new_file_id()
    data = b"".join(b"%d %s\n" % (i, b"x" * 1000) for i in range(3000))
    torn = store.writer(file_id)
    await torn.add(data[: CHUNK_BYTES + 10])
    with pytest.raises(UnknownFileError):
        await store.find(file_id)
    assert 0 < await redis.ttl(keys.file_bytes(file_id)) <= keys.FILE_UPLOAD_TTL_S

    for _ in range(2):
        writer = store.writer(file_id)
        for at in range(0, len(data), 70_001):
            await writer.add(data[at : at + 70_001])
        file = await writer.close("x.jsonl", "batch", 7200)
        assert b"".join([chunk async for chunk in store.read(await store.find(file_id))]) == data
    late = store.writer(file_id)  # of a process that was thought dead: it must not shorten the file's life
    await late.add(data[: CHUNK_BYTES + 10])
    assert await redis.ttl(keys.file_bytes(file_id)) > 7200
    numbers = [(number, int(line.split()[0])) async for number, line in store.lines(file, 10_000)]
    assert numbers == [(i + 1, i) for i in range(3000)]
    with pytest.raises(InvalidRequestError, match="longer"):
        [line async for line in store.lines(await written(store, b"y" * 3 * CHUNK_BYTES), 1000)]

    torn = store.writer()
    await torn.add(data)
    (key,) = [each async for each in redis.scan_iter(match=keys.file_bytes("*")) if await redis.ttl(each) <= 3600]
    await redis.hdel(key, "1")  # as a crash of Redis may
    with pytest.raises(ServiceUnavailableError, match="send it again"):
        await torn.close("torn", "batch", 7200)

    assert (await store.list("batch", 1, "", newest_first=True))[1]
    await store.delete(file_id)
    assert not await redis.exists(keys.file(file_id), keys.file_bytes(file_id))


async def written(store: FileStore, data: bytes, tenant: str = "") -> StoredFile:
    writer = store.writer()
    await writer.add(data)
    return await writer.close("y", "batch", 7200, tenant)


async def test_a_batch_ends_once_and_one_process_works_on_it(redis: Redis) -> None:
    store, asked = BatchStore(redis), spec()
    await store.create(asked)
    assert [record.spec async for record in store.pending()] == [asked]
    assert await store.take(asked.id, "a")
    assert not await store.take(asked.id, "b")
    assert not await store.renew(asked.id, "b")
    await store.release(asked.id, "b")
    assert await store.renew(asked.id, "a")
    await store.release(asked.id, "a")
    assert await store.take(asked.id, "b")

    assert await store.change(asked.id, state="in_progress", job="job-1", lines=3)
    error = BatchError("server_error", "why", None, 3)
    assert await store.end(asked.id, "failed", errors=(error,))
    assert not await store.end(asked.id, "completed")
    assert not await store.change(asked.id, cancelling_at=5)
    found = await store.find(asked.id)
    assert (found.state, found.errors, found.job, found.lines, found.cancelling_at) == (
        "failed",
        (error,),
        "job-1",
        3,
        0,
    )
    assert [record async for record in store.pending()] == []
    assert [record.spec.id for record in (await store.page(10, ""))[0]] == [asked.id]
    with pytest.raises(UnknownBatchError):
        await store.find("batch_x")


async def lists_read(redis: Redis, work: Callable[[], Awaitable[Any]]) -> int:
    """How often some work asks Redis for ids of a sorted set."""

    async def calls() -> int:
        stats = await redis.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("zrange", "zrevrange"))

    before = await calls()
    await work()
    return await calls() - before


async def test_a_tenants_lists_cost_nothing_of_what_others_have(redis: Redis) -> None:
    files, batches, acme = FileStore(redis), BatchStore(redis), Asker("acme", limited=True)
    for _ in range(40):
        await batches.create(msgspec.structs.replace(spec(), tenant="other"))
        await written(files, b"other", "other")
    hers = msgspec.structs.replace(spec(), tenant="acme")
    await batches.create(hers)
    mine = [await written(files, b"hers", "acme") for _ in range(2)]

    async def look() -> None:
        assert [record.spec for record in (await batches.page(1, "", acme))[0]] == [hers]
        assert (await files.list("", 1, "", newest_first=True, asker=acme))[0] == mine[1:]

    assert await lists_read(redis, look) <= 4
    assert await files.list("", 1, mine[0].id, newest_first=False, asker=acme) == (mine[1:], False)
    assert await files.list("", 1, mine[1].id, newest_first=True, asker=acme) == (mine[:1], False)
    await files.delete(mine[0].id)
    assert (await files.list("", 9, "", newest_first=True, asker=acme))[0] == mine[1:]
    assert len((await files.list("", 99, "", newest_first=True))[0]) == 41


@pytest.mark.cluster
async def test_ids_of_files_and_batches_that_are_gone_do_not_shorten_a_page(redis: Redis) -> None:
    files, batches = FileStore(redis), BatchStore(redis)
    asked, file = spec(), await written(files, b"x")
    await batches.create(asked)
    count = 2 * max(READ_AT_ONCE, LISTED_AT_ONCE) + 1
    for listed in (keys.files(), keys.batches(), keys.pending_batches()):
        await redis.zadd(listed, {f"gone-{i}": time.time() + 1 for i in range(count)})
    page = await batches.page(1, "")
    assert ([record.spec for record in page[0]], page[1]) == ([asked], False)
    assert await files.list("", 1, "", newest_first=True) == ([file], False)
    assert [record.spec async for record in batches.pending()] == [asked]
    assert await redis.zcard(keys.pending_batches()) == 1
