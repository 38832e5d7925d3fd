"""The server of each slot of a cluster, as one of them states it, and connections that follow a slot.

Invariants. Nobody asks for what is known and not in doubt, and one question answers all who wait for it. Whoever has
found the answer wrong says so (`doubt`, `moved`), and the next one who needs it asks another server: the one that
answered last may have been cut off. Of a server that may have been frozen, the others are asked.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from shared.redis.connection.faults import ClusterStateError, reason
from shared.redis.connection.routing import SLOTS

Place = tuple[str, int]  # host and port
Ask = Callable[[Place], Awaitable[list[list[Any]]]]  # the answer of a server to CLUSTER SLOTS


class NoClusterError(ClusterStateError):
    """A server answers that it is in no cluster."""


class UnknownSlotsError(ClusterStateError):
    """No server states the slots' primaries at the moment; the text has each server's answer."""


class FormerPrimaryError(ClusterStateError):
    """A server has answered what is another's to answer; so the answer does not count."""


class Topology:
    """The slots and their primaries."""

    def __init__(self, members: tuple[Place, ...], ask: Ask) -> None:
        self.version = 0  # how often it has changed
        self.members = members  # as the URL names them
        self._ask = ask
        self._slots: list[Place] = []
        self._known: list[Place] = []  # all servers, replicas too
        self._primaries: list[Place] = []
        self._in_doubt = True
        self._looking: asyncio.Task[None] | None = None
        self._checks = 0  # questions that `is_current` has begun, by their numbers
        self._checked: dict[Place, tuple[int, list[Place]]] = {}  # the latest one about a server, and its answer
        self._checking = asyncio.Lock()

    async def place(self, slot: int | None) -> Place:
        """The primary of a slot; of any with None. ConnectionError when no server knows it now."""
        if self._in_doubt:
            await self._look()
        return random.choice(self._primaries) if slot is None else self._slots[slot]

    async def primaries(self) -> list[Place]:
        """The servers that have slots."""
        if self._in_doubt:
            await self._look()
        return list(self._primaries)

    def doubt(self, version: int) -> None:
        """Mark the topology of this version as doubtful: an address in it was wrong or cannot be reached."""
        self._in_doubt = self._in_doubt or version == self.version

    def moved(self, slot: int, place: Place) -> None:
        """Set a slot's primary as a server has stated it; the other slots are asked for."""
        if self._slots:
            self._slots[slot] = place
        if place not in self._primaries:  # the first word of a failover, which has moved more than this slot
            self._in_doubt = True

    async def is_current(self, slot: int, place: Place) -> bool:
        """True if another server, asked after this call, says that the slot belongs to the server at `place`."""
        begun = self._checks
        async with self._checking:  # callers that arrive while this server is being asked share the next question
            if self._checked.get(place, (0, []))[0] <= begun:
                self._checks = number = self._checks + 1
                await self._ask_around(besides=place)
                self._checked[place] = number, self._slots
            _, slots = self._checked[place]
        return slots[slot] == place

    async def _look(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._ask_around())
            self._looking.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # possibly without a waiter
        await asyncio.shield(self._looking)

    async def _ask_around(self, besides: Place | None = None) -> None:
        answers: list[str] = []
        known = list(dict.fromkeys([*self._known, *self.members]))
        for place in [each for each in known if each != besides] or known:
            try:
                self._take(place, await self._ask(place))
            except (AuthenticationError, NoClusterError):
                raise  # to ask another one would not change it
            except (RedisError, OSError) as error:
                answers.append(f"{place[0]}:{place[1]}: {reason(error)}")
            else:
                return
        raise UnknownSlotsError(f"no server of the cluster says who has which slot ({'; '.join(answers)})")

    def _take(self, asked: Place, answer: list[list[Any]]) -> None:
        slots: list[Place | None] = [None] * SLOTS
        known: list[Place] = []
        for first, last, *servers in answer:
            places = [_place(server, asked) for server in servers]
            slots[first : last + 1] = [places[0]] * (last + 1 - first)
            known += places
        covered = [place for place in slots if place is not None]
        if len(covered) < SLOTS:
            raise UnknownSlotsError(f"{SLOTS - len(covered)} of {SLOTS} slots have no server")
        self._slots, self._primaries = covered, list(dict.fromkeys(covered))
        self._known = [*(place for place in dict.fromkeys(known) if place != asked), asked]
        self.version += 1
        self._in_doubt = False


class FollowingConnection(Connection):
    """Goes to whoever has its slot at each single attempt to connect; without a slot to any primary.

    When it has been somewhere before, it asks first: something has happened to whoever it was.
    """

    def __init__(self, *, topology: Topology, slot: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._topology, self._slot = topology, slot
        self._seen: int | None = None  # the topology by which it was connected last

    async def _connect(self) -> None:
        if self._seen is not None:
            self._topology.doubt(self._seen)
        self.host, self.port = await self._topology.place(self._slot)
        self._seen = self._topology.version
        await super()._connect()  # type: ignore[no-untyped-call]


class FollowingTlsConnection(FollowingConnection, SSLConnection):
    """A `FollowingConnection` that uses TLS."""


def slots_answer(place: Place, error: ResponseError) -> Exception:
    """Translate an error reply to CLUSTER SLOTS: NoClusterError for a server without cluster support."""
    if "cluster support disabled" in str(error):
        return NoClusterError(f"{place[0]}:{place[1]} is in no cluster")
    return error


def _place(server: list[Any], asked: Place) -> Place:
    host = (server[0] or b"").decode()
    return (host if host not in ("", "?") else asked[0]), int(server[1])
