"""Responses in Redis: request and answer, and for `background` all that is needed to continue.

A response's state is that of OpenAI: queued and in_progress while it runs; then completed, incomplete, failed or
cancelled, once.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.errors import UnknownResponseError
from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, ask_all
from shared.redis.kept.kept_things import KeptThings, Terms, When

ResponseState = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING: frozenset[str] = frozenset({"queued", "in_progress"})
READ_AT_ONCE = 256  # events

_chain = Script("kept_chain")


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as it is stored; bytes are JSON as a client gets it."""

    state: ResponseState
    body: bytes  # the response object, but for its output
    input: bytes = b"[]"  # its own items, without earlier responses'
    output: bytes = b"[]"
    previous: str = ""
    conversation: str = ""
    ids: bytes = b""  # of prompt and answer, msgpack: how many of `previous`' stand before them, and they
    run: bytes = b""  # msgpack: how to go on with it (api/openai/responses/background.py); b"": nothing does
    streams: int = 0  # its events are stored, too
    told: int = 0  # so many of them, when it has ended
    ended_at: int = 0  # Unix seconds, of one with `run`


class ResponseTurn(NamedTuple):
    """A response as one that follows it sees it; `state` "" is one that is not there."""

    id: str
    state: str
    conversation: str
    input: bytes
    output: bytes
    ids: bytes


class ResponseStore:
    """Responses by keeper and id."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._terms = terms
        self._things = KeptThings(redis, terms)

    async def put(self, keeper: str, response_id: str, stored: StoredResponse, when: When = "any") -> bool:
        """Write a response; False when the condition `when` does not hold."""
        fields: dict[str, Argument] = {
            name: value for name, value in msgspec.structs.asdict(stored).items() if value or name in ("state", "body")
        }
        return await self._things.put(keeper, response_id, fields, when)

    async def change(self, keeper: str, response_id: str, **fields: Argument) -> bool:
        """Write fields of a response that runs; False when it does not."""
        return await self._things.put(keeper, response_id, fields, "running")

    async def find(self, keeper: str, response_id: str) -> StoredResponse:
        """A response; UnknownResponseError when the keeper has none of this id."""
        stored: dict[bytes, bytes] = await ask(self._redis, "HGETALL", keys.kept(keeper, response_id))
        fields: dict[str, Any] = {name.decode(): value for name, value in stored.items()}
        if "state" not in fields:
            raise unknown_response(response_id)
        fields |= {name: fields[name].decode() for name in ("state", "previous", "conversation") if name in fields}
        fields |= {name: int(fields[name]) for name in ("streams", "told", "ended_at") if name in fields}
        return msgspec.convert(fields, StoredResponse)

    async def state(self, keeper: str, response_id: str) -> str:
        """State of a response; "" when there is none."""
        return (await ask(self._redis, "HGET", keys.kept(keeper, response_id), "state") or b"").decode()

    async def chain(self, keeper: str, last: str, most: int, most_bytes: int) -> tuple[list[ResponseTurn], bool]:
        """A response and its predecessors, the first one first, and whether there are more than the limit."""
        arguments = [*self._things.arguments(keeper, last)[:3], most, most_bytes]
        found = await _chain(self._redis, self._things.names(keeper, last), arguments)
        too_long = found[-1] == b"long"
        turns = [_turn(row) for row in reversed(found[:-1] if too_long else found)]
        return turns, too_long

    async def forget(self, keeper: str, response_id: str) -> bool:
        """Forget a response; False when there was none."""
        return await self._things.forget(keeper, response_id)

    # -- the events of a response's stream; event n has the entry n + 1

    async def write_events(self, keeper: str, response_id: str, number: int, events: Sequence[bytes]) -> None:
        """Write events from number `number` on; existing ones stay."""
        key = keys.kept_events(keeper, response_id)
        async with self._redis.pipeline(transaction=False) as pipe:
            for at, event in enumerate(events, number + 1):
                pipe.execute_command("XADD", key, f"{at}-0", "d", event)
            pipe.expire(key, keys.KEPT_EVENTS_TTL_S)
            for answer in await pipe.execute(raise_on_error=False):
                if isinstance(answer, Exception) and not _stands_already(answer):
                    raise answer

    async def count_events(self, keeper: str, response_id: str) -> int:
        """Number of events of the response so far."""
        newest = await ask(self._redis, "XREVRANGE", keys.kept_events(keeper, response_id), "+", "-", "COUNT", 1)
        return int(newest[0][0].split(b"-")[0]) if newest else 0

    async def events(self, keeper: str, response_id: str, after: int) -> tuple[str, list[tuple[int, bytes]]]:
        """The response's state, and (number, event) of the next events after number `after`: all, if it has ended."""
        key = keys.kept_events(keeper, response_id)
        commands: list[tuple[Argument, ...]] = [
            ("HGET", keys.kept(keeper, response_id), "state"),
            ("XRANGE", key, f"({after + 1}-0", "+", "COUNT", READ_AT_ONCE),
        ]
        state, page = await ask_all(self._redis, commands)
        return (state or b"").decode(), [(int(entry.split(b"-")[0]) - 1, fields[b"d"]) for entry, fields in page]

    async def keep_events(self, keeper: str, response_id: str) -> None:
        """All events are written: readers have an hour for the ones that they have missed."""
        await ask_all(self._redis, [("EXPIRE", keys.kept_events(keeper, response_id), keys.SEQUENCE_TTL_S)])


def unknown_response(response_id: str, param: str | None = None) -> UnknownResponseError:
    """The error for a response that is not there."""
    return UnknownResponseError(f"no stored response {response_id[:200]!r}, or its time to live is over", param=param)


def _stands_already(answer: Exception) -> bool:
    return isinstance(answer, ResponseError) and "equal or smaller" in str(answer)


def _turn(row: Sequence[bytes | None]) -> ResponseTurn:
    name, state, conversation, given, output, ids = ((part or b"") for part in row)
    return ResponseTurn(name.decode(), state.decode(), conversation.decode(), given or b"[]", output or b"[]", ids)
