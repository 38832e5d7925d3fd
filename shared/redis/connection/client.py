"""Connections to Redis with the settings that survive a restart of the server, and Lua scripts by name.

Without OSError among the retried errors a restart of 1.5 s ends the process; with it and 20 retries with
exponential back-off (at most 1 s each) a command waits out about 15 s of absence. A URL of Sentinels
(shared/redis/connection/address.py) gives a client that follows the primary, one of a cluster a client of all its
servers.
"""

import asyncio
import hashlib
import re
import socket
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import ServiceUnavailableError, SetupError
from shared.redis.connection.address import ClusterAddress, SentinelAddress, is_cluster, is_sentinel, shown
from shared.redis.connection.cancelling import make_cancellable
from shared.redis.connection.cluster import ClusterRedis
from shared.redis.connection.faults import DiscreetRedis, code_of, make_discreet, reason
from shared.redis.connection.routing import slot_of
from shared.redis.connection.sentinel import UnknownServiceError, follow
from shared.redis.connection.topology import NoClusterError

ANSWER_WITHIN_S = 5.0
ANSWER_S = 30  # of a Redis that accepts and does not answer, before its connection is given up
ANSWER_OF_PRIMARY_S = 10  # of one with replicas: if it froze, it has a successor by then

# A subscription never writes, so nothing else finds that the other machine has gone: after 15 + 3 * 5 s it breaks.
_KEEPALIVE_S = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_KEEPALIVE = {getattr(socket, name): value for name, value in _KEEPALIVE_S.items() if hasattr(socket, name)}

Argument = str | bytes | int | float
_USES = re.compile(r"^-- uses: ([\w ]+)$", re.MULTILINE)


def connect(url: str, *, blocking: bool = False) -> "Redis":
    """A client for a redis://, rediss://, unix://, Sentinel or cluster URL; `blocking` for commands that wait there.

    Responses stay bytes. Close it with `aclose()`.
    """
    has_replicas = is_sentinel(url) or is_cluster(url)
    options = {
        "socket_timeout": None if blocking else ANSWER_OF_PRIMARY_S if has_replicas else ANSWER_S,
        "socket_connect_timeout": 2 if has_replicas else 5,
        "health_check_interval": 0 if blocking else 15,
        **({} if url.startswith("unix") else {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}),
    }
    if is_cluster(url):
        return ClusterRedis(ClusterAddress.parse(url), retry=_retry(*_AWAY_IN_CLUSTER), **options)
    client = _client(url, retry=_retry(), retry_on_error=list(_AWAY), **options)
    make_cancellable(client.connection_pool)
    if not is_sentinel(url):  # whose connections try all of it again
        pool = client.connection_pool
        pool.connection_class = type("PatientConnection", (_Patient, pool.connection_class), {})
    return client


class _Patient:
    """A connection that is made anew if it breaks in its greeting; redis-py does so only before the greeting.

    A server that dies does so between accepting a connection and its first reply, and so does a proxy without one.
    """

    async def on_connect(self) -> None:
        """Greet, and connect again where that failed, for GREET_S; a refused password is not tried again."""
        until = time.monotonic() + GREET_S
        while True:
            try:
                if not self.is_connected:  # type: ignore[attr-defined]
                    await self._connect()  # type: ignore[attr-defined]
                await super().on_connect()  # type: ignore[misc]
                return
            except AuthenticationError:  # to redis-py a fault of the connection
                raise
            except _AWAY as error:
                await self.disconnect()  # type: ignore[attr-defined]
                if time.monotonic() > until:
                    raise RedisConnectionError("the server cannot be reached") from error
            await asyncio.sleep(0.2)


GREET_S = 12.0  # with what comes before, about as long as redis-py tries the rest
_AWAY = (RedisConnectionError, RedisTimeoutError, OSError)
_AWAY_IN_CLUSTER = (AskError, TryAgainError, ClusterDownError)  # a slot that has moved is an AskError, too


def _retry(*more: type[Exception]) -> Retry:
    return Retry(ExponentialBackoff(cap=1, base=0.05), 20, (*_AWAY, *more))  # type: ignore[arg-type]


def _client(url: str, **options: Any) -> "Redis":
    if is_cluster(url):
        return ClusterRedis(ClusterAddress.parse(url), retry=None, **options)
    if is_sentinel(url):
        client = follow(SentinelAddress.parse(url), **options)
    else:
        client = DiscreetRedis.from_url(url, **options)
    make_discreet(client.connection_pool)
    return client


async def require(url: str, within_s: float = ANSWER_WITHIN_S) -> None:
    """Return once a Redis answers at this URL; before a start, where `connect`'s patience would hide a mistake.

    Raises SetupError for a malformed URL, a service that no Sentinel knows, and a URL of a cluster where there is none
    or the other way round; ServiceUnavailableError when nobody answers in time, and at once when the server refuses the
    password: to ask again would not change it.
    """
    try:
        client = _client(url, socket_connect_timeout=within_s, socket_timeout=within_s)
    except ValueError as error:
        raise SetupError(f"--redis {shown(url)}: {error}") from error
    deadline = time.monotonic() + within_s
    try:
        while True:
            try:
                await client.ping()
                await _check_kind(url, client)
                return
            except NoClusterError as error:
                raise SetupError(f"--redis {shown(url)}: {reason(error)}: give it as redis://HOST:PORT") from error
            except (RedisError, OSError) as error:
                if isinstance(error.__cause__, UnknownServiceError):
                    raise SetupError(f"--redis {shown(url)}: {reason(error.__cause__)}") from error
                if isinstance(error, AuthenticationError) or time.monotonic() > deadline:
                    raise ServiceUnavailableError(f"no Redis answers at {shown(url)}: {reason(error)}") from error
            await asyncio.sleep(0.1)
    finally:
        await client.aclose()


async def _check_kind(url: str, client: "Redis") -> None:
    try:
        if is_cluster(url):
            await client.execute_command("PUBSUB SHARDNUMSUB")  # type: ignore[no-untyped-call]
        else:
            await client.exists("parallm:{a}:model", "parallm:{b}:model")  # of two slots, which only a cluster minds
    except ResponseError as error:
        if code_of(error) in ("CROSSSLOT", "MOVED", "CLUSTERDOWN"):
            raise SetupError(
                f"--redis {shown(url)}: this is a server of a Redis Cluster: give it as redis+cluster://HOST:PORT"
            ) from error
        if is_cluster(url) and code_of(error) == "ERR":
            raise SetupError(
                f"--redis {shown(url)}: its servers have no sharded pub/sub: a cluster needs Redis 7 or Valkey"
            ) from error
        if code_of(error) != "NOPERM":
            raise


async def answers(url: str, within_s: float = ANSWER_WITHIN_S) -> bool:
    """True if a Redis answers at this URL within the time."""
    try:
        await require(url, within_s)
    except (ServiceUnavailableError, SetupError):
        return False
    return True


async def infos(redis: "Redis") -> list[dict[str, Any]]:
    """INFO of the server with its number of `keys`; one entry for each primary of a cluster."""
    servers = await redis.primaries() if isinstance(redis, ClusterRedis) else [redis]
    return [{**await server.info(), "keys": int(await server.dbsize())} for server in servers]


async def ask(redis: "Redis", *command: Argument) -> Any:
    """One command; redis-py types its methods for both of its clients at once, so that few can be awaited."""
    return await redis.execute_command(*command)  # type: ignore[no-untyped-call]


async def ask_all(redis: "Redis", commands: Iterable[Sequence[Argument]]) -> list[Any]:
    """The answers to several commands, which go in one round trip; other clients' may run in between."""
    async with redis.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = await pipe.execute()
    return answers


async def members(redis: "Redis", key: str) -> list[str]:
    """The members of a sorted set, in its order."""
    return [member.decode(errors="replace") for member in await redis.zrange(key, 0, -1)]


async def server_time_ms(redis: "Redis", key: str = "") -> int:
    """Unix time by Redis' clock, the only one that leases and deadlines are measured with; of the server of a key."""
    if isinstance(redis, ClusterRedis):
        seconds, microseconds = await redis.at(slot_of(key), lambda node: node.time())
    else:
        seconds, microseconds = await redis.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


class Script:
    """A file of one of the folders shared/redis/*/lua, run by its hash; loaded again after a restart of the server.

    A line `-- uses: names` in its head puts the script of each name, which holds only functions, in front of it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        text = _lua(name)
        self.text = "\n".join([*(_lua(used) for line in _USES.findall(text) for used in line.split()), text])
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, redis: "Redis", keys: Sequence[str | bytes], args: Sequence[Argument]) -> Any:
        """Run it; raises what the script raises."""
        try:
            return await redis.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            if not is_no_script(error):
                raise
        async with redis.pipeline(transaction=True) as pipe:  # the server cannot forget it in between
            pipe.execute_command("SCRIPT LOAD", self.text)
            self.add(pipe, keys, args)
            _, answer = await pipe.execute(raise_on_error=False)  # raised by redis-py it would contain the arguments
        if isinstance(answer, Exception):
            raise answer
        return answer

    def add(self, pipe: "Pipeline", keys: Sequence[str | bytes], args: Sequence[Argument]) -> None:
        """Queue it in a pipeline; the caller loads and repeats on a NOSCRIPT answer."""
        pipe.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)

    async def load(self, redis: "Redis") -> None:
        """Make the server know it."""
        await redis.script_load(self.text)


def _lua(name: str) -> str:
    """The text of a script; names are unique over all rooms."""
    files = (room.joinpath("lua", f"{name}.lua") for room in resources.files("shared.redis").iterdir())
    return next(file for file in files if file.is_file()).read_text()


def is_no_script(error: object) -> bool:
    """True if the error means that the server has not loaded the script."""
    return isinstance(error, ResponseError) and code_of(error) == "NOSCRIPT"
