"""Tokens in, tokens out: vLLM's POST /inference/v1/generate, whole or as a stream of new tokens.

No text is made. A log-probability names its token both `token_id:<id>` and by the integer. A stream has one chunk for
each choice and decode step, `{"request_id", "choices", "usage"?}`, and ends with `data: [DONE]`.
"""

from collections.abc import AsyncGenerator
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.choice import DONE, RequestPlan, shown_versions, with_drawn
from api.generation.logprobs import TokenNames, floored, in_parts
from api.generation.plan import PreparedRequest, plan
from api.generation.running import Generation, by_choice, gather_all
from api.generation.sampling import WHOLE_VOCABULARY, SamplingFields, StrictId, TopLogprobs
from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_object, error_responses
from api.http.fields import Off, RequestModel, complaint
from api.http.sse import EventStream
from api.openai.replies import stream_failure, written
from api.ring.ring import TheRing
from shared.frames import TokenEvent, spans_of
from shared.text.codec import TextCodec
from shared.token_events import join

router = APIRouter(tags=["rl"], route_class=BodyRoute)

Ids = list[StrictId]


class TokenSampling(SamplingFields):
    """vLLM's `SamplingParams` inside the body of a request."""

    off: ClassVar[Off] = {
        "stream": (False,),
        "stream_options": (),
        "detokenize": (True, False),
        "output_kind": (0, 1, 2),
        "skip_special_tokens": (True, False),
        "request_id": (),
        "spaces_between_special_tokens": (True, False),
        "flat_logprobs": (False,),
        "best_of": (1,),
        "structured_outputs": (),
        "guided_decoding": (),
        "logits_processors": (),
        "extra_args": (),
    }

    max_tokens: int | None = Field(default=None, ge=1, description="default: up to the end of the context")
    logprobs: TopLogprobs | None = Field(default=None, description="-1: the whole vocabulary")


class TokenStreamOptions(RequestModel):
    """Options of a stream under vLLM's names."""

    include_usage: bool = Field(default=False, description="a last chunk with the counts")
    continuous_usage_stats: bool = Field(default=False, description="the counts so far with every chunk")


class TokenRequest(RequestModel):
    """Request body of POST /inference/v1/generate."""

    off: ClassVar[Off] = {
        "features": (),
        "output_mode": ("tokens",),
        "priority": (0,),
        "kv_transfer_params": (),
    }

    token_ids: Ids | None = None
    prompt_token_ids: Ids | None = Field(default=None, description="the same as `token_ids`")
    sampling_params: TokenSampling = Field(default_factory=lambda: TokenSampling.model_validate({}))
    model: str | None = None
    request_id: str | None = Field(default=None, max_length=256)
    stream: bool = Field(default=False, description="server-sent events with the new tokens of each choice")
    stream_options: TokenStreamOptions | None = None
    cache_salt: str | None = Field(default=None, description="accepted, not used")

    @model_validator(mode="after")
    def _one_prompt(self) -> "TokenRequest":
        if (self.token_ids is None) == (self.prompt_token_ids is None):
            raise complaint("token_ids", "give exactly one of 'token_ids' and 'prompt_token_ids'")
        if self.sampling_params.model not in (None, self.model):
            raise complaint("model", "'model' and 'sampling_params.model' differ")
        if self.stream_options is not None and not self.stream:
            raise complaint("stream_options", "'stream_options' needs 'stream': true")
        if self.sampling_params.logprob_token_ids and self.sampling_params.logprobs is None:
            raise complaint("sampling_params.logprob_token_ids", "'logprob_token_ids' needs 'logprobs'")
        if self.stream and self.sampling_params.logprobs == WHOLE_VOCABULARY:
            raise complaint("sampling_params.logprobs", "the whole vocabulary's do not go with 'stream'")
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            raise complaint("sampling_params.prompt_logprobs", "'prompt_logprobs' does not go with 'stream'")
        own = {"model": self.model, "request_id": self.request_id}
        self.sampling_params = self.sampling_params.model_copy(update=own)
        return self


@router.post(
    "/inference/v1/generate",
    summary="Tokens in, tokens out (vLLM)",
    response_class=Response,
    responses=error_responses(
        400, 404, 429, 503, 504, ok="Choices with token ids, log-probabilities and weight versions; or a stream of them"
    ),
)
async def generate_tokens(body: TokenRequest, request: Request, ring: TheRing) -> Response:
    """Completions of token ids, without any text."""
    sampling = body.sampling_params
    target = await target_of(ring, sampling, request)
    ring = target.ring
    served = target.served
    prepared = PreparedRequest(
        prompts=[list(body.token_ids if body.token_ids is not None else body.prompt_token_ids or [])],
        max_tokens=sampling.max_tokens,
        default_tokens=served.card.context_length,
        prompt_param="token_ids",
        logprobs=sampling.logprobs,
    )
    reply = await plan(ring, sampling, target, prepared)
    request_id = body.request_id or request.state.request_id
    if body.stream:
        return EventStream(_chunks(await Generation.start(ring, reply.sequences), body, reply, request_id))
    gathered = await gather_all(ring, reply.sequences)
    head = {
        "request_id": request_id,
        "model": body.model or served.card.name,
        "system_fingerprint": reply.fingerprint,
    }
    answer = await written(chain.from_iterable(gathered), partial(_whole, head, reply, served.codec, gathered))
    return Response(answer, media_type="application/json")


def _whole(head: dict[str, Any], reply: RequestPlan, codec: TextCodec, gathered: list[list[TokenEvent]]) -> bytes:
    answer = {
        **head,
        "choices": in_parts(_token_choice(i, events, reply) for i, events in enumerate(gathered)),
        "prompt_logprobs": None
        if reply.prompt_logprobs is None
        else _prompt_logprobs(codec, list(reply.sequences.prompts[0]), gathered[0], reply.prompt_logprobs),
        "kv_transfer_params": None,
    }
    return msgspec.json.encode(answer)


async def _chunks(
    generation: Generation, body: TokenRequest, reply: RequestPlan, request_id: str
) -> AsyncGenerator[bytes, None]:
    """All bytes of a stream, to [DONE], which comes after an error, too."""
    options = body.stream_options or TokenStreamOptions()
    prompt, tokens = len(reply.sequences.prompts[0]), [0] * len(reply.sequences)
    try:
        async for batch in generation.batches():
            out = generation.comment
            for index, events in by_choice(batch):
                choice = _token_choice(index, events, reply)
                tokens[index] += len(choice["token_ids"])
                chunk: dict[str, Any] = {"request_id": request_id, "choices": [choice]}
                if options.continuous_usage_stats:
                    chunk["usage"] = _usage(prompt, tokens[index])
                if choice["token_ids"] or choice["finish_reason"]:
                    out += _event(chunk)
            if out:
                yield out
        last = {"request_id": request_id, "choices": [], "usage": _usage(prompt, sum(tokens))}
        yield (_event(last) if options.include_usage else b"") + DONE
    except Exception as error:
        yield b"data: %s\n\n%s" % (error_object(stream_failure(error, reply.id)), DONE)
    finally:
        generation.close()


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(chunk)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _token_choice(index: int, events: list[TokenEvent], reply: RequestPlan) -> dict[str, Any]:
    """A choice, or what is new of it."""
    finish = events[-1].finish
    choice: dict[str, Any] = {
        "index": index,
        "token_ids": [token for event in events for token in event.tokens],
        "logprobs": None,
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": None if finish is None else finish.stop_match,
        "weight_versions": shown_versions(spans_of(events)),
    }
    if reply.logprobs is not None:
        named = (shown for event in events for shown in _token_logprobs(event, reply.names_tokens))
        choice["logprobs"] = {"content": in_parts(named)}
    return choice


def _token_logprobs(event: TokenEvent, names_tokens: bool) -> list[dict[str, Any]]:
    """With `logprobs` 0 the drawn token stands alone under `top_logprobs`, as in vLLM."""
    tops = with_drawn(event) if names_tokens or not event.top_logprobs else event.top_logprobs
    return [
        {**_named(token, logprob), "top_logprobs": [_named(each.token, each.logprob) for each in top]}
        for token, logprob, top in zip(event.tokens, event.logprobs, tops, strict=True)
    ]


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": floored(logprob), "bytes": None}


def _prompt_logprobs(codec: TextCodec, prompt: list[int], events: list[TokenEvent], count: int) -> Any:
    event = join(events)
    logprobs = event.prompt_logprobs or [None] * len(prompt)
    return in_parts(TokenNames(codec, by_id=True).of_prompt(prompt, logprobs, event.prompt_top_logprobs, count))
