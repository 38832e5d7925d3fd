"""POST /api/chat and /api/generate: Ollama's way to ask, answered as a chat or as a completion."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.generation.choice import RequestPlan
from api.generation.plan import PreparedRequest, plan
from api.generation.running import Generation, by_choice, gather_all
from api.generation.target import Target, target_of
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import error_responses, from_validation, json_reply
from api.http.ollama_errors import ollama_error
from api.http.sse import SHUTTING_DOWN, EventStream
from api.ollama.body import NAMES, ChatRequest, GenerateRequest
from api.ollama.lines import Kind, LineWriter, loaded, to_line
from api.ollama.turns import turn_starts
from api.openai.bodies import ChatCompletionRequest, CompletionRequest
from api.openai.chat import images_places, prepare_seen, unused_hints, with_unused
from api.openai.completions import prepare as prepare_completion
from api.openai.fitting import fewest_left_out
from api.openai.replies import stream_failure, written
from api.ring.ring import TheRing
from shared.errors import InvalidRequestError

router = APIRouter(tags=["ollama"], route_class=BodyRoute)

Planned = tuple[RequestPlan, list[str]]  # and the parameters that have no effect


class LineStream(EventStream):
    """A stream of lines, each a JSON object."""

    media_type = "application/x-ndjson"


@router.post(
    "/api/chat",
    summary="Answer a chat (Ollama)",
    responses=error_responses(ok="Lines of JSON, or one object when `stream` is false"),
)
async def chat(body: ChatRequest, request: Request, ring: TheRing) -> Response:
    """Ollama's chats for text, images, thinking, tools and formats."""
    target = await target_of(ring, body, request, split=True)
    if not body.messages:
        return json_reply(loaded("chat", body.model, leaves=_is_zero(body.keep_alive)))
    plan_it = partial(_plan_chat, body, target, long=len(await request.body()) > LONG_BYTES)
    return await _answer("chat", body, target, plan_it)


@router.post(
    "/api/generate",
    summary="Answer a prompt (Ollama)",
    responses=error_responses(ok="Lines of JSON, or one object when `stream` is false"),
)
async def generate(body: GenerateRequest, request: Request, ring: TheRing) -> Response:
    """One turn through the model's template, or with `raw` a completion."""
    target = await target_of(ring, body, request, split=True)
    if not (body.prompt or body.images):
        return json_reply(loaded("generate", body.model, leaves=_is_zero(body.keep_alive)))
    return await _answer("generate", body, target, partial(_plan_prompt, body, target))


async def _answer(
    kind: Kind, body: ChatRequest | GenerateRequest, target: Target, plan_it: Callable[[], Awaitable[Planned]]
) -> Response:
    try:
        planned, unused = await plan_it()
    except ValidationError as error:
        raise _renamed(from_validation(error.errors())) from None
    except InvalidRequestError as error:
        raise _renamed(error) from None
    ring, codec = target.ring, target.served.codec
    unused = [*body.unused(codec.bundle.chat_template), *unused]
    writer = LineWriter(kind, planned, codec)
    if body.streams:
        generation = await Generation.start(ring, planned.sequences)
        return with_unused(LineStream(_lines(generation, writer), ollama_error(SHUTTING_DOWN) + b"\n"), unused)
    (tokens,) = await gather_all(ring, planned.sequences)
    whole = await written(tokens, partial(writer.whole, tokens))
    return with_unused(Response(whole, media_type="application/json"), unused)


async def _lines(generation: Generation, writer: LineWriter) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream."""
    try:
        async for events in generation.batches():
            lines = [line for _, new in by_choice(events) for line in writer.take(new)]
            if lines:
                yield b"".join(map(to_line, lines))
        yield to_line(writer.last())
    except Exception as error:
        yield ollama_error(stream_failure(error, "ollama")) + b"\n"
    finally:
        generation.close()


async def _plan_chat(body: ChatRequest, target: Target, *, long: bool) -> Planned:
    """A chat's plan; with `truncate` without as few of its oldest turns as it takes to fit the context."""
    ring, card, codec = target.ring, target.served.card, target.served.codec
    places = [
        f"messages[{at}].images[{n}]" for at, each in enumerate(body.messages) for n in range(len(each.images or ()))
    ]
    most = ring.longest_prompt(card)

    async def look(skipped: int) -> tuple[bool, tuple[ChatCompletionRequest, PreparedRequest]]:
        make = partial(body.chat, codec.bundle.chat_template, skipped)
        chat = await aside(make) if long else make()
        prepared = await prepare_seen(ring, card, codec, chat, places=images_places(chat.messages, places))
        return len(prepared.prompts[0]) <= most, (chat, prepared)

    last = len(turn_starts(body.messages)) - 1 if body.truncate is not False else 0
    made, prepared = await fewest_left_out(look, last)
    return await _plan(body, made, prepared, target), unused_hints(made, codec, card)


async def _plan_prompt(body: GenerateRequest, target: Target) -> Planned:
    """The plan of one turn, behind the context that it goes on from."""
    ring, card, codec = target.ring, target.served.card, target.served.codec
    if body.raw:
        completion = body.completion()
        prepared = await prepare_completion(codec, completion, ring.settings)
        return await _plan(body, completion, _behind(body.context, prepared), target), []
    made = body.chat(codec.bundle.chat_template)
    prepared = await prepare_seen(ring, card, codec, made)
    return await _plan(body, made, _behind(body.context, prepared), target), unused_hints(made, codec, card)


def _behind(context: list[int] | None, prepared: PreparedRequest) -> PreparedRequest:
    return replace(prepared, prompts=[[*(context or ()), *prepared.prompts[0]]])


async def _plan(
    body: ChatRequest | GenerateRequest,
    made: ChatCompletionRequest | CompletionRequest,
    prepared: PreparedRequest,
    target: Target,
) -> RequestPlan:
    """A plan whose answer may have as many tokens as the request says, at most what the context leaves."""
    asked = body.drawn.num_predict
    most = asked if asked and asked > 0 else None
    filling = replace(prepared, max_tokens=most, default_tokens=target.served.card.context_length, clamp=True)
    return await plan(target.ring, made, target, filling)


def _is_zero(keep_alive: float | str | None) -> bool:
    """True for a request that would have the model unloaded."""
    return keep_alive is not None and str(keep_alive).rstrip("msh") in ("0", "0.0")


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """The same by Ollama's names of fields."""
    if theirs := error.param:
        bare = theirs.partition(".")[0].partition("[")[0]
        if ours := NAMES.get(bare):
            error.param = ours
            error.message = error.message.replace(f"'{theirs}'", f"'{ours}'")
    return error
