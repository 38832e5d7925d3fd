"""POST /v1/responses: OpenAI's newer way to ask, for text and functions; and the routes of stored responses."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.generation.named_images import unkept
from api.generation.running import Generation, by_choice, gather_all
from api.generation.target import target_of
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import error_responses
from api.http.sse import EventStream
from api.openai.chat import with_unused
from api.openai.replies import stream_failure, written
from api.openai.responses import background
from api.openai.responses.background import sse
from api.openai.responses.body import ResponseRequest
from api.openai.responses.history import history_of, is_stored, keeper, own_ids
from api.openai.responses.items import Event
from api.openai.responses.planning import plan_response, prepare_response, unused_of
from api.openai.responses.references import resolved
from api.openai.responses.storage import After, ItemPage, Limit, Order, entries, keep, page, whole
from api.openai.responses.writer import ResponseWriter
from api.ring.ring import TheRing
from shared.errors import InvalidRequestError

router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post(
    "/v1/responses",
    summary="Respond to a text or a conversation",
    responses=error_responses(404, 409, ok="A response object, or server-sent events when `stream` is true"),
)
async def create_response(body: ResponseRequest, request: Request, ring: TheRing) -> Response:
    """Text, structured text and function calls that continue earlier turns."""
    stored = is_stored(ring, body)
    body.store = stored
    body.input = await resolved(ring, body.input)
    history = await history_of(ring, body)
    asked = body.model_copy(update={"input": [*history.items, *body.input]}) if history.items else body
    target = await target_of(ring, asked, request, split=True)
    there = target.ring  # where it is computed; responses and conversations stay in the process's own ring
    codec = target.served.codec
    chat, planned = await plan_response(there, asked, target, history)
    unused = unused_of(asked, chat, target)
    writer = ResponseWriter(body, planned, codec)
    if body.background:
        begun = await background.begin(there, body, planned, writer, history.ids)
        request.app.state.background.look()
        if body.stream:
            return with_unused(EventStream(background.watch(ring, keeper(), writer.id, -1)), unused)
        return with_unused(Response(whole(begun), media_type="application/json"), unused)

    async def kept() -> None:
        if stored or body.conversation is not None:
            before = history.ids if body.conversation is None else ()
            ids = own_ids(before, planned.sequences.prompts[0], writer.tokens)
            await keep(ring, keeper(), body, writer, ids)

    if body.stream:
        return with_unused(EventStream(_events(await Generation.start(there, planned.sequences), writer, kept)), unused)
    (events,) = await gather_all(there, planned.sequences)
    answer = await written(events, partial(writer.whole, events))
    await kept()
    return with_unused(Response(answer, media_type="application/json"), unused)


class InputTokens(BaseModel):
    """Length of a request's prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@router.post(
    "/v1/responses/input_tokens", summary="Count the tokens of a response's input", responses=error_responses(404, 409)
)
async def count_input_tokens(body: ResponseRequest, request: Request, response: Response, ring: TheRing) -> InputTokens:
    """As many as POST /v1/responses would read; nothing is generated, and nothing is stored."""
    history = await history_of(ring, body)
    asked = body.model_copy(update={"input": [*history.items, *await resolved(ring, body.input)]})
    target = await target_of(ring, asked, request, split=True)
    chat, prepared = await prepare_response(target.ring, asked, target, history, unkept)
    with_unused(response, unused_of(asked, chat, target))
    return InputTokens(input_tokens=len(prepared.prompts[0]))


async def _events(
    generation: Generation, writer: ResponseWriter, kept: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream; it ends with the response as it has become, once that is kept."""
    number = 0

    def to_bytes(event: Event) -> bytes:
        nonlocal number
        number += 1
        return sse(event, number - 1)

    try:
        for name in ("created", "in_progress"):
            yield to_bytes({"type": f"response.{name}", "response": writer.shown()})
        try:
            async for events in generation.batches():
                if generation.comment:
                    yield generation.comment
                for _, new in by_choice(events):
                    out = [to_bytes(event) for event in writer.take(writer.choice.take(new))]
                    if out:
                        yield b"".join(out)
            await kept()
        except Exception as error:
            failure = stream_failure(error, writer.shown()["id"])
            detail = {
                "code": "rate_limit_exceeded" if failure.status == 429 else "server_error",
                "message": failure.message,
            }
            yield to_bytes({"type": "response.failed", "response": writer.shown(status="failed", error=detail)})
            return
        yield to_bytes({"type": f"response.{writer.status}", "response": writer.shown()})
    finally:
        generation.close()


@router.get(
    "/v1/responses/{response_id}",
    summary="Get a stored response",
    response_class=Response,
    responses=error_responses(400, 404, ok="The response object, or with `stream` the events of its stream"),
)
async def get_response(
    response_id: str,
    ring: TheRing,
    stream: Annotated[
        bool, Query(description="the events of a response that was asked for with both of `background` and `stream`")
    ] = False,
    starting_after: Annotated[int | None, Query(ge=-1, description="`sequence_number` of the last event seen")] = None,
) -> Response:
    """Returns the response in its present state, or streams the events that are still to come."""
    who = keeper()
    stored = await ring.responses.find(who, response_id)
    if not stream:
        if starting_after is not None:
            raise InvalidRequestError("'starting_after' goes with 'stream'", param="starting_after")
        return Response(whole(stored), media_type="application/json")
    if not stored.streams:
        raise InvalidRequestError(
            "only a response that was asked for with 'background' and 'stream' has events to send again", param="stream"
        )
    after = -1 if starting_after is None else starting_after
    await background.check_watchable(ring, who, response_id, stored, after)
    return EventStream(background.watch(ring, who, response_id, after))


@router.delete("/v1/responses/{response_id}", summary="Delete a stored response", responses=error_responses(404))
async def delete_response(response_id: str, ring: TheRing) -> dict[str, Any]:
    """One that runs is cancelled. Nothing can follow it any more."""
    await background.forget(ring, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a background response",
    response_class=Response,
    responses=error_responses(400, 404, ok="The response object"),
)
async def cancel_response(response_id: str, ring: TheRing) -> Response:
    """One that has ended stays as it is."""
    stored = await ring.responses.find(keeper(), response_id)
    if not stored.run:
        raise InvalidRequestError("only a response with 'background' can be cancelled", param="response_id")
    return Response(whole(await background.cancel(ring, response_id, stored)), media_type="application/json")


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the input of a stored response",
    response_class=Response,
    responses={200: {"model": ItemPage}, **error_responses(404)},
)
async def list_input_items(
    response_id: str,
    ring: TheRing,
    after: After = "",
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """Returns the response's own items, without those of the responses that it follows."""
    raw = (await ring.responses.find(keeper(), response_id)).input
    found = await aside(entries, raw) if len(raw) > LONG_BYTES else entries(raw)
    return page(found, after, limit, order)
