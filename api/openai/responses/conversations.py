"""/v1/conversations: items that belong together, to which responses add theirs."""

import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from api.callers.fair_pool import LARGE_COUNT, aside
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import RequestModel
from api.openai.responses.history import keeper
from api.openai.responses.references import resolved
from api.openai.responses.storage import After, Entry, ItemPage, Limit, Order, page, shown_items
from api.openai.responses.turns import Item, Items
from api.ring.ring import Ring, TheRing
from shared.errors import UnsupportedParameterError

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_Text = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], _Text], Field(max_length=16)]


def _none_for_none(value: Any) -> Any:
    return None if value == [] else value


class ConversationBody(RequestModel):
    """Request body of POST /v1/conversations."""

    items: Annotated[Items | None, BeforeValidator(_none_for_none)] = Field(
        default=None, description="what it begins with"
    )
    metadata: Metadata | None = None


class ConversationChange(RequestModel):
    """Request body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None = Field(description="in place of what it has")


class NewItems(RequestModel):
    """Request body of POST /v1/conversations/{conversation_id}/items."""

    items: Items


class Conversation(BaseModel):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


_ROUTE = "/v1/conversations/{conversation_id}"
_ITEM = _ROUTE + "/items/{item_id}"


async def _shown(ring: Ring, given: list[Item]) -> list[Entry]:
    base, items = secrets.token_hex(12), await resolved(ring, given)
    return await aside(shown_items, items, base) if len(items) > LARGE_COUNT else shown_items(items, base)


async def _found(ring: Ring, name: str) -> Conversation:
    return Conversation.model_validate_json(await ring.conversations.body(keeper(), name))


@router.post("/v1/conversations", summary="Begin a conversation", responses=error_responses(400))
async def create_conversation(body: ConversationBody, ring: TheRing) -> Conversation:
    """It expires when it was not used for `--response-ttl-s`."""
    if not ring.settings.response_ttl_s:
        raise UnsupportedParameterError("this server keeps no conversations (--response-ttl-s 0)")
    name, now = f"conv_{secrets.token_hex(24)}", int(time.time())
    made = Conversation(id=name, created_at=now, metadata=body.metadata or {})
    await ring.conversations.create(keeper(), name, made.model_dump_json().encode())
    if body.items:
        await ring.conversations.add(keeper(), name, await _shown(ring, body.items))
    return made


@router.get(_ROUTE, summary="Get a conversation", responses=error_responses(404))
async def get_conversation(conversation_id: str, ring: TheRing) -> Conversation:
    """Returns the conversation with its metadata."""
    return await _found(ring, conversation_id)


@router.post(_ROUTE, summary="Change a conversation's metadata", responses=error_responses(400, 404))
async def change_conversation(conversation_id: str, body: ConversationChange, ring: TheRing) -> Conversation:
    """Replaces the conversation's metadata. The items are not changed."""
    made = (await _found(ring, conversation_id)).model_copy(update={"metadata": body.metadata or {}})
    await ring.conversations.change(keeper(), conversation_id, made.model_dump_json().encode())
    return made


@router.delete(_ROUTE, summary="Delete a conversation", responses=error_responses(404))
async def delete_conversation(conversation_id: str, ring: TheRing) -> dict[str, Any]:
    """With its items; responses that belong to it stay."""
    await ring.conversations.forget(keeper(), conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.post(
    _ROUTE + "/items",
    summary="Add items to a conversation",
    response_class=Response,
    responses={200: {"model": ItemPage}, **error_responses(400, 404)},
)
async def add_items(conversation_id: str, body: NewItems, ring: TheRing) -> Response:
    """At its end; the answer has them all."""
    added = await _shown(ring, body.items)
    await ring.conversations.add(keeper(), conversation_id, added)
    return page(added, "", len(added), "asc")


@router.get(
    _ROUTE + "/items",
    summary="List a conversation's items",
    response_class=Response,
    responses={200: {"model": ItemPage}, **error_responses(404)},
)
async def list_items(
    conversation_id: str,
    ring: TheRing,
    after: After = "",
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """The newest ones first, unless `order` is asc."""
    return page((await ring.conversations.find(keeper(), conversation_id)).items, after, limit, order)


@router.get(_ITEM, summary="Get an item", response_class=Response, responses=error_responses(404))
async def get_item(conversation_id: str, item_id: str, ring: TheRing) -> Response:
    """One item of a conversation."""
    return Response(await ring.conversations.item(keeper(), conversation_id, item_id), media_type="application/json")


@router.delete(_ITEM, summary="Remove an item", responses=error_responses(404))
async def remove_item(conversation_id: str, item_id: str, ring: TheRing) -> Conversation:
    """The conversation goes on without it."""
    await ring.conversations.remove(keeper(), conversation_id, item_id)
    return await _found(ring, conversation_id)
