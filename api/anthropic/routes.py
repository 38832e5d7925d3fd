"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's way to ask, answered as a chat."""

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.anthropic.body import CountRequest, MessagesRequest
from api.anthropic.message import PING, MessageWriter, lines, to_bytes
from api.anthropic.planning import chat_of, plan_message, prepare_message, unused_of
from api.generation.named_images import unkept
from api.generation.running import SILENCE_S, Generation, by_choice, gather_all
from api.generation.target import find_job_target, target_of
from api.http.anthropic_errors import AnthropicError, anthropic_error
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import error_responses
from api.http.sse import SHUTTING_DOWN, EventStream
from api.openai.chat import with_unused
from api.openai.replies import stream_failure, written
from api.ring.ring import TheRing

router = APIRouter(tags=["anthropic"], route_class=BodyRoute)

PING_EVERY_S = SILENCE_S  # a long prompt is read, or a call is held back until it is whole


def described(ok: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of what Anthropic's routes answer with."""
    described = error_responses(400, 404, 413, 429, 504, ok=ok)
    described |= {401: {"description": "No API key, or a wrong one."}}
    described |= {529: {"description": "No live worker serves the model; `Retry-After` says when to try again."}}
    described |= {
        "default": {"description": "Any other error: the process is out of its depth, or Redis out of reach."}
    }
    return {status: each if status == 200 else {**each, "model": AnthropicError} for status, each in described.items()}


class TokenCount(BaseModel):
    """Length of a message request's prompt."""

    input_tokens: int = Field(description="the sum of a message's input_tokens and its cache's figures")


@router.post(
    "/v1/messages",
    summary="Answer a conversation (Anthropic)",
    responses=described("A message object, or server-sent events when `stream` is true"),
)
async def create_message(body: MessagesRequest, request: Request, ring: TheRing) -> Response:
    """Anthropic's Messages for text, images, thinking and tools."""
    target = await target_of(ring, body, request, split=True)
    ring = target.ring
    codec = target.served.codec
    chat = await chat_of(body, codec, long=len(await request.body()) > LONG_BYTES)
    planned = await plan_message(ring, body, chat, target)
    unused = unused_of(body, chat, codec, target.served.card)
    fills_context = planned.sequences.template.sampling.max_tokens < body.max_tokens
    writer = MessageWriter(body, planned, codec, fills_context=fills_context)
    if body.stream:
        request_id = request.state.request_id
        cut_off = to_bytes(anthropic_error(SHUTTING_DOWN, request_id), "error")
        events = _events(await Generation.start(ring, planned.sequences), writer, request_id)
        return with_unused(EventStream(events, cut_off), unused)
    (tokens,) = await gather_all(ring, planned.sequences)
    whole = await written(tokens, partial(writer.whole, tokens))
    return with_unused(Response(whole, media_type="application/json"), unused)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation (Anthropic)",
    responses=described("The number of tokens"),
)
async def count_tokens(body: CountRequest, request: Request, response: Response, ring: TheRing) -> TokenCount:
    """As many as POST /v1/messages would read, and nothing is generated."""
    target = await find_job_target(ring, body.model, body.adapter or body.lora_adapter or "", "follow")
    ring = target.ring
    codec = await ring.codecs.codec(target.card)
    chat = await chat_of(body, codec, long=len(await request.body()) > LONG_BYTES)
    prepared = await prepare_message(ring, target.card, codec, body, chat, unkept)
    with_unused(response, unused_of(body, chat, codec, target.card))
    return TokenCount(input_tokens=len(prepared.prompts[0]))


@router.head("/api/hello", include_in_schema=False)
@router.get("/api/hello", summary="Is the server there? (Claude Code)")
async def hello() -> dict[str, str]:
    """Answered without a key: Claude Code asks when it starts, to have the connection by its first request."""
    return {"message": "hello"}


async def _events(generation: Generation, writer: MessageWriter, request_id: str) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream."""
    try:
        yield writer.start()
        said = time.monotonic()
        try:
            async for events in generation.batches():
                out = [event for _, new in by_choice(events) for event in writer.take(new)]
                silence_s = time.monotonic() - said
                if out or generation.comment or silence_s >= PING_EVERY_S:
                    said = time.monotonic()
                    yield lines(out) or generation.comment or PING
            yield writer.last()
        except Exception as error:
            yield to_bytes(anthropic_error(stream_failure(error, writer.id), request_id), "error")
    finally:
        generation.close()
