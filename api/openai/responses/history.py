"""The history before a request's input: the turns of `previous_response_id`, or the items of `conversation`.

They come with the ids of the last prompt and its answer, so that the next prompt begins with the same ids and finds
their KV.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import TypeAdapter

from api.callers.fair_pool import aside
from api.generation.running import owner
from api.http.bodies import LONG_BYTES
from api.openai.responses.body import ResponseRequest
from api.openai.responses.turns import Item, Items
from api.ring.ring import Ring
from shared.errors import ConflictError, InvalidRequestError, UnsupportedParameterError
from shared.redis import keys
from shared.redis.kept.response_store import RUNNING, ResponseTurn, unknown_response

MAX_TURNS = 1024  # responses in a row: Redis looks at all of them in one call

_items: TypeAdapter[list[Item]] = TypeAdapter(Items)
_ids_decoder = msgspec.msgpack.Decoder(tuple[int, list[int]])


@dataclass(frozen=True)
class ResponseHistory:
    """Earlier items, and the ids of all of them up to the end of the last answer."""

    items: list[Item] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


NO_HISTORY = ResponseHistory()


def keeper() -> str:
    """Whose responses and conversations a request of this task sees."""
    return keys.keeper(owner())


def is_stored(ring: Ring, body: ResponseRequest) -> bool:
    """True if the response is to be stored; UnsupportedParameterError when the request needs what this server does not
    do."""
    if ring.settings.response_ttl_s:
        return body.store is not False
    for name in ("store", "previous_response_id", "conversation", "background"):
        if getattr(body, name):
            reason = "this server keeps nothing between two requests (--response-ttl-s 0)"
            raise UnsupportedParameterError(f"'{name}': {reason}", param=name)
    return False


async def history_of(ring: Ring, body: ResponseRequest) -> ResponseHistory:
    """The items before the input; UnknownResponseError, UnknownConversationError, or an error that says why nothing can
    follow."""
    if body.previous_response_id is not None:
        return await _followed(ring, body.previous_response_id)
    if body.conversation is None:
        return ResponseHistory()
    found = await ring.conversations.find(keeper(), body.conversation.id)
    raws = [raw for _, raw in found.items]
    check_size(ring, raws, "conversation")
    return await _read(raws, [found.ids])


async def _followed(ring: Ring, last: str) -> ResponseHistory:
    most_bytes = ring.settings.max_request_bytes
    turns, too_long = await ring.responses.chain(keeper(), last, MAX_TURNS, most_bytes)
    for turn in reversed(turns):
        _check_turn(turn, last)
    raws = [raw for turn in turns for raw in (turn.input, turn.output)]
    if too_long:
        raise _too_long(ring, "previous_response_id")
    check_size(ring, raws, "previous_response_id")
    return await _read(raws, [turn.ids for turn in turns])


def _check_turn(turn: ResponseTurn, last: str) -> None:
    """That another one can follow it."""
    param = "previous_response_id"
    if not turn.state:
        error = unknown_response(turn.id, param)
        if turn.id != last:
            error.message = f"response {last[:200]!r} follows {turn.id[:200]!r}, which is not stored any more"
        raise error
    if turn.conversation:
        raise InvalidRequestError(
            f"response {turn.id[:200]!r} belongs to conversation {turn.conversation!r}: go on with 'conversation'",
            param=param,
        )
    if turn.state in RUNNING:
        raise ConflictError(f"response {turn.id[:200]!r} has not ended yet", param=param)
    if turn.state in ("failed", "cancelled"):
        raise ConflictError(f"response {turn.id[:200]!r} has {turn.state}, and has no answer to follow", param=param)


def check_size(ring: Ring, raws: Sequence[bytes], param: str) -> None:
    """InvalidRequestError when stored items are more than a request may have."""
    if sum(map(len, raws)) > ring.settings.max_request_bytes:
        raise _too_long(ring, param)


def _too_long(ring: Ring, param: str) -> InvalidRequestError:
    most = ring.settings.max_request_bytes
    return InvalidRequestError(
        f"what was said so far has more than {MAX_TURNS} turns or {most} bytes (--max-request-bytes): begin anew",
        param=param,
    )


async def _read(raws: Sequence[bytes], ids: Sequence[bytes]) -> ResponseHistory:
    size = sum(map(len, raws)) + sum(map(len, ids))
    return await aside(_decoded, raws, ids) if size > LONG_BYTES else _decoded(raws, ids)


def _decoded(raws: Sequence[bytes], ids: Sequence[bytes]) -> ResponseHistory:
    found: list[Any] = []
    for raw in raws:
        value = json.loads(raw)
        found += value if isinstance(value, list) else [value]
    return ResponseHistory(read_items(found), _joined_ids(ids))


def read_items(stored: list[dict[str, Any]]) -> list[Item]:
    """Items as they are stored."""
    for item in stored:
        for part in item["content"] if isinstance(item.get("content"), list) else ():
            part.pop("logprobs", None)  # of no use to the model
    return _items.validate_python(stored) if stored else []


def _joined_ids(ids: Sequence[bytes]) -> list[int]:
    """The ids of the last turn: its own, after as many of the turn before as it says. [] when some are missing."""
    parts: list[list[int]] = []
    wanted = 0
    for raw in reversed(ids):
        if not raw:
            return []
        before, own = _ids_decoder.decode(raw)
        if parts and before + len(own) != wanted:
            return []
        parts.append(own)
        wanted = before
        if not before:
            return [token for part in reversed(parts) for token in part]
    return []


def shared_ids(history: Sequence[int], prompt: Sequence[int]) -> int:
    """How many ids the turn before and a prompt have in common: all of that turn's, or none."""
    return len(history) if list(prompt[: len(history)]) == list(history) else 0


def own_ids(history: Sequence[int], prompt: Sequence[int], answer: Iterable[int]) -> bytes:
    """Ids of a turn as they are stored: without those of the turn before, when its prompt begins with them."""
    before = shared_ids(history, prompt)
    return msgspec.msgpack.encode((before, [*prompt[before:], *answer]))
