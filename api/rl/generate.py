"""Generation for training code: POST /generate.

`policy_version` is the version of an adapter: of the one that the request names, else of the setting
`default_adapter`. 0 is the base.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from api.generation.choice import Choice, ReplyPlan, shown_versions
from api.generation.collection import collection_of
from api.generation.logprobs import floored
from api.generation.plan import encoded, reply_plan, work_for
from api.generation.running import gather_all
from api.generation.sampling import check_prompts, room_for, sampling_of, truncated
from api.generation.sampling_fields import Off, SamplingFields, StrictId
from api.generation.target import Target, find_target
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import complaint
from api.openai.completions import MAX_CHOICES
from api.openai.replies import written
from api.ring.ring import Ring, ring_of
from api.rl import generate_tokens
from shared.adapters import AdapterRef, version_id
from shared.errors import ConflictError, InvalidRequestError, UnknownAdapterError
from shared.frames import TokenEvent, VersionSpan, spans_of
from shared.text.codec import TextCodec

router = APIRouter(tags=["rl"], route_class=BodyRoute)
router.include_router(generate_tokens.router)
TheRing = Annotated[Ring, Depends(ring_of)]

Ids = list[StrictId]


class TokensPrompt(BaseModel):
    """A prompt as vLLM's simple server takes it; the answer then has that server's shape, too."""

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: Ids = Field(min_length=1)


class GenerateRequest(SamplingFields):
    """POST /generate. Exactly one of the three prompts is there."""

    off: ClassVar[Off] = {"stream": (False,), "stream_options": (), "prompt_logprobs": (), "logprob_token_ids": ()}

    prompt: str | TokensPrompt | None = Field(default=None, description="text, or vLLM's {prompt_token_ids: [...]}")
    prompts: list[str] | None = Field(default=None, min_length=1, description="several: the answer's fields are lists")
    prompt_ids: Ids | list[Ids] | None = Field(default=None, description="token ids, or a list of such prompts")
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | int | None = Field(default=None, description="the drawn tokens' log-probabilities; 0, false: none")
    policy_version: int | None = Field(default=None, ge=0, description="409 unless it exists; 0: the base")
    step_id: int | str | None = Field(default=None, description="comes back in the answer")
    request_id: str | None = Field(default=None, max_length=256, description="comes back in the answer")

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateRequest":
        if sum(given is not None for given in (self.prompt, self.prompts, self.prompt_ids)) != 1:
            raise complaint("prompt", "give exactly one of 'prompt', 'prompts' and 'prompt_ids'")
        return self

    @property
    def several(self) -> bool:
        """Whether the answer has lists."""
        nested = bool(self.prompt_ids) and isinstance((self.prompt_ids or [0])[0], list)
        return self.prompts is not None or nested or (self.n or 1) > 1

    def texts_or_ids(self) -> Sequence[str | list[int]]:
        """The prompts."""
        if isinstance(self.prompt, TokensPrompt):
            return [self.prompt.prompt_token_ids]
        if self.prompt is not None:
            return [self.prompt]
        if self.prompts is not None:
            return self.prompts
        given: list[Any] = list(self.prompt_ids or [])
        return given if given and isinstance(given[0], list) else [given]


@router.post(
    "/generate",
    summary="Generate for training",
    response_class=Response,
    responses={
        200: {"description": "Ids, text and log-probabilities; lists with one entry for each prompt and sample"},
        **error_responses(400, 404, 409, 429, 503, 504),
    },
)
async def generate(body: GenerateRequest, request: Request, ring: TheRing) -> Response:
    """Completions of one policy version: the newest of the default adapter, unless the request says otherwise."""
    began = time.perf_counter()
    target = await _policy_target(body, request, ring)
    served, settings = target.served, ring.settings
    prompts = await encoded(served.codec, body.texts_or_ids(), body.add_special_tokens is not False)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise InvalidRequestError(f"at most {MAX_CHOICES} completions a request; use /v1/jobs for more", param="n")
    prompts = [truncated(prompt, body, served.card, settings, body.max_tokens) for prompt in prompts]
    check_prompts(prompts, served.card, settings, "prompt")
    plan = reply_plan(body, target, settings, "completions", prompts)
    max_tokens = room_for(
        prompts, served.card, body.max_tokens, settings.default_max_tokens, clamp=settings.clamp_max_tokens
    )
    sampling = sampling_of(
        body,
        served.card,
        max_tokens,
        top_logprobs=None,
        prompt_logprobs=None,
        logprobs_mode=settings.logprobs_mode,
        codec=served.codec,
    )
    collect = collection_of(body, target, settings, len(prompts))
    gathered = await gather_all(ring, request, work_for(plan, target, sampling, collect=collect))
    if gathered is None:
        return Response(status_code=499)
    spans = [spans_of(events) for events in gathered]
    if isinstance(body.prompt, TokensPrompt):
        answer = await written(chain.from_iterable(gathered), partial(_vllm_answer, body, plan, served.codec, gathered))
        return Response(answer, media_type="application/json")
    name = target.admitted.name if target.admitted is not None else settings.default_adapter
    metadata = {
        "batch_size": plan.choices,
        "latency_ms": round(1000 * (time.perf_counter() - began), 2),
        "current_policy_version": await ring.adapters.latest(name),
    }
    head = {
        "request_id": body.request_id or request.state.request_id,
        "policy_version": _oldest_version(spans, target),
        "step_id": body.step_id,
    }

    def write() -> bytes:
        completions = _completions(body, plan, served.codec, gathered).items()
        fields = {field: values if body.several else values[0] for field, values in completions}
        return msgspec.json.encode({**head, **fields, "metadata": metadata})

    return Response(await written(chain.from_iterable(gathered), write), media_type="application/json")


async def _policy_target(body: GenerateRequest, request: Request, ring: Ring) -> Target:
    """The version that a request demands, else the newest of its adapter."""
    model: str | None = body.model
    adapter = body.adapter or body.lora_adapter or ""
    session, default = body.user or request.state.request_id, ring.settings.default_adapter
    policy = body.adapter_policy or "pin"
    if body.policy_version is None:
        if not adapter and model is None and await ring.adapters.latest(default):
            adapter = default
        return await find_target(ring, model, adapter, policy, session=session)
    if not adapter and model is not None and await ring.card(model) is None:
        adapter = model
        model = None
    choice = AdapterRef.parse(adapter or default).choose(session)
    version = body.policy_version
    if choice.version not in (0, version):
        raise ConflictError(f"'{choice}' is not policy version {version}", param="policy_version")
    if version == 0:
        if adapter:
            raise ConflictError(f"policy version 0 is the base, not '{adapter}'", param="policy_version")
        return await find_target(ring, model, session=session)
    try:
        return await find_target(ring, model, version_id(choice.name, version), session=session)
    except UnknownAdapterError as error:
        latest = await ring.adapters.latest(choice.name)
        raise ConflictError(
            f"policy version {version} of '{choice.name}' is not there; the latest is {latest}", param="policy_version"
        ) from error


def _completions(
    body: GenerateRequest, plan: ReplyPlan, codec: TextCodec, gathered: Sequence[list[TokenEvent]]
) -> dict[str, list[Any]]:
    """The fields of the answer that have one entry for each completion."""
    return {
        "prompt_ids": [plan.prompts[i // plan.n] for i in range(plan.choices)],
        "completion_ids": [[token for event in events for token in event.tokens] for events in gathered],
        "text": [Choice(plan, codec).take(events).text for events in gathered],
        "logprobs": [[x for event in events for x in event.logprobs] if body.logprobs else None for events in gathered],
        "finish_reason": [_finish_reason(events) for events in gathered],
        "weight_versions": [shown_versions(spans_of(events)) for events in gathered],
    }


def _vllm_answer(
    body: GenerateRequest, plan: ReplyPlan, codec: TextCodec, gathered: Sequence[list[TokenEvent]]
) -> bytes:
    """Lists with one entry a sample; log-probabilities of a token as `[{id: value}]`, which is what Atropos reads."""
    fields = _completions(body, plan, codec, gathered)
    answer = {
        "text": fields["text"],
        "prompt": codec.decode(plan.prompts[0], skip_special_tokens=False),
        "prompt_token_ids": plan.prompts[0],
        "token_ids": fields["completion_ids"],
        "finish_reasons": fields["finish_reason"],
        "weight_versions": fields["weight_versions"],
    }
    if body.logprobs is not None and body.logprobs is not False:
        answer["logprobs"] = [
            [[{token: floored(x)}] for event in events for token, x in zip(event.tokens, event.logprobs, strict=True)]
            for events in gathered
        ]
    return msgspec.json.encode(answer)


def _oldest_version(spans: Sequence[Sequence[VersionSpan]], target: Target) -> int:
    """The oldest version that any token was computed with."""
    if target.admitted is None:
        return 0
    versions = [int(span.version.rpartition("@")[2] or 0) for each in spans for span in each]
    return min(versions, default=target.admitted.version)


def _finish_reason(events: Sequence[TokenEvent]) -> str:
    finish = events[-1].finish
    assert finish is not None, "gathered before the end"
    return finish.reason
