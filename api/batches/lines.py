"""The lines of a batch: from a request's line to a job's input, and from a result to the answer's line.

A line goes through the same validation and planning as a request to its endpoint, and its answer is written by the
same code. What is wrong with a line's shape fails the batch; what its endpoint would refuse fails the line.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from api.anthropic.body import MessagesRequest
from api.anthropic.message import SHOWN_FIELDS, MessageWriter
from api.anthropic.planning import chat_of, plan_message
from api.batches.shapes import MESSAGES, LineShape, shape_of
from api.callers.fair_pool import aside
from api.generation.choice import RequestPlan, stored_plan
from api.generation.named_images import Keep
from api.generation.plan import plan
from api.generation.sampling import WHOLE_VOCABULARY, SamplingFields
from api.generation.sequences import Sequences
from api.generation.target import Target
from api.http.bodies import LONG_BYTES
from api.http.errors import from_validation
from api.http.limits import IMAGES, check_shape, check_without_images
from api.openai import completions
from api.openai.bodies import ChatCompletionRequest, CompletionRequest
from api.openai.chat import prepare_seen
from api.openai.embeddings import EmbeddingRequest, embeddings_answer, plan_embeddings
from api.openai.replies import whole_body
from api.openai.responses.body import ResponseRequest
from api.openai.responses.planning import plan_response
from api.openai.responses.writer import ResponseWriter
from api.ring.ring import Ring
from shared.errors import (
    InvalidRequestError,
    ParallmError,
    PayloadTooLargeError,
    UnsupportedParameterError,
    from_code,
)
from shared.jobs import JobInput, JobState, LineRequest
from shared.process.api_settings import ApiSettings
from shared.redis.files.batch_store import BatchError
from shared.text.codec import TextCodec
from shared.trajectories import Trajectory, event_of

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
M = TypeVar("M", bound=BaseModel)
Named = tuple[Any, Any, Any]  # model, adapter, policy as a line names them

_CUT = frozenset({"cancelled", "abort", "deadline"})  # how a choice ends that is no answer
_ANY_TURN = {"role": "user", "content": "-"}  # the turns of an answered message are not stored with its tokens
_MARK = b"\xef\xbb\xbf"  # some editors write it before the first line
_encode = msgspec.json.encode


class BatchLine(NamedTuple):
    """One line of an input file."""

    custom_id: str
    url: str
    body: dict[str, Any]  # empty when it is refused unread
    refused: ParallmError | None = None
    size: int = 0  # bytes of the body


class _Shape(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


# What a line needs -> how its JSON begins, in words.
_FIELDS = {
    "custom_id": (b'"', "a string"),
    "method": (b'"', "a string"),
    "url": (b'"', "a string"),
    "body": (b"{", "an object"),
}
_shape_decoder = msgspec.json.Decoder(_Shape)
_body_decoder = msgspec.json.Decoder(dict[str, Any])
_result_decoder = msgspec.json.Decoder(Trajectory)


def read_line(number: int, raw: bytes, endpoint: str, settings: ApiSettings) -> BatchLine | list[BatchError]:
    """A line, or all that is wrong with its shape. A body that no request may have is not read: its line is refused."""
    try:
        line = _shape_decoder.decode(raw.removeprefix(_MARK) if number == 1 else raw)
        refused = too_much(line.body, endpoint, settings)
        body = {} if refused else _body_decoder.decode(line.body)
    except msgspec.ValidationError as error:
        return _shape_errors(number, raw) or [BatchError("invalid_line", str(error), None, number)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [BatchError("invalid_json_line", "this line is not valid JSON", None, number)]
    errors = []
    if not 1 <= len(line.custom_id) <= 512:
        errors.append(BatchError("invalid_custom_id", "'custom_id' has 1 to 512 characters", "custom_id", number))
    if line.method != "POST":
        errors.append(BatchError("invalid_method", "'method' must be 'POST'", "method", number))
    if line.url != endpoint:
        message = f"'url' is {line.url[:100]!r}, and the batch's endpoint is {endpoint!r}"
        errors.append(BatchError("mismatched_endpoint", message, "url", number))
    return errors or BatchLine(line.custom_id, line.url, body, refused, len(memoryview(line.body)))


def _shape_errors(number: int, raw: bytes) -> list[BatchError]:
    """Errors of a JSON line that is no request of a batch, field by field; [] when it is no object."""
    try:
        fields = msgspec.json.decode(raw.removeprefix(_MARK), type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return []
    errors = []
    for name, (start, kind) in _FIELDS.items():
        if name not in fields:
            errors.append(BatchError("missing_required_parameter", f"'{name}' is required", name, number))
        elif not bytes(fields[name]).lstrip().startswith(start):
            errors.append(BatchError("invalid_line", f"'{name}' must be {kind}", name, number))
    return errors


def too_much(body: msgspec.Raw, endpoint: str, settings: ApiSettings) -> ParallmError | None:
    """Why the endpoint would not read this body."""
    size, most = len(memoryview(body)), settings.max_request_bytes
    if endpoint in IMAGES:
        most = max(most, settings.max_image_request_bytes)
    if size > most:
        return PayloadTooLargeError(f"the body has {size} bytes, and at most {most} are read")
    try:
        if size > settings.max_request_bytes:
            check_without_images(bytes(body), settings.max_request_bytes)
        check_shape(bytes(body), settings.max_json_values)
    except (InvalidRequestError, PayloadTooLargeError) as error:
        return error
    return None


def named_by(line: BatchLine) -> Named:
    """Which model and adapter a line names."""
    body = line.body
    return body.get("model"), body.get("adapter") or body.get("lora_adapter"), body.get("adapter_policy")


async def planned(ring: Ring, line: BatchLine, named: Named, target: Target, keep: Keep) -> list[JobInput]:
    """Inputs of the job for a line, one for each choice. The first one stores how the answer is written.

    `keep` stores the bytes of its images.

    A line that its endpoint refuses becomes an input that fails with the refusal.
    """
    try:
        if line.refused is not None:
            raise line.refused
        if named_by(line) != named:
            raise InvalidRequestError("all lines of a batch name the same model and adapter", param="model")
        return await _PLANNERS[line.url](ring, line, target, keep)
    except ValidationError as error:
        refusal: ParallmError = from_validation(error.errors())
    except ParallmError as error:
        refusal = error
    shown = msgspec.json.decode(shape_of(line.url).error(refusal))
    reply = {"custom_id": line.custom_id, "status": refusal.status, "error": shown}
    return [JobInput(prompt=[], refused=refusal.message, reply={**reply, "parts": 1})]


async def _valid(model: type[M], line: BatchLine) -> M:
    return await aside(model.model_validate, line.body) if line.size > LONG_BYTES else model.model_validate(line.body)


async def _plan_chat(ring: Ring, line: BatchLine, target: Target, keep: Keep) -> list[JobInput]:
    body = await _valid(ChatCompletionRequest, line)
    _check_sampled(body, body.top_logprobs)
    prepared = await prepare_seen(ring, target.served.card, target.served.codec, body, keep=keep)
    return _planned_inputs(line, await plan(ring, body, target, prepared))


async def _plan_completion(ring: Ring, line: BatchLine, target: Target, keep: Keep) -> list[JobInput]:
    body = await _valid(CompletionRequest, line)
    _check_sampled(body, body.logprobs)
    prepared = await completions.prepare(target.served.codec, body, ring.settings)
    return _planned_inputs(line, await plan(ring, body, target, prepared))


async def _plan_embedding(ring: Ring, line: BatchLine, target: Target, keep: Keep) -> list[JobInput]:
    body = await _valid(EmbeddingRequest, line)
    sequences = await plan_embeddings(body, body.input, target, ring.settings)
    return _inputs(line, sequences, embedding=body.model_dump(exclude_none=True, exclude={"input"}))


async def _plan_response(ring: Ring, line: BatchLine, target: Target, keep: Keep) -> list[JobInput]:
    body = await _valid(ResponseRequest, line)
    _check_whole(streamed=body.stream)
    for name in ("store", "previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise UnsupportedParameterError(
                "the lines of a batch stand alone, and their answers in its file", param=name
            )
    _, planned = await plan_response(ring, body, target, keep=keep)
    asked = body.model_dump(by_alias=True, exclude_none=True, exclude={"input"})
    return _planned_inputs(line, planned, response=asked)


async def _plan_message(ring: Ring, line: BatchLine, target: Target, keep: Keep) -> list[JobInput]:
    body = await _valid(MessagesRequest, line)
    _check_whole(streamed=bool(body.stream))
    chat = await chat_of(body, target.served.codec, long=line.size > LONG_BYTES)
    planned = await plan_message(ring, body, chat, target, keep)
    asked = body.model_dump(mode="json", by_alias=True, exclude_none=True, include=SHOWN_FIELDS)
    return _planned_inputs(line, planned, message=asked)


_PLANNERS: dict[str, Callable[[Ring, BatchLine, Target, Keep], Awaitable[list[JobInput]]]] = {
    "/v1/chat/completions": _plan_chat,
    "/v1/completions": _plan_completion,
    "/v1/embeddings": _plan_embedding,
    "/v1/responses": _plan_response,
    MESSAGES: _plan_message,
}


def _check_whole(*, streamed: bool | None) -> None:
    if streamed:
        raise UnsupportedParameterError("a batch's answers are not streamed", param="stream")


def _check_sampled(body: SamplingFields, logprobs: int | None) -> None:
    """Refuse what a line cannot have."""
    _check_whole(streamed=body.stream)
    if body.deadline_s is not None:
        raise UnsupportedParameterError("a batch has its 'completion_window'", param="deadline_s")
    if body.collect_trajectory:
        raise UnsupportedParameterError("not in a batch: submit a rollout job", param="collect_trajectory")
    if WHOLE_VOCABULARY in (logprobs, body.prompt_logprobs):
        raise UnsupportedParameterError("not of the whole vocabulary in a batch", param="logprobs")


def _planned_inputs(line: BatchLine, planned: RequestPlan, **reply: Any) -> list[JobInput]:
    """The stored plan has no prompts, which the inputs have, and does not count how much of a prediction was right."""
    bare = msgspec.structs.replace(planned.for_storage(deadline_ms=0).with_prompts(()), predicted=False)
    return _inputs(line, planned.sequences, plan=msgspec.to_builtins(bare), **reply)


def _inputs(line: BatchLine, sequences: Sequences, **reply: Any) -> list[JobInput]:
    specs = sequences.specs("")
    first = {"custom_id": line.custom_id, "parts": len(specs), **reply}
    return [
        JobInput(
            prompt=spec.prompt_ids,
            request=LineRequest(
                spec.sampling, spec.kind, spec.pooling, spec.prediction_ids, spec.images, spec.image_token, spec.cache
            ),
            reply={} if at else first,
        )
        for at, spec in enumerate(specs)
    ]


class LineUsage(NamedTuple):
    """Tokens of an answered line."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class LineAnswer(NamedTuple):
    """A line of the output file, or of the error file."""

    kind: Literal["completed", "failed", "cancelled", "expired", "unended"]
    line: bytes
    usage: LineUsage = LineUsage()


def answer(
    shape: LineShape,
    name: str,
    asked: JobInput,
    stored: Sequence[bytes | None],
    ended: JobState,
    codec: TextCodec,
    model: str,
) -> LineAnswer:
    """The answer to a line out of its choices' stored results; `ended`: the job's terminal state."""
    results = [None if result is None else _result_decoder.decode(result) for result in stored]
    custom_id = asked.reply["custom_id"]
    if "error" in asked.reply:
        return LineAnswer("failed", shape.answered(name, custom_id, asked.reply["status"], asked.reply["error"]))
    found = [each for each in results if each is not None and each.finish_reason not in _CUT]
    try:
        for each in found:
            if each.finish_reason == "error":
                code, _, message = each.error.partition(": ")
                raise from_code(code, message or "the engine failed on this sequence")
        if len(found) == len(results):
            body = _body(asked, found, codec, model)
            return LineAnswer("completed", shape.answered(name, custom_id, 200, msgspec.Raw(body)), _usage(body))
    except ParallmError as error:
        return LineAnswer("failed", shape.answered(name, custom_id, error.status, msgspec.Raw(shape.error(error))))
    if any(each is not None and each.finish_reason == "deadline" for each in results):
        ended = "expired"
    kind = ended if ended in ("cancelled", "expired") else "unended"
    return LineAnswer(kind, shape.unended(name, custom_id, ended))


def _body(asked: JobInput, found: Sequence[Trajectory], codec: TextCodec, model: str) -> bytes:
    assert asked.request is not None, "an answer to a refused line"
    if "embedding" in asked.reply:
        body = EmbeddingRequest.model_validate({**asked.reply["embedding"], "input": [0]})
        vectors = [np.frombuffer(each.embedding, "<f4") for each in found]
        return _encode(embeddings_answer(body, model, [each.prompt_ids for each in found], vectors))
    plan = stored_plan(asked.reply["plan"])
    plan = plan.with_prompts([each.prompt_ids for each in found[:: plan.sequences.n]])
    with_text = bool(asked.request.sampling.stop)
    events = [event_of(plan.sequences.id_of(choice), each, with_text=with_text) for choice, each in enumerate(found)]
    if "message" in asked.reply:
        message = MessagesRequest.model_validate({**asked.reply["message"], "messages": [_ANY_TURN]})
        fills_context = asked.request.sampling.max_tokens < message.max_tokens
        return MessageWriter(message, plan, codec, fills_context=fills_context, tier="batch").whole(events)
    if "response" in asked.reply:
        respond = ResponseRequest.model_validate({**asked.reply["response"], "input": "-"})
        return ResponseWriter(respond, plan, codec).whole(events)
    return whole_body(plan, codec, events, [each.spans for each in found] if plan.weight_versions else ())


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Thought(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)
    completion_tokens_details: _Thought = msgspec.field(default_factory=_Thought)
    input_tokens: int = 0  # so responses and messages call them
    output_tokens: int = 0
    input_tokens_details: _Details = msgspec.field(default_factory=_Details)
    output_tokens_details: _Thought = msgspec.field(default_factory=_Thought)
    cache_read_input_tokens: int = 0  # of a message, whose `input_tokens` are without them


class _CountedReply(msgspec.Struct):
    """The token counts in a reply of any endpoint."""

    usage: _Usage


_counted_decoder = msgspec.json.Decoder(_CountedReply)


def _usage(body: bytes) -> LineUsage:
    used = _counted_decoder.decode(body).usage
    return LineUsage(
        used.prompt_tokens or used.input_tokens + used.cache_read_input_tokens,
        used.prompt_tokens_details.cached_tokens
        or used.input_tokens_details.cached_tokens
        or used.cache_read_input_tokens,
        used.completion_tokens or used.output_tokens,
        used.completion_tokens_details.reasoning_tokens or used.output_tokens_details.reasoning_tokens,
    )
