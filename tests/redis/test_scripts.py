"""Lua scripts on a server that forgets them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.redis import keys
from shared.redis.connection.client import Script, connect


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


async def test_a_server_that_forgets_its_scripts_all_the_time_fails_no_call(redis: Redis, redis_url: str) -> None:
    lease = Script("job_lease")
    forgetting = connect(redis_url)

    async def forget() -> None:
        while True:
            await asyncio.gather(*(forgetting.script_flush() for _ in range(4)))

    tasks = [asyncio.create_task(forget()) for _ in range(2)]
    try:
        for _ in range(20):
            calls = (lease(redis, [keys.job_lease("job-x")], ["r", "1000"]) for _ in range(16))
            assert set(await asyncio.gather(*calls)) == {0}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await forgetting.aclose()


async def test_an_error_of_a_script_is_raised_as_it_is_after_a_flush_too(redis: Redis) -> None:
    begin = Script("job_begin")
    await redis.set("parallm:job:wrong", "a string", ex=60)
    for _ in range(2):
        await redis.script_flush()
        with pytest.raises(ResponseError, match="WRONGTYPE") as raised:
            await begin(redis, ["parallm:job:wrong", "parallm:job:wrong:lease"], ["secret-argument", "0", "1000"])
        assert "secret-argument" not in str(raised.value)
    await redis.delete("parallm:job:wrong")
