"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's way to ask, answered as a chat."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

from api.anthropic.body import CountRequest, MessagesRequest, PromptedFields
from api.anthropic.message import PING, MessageWriter, lines, to_bytes
from api.anthropic.turns import places_of_images
from api.generation.choice import ReplyPlan
from api.generation.plan import Asked, plan
from api.generation.running import Generation, by_choice, gather_all
from api.generation.target import Target, find_job_target, target_of
from api.generation.work import Work
from api.http.anthropic_errors import AnthropicError, anthropic_error
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import error_responses, from_validation
from api.http.sse import SHUTTING_DOWN, EventStream
from api.openai.bodies import ChatCompletionRequest
from api.openai.chat import asked_of, unused_hints, with_unused
from api.openai.images import named_images
from api.openai.replies import stream_failure, written
from api.ring.named_images import Keep, read_images
from api.ring.ring import Ring, TheRing
from api.ring.room import aside
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.sequences import ModelCard
from shared.text.codec import TextCodec

router = APIRouter(tags=["anthropic"], route_class=BodyRoute)
T = TypeVar("T")

PING_EVERY_S = 10.0  # of silence: a long prompt is read, or a call is held back until it is whole
_NAMES = {  # of a chat's fields -> ours
    "prompt": "messages",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
    "stop": "stop_sequences",
}


def _described(ok: str) -> dict[int | str, dict[str, Any]]:
    described = error_responses(400, 404, 413, 429, 504, ok=ok)
    described |= {401: {"description": "No API key, or a wrong one."}}
    described |= {529: {"description": "No live worker serves the model; `Retry-After` says when to try again."}}
    described |= {
        "default": {"description": "Any other error: the process is out of its depth, or Redis out of reach."}
    }
    return {status: each if status == 200 else {**each, "model": AnthropicError} for status, each in described.items()}


class TokenCount(BaseModel):
    """What a message request's prompt comes to."""

    input_tokens: int = Field(description="the sum of a message's input_tokens and its cache's figures")


@router.post(
    "/v1/messages",
    summary="Answer a conversation (Anthropic)",
    responses=_described("A message object, or server-sent events when `stream` is true"),
)
async def create_message(body: MessagesRequest, request: Request, ring: TheRing) -> Response:
    """Anthropic's Messages for text, images, thinking and tools."""
    target = await target_of(ring, body, request, split=True)
    ring = target.ring
    codec = target.served.codec
    chat = await _chat(body, codec, request)
    work, reply = await _planned(ring, body, chat, target)
    unused = [_NAMES.get(name, name) for name in unused_hints(chat, codec)]
    unused += body.unused(codec.bundle.chat_template)
    writer = MessageWriter(body, reply, codec, fills_context=work.sampling.max_tokens < body.max_tokens)
    if body.stream:
        request_id = request.state.request_id
        cut_off = to_bytes(anthropic_error(SHUTTING_DOWN, request_id), "error")
        events = _events(await Generation.start(ring, work), writer, request_id)
        return with_unused(EventStream(events, cut_off), unused)
    (tokens,) = await gather_all(ring, work)
    whole = await written(tokens, partial(writer.whole, tokens))
    return with_unused(Response(whole, media_type="application/json"), unused)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation (Anthropic)",
    responses=_described("The number of tokens"),
)
async def count_tokens(body: CountRequest, request: Request, ring: TheRing) -> TokenCount:
    """As many as POST /v1/messages would read, and nothing is generated."""
    target = await find_job_target(ring, body.model, body.adapter or body.lora_adapter or "", "follow")
    ring = target.ring
    codec = await ring.codecs.codec(target.card)
    chat = await _chat(body, codec, request)
    asked = await _asked(ring, target.card, codec, body, chat, _unkept)
    return TokenCount(input_tokens=len(asked.prompts[0]))


async def _chat(body: PromptedFields, codec: TextCodec, request: Request) -> ChatCompletionRequest:
    """The chat that a request comes to; what is wrong with it is called by our names."""
    make = partial(body.chat, codec.bundle.chat_template, system_anywhere=takes_system_anywhere(codec))
    try:
        return await aside(make) if len(await request.body()) > LONG_BYTES else make()
    except ValidationError as error:
        raise _renamed(from_validation(error.errors())) from error


@lru_cache(maxsize=16)  # models
def takes_system_anywhere(codec: TextCodec) -> bool:
    """Whether the model's template shows what the system says in the middle: many refuse it, some leave it out."""
    said = [{"role": role, "content": f"a {role} speaks"} for role in ("system", "user", "assistant", "user", "system")]
    said[-1]["content"] = "in the middle"
    try:
        return said[-1]["content"] in codec.render_chat(said)
    except InvalidRequestError:
        return False


async def _unkept(sha256: bytes, data: bytes) -> None:
    """Of images that are only counted, nothing is kept."""


async def _asked(
    ring: Ring,
    card: ModelCard,
    codec: TextCodec,
    body: PromptedFields,
    chat: ChatCompletionRequest,
    keep: Keep | None = None,
) -> Asked:
    places = zip(named_images(chat.messages), places_of_images(body.messages), strict=True)
    images = await read_images(ring, card, [image._replace(where=where) for image, where in places], keep)
    try:
        return await asked_of(codec, chat, ring.settings, images=images)
    except InvalidRequestError as error:
        raise _renamed(error) from None


async def _planned(
    ring: Ring, body: MessagesRequest, chat: ChatCompletionRequest, target: Target
) -> tuple[Work, ReplyPlan]:
    """What to ask of the workers, and what to make of their tokens.

    Clients know a conversation that has become too long by the words of the error, and shorten it.
    """
    asked = await _asked(ring, target.served.card, target.served.codec, body, chat)
    tokens, context = len(asked.prompts[0]), target.served.card.context_length
    most = min(ring.settings.max_prompt_tokens or context, context - 1)
    if tokens > most and body.truncate_prompt_tokens is None:
        raise ContextLengthExceededError(f"prompt is too long: {tokens} tokens > {most} maximum")
    split = asked.split and msgspec.structs.replace(asked.split, named=False)  # a named tool ends an answer as any does
    asked = replace(asked, clamp=True, split=split)
    try:
        return await plan(ring, chat, target, asked)
    except InvalidRequestError as error:
        raise _renamed(error) from None


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    if theirs := error.param:
        bare = theirs.partition(".")[0].partition("[")[0]
        error.param = "messages" if bare == "messages" else _NAMES.get(bare, theirs)
        error.message = error.message.replace(f"'{theirs}'", f"'{error.param}'")
    return error


async def _events(generation: Generation, writer: MessageWriter, request_id: str) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream."""
    try:
        yield writer.start()
        said = time.monotonic()
        try:
            async with contextlib.aclosing(_with_silence(generation.batches())) as batches:
                async for events in batches:
                    out = [event for _, new in by_choice(events or []) for event in writer.take(new)]
                    if out or events is None or time.monotonic() - said >= PING_EVERY_S:
                        said = time.monotonic()
                        yield lines(out) or PING
            yield writer.last()
        except Exception as error:
            yield to_bytes(anthropic_error(stream_failure(error, writer.id), request_id), "error")
    finally:
        generation.close()


async def _with_silence(batches: AsyncIterator[T]) -> AsyncGenerator[T | None, None]:
    """The same, with None for each PING_EVERY_S that the first takes: the others follow each other closely."""
    first = asyncio.ensure_future(anext(batches, None))
    try:
        while not (await asyncio.wait({first}, timeout=PING_EVERY_S))[0]:
            yield None
        yield first.result()
        async for batch in batches:
            yield batch
    finally:
        first.cancel()
