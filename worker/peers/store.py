"""The engine's cache of prefixes, as the server and the client of KV see it: from the event loop, in plain bytes."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from shared.wire import PeerError
from worker.engine.prefixes.entries import NOTHING, Promotion
from worker.engine.prefixes.parcels import KvParcel, Packed, UnusableParcelError, pack
from worker.engine.prefixes.sharing import HeldPrompt, SharedCache
from worker.peers.messages import KvRequest, Offer

T = TypeVar("T")

LOOK_EVERY_S = 0.01
DISK_S = 2.0  # for our disk; a peer that asks for an offer waits STALL_S for it
ENGINE_S = 10.0  # for one answer of the engine, which may be in the middle of a step


class KvOwner(Protocol):
    """The part of `EngineThread` that gives access to KV."""

    def on_kv(self, call: Callable[[SharedCache], T]) -> Future[T]: ...


class EngineStore:
    """Asynchronous access to the KV of one worker's engine."""

    def __init__(self, engine: KvOwner, most_ids: int) -> None:
        """`most_ids`: of a prompt that may be asked for; the model's context."""
        self._engine = engine
        self._most_ids = most_ids
        self._packing = ThreadPoolExecutor(2, "kv-parcels")

    def close(self) -> None:
        """Nothing is packed any more."""
        self._packing.shutdown(wait=False, cancel_futures=True)

    async def identity(self) -> str:
        """Identity of the KV that this engine computes."""
        return await self._ask(lambda cache: cache.identity)

    async def held(self, ids: list[int], version: str, at_most: int) -> HeldPrompt:
        """Look up how much of a prompt is in memory."""
        return await self._ask(lambda cache: cache.held(ids, version, at_most))

    async def gathered(self, ids: list[int], version: str, at_most: int) -> HeldPrompt:
        """The same, after our own disk's part of it has come there."""
        return await self._with_disk(
            lambda cache: cache.promotion(ids, version, at_most), lambda cache: cache.held(ids, version, at_most)
        )

    async def take(self, prompt: HeldPrompt, parcel: KvParcel) -> None:
        """Store a parcel. PeerError when it is not what was asked for."""
        try:
            await self._ask(lambda cache: cache.take(prompt, parcel))
        except UnusableParcelError as error:
            raise PeerError(f"a parcel cannot be used: {error}") from error

    async def offer(self, ask: KvRequest) -> tuple[int, Offer]:
        """Number and description of an offer; the number is 0 if there is nothing to give."""

        at_most = min(ask.at_most, len(ask.ids))

        def promotion(cache: SharedCache) -> Promotion:
            is_ours = cache.identity == ask.identity
            return cache.promotion(ask.ids, ask.version, at_most) if is_ours else NOTHING

        def look(cache: SharedCache) -> tuple[int, Offer]:
            if cache.identity != ask.identity:
                return 0, Offer(refusal="another model, dtype, layout or release of mlx-lm computes here")
            offered = cache.offer(ask.ids, ask.version, ask.known, max(0, ask.blocks), at_most, ask.most_bytes)
            return (offered.number, Offer(offered.length, offered.sizes)) if offered else (0, Offer())

        if len(ask.ids) > self._most_ids:
            return 0, Offer(refusal=f"{len(ask.ids)} ids are more than the model's context")
        return await self._with_disk(promotion, look)

    async def parcel(self, offer: int, number: int) -> Packed:
        """A part of an offer, ready to be sent."""
        await self._ask(lambda cache: cache.begin(offer, number))
        parcel = await self._ask(lambda cache: cache.finish(offer, number))
        return await asyncio.get_running_loop().run_in_executor(self._packing, pack, parcel)

    def drop(self, offer: int) -> None:
        """Drop the offer, which is no longer fetched."""
        if offer:
            self._engine.on_kv(lambda cache: cache.drop(offer))

    async def _with_disk(self, begin: Callable[[SharedCache], Promotion], look: Callable[[SharedCache], T]) -> T:
        """Result of `look` after a promotion from disk has finished or has taken DISK_S."""

        def first(cache: SharedCache) -> tuple[Promotion, T | None]:
            promotion = begin(cache)
            return promotion, look(cache) if promotion is NOTHING else None

        promotion, found = await self._ask(first)
        if found is not None:
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISK_S):
                while promotion.waits:  # noqa: ASYNC110 - the engine's thread ends it
                    await asyncio.sleep(LOOK_EVERY_S)
        return await self._ask(look)

    async def _ask(self, call: Callable[[SharedCache], T]) -> T:
        try:
            async with asyncio.timeout(ENGINE_S):
                return await asyncio.wrap_future(self._engine.on_kv(call))
        except TimeoutError as error:
            raise PeerError(f"our engine has not answered within {ENGINE_S:.0f} s") from error
        except LookupError as error:
            raise PeerError("our cache no longer has it") from error
