"""Loops that a process runs as long as it lives, and its writes to Redis before they begin."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis.connection.faults import is_refusal, reason

log = structlog.get_logger()
T = TypeVar("T")

REST_S = 0.2
ASK_AGAIN_S = 1.0
SAY_EVERY_S = 10.0


def begin(of: str, **loops: Callable[[], Awaitable[None]]) -> list[asyncio.Task[Any]]:
    """Run these of one owner, by name; a lost Redis is waited for, and any other error is logged and tried again."""
    return [asyncio.create_task(forever(of, name, loop)) for name, loop in loops.items()]


async def until_taken(of: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until Redis takes it, with a line in the log while Redis is away or refuses (full, read-only, no disk).

    `ask` must be safe to repeat. Every other error is raised.
    """
    said, at = "", 0.0
    while True:
        try:
            return await ask()
        except (RedisError, OSError) as error:
            if not is_refusal(error) and not isinstance(error, RedisConnectionError | RedisTimeoutError | OSError):
                raise
            if said != (said := reason(error)) or time.monotonic() - at > SAY_EVERY_S:
                log.warning(f"{of}.waits_for_redis", error=said)
                at = time.monotonic()
        await asyncio.sleep(ASK_AGAIN_S)


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End them, and wait for that."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def forever(of: str, name: str, loop: Callable[[], Awaitable[None]], rest_s: float = REST_S) -> None:
    """Run one loop until cancelled, as `begin` does; `rest_s`: between an end of it and its next beginning."""
    while True:
        try:
            await loop()
        except (RedisError, OSError) as error:
            log.warning(f"{of}.redis_trouble", loop=name, error=reason(error))
        except Exception:
            log.exception(f"{of}.loop_failed", loop=name)
        await asyncio.sleep(rest_s)
