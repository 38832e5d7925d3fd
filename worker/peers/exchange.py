"""KV between this worker and the others of its ring: all that the worker's process needs to know of it.

Does nothing unless the settings say so. A worker without a secret (Redis refuses it, or has not answered yet) lets
no peer in and asks none, and says so once.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.process.worker_settings import LINGER_S, WorkerSettings
from shared.redis.connection.faults import reason
from shared.sequences import ModelCard, SequenceSpec
from shared.telemetry.metrics import Tally
from worker.engine.messages import RowRequest
from worker.engine.thread import EngineThread
from worker.peers.directory import PeerDirectory
from worker.peers.fetching import FetchCounts, Fetching
from worker.peers.listening import listen_for
from worker.peers.server import PeerServer
from worker.peers.store import EngineStore

log = structlog.get_logger()

QUIET_S = 1.0  # without a fetch for so long, and with nothing waiting, none will come
LOOK_EVERY_S = 0.2


class KvExchange:
    """KV transfers of one worker in both directions."""

    def __init__(
        self, settings: WorkerSettings, redis: Redis, engine: EngineThread, card: ModelCard, worker_id: str
    ) -> None:
        self.on = settings.kv_transfer
        self.address = ""  # where others fetch; "": they cannot
        self._settings = settings
        self._engine = engine
        self._directory = PeerDirectory(redis, card.name, worker_id)
        self._model = card.name
        self._store = EngineStore(engine, card.context_length)
        self._server = PeerServer(self._store, lambda: self._directory.secret)
        self._trouble = ""

    def open(self, tally: Tally) -> None:
        """Listen. SetupError where the settings name no address of this machine."""
        if not self.on:
            return
        self._counts = counts = FetchCounts(tally, self._model)
        most_bytes = int(self._settings.prefix_cache_gb * 1e9)
        self._fetching = Fetching(
            self._directory,
            self._store,
            counts,
            most_bytes,
            lambda: self._engine.stats().prefill_token_s,
            self._version,
        )
        self._given = tally.counter("mlx_parallm_kv_given_bytes_total", self._model)
        s = self._settings
        self.address = listen_for("workers", self._server.listen, s.redis, s.kv_transfer_host, "--kv-transfer")
        log.info("kv.listens", address=self.address)

    async def tend(self) -> None:
        """Refresh what is known of peers; called with every heartbeat."""
        if not self.on:
            return
        self._count_given()
        try:
            await self._directory.look(self._engine.stats().disk.folder_id)
            self._trouble = ""
        except RedisError as error:
            if reason(error) != self._trouble:
                self._trouble = reason(error)
                log.warning("kv.no_secret", error=self._trouble)

    @property
    def figures(self) -> dict[str, float]:
        """Counts that the heartbeat reports."""
        return self._counts.figures if self.address else {}

    async def close(self) -> None:
        """Close all connections and free the offers."""
        await self._server.close()
        self._store.close()
        self._count_given()

    def _count_given(self) -> None:
        if self.on:
            self._given.value = float(self._server.bytes)

    # -- coming

    async def holders(self, requests: list[RowRequest]) -> dict[str, str]:
        """By sequence, another worker that may have its KV."""
        if not self.on or not self._directory.secret:
            return {}
        try:
            return await self._directory.holders(requests)
        except (RedisError, OSError):
            return {}

    async def fetch(self, request: RowRequest, worker: str, is_wanted: Callable[[], bool]) -> None:
        """Have a request's KV here if that is quicker than computing it."""
        await self._fetching.fetch(request, worker, is_wanted)

    def _version(self, spec: SequenceSpec) -> str | None:
        """The adapter version that a row will compute with; None: not known yet."""
        if "@" in spec.adapter or not spec.adapter:
            return spec.adapter
        return self._engine.adapter_stats().serving.get(spec.adapter)

    # -- leaving

    async def linger(self, sequences: list[str]) -> None:
        """Stay while peers fetch what was handed back, or may come to; LINGER_S at most."""
        if not self.on or not sequences or not await self._has_heirs():
            return
        began = busy_at = time.monotonic()
        with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
            async with asyncio.timeout(LINGER_S):
                while time.monotonic() - max(busy_at, self._server.used_at) < QUIET_S:
                    if self._server.transfers or await self._directory.waiting(sequences):
                        busy_at = time.monotonic()
                    await asyncio.sleep(LOOK_EVERY_S)
        log.info("kv.lingered", seconds=round(time.monotonic() - began, 1), given=self._server.given)

    async def _has_heirs(self) -> bool:
        try:
            async with asyncio.timeout(QUIET_S):
                return bool(self.address and await self._directory.others())
        except (RedisError, OSError):
            return False
