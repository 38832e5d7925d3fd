"""Answer a request: as a stream of chunks, or whole. Both begin with sequences in flight and a plan of the reply."""

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import structlog
from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import Response

from api.generation.choice import DONE, Choice, Delta, ReplyPlan, shown_versions, usage
from api.generation.logprobs import TextLogprobs, TextOffsets, TokenNames, in_parts
from api.generation.resume import reading, remember, take_over
from api.generation.running import Events, Generation, by_choice, gather_all
from api.generation.work import Work
from api.http.errors import error_object, error_responses, from_fault
from api.http.sse import EventStream
from api.openai.chunks import ChunkWriter, event_id, older_call, seen_until, shown_call
from api.ring.ring import Ring, ServedModel, ring_of
from api.ring.room import aside
from shared.errors import InvalidRequestError
from shared.frames import TokenEvent, VersionSpan, spans_of
from shared.text.codec import TextCodec
from shared.token_events import join

log = structlog.get_logger()

LARGE_TOKENS = 4096  # tokens and competitors told of: from here on writing a reply takes some 10 ms


async def reply(
    ring: Ring, request: Request, served: ServedModel, work: Work, plan: ReplyPlan, stream: bool
) -> Response:
    """Enqueue the work and answer with its tokens."""
    if stream and plan.event_ids:
        await remember(ring, plan)
    if stream:
        generation = await Generation.start(ring, work)
        return EventStream(stream_events(ring, generation, plan, served.codec))
    gathered = await gather_all(ring, request, work)
    if gathered is None:
        return Response(status_code=499)
    spans = [spans_of(events) for events in gathered] if plan.weight_versions else ()
    joined = [join(events) for events in gathered]
    write = functools.partial(whole_body, plan, served.codec, joined, spans)
    return Response(await written(joined, write), media_type="application/json")


async def written(gathered: Iterable[TokenEvent], write: Callable[[], bytes]) -> bytes:
    """What `write` makes of these events; for a long answer beside the event loop."""
    return await aside(write) if is_large(gathered) else write()


async def stream_events(
    ring: Ring, generation: Generation, plan: ReplyPlan, codec: TextCodec, choices: list[Choice] | None = None
) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream, to [DONE], which comes after an error, too.

    A resumed stream passes `choices` that know what its client has seen.
    """
    choices = choices or [Choice(plan, codec) for _ in range(plan.choices)]
    writer = ChunkWriter(plan, codec)
    resumable = reading(ring, plan, generation.leave) if plan.event_ids else contextlib.nullcontext()
    try:
        with resumable:
            try:
                if plan.endpoint == "chat" and (opening := _roles(writer, plan, choices)):
                    yield opening
                async for events in generation.batches():
                    if out := _chunks(writer, plan, choices, events):
                        yield out
            except Exception as error:
                generation.close()
                told = from_fault(error)
                if told.status == 500:
                    log.exception("api.stream_failed", stream=plan.id)
                yield b"data: %s\n\n%s" % (error_object(told), DONE)
                return
        yield (writer.usage(choices) if plan.include_usage else b"") + DONE
    finally:
        generation.close()


def _chunks(writer: ChunkWriter, plan: ReplyPlan, choices: Sequence[Choice], events: Events) -> bytes:
    out: list[bytes] = []
    for index, new in by_choice(events):
        choice = choices[index]
        chunk = writer.chunk(index, choice.take(new))
        if chunk and not choice.seen_end:
            choice.begun = True
            chunk = writer.counted(chunk, index, choice) if plan.usage_so_far else chunk
            out += (event_id(choices), chunk) if plan.event_ids else (chunk,)
    return b"".join(out)


def _roles(writer: ChunkWriter, plan: ReplyPlan, choices: Sequence[Choice]) -> bytes:
    out: list[bytes] = []
    for index, choice in enumerate(choices):
        if not choice.begun:
            choice.begun = True
            role = writer.counted(writer.role(index), index, choice) if plan.usage_so_far else writer.role(index)
            out += (event_id(choices), role) if plan.event_ids else (role,)
    return b"".join(out)


def is_large(gathered: Iterable[TokenEvent]) -> bool:
    """Whether a reply has so much in it that it is written beside the event loop."""
    told = sum(len(event.tokens) + sum(map(len, event.top_logprobs or ())) for event in gathered)
    told += sum(len(event.prompt_logprobs or ()) + sum(map(len, event.prompt_top_logprobs or ())) for event in gathered)
    return told > LARGE_TOKENS


def whole_body(
    plan: ReplyPlan,
    codec: TextCodec,
    gathered: Sequence[TokenEvent],
    spans: Sequence[Sequence[VersionSpan]] = (),
) -> bytes:
    """JSON of a reply that is not streamed; each choice is decoded once. `spans`: the choices' version spans.

    Choices become bytes one by one: bytes of all at once would be one long call under the interpreter's lock.
    """
    choices = [Choice(plan, codec) for _ in gathered]
    deltas = [choice.take([event]) for choice, event in zip(choices, gathered, strict=True)]
    shape = _chat_choice if plan.endpoint == "chat" else _text_choice

    def written(index: int, event: TokenEvent) -> msgspec.Raw:
        choice = shape(plan, codec, index, deltas[index], event)
        if spans:
            choice["weight_versions"] = shown_versions(spans[index])
        return msgspec.Raw(msgspec.json.encode(choice))

    body: dict[str, Any] = {
        "id": plan.shown_id,
        "object": "chat.completion" if plan.endpoint == "chat" else "text_completion",
        "created": plan.created,
        "model": plan.model,
        "system_fingerprint": plan.fingerprint,
        "choices": [written(index, event) for index, event in enumerate(gathered)],
        "usage": usage(plan, choices),
    }
    if plan.endpoint == "chat":
        names = TokenNames(codec, plan.name_tokens_by_id)
        if plan.token_ids:
            body["prompt_token_ids"] = plan.prompts[0]
        if plan.prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_logprobs(plan, names, 0, gathered[0])
    return msgspec.json.encode(body)


def _chat_choice(plan: ReplyPlan, codec: TextCodec, index: int, delta: Delta, event: TokenEvent) -> dict[str, Any]:
    shown = None
    if plan.logprobs is not None:
        names = TokenNames(codec, plan.name_tokens_by_id)
        content = names.chat(event.tokens, event.logprobs, event.top_logprobs)
        shown = {"content": in_parts(content) if plan.is_long else content, "refusal": None}
    ending = {**_ending(plan, event), "finish_reason": delta.finish_reason}
    return {"index": index, "message": _message(plan, index, delta), "logprobs": shown, **ending}


def _message(plan: ReplyPlan, index: int, delta: Delta) -> dict[str, Any]:
    piece = delta.piece
    if piece is None:
        return {"role": "assistant", "content": delta.text, "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.calls and plan.split is not None and plan.split.older:
        message["content"] = piece.content or None
        message["function_call"] = older_call(piece.calls[0])
    elif piece.calls:
        message["content"] = piece.content or None
        message["tool_calls"] = [shown_call(plan.call_id(index, call.index), call) for call in piece.calls]
    return message


def _text_choice(plan: ReplyPlan, codec: TextCodec, index: int, delta: Delta, event: TokenEvent) -> dict[str, Any]:
    prompt, text = index // plan.n, delta.text
    names = TokenNames(codec, plan.name_tokens_by_id)
    choice: dict[str, Any] = {
        "index": index,
        "text": plan.echo[prompt] + text if plan.echo else text,
        "logprobs": None if plan.logprobs is None else _text_logprobs(plan, codec, names, index, event),
        **_ending(plan, event),
    }
    if plan.token_ids:
        choice["prompt_token_ids"] = plan.prompts[prompt]
    if plan.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(plan, names, prompt, event)
    return choice


def _text_logprobs(plan: ReplyPlan, codec: TextCodec, names: TokenNames, index: int, event: TokenEvent) -> TextLogprobs:
    offsets = TextOffsets(codec, names, plan.logprobs or 0, plan.shown_tokens(codec))
    echoed = TextLogprobs()
    prompt = index // plan.n
    if plan.echo and event.prompt_logprobs is not None:
        echoed = offsets.prompt(
            plan.echo[prompt], plan.prompts[prompt], event.prompt_logprobs, event.prompt_top_logprobs
        )
    return echoed + offsets.completion(event.tokens, event.logprobs, event.top_logprobs)


def _prompt_logprobs(plan: ReplyPlan, names: TokenNames, prompt: int, event: TokenEvent) -> Any:
    ids = plan.prompts[prompt]
    logprobs = event.prompt_logprobs or [None] * len(ids)
    shown = names.of_prompt(ids, logprobs, event.prompt_top_logprobs, plan.prompt_logprobs or 0)
    return in_parts(shown) if plan.is_long else shown


def _ending(plan: ReplyPlan, event: TokenEvent) -> dict[str, Any]:
    finish = event.finish
    assert finish is not None, "gathered before the end"
    ending: dict[str, Any] = {"finish_reason": "length" if plan.scores_only else finish.reason}
    if finish.stop_match is not None:
        ending["stop_reason"] = finish.stop_match
    if plan.token_ids:
        ending["token_ids"] = event.tokens
    return ending


router = APIRouter(tags=["openai"])


@router.get(
    "/v1/streams/{request_id}",
    summary="Resume a stream",
    response_class=Response,
    responses={200: {"description": "The chunks after `Last-Event-ID`, to [DONE]"}, **error_responses(400, 404, 503)},
)
async def resume_stream(
    request_id: str,
    ring: Annotated[Ring, Depends(ring_of)],
    last_event_id: Annotated[str, Header(description="id of the last event that was read; empty: from the start")] = "",
) -> Response:
    """Only streams that were asked for with `stream_options.include_event_ids` can be resumed."""
    resumable = await take_over(ring, request_id)
    plan = resumable.plan
    try:
        seen = seen_until(last_event_id, plan.choices)
    except ValueError:
        raise InvalidRequestError(f"malformed Last-Event-ID '{last_event_id}'", param="Last-Event-ID") from None
    _, codec = await ring.known(plan.served)
    seqs = [plan.sequence(choice) for choice in range(plan.choices)]
    choices = [Choice(plan, codec, progress) for progress in seen]
    generation = Generation.resume(ring, plan.served, seqs, resumable.history, plan.deadline_ms)
    return EventStream(stream_events(ring, generation, plan, codec, choices))
