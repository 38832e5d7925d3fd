"""Subscriptions of a Redis Cluster's client, to channels of its servers or to sharded ones, which follow their slot."""

from collections.abc import Callable
from typing import Any

from redis.asyncio.client import PubSub
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError

from shared.redis.connection import routing
from shared.redis.connection.topology import Topology


class ClusterPubSub(PubSub):
    """Subscriptions in a cluster whose messages look as those of one server, for sharded channels too."""

    def __init__(self, topology: Topology, following: Callable[[int | None], ConnectionPool], **options: Any) -> None:
        """`following` gives connections to the primary of a slot; with None to any primary."""
        super().__init__(following(None), **options)
        self._topology, self._following = topology, following
        self._slot: int | None = None

    async def execute_command(self, *args: Any) -> None:
        """Called by redis-py, also to subscribe again."""
        if args[0] in ("SUBSCRIBE", "UNSUBSCRIBE"):
            slots = {routing.slot_of(name) if routing.is_sharded(name) else None for name in args[1:]} or {self._slot}
            assert len(slots) == 1, "channels of several slots need several subscriptions"
            (self._slot,) = slots
            if self.connection is None:
                self.connection_pool = self._following(self._slot)
            if self._slot is not None:
                args = (f"S{args[0]}", *args[1:])
        await super().execute_command(*args)

    async def parse_response(self, block: bool = True, timeout: float = 0) -> Any:
        """As of one server. ConnectionError when the channel's slot has gone to another server: subscribe again."""
        seen = self._topology.version
        try:
            message = await super().parse_response(block, timeout)
        except MovedError:
            raise await self._gone(seen) from None
        if self._slot is None or not isinstance(message, list):
            return message
        kind = message[0]
        if kind == b"sunsubscribe" and message[1] not in self.pending_unsubscribe_channels:
            raise await self._gone(seen)
        return [kind[1:], *message[1:]] if kind in (b"smessage", b"ssubscribe", b"sunsubscribe") else message

    async def _gone(self, seen: int) -> RedisConnectionError:
        self._topology.doubt(seen)
        if self.connection is not None:
            await self.connection.disconnect()
        return RedisConnectionError("the channel's slot has moved")
