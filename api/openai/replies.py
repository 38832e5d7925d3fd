"""Answer a request: as a stream of chunks, or whole. Both begin with sequences in flight and a plan of the reply."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import structlog
from fastapi import APIRouter, Header
from starlette.responses import Response

from api.callers.caller import asker
from api.callers.fair_pool import aside
from api.generation.choice import DONE, Choice, Delta, RequestPlan, shown_versions, usage
from api.generation.logprobs import TextOffsets, TokenNames, in_parts
from api.generation.resume import reading, remember, take_over
from api.generation.running import LARGE_SIZE, Events, Generation, by_choice, gather_all
from api.http.errors import error_object, error_responses, from_fault
from api.http.sse import EventStream
from api.openai.chunks import ChunkWriter, event_id, older_call, seen_until, shown_call, text_logprobs
from api.ring.ring import Ring, TheRing
from shared.errors import InvalidRequestError, ParallmError
from shared.frames import TokenEvent, VersionSpan, spans_of
from shared.text.codec import TextCodec
from shared.text.languages.pieces import ReplyPiece
from shared.token_events import join

log = structlog.get_logger()


async def reply(ring: Ring, codec: TextCodec, plan: RequestPlan, stream: bool) -> Response:
    """Enqueue the plan's sequences and answer with their tokens."""
    if stream:
        record = partial(remember, ring, plan, asker().tenant) if plan.event_ids else None
        return EventStream(stream_events(ring, await Generation.start(ring, plan.sequences, record), plan, codec))
    gathered = await gather_all(ring, plan.sequences)
    spans = [spans_of(events) for events in gathered] if plan.weight_versions else ()
    joined = [join(events) for events in gathered]
    body = await written(joined, lambda: whole_body(plan, codec, joined, spans))
    return Response(body, media_type="application/json")


async def written(gathered: Iterable[TokenEvent], write: Callable[[], bytes]) -> bytes:
    """The bytes that `write` makes of these events. It runs in a thread when the answer is long, and writes what there
    may be much of `in_parts`, since bytes of all at once would be one long call under the interpreter's lock."""
    return await aside(write) if sum(event.size for event in gathered) > LARGE_SIZE else write()


def stream_failure(error: Exception, stream: str) -> ParallmError:
    """The error that the client of a stream gets; a fault of the server is logged."""
    shown = from_fault(error)
    if shown.status == 500:
        log.exception("api.stream_failed", stream=stream)
    return shown


async def stream_events(
    ring: Ring, generation: Generation, plan: RequestPlan, codec: TextCodec, choices: list[Choice] | None = None
) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream, to [DONE], which comes after an error, too.

    A resumed stream passes `choices` that know what its client has seen.
    """
    choices = choices or [Choice(plan, codec) for _ in range(len(plan.sequences))]
    writer = ChunkWriter(plan, codec)
    resumable = reading(ring, plan, generation.leave) if plan.event_ids else contextlib.nullcontext()
    try:
        with resumable:
            try:
                if plan.sequences.chat and (opening := _roles(writer, plan, choices)):
                    yield opening
                async for events in generation.batches():
                    write = partial(_chunks, writer, plan, choices, events)
                    if out := await written((event for _, event in events), write) or generation.comment:
                        yield out
            except Exception as error:
                generation.close()
                yield b"data: %s\n\n%s" % (error_object(stream_failure(error, plan.id)), DONE)
                return
        yield (writer.usage(choices) if plan.include_usage else b"") + DONE
    finally:
        generation.close()


def _chunks(writer: ChunkWriter, plan: RequestPlan, choices: Sequence[Choice], events: Events) -> bytes:
    out: list[bytes] = []
    for index, new in by_choice(events):
        choice = choices[index]
        chunk = writer.chunk(index, choice.take(new))
        if chunk and not choice.seen_end:
            choice.begun = True
            chunk = writer.counted(chunk, index, choice) if plan.usage_so_far else chunk
            out += (event_id(choices), chunk) if plan.event_ids else (chunk,)
    return b"".join(out)


def _roles(writer: ChunkWriter, plan: RequestPlan, choices: Sequence[Choice]) -> bytes:
    out: list[bytes] = []
    for index, choice in enumerate(choices):
        if not choice.begun:
            choice.begun = True
            role = writer.counted(writer.role(index), index, choice) if plan.usage_so_far else writer.role(index)
            out += (event_id(choices), role) if plan.event_ids else (role,)
    return b"".join(out)


def whole_body(
    plan: RequestPlan,
    codec: TextCodec,
    gathered: Sequence[TokenEvent],
    spans: Sequence[Sequence[VersionSpan]] = (),
) -> bytes:
    """JSON of a reply that is not streamed; each choice is decoded once. `spans`: the choices' version spans."""
    choices = [Choice(plan, codec) for _ in gathered]
    deltas = [choice.take([event]) for choice, event in zip(choices, gathered, strict=True)]
    chat = plan.sequences.chat
    names = TokenNames(codec, plan.name_tokens_by_id)

    def written(index: int, delta: Delta) -> dict[str, Any]:
        choice = _chat_choice(plan, names, index, delta) if chat else _text_choice(plan, codec, index, delta)
        choice |= _ending(plan, delta)
        if not chat and plan.prompt_logprobs is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(plan, names, index // plan.sequences.n, delta)
        if spans:
            choice["weight_versions"] = shown_versions(spans[index])
        return choice

    body: dict[str, Any] = {
        "id": plan.shown_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": plan.created,
        "model": plan.model,
        "system_fingerprint": plan.fingerprint,
        "choices": in_parts(written(index, delta) for index, delta in enumerate(deltas)),
        "usage": usage(plan, choices),
    }
    if chat and plan.token_ids:
        body["prompt_token_ids"] = plan.sequences.prompts[0]
    if chat and plan.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(plan, names, 0, deltas[0])
    return msgspec.json.encode(body)


def _chat_choice(plan: RequestPlan, names: TokenNames, index: int, delta: Delta) -> dict[str, Any]:
    piece, shown = delta.piece or ReplyPiece(content=delta.text), None
    message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.calls:
        message["content"] = piece.content or None
        if plan.split is not None and plan.split.older:
            message["function_call"] = older_call(piece.calls[0])
        else:
            message["tool_calls"] = [shown_call(plan.call_id(index, call.index), call) for call in piece.calls]
    if plan.logprobs is not None:
        content = names.chat(delta.tokens, delta.logprobs, delta.top_logprobs)
        shown = {"content": in_parts(content), "refusal": None}
    return {"index": index, "message": message, "logprobs": shown}


def _text_choice(plan: RequestPlan, codec: TextCodec, index: int, delta: Delta) -> dict[str, Any]:
    prompt, shown = index // plan.sequences.n, None
    if plan.logprobs is not None:
        shown = text_logprobs(plan, TextOffsets.of(plan, codec), index, delta)
        shown.top_logprobs = in_parts(shown.top_logprobs)
    text = plan.echo[prompt] + delta.text if plan.echo else delta.text
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": shown}
    if plan.token_ids:
        choice["prompt_token_ids"] = plan.sequences.prompts[prompt]
    return choice


def _prompt_logprobs(plan: RequestPlan, names: TokenNames, prompt: int, delta: Delta) -> Any:
    ids = plan.sequences.prompts[prompt]
    logprobs = delta.prompt_logprobs or [None] * len(ids)
    return in_parts(names.of_prompt(ids, logprobs, delta.prompt_top_logprobs, plan.prompt_logprobs or 0))


def _ending(plan: RequestPlan, delta: Delta) -> dict[str, Any]:
    assert delta.finish is not None, "gathered before the end"
    ending: dict[str, Any] = {"finish_reason": "length" if plan.sequences.scores_only else delta.finish_reason}
    if delta.finish.stop_match is not None:
        ending["stop_reason"] = delta.finish.stop_match
    if plan.token_ids:
        ending["token_ids"] = delta.tokens
    return ending


router = APIRouter(tags=["openai"])


@router.get(
    "/v1/streams/{request_id}",
    summary="Resume a stream",
    response_class=Response,
    responses=error_responses(400, 404, 503, ok="The chunks after `Last-Event-ID`, to [DONE]"),
)
async def resume_stream(
    request_id: str,
    ring: TheRing,
    last_event_id: Annotated[str, Header(description="id of the last event that was read; empty: from the start")] = "",
) -> Response:
    """Only streams that were asked for with `stream_options.include_event_ids` can be resumed."""
    plan, history = await take_over(ring, request_id)
    try:
        seen = seen_until(last_event_id, len(plan.sequences))
    except ValueError:
        raise InvalidRequestError(f"malformed Last-Event-ID '{last_event_id}'", param="Last-Event-ID") from None
    sequences = plan.sequences
    model, deadline_ms = sequences.template.model, sequences.template.deadline_ms
    _, codec = await ring.known(model)
    choices = [Choice(plan, codec, progress) for progress in seen]
    generation = Generation.resume(ring, model, sequences.ids, history, deadline_ms)
    return EventStream(stream_events(ring, generation, plan, codec, choices))
