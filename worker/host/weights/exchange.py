"""Weights between this host and the others of its ring: all that the host's process needs to know of it.

Does nothing without a folder for them (`--weights-cache-dir`).
"""

from collections.abc import Callable, Collection
from pathlib import Path

import structlog
from redis.asyncio import Redis

from shared.catalogue import CatalogueEntry, RingModels
from shared.process.model_aliases import hub_folder
from shared.process.worker_settings import WorkerSettings
from shared.redis.processes.ring_secret import ring_secret
from worker.host.weights.files import WeightsRequest
from worker.host.weights.giver import WeightGiver
from worker.host.weights.taker import WeightTaker
from worker.peers.listening import listen_for

log = structlog.get_logger()


class WeightExchange:
    """Transfers of one host in both directions."""

    def __init__(self, settings: WorkerSettings, host_id: str, source_of: Callable[[WeightsRequest], str]) -> None:
        """`source_of`: folder or hub name of a model that this host offers with that hash; "" for none."""
        self._settings, self._id, self._source_of = settings, host_id, source_of
        self.address = ""  # where other hosts fetch; "": they cannot
        self._secret = b""
        folder = settings.weights_cache_dir
        self._taker = (
            None
            if folder is None
            else WeightTaker(folder.expanduser(), lambda: self._secret, int(settings.weights_cache_gb * 1e9))
        )
        self._giver = WeightGiver(lambda: self._secret, self._folder_of)

    def open(self) -> None:
        """Listen. SetupError where the settings name no address of this machine."""
        if self._taker is None:
            return
        s = self._settings
        self.address = listen_for("hosts", self._giver.listen, s.redis, s.kv_transfer_host, "--weights-cache-dir")
        log.info("weights.listens", address=self.address)

    async def tend(self, redis: Redis) -> None:
        """Refresh the ring's secret; called with every heartbeat."""
        if self._taker is not None:
            self._secret = await ring_secret(redis)

    async def close(self) -> None:
        """Stop listening; transfers that are under way end."""
        await self._giver.close()

    def stored(self, sha256: str) -> Path | None:
        """Folder of weights that were got from another host."""
        return None if self._taker is None else self._taker.stored(sha256)

    def forget(self, sha256: str) -> None:
        """Remove weights that are others than their name says."""
        if self._taker is not None:
            self._taker.forget(sha256)

    def note_use(self, sha256: str) -> None:
        """The weights with a hash are loaded: others leave the folder before them."""
        if self._taker is not None:
            self._taker.note_use(sha256)

    def givers(self, entry: CatalogueEntry, models: RingModels) -> dict[str, str]:
        """Addresses of other hosts that have a model's files, by name."""
        if self._taker is None or not entry.sha256:
            return {}
        return {
            host.host: host.weights_address
            for host in models.hosts
            if host.id != self._id and host.weights_address and not host.draining and host.offers.get(entry.name)
        }

    async def take(
        self, entry: CatalogueEntry, models: RingModels, advance: Callable[[float], None], in_use: Collection[str]
    ) -> str:
        """Get a model's files from one of its givers; why that cannot be, "" when they are here."""
        assert self._taker is not None
        ask = WeightsRequest(entry.name, entry.sha256)
        return await self._taker.take(ask, self.givers(entry, models), advance, in_use)

    def _folder_of(self, ask: WeightsRequest) -> Path | None:
        source = self._source_of(ask)
        if not source:
            return None
        folder = Path(source).expanduser()
        if not folder.exists():
            folder = hub_folder(source)
            revision = folder / "refs" / "main"
            folder = folder / "snapshots" / revision.read_text().strip() if revision.exists() else folder
        return folder if folder.is_dir() else None
