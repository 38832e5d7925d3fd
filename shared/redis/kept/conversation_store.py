"""Conversations in Redis: items in an order, to which requests to /v1/responses add theirs."""

from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from shared.errors import InvalidRequestError, UnknownConversationError
from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, ask_all
from shared.redis.kept.kept_things import KeptThings, Terms

MAX_ITEMS = 4096  # as many as a request may have

_add = Script("conversation_add")
_remove = Script("conversation_remove")

Item = tuple[str, bytes]  # its id, and its JSON


class StoredConversation(NamedTuple):
    """A conversation with all of its items in order."""

    body: bytes
    items: list[Item]
    ids: bytes  # of its last prompt and answer, as a response has them


class ConversationStore:
    """Conversations by keeper and id."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._things = KeptThings(redis, terms)

    async def create(self, keeper: str, name: str, body: bytes) -> None:
        """Begin one; may be repeated."""
        await self._things.put(keeper, name, {"body": body})

    async def change(self, keeper: str, name: str, body: bytes) -> None:
        """Replace the conversation's JSON body; UnknownConversationError."""
        if not await self._things.put(keeper, name, {"body": body}, "there"):
            raise unknown_conversation(name)

    async def body(self, keeper: str, name: str) -> bytes:
        """JSON body of the conversation; UnknownConversationError."""
        state, body = await ask(self._redis, "HMGET", keys.kept(keeper, name), "state", "body")
        if body is None or state is not None:  # a response is none
            raise unknown_conversation(name)
        found: bytes = body
        return found

    async def find(self, keeper: str, name: str) -> StoredConversation:
        """All items of a conversation; UnknownConversationError."""
        body = await self.body(keeper, name)
        raws, ids = await ask_all(
            self._redis,
            [("ZRANGE", keys.kept_order(keeper, name), 0, -1), ("HGET", keys.kept(keeper, name), "ids")],
        )
        names = [raw.decode() for raw in raws]
        found = await self._items(keeper, name, names)
        return StoredConversation(body, list(zip(names, found, strict=True)), ids or b"")

    async def item(self, keeper: str, name: str, item_id: str) -> bytes:
        """One item; UnknownConversationError when it is not there."""
        await self.body(keeper, name)
        return (await self._items(keeper, name, [item_id]))[0]

    async def add(self, keeper: str, name: str, items: Sequence[Item], ids: bytes = b"") -> None:
        """Add items at its end; may be repeated. UnknownConversationError; InvalidRequestError for too many items."""
        flat: list[Argument] = [part for item in items for part in item]
        names = [*self._things.names(keeper, name), keys.kept_order(keeper, name)]
        done = await _add(self._redis, names, [*self._things.arguments(keeper, name), MAX_ITEMS, ids, *flat])
        if not done:
            raise unknown_conversation(name)
        if done == -2:
            raise InvalidRequestError(
                "the conversation has more bytes than are stored (--response-store-mb): begin another one",
                param="conversation",
            )
        if done < 0:
            raise InvalidRequestError(
                f"a conversation has at most {MAX_ITEMS} items: begin another one", param="conversation"
            )

    async def remove(self, keeper: str, name: str, item_id: str) -> None:
        """Remove an item; UnknownConversationError when it is not there."""
        await self.body(keeper, name)
        names = [keys.kept(keeper, name), keys.kept_order(keeper, name), keys.kept_sizes(keeper)]
        if not await _remove(self._redis, names, [name, item_id]):
            raise unknown_item(name, item_id)

    async def forget(self, keeper: str, name: str) -> None:
        """Delete a conversation with its items; UnknownConversationError."""
        await self.body(keeper, name)
        await self._things.forget(keeper, name)

    async def _items(self, keeper: str, name: str, names: Sequence[str]) -> list[bytes]:
        if not names:
            return []
        found = await ask(self._redis, "HMGET", keys.kept(keeper, name), *(f"item:{each}" for each in names))
        for item_id, item in zip(names, found, strict=True):
            if item is None:
                raise unknown_item(name, item_id)
        items: list[bytes] = found
        return items


def unknown_conversation(name: str) -> UnknownConversationError:
    """The error for a conversation that is not there."""
    return UnknownConversationError(
        f"no conversation {name[:200]!r}, or its time to live is over", param="conversation"
    )


def unknown_item(name: str, item_id: str) -> UnknownConversationError:
    """The error for an item that a conversation does not have."""
    return UnknownConversationError(f"conversation {name[:200]!r} has no item {item_id[:200]!r}")
