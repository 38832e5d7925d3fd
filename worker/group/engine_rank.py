"""A worker's follower: it runs the same engine as rank 0, and what rank 0's guest does there."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_model.loader import LoadedModel
from ranks.following import Follower, Learning
from ranks.messages import EngineTurn, Fetch, Fetched, LoadModel, Read, Unit, Woken
from ranks.placement import Placement
from shared.adapters import AdapterManifest
from shared.process.worker_settings import WorkerSettings
from shared.redis.adapters.store import AdapterStore
from worker.adapters.cache import DiskCache
from worker.engine.build import build
from worker.engine.orders import Order, Provide, Withdraw
from worker.group.engine_lead import content_of


class EngineRank(Follower):
    """It fetches adapters from Redis, too."""

    def __init__(
        self, settings: WorkerSettings, placed: Placement, guest: Callable[[LoadedModel], Learning] | None
    ) -> None:
        """`guest`: makes what follows rank 0's guest."""
        super().__init__(settings, placed)
        self._own_settings, self._guest = settings, guest
        self._files: dict[str, tuple[Path, AsyncExitStack]] = {}

    async def run(self) -> int:
        s = self._own_settings
        self._cache = DiskCache(s.adapter_cache_dir, int(s.adapter_cache_gb * 1e9))
        return await super().run()

    # -- the event loop's

    def _hear(self, message: Fetch) -> None:
        self._begin(self._fetch(message.number, message.manifest))

    async def _fetch(self, number: int, manifest: AdapterManifest) -> None:
        fault = ""
        if manifest.id not in self._files:
            file = AsyncExitStack()
            try:
                path = await file.enter_async_context(self._cache.hold(AdapterStore(self._redis), manifest))
                self._files[manifest.id] = path, file
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
        await self._talk_say(Fetched(number, fault))

    # -- thread G's

    def _load(self, begin: LoadModel, group: Any) -> LoadedModel:
        s = self._own_settings
        config = replace(
            begin.config,
            model=s.model,
            trust_remote_code=s.trust_remote_code,
            kv_limit_bytes=int(s.kv_memory_gb * 1e9) or None,
        )
        self._parts = build(config, begin.adapters, group, lambda: self._say(Woken()))
        self._learning = None if self._guest is None else self._guest(self._parts.loaded)
        return self._parts.loaded

    def _take(self, turn: EngineTurn | Unit) -> None:
        engine = self._parts.engine
        if isinstance(turn, Unit):
            assert self._learning is not None, "rank 0 has a guest that we have"
            self._learn(turn, self._learning)
            return
        seen = engine.seen()
        if seen.is_news:
            self._say(Read(seen.read, seen.unreadable))
        facts, orders = content_of(turn)
        for order in orders:
            self._own(order).carry_out(self._parts)
        output = engine.turn(facts)
        self._outcome.add(turn.number, output.events)
        engine.settle()

    def _own(self, order: Order) -> Order:
        """An order as it is for this rank: files are where we have them."""
        match order:
            case Provide(_, manifest):
                return Provide(str(self._files[manifest.id][0]), manifest)
            case Withdraw(version):
                self._loop.call_soon_threadsafe(self._let_go, version)
        return order

    def _let_go(self, version: str) -> None:
        if (known := self._files.pop(version, None)) is not None:
            self._begin(known[1].aclose())
