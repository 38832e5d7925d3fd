"""Connections of redis-py that do not lose a cancellation, and that pack commands in C."""

import asyncio
from typing import Any

from redis.asyncio.connection import ConnectionPool
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError


def make_cancellable(pool: ConnectionPool) -> None:
    """Let the pool make connections whose commands can be cancelled at any moment."""
    pool.connection_class = type("CancellableConnection", (_Cancellable, pool.connection_class), {})


_packer = HiredisRespSerializer()


class _Cancellable:
    """Sends under `asyncio.timeout` where redis-py uses `asyncio.wait_for`.

    Until Python 3.12 `wait_for` loses a cancellation that arrives as the send ends, so that a cancelled loop runs on
    for ever; and it starts a task for every command.
    """

    socket_timeout: float | None

    def pack_command(self, *args: Any) -> list[bytes]:
        """As redis-py's own connections without asyncio do: to enqueue 2,000 sequences held the loop for 150 ms."""
        packed: list[bytes] = _packer.pack(*args)
        return packed

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except TimeoutError:
            raise RedisTimeoutError("Timeout writing to socket") from None
        except RuntimeError as error:  # uvloop's, where asyncio lets the next read fail
            if "handler is closed" not in str(error):
                raise
            raise RedisConnectionError("the connection was closed") from None
        finally:
            self.socket_timeout = limit
