"""The training service inside a worker: `mlx_parallm_serve --learners 16`.

One base in memory: learners are built over the worker's arrays, and their microbatches run in its engine thread,
between decode steps and by its share (worker/engine/between_steps.py). All else runs in a thread of its own with an
event loop of its own. Otherwise it is the service that `mlx_parallm_learners` is: what a killed worker had taken is
carried out again by the next one, or by any other service of the model.

Invariant. No error of a learner reaches the worker; an error of the service starts it anew, over the stored states.
"""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import threading
from collections.abc import Callable

import structlog

from shared.errors import SetupError
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.redis.connection.client import connect
from trainer.learn.compute import EngineHost, LendingWorker
from trainer.service.service import LearnerService
from trainer.service.settings import USUAL_RANK, LearnersSettings

log = structlog.get_logger()

MICROBATCH_TOKENS = 512  # by default: a row waits for one microbatch
PAUSES_S = (1.0, 60.0)  # between two tries, first and longest
LAST_WORDS_S = 2.0


class HostedLearners:
    """A guest of a worker (worker/guest.py) that serves learners."""

    def __init__(self, worker: WorkerSettings) -> None:
        self._settings = hosted_settings(worker)
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[None] | None = None
        self._service: LearnerService | None = None
        self._thread: threading.Thread | None = None

    @property
    def learner_rank(self) -> int:
        """Rank by which memory is planned: one learner as most are."""
        return min(self._settings.max_rank, USUAL_RANK)

    def resolved(self) -> str:
        """The service's settings as YAML."""
        return self._settings.resolved()

    def start(self, place: LendingWorker, ended: Callable[[bool], None]) -> None:
        """Start the service in a thread of its own; `ended` gets True if it was stopped."""

        def run() -> None:
            try:
                asyncio.run(self._serve(place))
            except Exception:
                log.exception("learners.failed")
            finally:
                ended(self._stopping.is_set())

        self._thread = threading.Thread(target=run, name="learners", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Store what learners have learned and end, or end at `timeout_s` without: their requests stay in Redis."""
        self._stopping.set()
        if self._thread is None:
            return
        self._call(self._end_in_order)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._call(lambda: self._running is not None and self._running.cancel())
            self._thread.join(LAST_WORDS_S)

    def _call(self, function: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: all is done
                loop.call_soon_threadsafe(function)

    def _end_in_order(self) -> None:
        if self._service is not None:
            self._service.stop()
        elif self._running is not None:  # a pause
            self._running.cancel()

    # -- in the learners' thread

    async def _serve(self, place: LendingWorker) -> None:
        self._loop, pause_s = asyncio.get_running_loop(), PAUSES_S[0]
        while not self._stopping.is_set():
            self._running = asyncio.create_task(self._try(place))
            await asyncio.gather(self._running, return_exceptions=True)
            self._service = None
            gc.collect()  # a broken service's learners hold their arrays in a cycle with their error
            if self._stopping.is_set():
                return
            log.warning("learners.again", in_s=pause_s)
            self._running = asyncio.create_task(asyncio.sleep(pause_s))
            await asyncio.gather(self._running, return_exceptions=True)
            pause_s = min(2 * pause_s, PAUSES_S[1])

    async def _try(self, place: LendingWorker) -> None:
        # Errors end in here: a stored one would hold all learners' arrays.
        card = place.loaded.card
        id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        try:
            async with contextlib.aclosing(connect(self._settings.redis)) as redis:
                host = EngineHost(place.engine)
                service = self._service = LearnerService(self._settings, host, place.loaded, card, redis, id)
                if self._stopping.is_set():
                    return
                log.info("learners.ready", model=card.name, places=self._settings.max_learners)
                await service.run()
                log.info("learners.ended")
        except Exception:
            log.exception("learners.broken")


def hosted_settings(worker: WorkerSettings) -> LearnersSettings:
    """The service's settings; model, dtype and ring are the worker's. SetupError for a rank that it cannot serve."""
    settings = load(LearnersSettings, [])
    if "max_rank" in settings.model_fields_set and settings.max_rank > worker.adapter_rank:
        raise SetupError(f"--max-rank {settings.max_rank} of learners is above --adapter-rank {worker.adapter_rank}")
    bounds = {"max_rank": min(settings.max_rank, worker.adapter_rank)}
    if "microbatch_tokens" not in settings.model_fields_set:
        bounds["microbatch_tokens"] = MICROBATCH_TOKENS
    ring = {"redis": worker.redis, "connect_to": ""}
    return settings.model_copy(update={"model": worker.model, "dtype": worker.dtype, **bounds, **ring})
