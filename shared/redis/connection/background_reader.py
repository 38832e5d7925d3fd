"""Reading from Redis in a task of its own, while the reader is entered as a context."""

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import structlog
from redis.exceptions import RedisError

from shared.errors import ServiceUnavailableError
from shared.redis.connection.faults import reason

log = structlog.get_logger()

RETRY_S = 0.2


class BackgroundReader(ABC):
    """Reads in rounds; while Redis is away, it waits and then continues."""

    _reading: "asyncio.Task[None] | None" = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    @abstractmethod
    async def _read_round(self) -> None:
        """Take what is there, or wait a while for something."""

    async def _read_forever(self) -> None:
        while True:
            try:
                await self._read_round()
            except (RedisError, OSError, ServiceUnavailableError) as error:
                log.warning("reading.away", reader=type(self).__name__, error=reason(error))
                await asyncio.sleep(RETRY_S)
            except Exception:  # a reader that ends would leave others waiting in silence
                log.exception("reading.failed", reader=type(self).__name__)
                await asyncio.sleep(RETRY_S)
