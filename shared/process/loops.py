"""Loops that a process runs as long as it lives."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError

from shared.redis.connection.faults import reason

log = structlog.get_logger()

REST_S = 0.2


def begin(of: str, **loops: Callable[[], Awaitable[None]]) -> list[asyncio.Task[Any]]:
    """Run these of one owner, by name; a lost Redis is waited for, and any other error is logged and tried again."""
    return [asyncio.create_task(_forever(of, name, loop)) for name, loop in loops.items()]


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End them, and wait for that."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _forever(of: str, name: str, loop: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await loop()
        except (RedisError, OSError) as error:
            log.warning(f"{of}.redis_trouble", loop=name, error=reason(error))
        except Exception:
            log.exception(f"{of}.loop_failed", loop=name)
        await asyncio.sleep(REST_S)
