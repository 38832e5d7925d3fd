"""An api's event loop in a thread of its own, and for how long it stands still."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from shared.process.garbage import leave_out_what_is_loaded
from tests.redis.api_servers import api
from tests.waiting import HANG_S

LONGEST = 16  # times `known_work`: 0.1 s where that takes 6 ms
SHORT_S = 0.02  # no machine does the known work in a tenth of this
TRIES = 6
_BEAT_S = 0.0005
Answer = TypeVar("Answer")


class Loop:
    """An api process's event loop in a thread of its own.

    It stands still while it computes, and while another thread keeps the interpreter's lock: both are computing of this
    process between two beats, which a busy machine does not lengthen.
    """

    def __init__(self, redis_url: str) -> None:
        self.url = ""
        self._stood_s = 0.0
        self._redis_url = redis_url
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(HANG_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(HANG_S)

    async def begin(self) -> None:
        """Forget what was; what the test's own worker has kept is no part of an api that collects garbage."""
        leave_out_what_is_loaded()
        await self._beaten()
        self._stood_s = 0.0

    async def stood(self) -> float:
        """For how long it has stood still, in times of the known work; 0 when that was not long on any machine."""
        await self._beaten()
        return self._stood_s / known_work() if self._stood_s > SHORT_S else 0.0

    async def _beaten(self) -> None:
        """A beat has come and gone, so that what was before it is counted."""
        for _ in range(2):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(_BEAT_S), self._loop))

    async def _beat(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(_BEAT_S)
            now = time.process_time()
            self._stood_s, last = max(self._stood_s, now - last), now

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with api(self._redis_url) as server:
            self.url = server.url
            self._ready.set()
            beating = asyncio.create_task(self._beat())
            await self._end.wait()
            beating.cancel()


async def least_stop(loop: Loop, send: Callable[[], Awaitable[Answer]]) -> tuple[Answer, float]:
    """The last answer, and the shortest stop of the loop: sent again while that is long.

    On a busy machine the loop's thread waits for a core while others of this process compute, which looks the same, now
    and then. A request that stops the loop does so each time.
    """
    stops: list[float] = []
    while not stops or (min(stops) > LONGEST and len(stops) < TRIES):
        await loop.begin()
        answer = await send()
        stops.append(await loop.stood())
    return answer, min(stops)


@contextlib.contextmanager
def event_loop(redis_url: str) -> Iterator[Loop]:
    """Around a test; what earlier tests have left in memory is not looked through meanwhile, as in an api process."""
    made = Loop(redis_url)
    gc.collect()
    gc.freeze()
    made.start()
    leave_out_what_is_loaded()
    try:
        yield made
    finally:
        gc.unfreeze()
        made.stop()
        gc.unfreeze()


def known_work() -> float:
    """Seconds of computing that this machine takes right now for work of known size: the least of three."""
    taken = []
    for _ in range(3):
        began, total = time.thread_time(), 0
        for at in range(200_000):
            total += at % 7
        taken.append(time.thread_time() - began)
    return min(taken)
