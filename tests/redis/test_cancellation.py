"""A cancelled task ends, wherever in a Redis command the cancellation meets it.

redis-py sends under `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives as the send ends:
264 of 2,000 loops ran on for ever, and with them processes that were told to stop.
"""

import asyncio

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.redis.connection.client import connect
from tests.waiting import HANG_S


async def test_a_cancelled_loop_over_redis_ends(redis_url: str) -> None:
    redis = connect(redis_url)

    async def loop() -> None:
        while True:
            await redis.get("nothing")

    for turns in range(300):
        task = asyncio.create_task(loop())
        for _ in range(turns % 37):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=HANG_S)
        assert done, f"not cancelled after {turns % 37} turns of the event loop"
    await redis.aclose()


def test_a_connection_that_was_closed_under_a_command_is_no_error_of_the_program_on_uvloop(redis_url: str) -> None:
    async def send() -> None:
        client = connect(redis_url)
        connection = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        await asyncio.sleep(0)  # by then the loop has closed it
        with pytest.raises(RedisConnectionError):
            await connection.send_command("PING")
        await client.connection_pool.release(connection)
        assert await client.ping(), "it connects anew"
        await client.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send())
