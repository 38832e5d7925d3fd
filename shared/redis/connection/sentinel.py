"""The primary of a service, found by asking Sentinels, and connections that follow it when it changes.

Every attempt to connect asks first, so a subscription, a blocked read and a repeated command all come back at the new
primary. redis-py does the same with two loops of retries, one inside the other: the inner one would try the dead
primary for its whole patience before the outer one asks again.

Invariant. A connection whose server says READONLY, a primary of yesterday, is closed; the next attempt asks.
"""

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.exceptions import RedisError

from shared.redis.connection.address import SentinelAddress
from shared.redis.connection.cancelling import make_cancellable
from shared.redis.connection.faults import DiscreetRedis, reason

ANSWER_WITHIN_S = 1.0  # a Sentinel; then the next one is asked


class UnknownServiceError(MasterNotFoundError):
    """Sentinels answer, and none of them knows the service."""


class SentinelDirectory(Sentinel):
    """The Sentinels of a service. An error contains the answer of each of them."""

    def __init__(self, address: SentinelAddress) -> None:
        tls = {name: value for name, value in _options(address).items() if name.startswith("ssl_")}
        super().__init__(  # type: ignore[no-untyped-call]
            address.sentinels,
            sentinel_kwargs={
                "username": address.username or None,
                "password": address.password or None,
                "socket_timeout": ANSWER_WITHIN_S,
                "socket_connect_timeout": ANSWER_WITHIN_S,
                **({"ssl": True, **tls} if address.tls else {}),
            },
        )
        for sentinel in self.sentinels:
            make_cancellable(sentinel.connection_pool)

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the primary; MasterNotFoundError with every Sentinel's answer when there is none now."""
        answers: list[str] = []
        known: set[str] | None = None
        down = False
        for place, sentinel in enumerate(self.sentinels):
            try:
                services: dict[str, dict[str, Any]] = await sentinel.sentinel_masters()  # type: ignore[no-untyped-call]
            except (RedisError, OSError) as error:
                answers.append(f"{_place(sentinel)}: {reason(error)}")
                continue
            state = services.get(service_name)
            if state is None:
                known = {*(known or ()), *services}
                continue
            if self.check_master_state(state, service_name):
                self.sentinels.insert(0, self.sentinels.pop(place))
                return state["ip"], state["port"]
            down = True
        if down:
            raise MasterNotFoundError(f"the Sentinels say that service {service_name!r} has no primary at the moment")
        if known is None:
            raise MasterNotFoundError(f"no Sentinel answers ({'; '.join(answers)})")
        watched = ", ".join(sorted(known)) or "none"
        raise UnknownServiceError(f"the Sentinels know no service {service_name!r}; they watch: {watched}")

    async def aclose(self) -> None:
        """Disconnect from the Sentinels; the next call connects again."""
        for sentinel in self.sentinels:
            await sentinel.connection_pool.disconnect()


class _Following(SentinelManagedConnection):
    """Asks for the primary before each single attempt to connect."""

    async def connect(self) -> None:
        await Connection.connect(self)  # type: ignore[no-untyped-call]

    async def _connect(self) -> None:
        self.host, self.port = await self.connection_pool.get_master_address()
        await super()._connect()  # type: ignore[no-untyped-call]


class _FollowingTls(_Following, SSLConnection):
    pass


class _Pool(SentinelConnectionPool):
    """Closes its Sentinels with its connections."""

    sentinel_manager: SentinelDirectory

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


def follow(address: SentinelAddress, **connection: Any) -> "Redis":
    """A client of the present primary; `connection` as of `Redis.from_url`. ValueError for a wrong option."""
    options = {**connection, **_options(address)}
    kind = _FollowingTls if address.tls else _Following
    pool = _Pool(address.service, SentinelDirectory(address), connection_class=kind, **options)  # type: ignore[no-untyped-call]
    return DiscreetRedis.from_pool(pool)


def _options(address: SentinelAddress) -> dict[str, Any]:
    options = dict(parse_url(address.data_url))
    options.pop("connection_class", None)
    options.pop("host", None)
    return options


def _place(sentinel: "Redis") -> str:
    at = sentinel.connection_pool.connection_kwargs
    return f"{at['host']}:{at['port']}"
