"""What both endpoints make of a request: the plan of the reply, and the work for the workers."""

import time
import uuid
from typing import Any

from api.generation import Work
from api.openai.choices import Endpoint, ReplyPlan
from api.openai.sampling import deadline
from api.openai.schemas import SamplingFields
from api.ring import ServedModel
from shared.sequences import SamplingParams, SequenceKind
from shared.settings import ApiSettings

_ID_PREFIX: dict[Endpoint, str] = {"chat": "chatcmpl", "completions": "cmpl"}


def reply_plan(
    body: SamplingFields,
    served: ServedModel,
    settings: ApiSettings,
    endpoint: Endpoint,
    prompts: list[list[int]],
    **shape: Any,
) -> ReplyPlan:
    """The plan under a fresh id; `shape` has what only one of the endpoints knows."""
    streamed = body.stream_options
    return ReplyPlan(
        id=f"{_ID_PREFIX[endpoint]}-{uuid.uuid4().hex}",
        endpoint=endpoint,
        created=int(time.time()),
        served=served.card.name,
        model=body.model or served.card.name,
        fingerprint=served.fingerprint,
        prompts=tuple(map(tuple, prompts)),
        n=body.n or 1,
        prompt_logprobs=body.prompt_logprobs,
        include_usage=bool(streamed and streamed.include_usage),
        event_ids=bool(streamed and streamed.include_event_ids),
        token_ids=bool(body.return_token_ids),
        name_tokens_by_id=bool(body.return_tokens_as_token_ids),
        eos_token_ids=served.card.eos_token_ids,
        show_stop_token=bool(body.include_stop_str_in_output),
        deadline_ms=deadline(settings),
        **shape,
    )


def work_for(plan: ReplyPlan, body: SamplingFields, sampling: SamplingParams, kind: SequenceKind = "generate") -> Work:
    """The sequences behind a plan's choices."""
    return Work(
        id=plan.id,
        model=plan.served,
        prompts=plan.prompts,
        sampling=sampling,
        n=plan.n,
        kind=kind,
        adapter=body.adapter or body.lora_adapter or "",
        adapter_policy=body.adapter_policy or "pin",
        deadline_ms=plan.deadline_ms,
    )
