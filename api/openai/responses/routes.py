"""POST /v1/responses: OpenAI's newer way to ask, for text and functions, without state."""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from api.generation.choice import Choice, Delta, ReplyPlan, ends_with_stop_token, usage
from api.generation.logprobs import ChatLogprob, TokenNames
from api.generation.plan import Asked, plan
from api.generation.running import Generation, by_choice, gather_all
from api.generation.splitter import Piece
from api.generation.target import Target, target_of
from api.generation.work import Work
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, from_validation
from api.http.sse import EventStream
from api.openai.bodies import ChatCompletionRequest
from api.openai.chat import asked_of, unused_hints, with_unused
from api.openai.replies import stream_failure, written
from api.openai.responses.body import ResponseRequest
from api.openai.responses.items import Event, ItemWriter
from api.openai.responses.turns import turn_starts
from api.ring.ring import Ring, TheRing
from api.ring.room import LARGE_CHARS, LARGE_COUNT, aside
from shared.errors import InvalidRequestError
from shared.frames import Finish, TokenEvent
from shared.text.codec import TextCodec
from shared.token_events import by_token, join

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_NAMES = {  # of a chat's fields -> ours
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "prompt": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "top_logprobs",
}


@router.post(
    "/v1/responses",
    summary="Respond to a text or a conversation",
    responses=error_responses(ok="A response object, or server-sent events when `stream` is true"),
)
async def create_response(body: ResponseRequest, request: Request, ring: TheRing) -> Response:
    """Text, structured text and function calls; nothing is stored."""
    target = await target_of(ring, body, request)
    codec = target.served.codec
    chat, work, reply_plan = await plan_response(ring, body, target)
    unused = [_NAMES.get(name, name) for name in unused_hints(chat, codec)]
    writer = ResponseWriter(body, reply_plan, codec)
    if body.stream:
        return with_unused(EventStream(_events(await Generation.start(ring, work), writer)), unused)
    (events,) = await gather_all(ring, work)
    whole = await written(events, partial(writer.whole, events))
    return with_unused(Response(whole, media_type="application/json"), unused)


async def chat_body(body: ResponseRequest, skipped: int = 0) -> ChatCompletionRequest:
    """The same request to /v1/chat/completions; what is wrong with it is called by our names."""
    try:
        return await aside(body.chat, skipped) if len(body.input) > LARGE_COUNT else body.chat(skipped)
    except ValidationError as error:
        raise _renamed(from_validation(error.errors())) from error


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    theirs = error.param
    field, dot, rest = (error.param or "").partition(".")
    bare, bracket, index = field.partition("[")
    if bare == "messages":
        error.param = "input"
    else:
        error.param = (_NAMES.get(bare, bare) + bracket + index + dot + rest) or None
    error.message = error.message.replace(f"'{theirs}'", f"'{error.param}'")
    return error


async def plan_response(
    ring: Ring, body: ResponseRequest, target: Target
) -> tuple[ChatCompletionRequest, Work, ReplyPlan]:
    """The chat that a request comes to, what to ask of the workers, and what to make of their tokens."""
    try:
        chat, asked = await _fitting(ring, body, target)
        return chat, *await plan(ring, chat, target, asked)
    except InvalidRequestError as error:
        raise _renamed(error) from None


async def _fitting(ring: Ring, body: ResponseRequest, target: Target) -> tuple[ChatCompletionRequest, Asked]:
    """The chat; with `truncation: auto` without as few of its oldest turns as it takes to fit the context."""
    card, codec = target.served.card, target.served.codec
    behind = body.max_output_tokens or min(ring.settings.default_max_tokens, card.context_length // 8)
    most = min(ring.settings.max_prompt_tokens or card.context_length, card.context_length - behind)
    skipped, last, tried = 0, 0, -1
    if body.truncation == "auto":
        last = len(turn_starts(body.messages())) - 1
    while True:  # the first look is at all of it, the others halve what is left
        chat = await chat_body(body, skipped)
        asked = await asked_of(codec, chat, ring.settings)
        fits = len(asked.prompts[0]) <= most
        if fits and (skipped == 0 or skipped - tried == 1):
            return chat, asked
        if not fits and skipped == last:
            return chat, asked  # refused by whoever plans it
        if fits:
            last = skipped
        else:
            tried = skipped
        skipped = last if last - tried == 1 else (tried + last) // 2


class ResponseWriter:
    """One response while its tokens come in."""

    def __init__(self, body: ResponseRequest, plan: ReplyPlan, codec: TextCodec) -> None:
        self._body = body
        self._plan = plan
        self._codec = codec
        self._names = TokenNames(codec, by_id=False)
        self._name = plan.id.rpartition("-")[2]
        self._writer = ItemWriter(self._name[:24])
        self._finish: Finish | None = None
        self.choice = Choice(plan, codec)

    def whole(self, events: list[TokenEvent]) -> bytes:
        """JSON of the response that all of its events make; with log-probabilities token by token, which says whose
        they are."""
        for event in by_token(events) if self._body.wants_logprobs else [join(events)]:
            self.take(self.choice.take([event]))
        return msgspec.json.encode(self.shown())

    def take(self, delta: Delta) -> list[Event]:
        """The events of a delta."""
        logprobs = self._logprobs(delta) if self._body.wants_logprobs else ()
        events = self._writer.take(delta.piece or Piece(content=delta.text), logprobs)
        if delta.finish is not None:
            self._finish = delta.finish
            events += self._writer.end(incomplete=delta.finish.reason == "length")
        return events

    def _logprobs(self, delta: Delta) -> list[ChatLogprob]:
        """Of the delta's tokens that may be text: neither what ends the completion nor a mark."""
        tokens, finish = delta.tokens, delta.finish
        if finish is not None and ends_with_stop_token(tokens, finish, self._plan.eos_token_ids):
            tokens = tokens[:-1]
        told = self._names.chat(tokens, delta.logprobs[: len(tokens)], delta.top_logprobs)
        marks = () if self._plan.split is None else self._plan.split.marks
        return [each for each in told if each.token not in marks]

    @property
    def is_long(self) -> bool:
        """Whether to count the tokens of its reasoning takes so long that it is done beside the event loop."""
        return len(self._writer.reasoning) > LARGE_CHARS

    @property
    def status(self) -> str:
        """in_progress, completed or incomplete."""
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish.reason == "length" else "completed"

    def shown(self, **changed: Any) -> dict[str, Any]:
        """The response object as it is now."""
        body, cut = self._body, self.status == "incomplete"
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "reasoning"})
        wanted = body.text.format if body.text is not None else None
        verbosity = body.text.verbosity if body.text is not None else None
        shown_verbosity = {} if verbosity is None else {"verbosity": verbosity}
        shown_format = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{self._plan.name or self._name}",
            "object": "response",
            "created_at": self._plan.created,
            "status": self.status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._plan.model,
            "output": self._writer.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": shown_format, **shown_verbosity},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [{"parameters": {}, "strict": False, **tool} for tool in given.get("tools", [])],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            **({} if body.max_tool_calls is None else {"max_tool_calls": body.max_tool_calls}),
            "metadata": body.metadata or {},
            **({} if body.user is None else {"user": body.user}),
            **({} if self._finish is None else {"usage": self._usage()}),
            **changed,
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._plan, [self.choice])
        thought = self._writer.reasoning
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counts.completion_tokens,
            # Counted by encoding the text again.
            "output_tokens_details": {"reasoning_tokens": len(self._codec.encode(thought, False)) if thought else 0},
            "total_tokens": counts.total_tokens,
        }


async def _events(generation: Generation, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream; it ends with the response as it has become."""
    number = 0

    def to_bytes(event: Event) -> bytes:
        nonlocal number
        data = msgspec.json.encode({**event, "sequence_number": number})
        number += 1
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data)

    try:
        for name in ("created", "in_progress"):
            yield to_bytes({"type": f"response.{name}", "response": writer.shown()})
        try:
            async for events in generation.batches():
                for _, new in by_choice(events):
                    out = [to_bytes(event) for event in writer.take(writer.choice.take(new))]
                    if out:
                        yield b"".join(out)
        except Exception as error:
            told = stream_failure(error, writer.shown()["id"])
            detail = {"code": "rate_limit_exceeded" if told.status == 429 else "server_error", "message": told.message}
            yield to_bytes({"type": "response.failed", "response": writer.shown(status="failed", error=detail)})
            return
        last = await aside(writer.shown) if writer.is_long else writer.shown()
        yield to_bytes({"type": f"response.{writer.status}", "response": last})
    finally:
        generation.close()
