"""Generation for training code: POST /generate.

`policy_version` is the version of an adapter: of the one that the request names, else of the setting
`default_adapter`. 0 is the base.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from api.generation.choice import Choice, RequestPlan, shown_versions
from api.generation.logprobs import floored
from api.generation.plan import PreparedRequest, encoded, plan
from api.generation.running import gather_all
from api.generation.sampling import SamplingFields, StrictId
from api.generation.target import Target, find_target, meant
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import Off, complaint
from api.openai.replies import written
from api.ring.choosing import ring_for
from api.ring.ring import Ring, TheRing
from api.rl import generate_tokens
from shared.adapters import AdapterRef, version_id
from shared.errors import ConflictError, UnknownAdapterError
from shared.frames import TokenEvent, VersionSpan, spans_of
from shared.text.codec import TextCodec
from shared.token_events import join

router = APIRouter(tags=["rl"], route_class=BodyRoute)
router.include_router(generate_tokens.router)

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
        """True if the answer's fields are lists."""
        nested = bool(self.prompt_ids) and isinstance((self.prompt_ids or [0])[0], list)
        return self.prompts is not None or nested or (self.n or 1) > 1

    def texts_or_ids(self) -> Sequence[str | list[int]]:
        """The prompts, whichever field has them."""
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
    ring = target.ring
    codec, settings = target.served.codec, ring.settings
    prepared = PreparedRequest(
        prompts=await encoded(codec, body.texts_or_ids(), body.add_special_tokens is not False),
        max_tokens=body.max_tokens,
        default_tokens=settings.default_max_tokens,
    )
    reply = await plan(ring, body, target, prepared)
    gathered = await gather_all(ring, reply.sequences)
    if isinstance(body.prompt, TokensPrompt):
        answer = await written(chain.from_iterable(gathered), partial(_vllm_answer, body, reply, codec, gathered))
        return Response(answer, media_type="application/json")
    name = target.admitted.name if target.admitted is not None else settings.default_adapter
    metadata = {
        "batch_size": len(reply.sequences),
        "latency_ms": round(1000 * (time.perf_counter() - began), 2),
        "current_policy_version": await ring.adapters.latest(name),
    }

    def write() -> bytes:
        completions = _completions(body, reply, codec, gathered).items()
        answer = {
            "request_id": body.request_id or request.state.request_id,
            "policy_version": _oldest_version([spans_of(events) for events in gathered], target),
            "step_id": body.step_id,
            **{field: values if body.several else values[0] for field, values in completions},
            "metadata": metadata,
        }
        return msgspec.json.encode(answer)

    return Response(await written(chain.from_iterable(gathered), write), media_type="application/json")


async def _policy_target(body: GenerateRequest, request: Request, ring: Ring) -> Target:
    """The version that a request demands, else the newest of its adapter."""
    adapter = body.adapter or body.lora_adapter or ""
    if body.model or adapter:
        ring, model, adapter = await ring_for(ring, body.model, adapter)
    else:
        model = None
    model = await meant(ring, model)
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
    body: GenerateRequest, reply: RequestPlan, codec: TextCodec, gathered: Sequence[list[TokenEvent]]
) -> dict[str, list[Any]]:
    """The fields of the answer that have one entry for each completion."""
    joined = [join(events) for events in gathered]
    return {
        "prompt_ids": [reply.sequences.prompt_of(i) for i in range(len(reply.sequences))],
        "completion_ids": [event.tokens for event in joined],
        "text": [Choice(reply, codec).take([event]).text for event in joined],
        "logprobs": [event.logprobs if body.logprobs else None for event in joined],
        "finish_reason": [event.finish and event.finish.reason for event in joined],
        "weight_versions": [shown_versions(spans_of(events)) for events in gathered],
    }


def _vllm_answer(
    body: GenerateRequest,
    reply: RequestPlan,
    codec: TextCodec,
    gathered: Sequence[list[TokenEvent]],
) -> bytes:
    """Lists with one entry a sample; log-probabilities of a token as `[{id: value}]`, which is what Atropos reads."""
    completions = _completions(body, reply, codec, gathered)
    answer = {
        "text": completions["text"],
        "prompt": codec.decode(reply.sequences.prompts[0], skip_special_tokens=False),
        "prompt_token_ids": reply.sequences.prompts[0],
        "token_ids": completions["completion_ids"],
        "finish_reasons": completions["finish_reason"],
        "weight_versions": completions["weight_versions"],
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
