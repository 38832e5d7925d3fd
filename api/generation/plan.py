"""What both endpoints make of a request: the plan of the reply, and the work for the workers."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from fastapi import Request

from api.generation.choice import Endpoint, ReplyPlan
from api.generation.sampling import (
    check_whole_logprobs,
    deadline,
    top_of,
)
from api.generation.sampling_fields import SamplingFields
from api.generation.target import Target, find_target
from api.generation.work import Work
from api.ring.ring import Ring
from api.ring.room import LARGE_CHARS, aside
from shared.errors import InvalidGrammarError, InvalidRequestError
from shared.process.settings import ApiSettings
from shared.sequences import AdapterPolicy, Collection, SamplingParams, SequenceKind
from shared.text.codec import TextCodec

CHARS_OF_A_CALL = 64  # that are tokenized in the time that it takes to begin

_ID_PREFIX: dict[Endpoint, str] = {"chat": "chatcmpl", "completions": "cmpl"}


class TargetFields(Protocol):
    """What says which model and adapter a request wants."""

    @property
    def model(self) -> str | None:
        """A model or an adapter."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def lora_adapter(self) -> str | None:
        """The same."""

    @property
    def adapter_policy(self) -> AdapterPolicy | None:
        """Whether it stays with its version."""

    @property
    def user(self) -> str | None: ...


async def target_of(body: TargetFields, request: Request, ring: Ring) -> Target:
    """Model and adapter of a request, pinned unless it says otherwise."""
    return await find_target(
        ring,
        body.model,
        body.adapter or body.lora_adapter or "",
        body.adapter_policy or "pin",
        session=body.user or request.state.request_id,
    )


async def with_grammar(ring: Ring, work: Work, target: Target, param: str) -> Work:
    """The work with its grammar as workers take it; InvalidGrammarError that names `param` when they could not."""
    sampling = work.sampling
    if not sampling.grammar:
        return work
    try:
        text = await ring.grammars.checked(sampling.grammar, target.served.card, target.served.codec)
    except InvalidGrammarError as error:
        error.param = param
        raise
    return msgspec.structs.replace(work, sampling=msgspec.structs.replace(sampling, grammar=text))


def reply_plan(
    body: SamplingFields,
    target: Target,
    settings: ApiSettings,
    endpoint: Endpoint,
    prompts: list[list[int]],
    **shape: Any,
) -> ReplyPlan:
    """The plan under a fresh id; `shape` has what only one of the endpoints knows."""
    streamed, served = body.stream_options, target.served
    return ReplyPlan(
        id=f"{_ID_PREFIX[endpoint]}-{uuid.uuid4().hex}",
        endpoint=endpoint,
        created=int(time.time()),
        served=served.card.name,
        model=body.model or served.card.name,
        fingerprint=target.fingerprint,
        prompts=tuple(map(tuple, prompts)),
        n=body.n or 1,
        prompt_logprobs=top_of(body.prompt_logprobs, served.card),
        include_usage=bool(streamed and streamed.include_usage),
        usage_so_far=bool(streamed and streamed.include_usage and streamed.continuous_usage_stats),
        event_ids=bool(streamed and streamed.include_event_ids),
        token_ids=bool(body.return_token_ids),
        weight_versions=bool(body.return_weight_versions),
        name_tokens_by_id=bool(body.return_tokens_as_token_ids),
        eos_token_ids=served.card.eos_token_ids,
        show_stop_token=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        name=body.request_id or "",
        deadline_ms=deadline(settings, body.deadline_s),
        **shape,
    )


def work_for(
    plan: ReplyPlan,
    target: Target,
    sampling: SamplingParams,
    kind: SequenceKind = "generate",
    collect: Collection | None = None,
) -> Work:
    """The sequences behind a plan's choices."""
    if collect is not None and kind == "score":
        raise InvalidRequestError("a trajectory needs generated tokens: 'max_tokens' 0 has none", param="max_tokens")
    check_whole_logprobs(sampling, plan.prompts, plan.n, target.served.card)
    return Work(
        id=plan.id,
        model=plan.served,
        prompts=plan.prompts,
        sampling=sampling,
        n=plan.n,
        kind=kind,
        chat=plan.endpoint == "chat",
        adapter=target.adapter,
        adapter_policy=target.policy,
        deadline_ms=plan.deadline_ms,
        collect=collect,
        name=plan.name,
    )


async def encoded(
    codec: TextCodec, prompts: Sequence[str | list[int]], add_special_tokens: bool = True
) -> list[list[int]]:
    """Ids of prompts; beside the event loop when they are long together, or many."""
    if sum(CHARS_OF_A_CALL + len(each) for each in prompts if isinstance(each, str)) > LARGE_CHARS:
        return await aside(_encode, codec, prompts, add_special_tokens)
    return _encode(codec, prompts, add_special_tokens)


def _encode(codec: TextCodec, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
    return [codec.encode(each, add_special_tokens) if isinstance(each, str) else each for each in prompts]
