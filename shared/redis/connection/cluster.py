"""A Redis Cluster with the methods of redis-py's client of one server, so that callers need not know.

redis-py has a client for clusters, too. It cannot subscribe, has no transactions, loses a connection's place when a
command is cancelled, and closes all its connections for the fault of one. This one keeps a plain client for each
server, which our other settings hold for, and adds what a cluster asks for:

- A command goes to the primary of its slot (routing.py). When that has moved or is away, it is asked again where it is
  (topology.py), and the command repeated there, for as long as with one server: all our writes may be repeated.
- A pipeline is sent to each server in one piece, to all at once. If it runs a script, what goes to the server of its
  first command is answered before the rest is sent: whoever hears of an end finds it committed.
- A transaction is one MULTI for each of its slots, the first slot's before the others: atomic in each of them alone.
- An answer that came late counts only if its server still has the slot. A primary that was frozen until another took
  its place first answers what it was sent meanwhile, and then forgets it.
- A channel with braces in its name is a sharded one, also with PUBLISH and SUBSCRIBE.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline, PubSub
from redis.asyncio.cluster import ClusterParser
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TryAgainError,
    WatchError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis.connection import routing
from shared.redis.connection.address import ClusterAddress
from shared.redis.connection.cancelling import make_cancellable
from shared.redis.connection.faults import ClusterStateError, DiscreetPipeline, DiscreetRedis, make_discreet
from shared.redis.connection.subscription import ClusterPubSub
from shared.redis.connection.topology import (
    FollowingConnection,
    FollowingTlsConnection,
    FormerPrimaryError,
    NoClusterError,
    Place,
    Topology,
    UnknownSlotsError,
    slots_answer,
)

ANSWER_WITHIN_S = 1.0  # a server that is asked who has which slot; then the next one is asked
LATE_S = 0.5  # for an answer; no cluster replaces a primary sooner
AT_ONCE = 3  # times that a command is sent after a slot that has moved, before it waits

T = TypeVar("T")


class ClusterRedis(DiscreetRedis):
    """A client of all servers; `retry` bounds how long a command waits for its slot."""

    def __init__(self, address: ClusterAddress, retry: Retry | None, **options: Any) -> None:
        given = dict(parse_url(address.data_url))
        for name in ("host", "connection_class"):
            given.pop(name, None)
        self._options: dict[str, Any] = {**options, **given, "parser_class": ClusterParser}
        self._tls = address.tls
        self._retry = retry
        # For commands that wait at the server: every answer is late.
        self._waits = options.get("socket_timeout") is None
        self._nodes: dict[Place, DiscreetRedis] = {}
        self._pools: dict[int | None, ConnectionPool] = {}
        self.topology = Topology(address.members, self._ask_slots)
        super().__init__(connection_pool=self.following(None))

    # -- what redis-py's client has

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """One command, at its slot; those of routing.SPREAD and XREAD may name keys of several slots."""
        command, name = routing.sent(args), routing.name_of(args)
        if name in routing.EVERYWHERE:
            return await self.patiently(lambda: self._everywhere(command, options))
        found = routing.keys_of(command)
        if len(found) > 1 and len({routing.slot_of(key) for key in found}) > 1:
            if name in routing.SPREAD:
                return await self._spread(command, options)
            if name == "XREAD":
                return await self._read_first(command, options)
        slot, waits_s = routing.slot_of(found[0]) if found else 0, routing.waits_s(command)
        return await self.at(slot, lambda node: _one(self, node, command, options), waits_s)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """As redis-py's `pipeline`, for keys of several slots."""
        return ClusterPipeline(self, transaction)

    def pubsub(self, **options: Any) -> PubSub:
        """As in redis-py; all its channels are of one slot, or none is a sharded one."""
        return ClusterPubSub(self.topology, self.following, **options)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections to all nodes."""
        pools = [*self._pools.values(), *(node.connection_pool for node in self._nodes.values())]
        for pool in pools:
            await pool.disconnect()

    # -- the servers

    def node(self, place: Place) -> DiscreetRedis:
        """The plain client of one server."""
        if place not in self._nodes:
            self._nodes[place] = DiscreetRedis(connection_pool=_ours(self._pool(place, self._options)))
        return self._nodes[place]

    def following(self, slot: int | None) -> ConnectionPool:
        """Connections to the primary of a slot; with None to any primary."""
        if slot not in self._pools:
            kind = FollowingTlsConnection if self._tls else FollowingConnection
            options = {**self._options, "retry": self._retry, "topology": self.topology, "slot": slot}
            if self._retry is not None:
                options["retry_on_error"] = [RedisConnectionError, RedisTimeoutError, OSError]
            self._pools[slot] = _ours(ConnectionPool(connection_class=kind, **options))
        return self._pools[slot]

    async def primaries(self) -> list[DiscreetRedis]:
        """A client of each server that has slots."""
        return [self.node(place) for place in await self.patiently(self.topology.primaries)]

    async def at(self, slot: int, act: Callable[[DiscreetRedis], Awaitable[T]], waits_s: float = 0.0) -> T:
        """Run `act` at the present primary of a slot and return its result; waits up to `waits_s` for a primary."""

        async def attempt() -> T:
            place = await self.topology.place(slot)
            began = time.monotonic()
            try:
                answer = await act(self.node(place))
            except MovedError as error:
                self.topology.moved(slot, (error.host or place[0], error.port))
                raise
            await self.require_current(slot, place, began + waits_s)
            return answer

        return await self.patiently(attempt)

    async def require_current(self, slot: int, place: Place, began: float) -> None:
        """FormerPrimaryError when a server that was asked at `began` took long to answer, and the slot is another's."""
        if self._waits or time.monotonic() - began < LATE_S:
            return
        if not await self.topology.is_current(slot, place):
            raise FormerPrimaryError("it answered late, and its slots are another's by now")

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt for as long as its servers may come back, or have successors."""
        moves = 0

        async def again() -> T:
            nonlocal moves
            while True:
                seen = self.topology.version
                try:
                    return await attempt()
                except MovedError:
                    moves += 1
                    if moves % AT_ONCE == 0:
                        raise
                except (AuthenticationError, NoPermissionError, NoClusterError):
                    raise
                except _AWAY:
                    self.topology.doubt(seen)
                    raise

        if self._retry is None:
            return await again()
        try:
            return await self._retry.call_with_retry(again, _nothing)
        except (AskError, TryAgainError) as error:
            raise ClusterStateError("a slot is on its way to another server, and has not arrived") from error

    async def _ask_slots(self, place: Place) -> list[list[Any]]:
        limits = {"socket_timeout": ANSWER_WITHIN_S, "socket_connect_timeout": ANSWER_WITHIN_S}
        pool = self._pool(place, {**self._options, **limits})
        make_cancellable(pool)  # not yet discreet: the server's text states whether it is in a cluster
        asked = Redis(connection_pool=pool)
        try:
            answer: list[list[Any]] = await asked.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
            return answer
        except ResponseError as error:
            raise slots_answer(place, error) from None
        finally:
            await pool.disconnect()

    def _pool(self, place: Place, options: dict[str, Any]) -> ConnectionPool:
        kind = SSLConnection if self._tls else Connection
        return ConnectionPool(connection_class=kind, host=place[0], port=place[1], **options)

    async def _everywhere(self, command: routing.Command, options: dict[str, Any]) -> Any:
        nodes = [self.node(place) for place in await self.topology.primaries()]
        return (await asyncio.gather(*(_whole(node, command, options) for node in nodes)))[0]

    async def _spread(self, command: routing.Command, options: dict[str, Any]) -> Any:
        parts = routing.by_slot(command)
        pipe = self.pipeline(transaction=False)
        for part in parts.values():
            pipe.execute_command(*part, **options)
        return routing.joined(command, dict(zip(parts, await pipe.execute(), strict=True)))

    async def _read_first(self, command: routing.Command, options: dict[str, Any]) -> Any:
        """XREAD from several slots: what the first of them has, or nothing when all have waited in vain."""
        reads = {
            asyncio.ensure_future(self.execute_command(*part, **options)) for part in routing.by_slot(command).values()
        }
        try:
            found: list[Any] = []
            waiting = set(reads)
            while waiting and not found:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                found = [stream for read in done for stream in read.result() or []]
            return found
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)


class ClusterPipeline(DiscreetPipeline):
    """Sends each server its commands in one piece; after `watch`, which binds it to one, as redis-py's does."""

    def __init__(self, cluster: ClusterRedis, transaction: bool) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction, None)
        self._cluster = cluster
        self._watched = 0  # a slot

    async def watch(self, *names: Any) -> None:  # type: ignore[override]  # redis-py types both of its clients
        """As in redis-py; all that follows is of these keys' slot."""

        async def begin(node: DiscreetRedis) -> None:
            await self.aclose()
            self.connection_pool = node.connection_pool
            await super(ClusterPipeline, self).watch(*names)

        self._watched = routing.slot_of(names[0])
        await self._cluster.at(self._watched, begin)

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        """As in redis-py. WatchError, too, when the slot has gone to another server, where no key is watched."""
        try:
            return await super().immediate_execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except _ELSEWHERE:
            if args[0] == "WATCH":
                raise
            raise self._unwatched() from None

    def _unwatched(self) -> WatchError:
        self._cluster.topology.doubt(self._cluster.topology.version)
        return WatchError("the slot of the watched keys has moved")

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """As redis-py's `execute`, divided by the slots of the commands."""
        if self.watching or self.explicit_transaction:
            there = self.connection_pool.connection_kwargs
            began = time.monotonic()
            try:
                answers: list[Any] = await super().execute(raise_on_error)
                await self._cluster.require_current(self._watched, (there["host"], there["port"]), began)
            except (*_ELSEWHERE, FormerPrimaryError):
                raise self._unwatched() from None
            return answers
        stack = [(routing.sent(args), options) for args, options in self.command_stack]
        self.command_stack = []
        sending = _Sending(self._cluster, stack, bool(self.is_transaction))
        await self._cluster.patiently(sending.attempt)
        if raise_on_error:
            self.raise_first_error(stack, sending.answers)
        return sending.answers


class _Sending:
    """The commands of a pipeline on their way: an attempt sends the commands without an answer."""

    def __init__(self, cluster: ClusterRedis, stack: Sequence[Any], transaction: bool) -> None:
        self.answers: list[Any] = [None] * len(stack)
        self._cluster, self._stack, self._transaction = cluster, stack, transaction
        self._slots = routing.slots_of([args for args, _ in stack])
        self._first_comes_first = transaction or any(args[0] == "EVALSHA" for args, _ in stack)
        self._left = set(range(len(stack)))

    async def attempt(self) -> None:
        if not self._left:
            return
        places = {slot: await self._cluster.topology.place(slot) for slot in set(self._slots)}
        at: list[Any] = [(places[slot], slot if self._transaction else 0) for slot in self._slots]
        rest = list(routing.groups(at, sorted(self._left)).items())
        first = rest[:1] if self._first_comes_first or len(rest) == 1 else []
        for together in (first, rest[len(first) :]):
            faults = await asyncio.gather(*(self._send(where[0], commands) for where, commands in together))
            for fault in faults:
                if fault is not None:
                    raise fault

    async def _send(self, place: Place, commands: list[int]) -> Exception | None:
        """Fill in the answers; the reason why some are still missing."""
        node = self._cluster.node(place)
        pipe = node.pipeline(transaction=self._transaction)
        pipe.command_stack = [self._stack[number] for number in commands]
        began = time.monotonic()
        try:
            answers = await pipe.execute(raise_on_error=False)
            await self._cluster.require_current(self._slots[commands[0]], place, began)
        except (RedisError, OSError) as error:
            self._note(commands[0], place, error)
            return error
        missing: Exception | None = None
        for number, answer in zip(commands, answers, strict=True):
            if isinstance(answer, AskError) and not isinstance(answer, MovedError):
                args, options = self._stack[number]
                answer = await _asking(self._cluster, answer, args, options)
            if isinstance(answer, (MovedError, TryAgainError, ClusterDownError, RedisConnectionError)):
                self._note(number, place, answer)
                missing = answer
                continue
            self.answers[number] = answer
            self._left.discard(number)
        return missing

    def _note(self, number: int, place: Place, error: Exception) -> None:
        if isinstance(error, MovedError):
            self._cluster.topology.moved(self._slots[number], (error.host or place[0], error.port))


async def _whole(node: DiscreetRedis, command: routing.Command, options: dict[str, Any]) -> Any:
    return await node.execute_command(*command, **options)  # type: ignore[no-untyped-call]


async def _one(cluster: ClusterRedis, node: DiscreetRedis, command: routing.Command, options: dict[str, Any]) -> Any:
    try:
        return await _whole(node, command, options)
    except MovedError:
        raise
    except AskError as error:
        answer = await _asking(cluster, error, command, options)
        if isinstance(answer, Exception):
            raise answer from None
        return answer


async def _asking(cluster: ClusterRedis, error: AskError, command: routing.Command, options: dict[str, Any]) -> Any:
    """The answer of the server that a key is on its way to, which may be an error."""
    pipe = cluster.node((error.host, error.port)).pipeline(transaction=False)
    pipe.execute_command("ASKING")
    pipe.execute_command(*command, **options)
    _, answer = await pipe.execute(raise_on_error=False)
    return answer


def _ours(pool: ConnectionPool) -> ConnectionPool:
    make_cancellable(pool)
    make_discreet(pool)
    return pool


async def _nothing(error: Exception) -> None:
    """Take no action between two attempts of redis-py's Retry."""


_ELSEWHERE = (AskError, TryAgainError, ClusterDownError)  # AskError: MovedError, too
_AWAY = (RedisConnectionError, RedisTimeoutError, OSError, ClusterDownError, UnknownSlotsError)
