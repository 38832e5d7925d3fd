"""Rank 0's side of a group of workers: what its engine does, the other ranks' engines do in the same turn."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from mlx_model.config import EngineConfig, SlotConfig
from ranks.followers import FollowerLink
from ranks.lead import GroupLead
from ranks.messages import EngineTurn, Fetch, Fetched, Read, Woken
from ranks.placement import Placement
from shared.adapters import AdapterManifest
from shared.errors import EngineError
from shared.frames import TokenEvent
from shared.process.worker_settings import WorkerSettings
from shared.wire import PeerError
from worker.engine.orders import Order, Rehearse
from worker.engine.turns import Consent, RankReport, TurnFacts

_FACTS = msgspec.msgpack.Decoder(TurnFacts)
_ORDERS = msgspec.msgpack.Decoder(list[Order])


class EngineLead(GroupLead):
    """Rank 0 of a worker. Thread G calls what worker/engine/build.py names `OtherRanks`, the event loop the rest."""

    def __init__(
        self,
        settings: WorkerSettings,
        placed: Placement,
        on_lost: Callable[[str], None],
        config: EngineConfig,
        adapters: SlotConfig | None,
    ) -> None:
        super().__init__(settings, placed, on_lost, config, adapters)
        self._consent = Consent(placed.size)
        self._fetching: dict[int, asyncio.Future[str]] = {}
        self._fetches = 0

    # -- the event loop's

    async def bring(self, manifest: AdapterManifest) -> None:
        """Have the file of a version at every rank; EngineError when one cannot get it.

        Once the group is lost this does not return: the worker ends, and its sequences go on elsewhere.
        """
        waiting: list[tuple[FollowerLink, asyncio.Future[str]]] = []
        for follower in self.followers:
            self._fetches += 1
            waits: asyncio.Future[str] = self._loop.create_future()
            self._fetching[self._fetches] = waits
            waiting.append((follower, waits))
            with contextlib.suppress(PeerError):  # the group is lost, or about to be
                await follower.say(Fetch(self._fetches, manifest))
        for follower, waits in waiting:
            if fault := await waits:
                raise EngineError(f"rank {follower.rank} ({follower.host}) cannot get adapter {manifest.id}: {fault}")

    def _hear(self, follower: FollowerLink, message: object) -> None:
        match message:
            case Read(read, unreadable):
                with self._lock:
                    self._consent.hear(follower.rank, read, unreadable)
                self._wake()
            case Woken():
                self._wake()
            case Fetched(number, fault):
                if (waits := self._fetching.pop(number, None)) is not None and not waits.done():
                    waits.set_result(fault)
            case _:
                super()._hear(follower, message)

    # -- thread G's

    def turn(self, orders: Sequence[Order], seen: RankReport) -> TurnFacts:
        """Let them take a turn that begins with these orders; what all of us know in it."""
        with self._lock:
            self._consent.hear(0, seen.read, seen.unreadable)
            facts = self._consent.facts(seen)
            self._number += 1
            if any(isinstance(order, Rehearse) for order in orders):
                self._rehearsal = self._number
        self._send(engine_turn(self._number, facts, [order.for_followers() for order in orders]))
        return facts

    def turned(self, events: Sequence[TokenEvent]) -> None:
        """Report the events of this rank's latest turn; if another rank's differ, the group is lost."""
        with self._lock:
            self._outcome.add(self._number, events)
            self._keep_sum()


def engine_turn(number: int, facts: TurnFacts, orders: Sequence[Order]) -> EngineTurn:
    """The message by which the other ranks take this turn."""
    return EngineTurn(number, msgspec.Raw(msgspec.msgpack.encode(facts)), msgspec.Raw(msgspec.msgpack.encode(orders)))


def content_of(turn: EngineTurn) -> tuple[TurnFacts, list[Order]]:
    """Facts and orders of a turn that `engine_turn` has made."""
    return _FACTS.decode(turn.facts), _ORDERS.decode(turn.orders)
