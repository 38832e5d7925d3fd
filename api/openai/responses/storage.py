"""Responses and their items as they are kept, and as a client gets them back."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from pydantic import BaseModel
from starlette.responses import Response

from api.callers.fair_pool import LARGE_COUNT, aside
from api.http.bodies import LONG_BYTES
from api.http.errors import json_reply
from api.openai.responses.body import ResponseRequest
from api.openai.responses.turns import Item
from api.openai.responses.writer import ResponseWriter
from api.ring.ring import Ring
from shared.errors import NotFoundError
from shared.redis.kept.response_store import StoredResponse

Order = Literal["asc", "desc"]
After = Annotated[str, Query(description="the item after which the page begins")]
Limit = Annotated[int, Query(ge=1, le=100)]
Entry = tuple[str, bytes]  # an item's id and its JSON


def shown_items(items: Sequence[Item], base: str) -> list[Entry]:
    """Items of an input as a client gets them back, under ids of their own that begin with `base`."""
    names = [f"{item.prefix}_{base}_i{at:04d}" for at, item in enumerate(items)]
    return [(name, msgspec.json.encode({"id": name, **item.shown()})) for name, item in zip(names, items, strict=True)]


def without_output(shown: dict[str, Any]) -> bytes:
    """JSON of a response object as it is stored."""
    return msgspec.json.encode({name: value for name, value in shown.items() if name != "output"})


def joined(entries: Sequence[Entry]) -> bytes:
    """JSON list of the stored items."""
    return b"[%s]" % b",".join(raw for _, raw in entries)


async def keep(ring: Ring, who: str, body: ResponseRequest, writer: ResponseWriter, ids: bytes) -> None:
    """Keep an answered response, and add its items to its conversation; both may be repeated."""

    def write() -> tuple[list[Entry], list[Entry], bytes]:
        output = [(item["id"], msgspec.json.encode(item)) for item in writer.output]
        return shown_items(body.input, writer.name), output, without_output(writer.shown())

    large = len(body.input) > LARGE_COUNT or len(writer.tokens) > LONG_BYTES // 8
    given, output, shown = await aside(write) if large else write()
    name = "" if body.conversation is None else body.conversation.id
    if name:
        await ring.conversations.add(who, name, [*given, *output], ids)
    if body.store is False:
        return
    stored = StoredResponse(
        state=writer.status,
        body=shown,
        input=joined(given),
        output=joined(output),
        previous=body.previous_response_id or "",
        conversation=name,
        ids=ids,
    )
    await ring.responses.put(who, writer.id, stored)


def whole(stored: StoredResponse) -> bytes:
    """JSON of a response object out of what is stored."""
    shown = msgspec.json.decode(stored.body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**shown, "output": msgspec.Raw(stored.output)})


def entries(raw: bytes) -> list[Entry]:
    """The items of a stored list, with their ids."""
    found = msgspec.json.decode(raw, type=list[msgspec.Raw])
    return [(msgspec.json.decode(each, type=_Named).id, bytes(each)) for each in found]


class _Named(msgspec.Struct):
    id: str


class ItemPage(BaseModel):
    """One page of a list of items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(found: Sequence[Entry], after: str, limit: int, order: Order) -> Response:
    """The response with the items after `after`; NotFoundError when that is none of them."""
    ordered = list(found) if order == "asc" else list(reversed(found))
    start = 0
    if after:
        start = next((at + 1 for at, (name, _) in enumerate(ordered) if name == after), 0)
        if not start:
            raise NotFoundError(f"no item {after[:200]!r}", param="after")
    shown = ordered[start : start + limit]
    return json_reply(
        {
            "object": "list",
            "data": [msgspec.Raw(raw) for _, raw in shown],
            "first_id": shown[0][0] if shown else None,
            "last_id": shown[-1][0] if shown else None,
            "has_more": start + limit < len(ordered),
        }
    )
