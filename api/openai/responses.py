"""POST /v1/responses: OpenAI's newer way to ask, for text and functions, without state."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
import structlog
from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.responses import Response

from api.errors import error_responses, from_fault
from api.generation import Generation, Work, by_choice
from api.openai.chat import chat_of, grammar_param, plan_chat
from api.openai.choices import Choice, Delta, ReplyPlan, join
from api.openai.chunks import usage
from api.openai.pieces import Piece
from api.openai.planning import target_of, with_grammar
from api.openai.replies import gather_all
from api.openai.response_body import ResponseRequest
from api.openai.response_items import Event, ItemWriter
from api.ring import Ring, ring_of
from api.sse import EventStream
from shared.errors import InvalidRequestError
from shared.frames import Finish
from shared.text import TextCodec

log = structlog.get_logger()

router = APIRouter(tags=["openai"])

_NAMES = {  # of a chat's fields -> ours
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "prompt": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@router.post(
    "/v1/responses",
    summary="Respond to a text or a conversation",
    responses={
        200: {"description": "A response object, or server-sent events when `stream` is true"},
        **error_responses(400, 404, 413, 429, 503, 504),
    },
)
async def create_response(body: ResponseRequest, request: Request, ring: Annotated[Ring, Depends(ring_of)]) -> Response:
    """Text, structured text and function calls; nothing is stored."""
    try:
        chat = body.chat()
    except ValidationError as error:
        raise InvalidRequestError(error.errors()[0]["msg"], param="input") from error
    target = await target_of(chat, request, ring)
    try:
        work, plan = plan_chat(chat, await chat_of(target.served.codec, chat), target, ring.settings)
        work = await with_grammar(ring, work, target, grammar_param(chat))
    except InvalidRequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise
    answer = Answer(body, plan, work, target.served.codec)
    if body.stream:
        return EventStream(_events(await Generation.start(ring, work), answer))
    gathered = await gather_all(ring, request, work)
    if gathered is None:
        return Response(status_code=499)
    answer.take(answer.choice.take([join(gathered[0])]))
    return Response(msgspec.json.encode(answer.shown()), media_type="application/json")


class Answer:
    """One response while its tokens come in."""

    def __init__(self, body: ResponseRequest, plan: ReplyPlan, work: Work, codec: TextCodec) -> None:
        self._body = body
        self._plan = plan
        self._codec = codec
        self._max_tokens = work.sampling.max_tokens
        self._name = plan.id.rpartition("-")[2]
        self._writer = ItemWriter(self._name[:24])
        self._finish: Finish | None = None
        self.choice = Choice(plan, codec)

    def take(self, delta: Delta) -> list[Event]:
        """The events of a delta."""
        events = self._writer.take(delta.piece or Piece(content=delta.text))
        if delta.finish is not None:
            self._finish = delta.finish
            events += self._writer.end(incomplete=delta.finish.reason == "length")
        return events

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
        shown_format = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{self._name}",
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
            "text": {"format": shown_format},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [{"parameters": {}, "strict": False, **tool} for tool in given.get("tools", [])],
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
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


async def _events(generation: Generation, answer: Answer) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream; it ends with the response as it has become."""
    number = 0

    def written(event: Event) -> bytes:
        nonlocal number
        data = msgspec.json.encode({**event, "sequence_number": number})
        number += 1
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data)

    try:
        for name in ("created", "in_progress"):
            yield written({"type": f"response.{name}", "response": answer.shown()})
        try:
            async for events in generation.batches():
                for _, new in by_choice(events):
                    out = [written(event) for event in answer.take(answer.choice.take(new))]
                    if out:
                        yield b"".join(out)
        except Exception as error:
            told = from_fault(error)
            if told.status == 500:
                log.exception("api.stream_failed", stream=answer.shown()["id"])
            detail = {"code": "rate_limit_exceeded" if told.status == 429 else "server_error", "message": told.message}
            yield written({"type": "response.failed", "response": answer.shown(status="failed", error=detail)})
            return
        yield written({"type": f"response.{answer.status}", "response": answer.shown()})
    finally:
        generation.close()
