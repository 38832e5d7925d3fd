"""Adapter versions from the store to the engine, on the asyncio side: watch, fetch, provide, acknowledge.

Two things bring a version here: the store's pointer moves (`run`: events are hints, pointers are read again), or a
claimed sequence needs it (`prepare`). Either way its file is fetched into the disk cache and held there, then the
engine is told. What the engine has loaded comes back through `on_stats` and is acknowledged in the store.

Invariants. A file that the engine knows stays on disk until it has been withdrawn. A version that a sequence here needs
is pinned in the store, so that it is not deleted meanwhile. Belongs to the event loop.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.adapters import (
    NETWORK_BASE,
    AdapterChoice,
    AdapterEvent,
    AdapterManifest,
    AdapterRef,
    unknown_adapter,
    version_id,
)
from shared.errors import AdapterRejectedError, ConflictError, ParallmError, UnknownAdapterError
from shared.frames import TokenEvent
from shared.owners import Asker
from shared.redis.adapters.store import AdapterStore
from shared.redis.adapters.watch import watch
from shared.sequences import SequenceSpec
from worker.adapters.cache import DiskCache
from worker.engine.orders import KeepOnDisk, Point, Provide, Withdraw
from worker.engine.thread import EngineThread

log = structlog.get_logger()

PIN_S = 60.0
REPEAT_ACK_S = 600.0
KEEP_S = 60.0  # an unused version stays provided this long


@dataclass
class _Provided:
    """A version that the engine knows, and the hold on its file."""

    manifest: AdapterManifest
    file: AsyncExitStack
    needed_at: float = field(default_factory=time.monotonic)
    pinned_at: float = 0.0


class AdapterSync:
    """Keeps one worker's engine supplied with adapters of its base model."""

    def __init__(
        self,
        redis: Redis,
        events: Redis,
        engine: EngineThread,
        cache: DiskCache,
        *,
        worker_id: str,
        base_sha256: str,
        slots: int,
        everywhere: Callable[[AdapterManifest], Awaitable[None]] | None = None,
    ) -> None:
        """`everywhere`: have a version's file at the other ranks of a group, too."""
        self._everywhere = everywhere
        self._store = AdapterStore(redis)
        self._events = events  # a connection that may block
        self._engine = engine
        self._cache = cache
        self._worker_id = worker_id
        self._base_sha256 = base_sha256
        self._slots = slots
        self._provided: dict[str, _Provided] = {}
        self._bringing: dict[str, asyncio.Lock] = {}
        self._pointed: dict[str, int] = {}  # sent to the engine
        self._acknowledged: dict[str, tuple[int, float]] = {}
        self._lasting: dict[str, str] = {}
        self._news = asyncio.Event()

    @property
    def loaded(self) -> dict[str, int]:
        """Version by name that this worker computes with, for its status."""
        stats = self._engine.adapter_stats()
        found: dict[str, int] = {}
        for version in [*stats.loaded, *(each for each in stats.serving.values() if each in stats.loaded)]:
            name, _, number = version.partition("@")
            found[name] = int(number)
        return found

    def on_stats(self) -> None:
        """The engine has loaded something, or failed to."""
        self._news.set()

    # -- what sequences need

    async def prepare(self, spec: SequenceSpec, prior: Iterable[TokenEvent] = ()) -> SequenceSpec:
        """Have the sequence's adapter at hand; the spec to submit: a pinned reference names its version.

        A sequence that was taken over keeps the version of its earlier tokens. Errors of ours end the sequence.
        """
        if not spec.adapter:
            return spec
        choice = AdapterRef.parse(spec.adapter).choose(spec.group or spec.id)
        follows = choice.follows and spec.adapter_policy == "follow"
        version = choice.version or (0 if follows else _version_so_far(choice, prior))
        if not version:
            version = await self._store.latest(choice.name)
            if not version:
                raise unknown_adapter(choice.name)
        manifest = await self._bring(choice.name, version, needed=True)
        if not Asker.working_for(spec.tenant).sees(manifest.tenant):
            raise unknown_adapter(choice.name)  # it was deleted meanwhile, and the name is another tenant's now
        if follows:
            self._point(choice.name, version)
            return msgspec.structs.replace(spec, adapter=choice.name)
        return msgspec.structs.replace(spec, adapter=version_id(choice.name, version))

    async def _bring(self, name: str, version: int, *, needed: bool = False) -> AdapterManifest:
        """Fetch a version and provide it to the engine, once."""
        known = version_id(name, version)
        async with self._bringing.setdefault(known, asyncio.Lock()):
            provided = self._provided.get(known)
            if provided is None:
                manifest = await self._manifest(name, version)
                file = AsyncExitStack()
                path = await file.enter_async_context(self._cache.hold(self._store, manifest))
                if self._everywhere is not None:
                    async with file:
                        await self._everywhere(manifest)
                        file = file.pop_all()
                provided = self._provided[known] = _Provided(manifest, file)
                self._engine.send(Provide(str(path), manifest))
                log.info("adapters.provided", adapter=known, bytes=manifest.size)
            if needed:
                provided.needed_at = time.monotonic()
                await self._pin(provided)
        self._bringing.pop(known, None)
        return provided.manifest

    async def _manifest(self, name: str, version: int) -> AdapterManifest:
        manifest = await self._store.manifest(name, version)
        if manifest.status == "rejected":
            raise ConflictError(f"adapter {manifest.id} did not pass its gate")
        if manifest.base_sha256 not in ("", NETWORK_BASE, self._base_sha256):
            raise AdapterRejectedError(f"adapter {manifest.id} was made for another base model")
        return manifest

    async def _pin(self, provided: _Provided) -> None:
        if time.monotonic() - provided.pinned_at > PIN_S / 3:
            manifest = provided.manifest
            await self._store.pin(manifest.name, manifest.version, self._worker_id, PIN_S)
            provided.pinned_at = time.monotonic()

    def _point(self, name: str, version: int) -> None:
        if self._pointed.get(name) != version:
            self._pointed[name] = version
            self._engine.send(Point(name, version))

    # -- what the store says

    async def run(self) -> None:
        """Follow the store's pointers for ever."""
        async for event in watch(self._events):
            try:
                await self._follow(event)
            except ParallmError as error:
                log.warning("adapters.not_taken", adapter=version_id(event.name, event.latest), reason=error.message)

    async def _follow(self, event: AdapterEvent) -> None:
        if event.latest == 0:
            if self._pointed.pop(event.name, None):
                self._engine.send(Point(event.name, 0))
        elif event.name in self._pointed or len(self._pointed) < self._slots:
            await self._bring(event.name, event.latest)
            self._point(event.name, event.latest)

    # -- what the engine says

    async def acknowledge(self) -> None:
        """Publish loaded versions in the store for ever: after every load, and again at times."""
        while True:
            self._news.clear()  # before we look: what comes while one is published is news, too
            for name, version in self.loaded.items():
                known, at = self._acknowledged.get(name, (0, 0.0))
                if known != version or time.monotonic() - at > REPEAT_ACK_S:
                    await self._store.acknowledge(self._worker_id, name, version)
                    self._acknowledged[name] = (version, time.monotonic())
            try:
                async with asyncio.timeout(REPEAT_ACK_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def tend(self) -> None:
        """With every heartbeat: renew the pins of what is used, release what is no longer needed."""
        stats, now = self._engine.adapter_stats(), time.monotonic()
        for version, provided in list(self._provided.items()):
            manifest = provided.manifest
            if stats.loaded.get(version) or version in stats.waited_for:
                provided.needed_at = now
                try:
                    await self._pin(provided)
                except UnknownAdapterError:
                    log.warning("adapters.deleted_in_use", adapter=version)
                    provided.pinned_at = now
            elif now - provided.needed_at > KEEP_S and self._pointed.get(manifest.name) != manifest.version:
                del self._provided[version]
                self._engine.send(Withdraw(version))
                await provided.file.aclose()

    async def send_lasting(self, workers: Collection[str], dtype: str) -> None:
        """Send the engine the versions whose KV may be stored on disk: a trained policy's other versions are dead soon.

        A worker pins what it computes with, which says nothing of the next days: `workers` do not count.
        """
        provided = [each.manifest for each in self._provided.values()]
        lasting = {name: await self._store.lasting(name, workers) for name in {each.name for each in provided}}
        kept = {each.id: _digest(each, dtype) for each in provided if each.version in lasting[each.name]}
        if kept != self._lasting:
            self._lasting = kept
            self._engine.send(KeepOnDisk(kept))

    async def close(self) -> None:
        """Let go of everything: files and pins."""
        for provided in self._provided.values():
            await provided.file.aclose()
            if provided.pinned_at:
                try:
                    await self._store.unpin(provided.manifest.name, provided.manifest.version, self._worker_id)
                except (RedisError, OSError):
                    break
        self._provided.clear()


def _digest(manifest: AdapterManifest, dtype: str) -> str:
    """Hash of everything in a version that changes what is computed; its name and number may differ in another ring."""
    whole = f"{manifest.sha256} {manifest.kind} {manifest.rank} {manifest.scale!r} {dtype}"
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def _version_so_far(choice: AdapterChoice, prior: Iterable[TokenEvent]) -> int:
    """The version of earlier attempts' tokens, 0: none."""
    for event in prior:
        name, _, version = event.version.partition("@")
        if event.tokens and name == choice.name and version:
            return int(version)
    return 0
