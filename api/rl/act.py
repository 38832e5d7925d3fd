"""POST /v1/rl/act: a batch of observations in, an action for each out, for loops of reinforcement learning.

With `actions` the action space is discrete: the policy is the model's own distribution over those texts, and the
action's log-probability is exact under it. Without, an action is the text that the model writes.
"""

import asyncio
import math
import random
import secrets
import uuid
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.choice import ends_with_stop_token, shown_versions
from api.generation.continuations import check_pairs, log_probabilities
from api.generation.heads import heads_of, read_by_head
from api.generation.plan import check_prompts, encoded, plain_work, room_for
from api.generation.running import gather_all
from api.generation.sampling import StrictId
from api.generation.target import Target, TargetFields, target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import Off, complaint
from api.openai.bodies import ChatMessage
from api.openai.conversations import template_messages
from api.ring.ring import Ring, TheRing
from api.ring.room import aside
from shared.frames import spans_of
from shared.heads import VALUE
from shared.rewards.model_kinds import softmax
from shared.sequences import LogprobsMode, SamplingParams
from shared.text.codec import TextCodec
from shared.token_events import join

router = APIRouter(tags=["rl"], route_class=BodyRoute)

Observation = str | list[StrictId] | list[ChatMessage]


class PolicyFields(TargetFields):
    """A target that may be called `model_id`, too."""

    model_id: str | None = Field(default=None, description="the same as `model`")

    @model_validator(mode="after")
    def _one_model(self) -> "PolicyFields":
        if self.model and self.model_id and self.model != self.model_id:
            raise complaint("model_id", "'model' and 'model_id' name different models")
        self.model = self.model or self.model_id
        return self


class ActRequest(PolicyFields):
    """POST /v1/rl/act."""

    off: ClassVar[Off] = {"hidden_states": ()}

    observations: list[Observation] = Field(min_length=1, max_length=1024, description="texts, token ids, or chats")
    actions: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=1, max_length=256, description="the action space; without it an action is free text"
    )
    deterministic: bool | None = Field(default=False, description="the most likely action instead of a drawn one")
    temperature: float | None = Field(default=1.0, gt=0, le=10)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1, description="of an action that is free text")
    logprobs_mode: LogprobsMode | None = Field(
        default=None, description="of free text: raw or processed; default: the server's setting"
    )

    @model_validator(mode="after")
    def _possible(self) -> "ActRequest":
        if self.actions is not None and self.max_tokens is not None:
            raise complaint("max_tokens", "'max_tokens' is a matter of free text, not of given 'actions'")
        return self


@router.post(
    "/v1/rl/act",
    summary="Act on a batch of observations",
    responses=error_responses(ok="An action for each observation, with its log-probability and the policy's version"),
)
async def act(body: ActRequest, request: Request, ring: TheRing) -> Response:
    """`value_estimates` are those of the head `value`, null without one; a language model has no hidden states."""
    target = await target_of(ring, body, request)
    if body.actions is not None:
        check_pairs(len(body.observations), len(body.actions), "observations")
    prompts = await _prompts(target.served.codec, body.observations)
    seed = secrets.randbits(62) if body.seed is None else body.seed
    choose = _choose if body.actions is not None else _write
    values = asyncio.create_task(_values(ring, target, prompts))
    try:
        chosen = await choose(body, ring, target, prompts, seed)
        estimates = await values
    finally:
        values.cancel()
        await asyncio.gather(values, return_exceptions=True)
    return json_reply(
        {
            "id": f"act-{uuid.uuid4().hex}",
            "object": "rl.act",
            "model": body.model or target.served.card.name,
            "policy_version": target.admitted.id if target.admitted is not None else "",
            **chosen,
            "value_estimates": estimates,
            "new_hidden_states": None,
            "seed": seed,
        }
    )


async def _prompts(codec: TextCodec, observations: list[Observation]) -> list[list[int]]:
    """Prompts of texts, chats and ids; chats, of which there may be many, are rendered beside the event loop."""
    if any(isinstance(observation, list) for observation in observations):
        return await aside(lambda: [_prompt(codec, each) for each in observations])
    return await encoded(codec, [each for each in observations if isinstance(each, str)])


def _prompt(codec: TextCodec, observation: Observation) -> list[int]:
    if isinstance(observation, str):
        return codec.encode(observation)
    messages = [each for each in observation if isinstance(each, ChatMessage)]
    if messages:
        return codec.encode_chat(template_messages(messages))
    return [each for each in observation if isinstance(each, int)]


async def _values(ring: Ring, target: Target, prompts: list[list[int]]) -> list[float] | None:
    """What the policy's value head says of each observation; None when it has none."""
    spec = heads_of(target).get(VALUE)
    if spec is None or spec.kind != "scalar":
        return None
    check_prompts(prompts, target.served.card, ring.settings, "observations")
    return [float(outputs[0]) for outputs in await read_by_head(ring, target, VALUE, prompts)]


async def _choose(body: ActRequest, ring: Ring, target: Target, prompts: list[list[int]], seed: int) -> dict[str, Any]:
    """Actions of a discrete space."""
    names = body.actions or []
    space = await encoded(target.served.codec, names, add_special_tokens=False)
    scores = await log_probabilities(ring, target, prompts, space, "observations")
    policies = [softmax(each, body.temperature or 1.0) for each in scores]
    if body.deterministic:
        chosen = [max(range(len(names)), key=chances.__getitem__) for chances in policies]
    else:
        drawn = random.Random(seed)
        chosen = [drawn.choices(range(len(names)), chances)[0] for chances in policies]
    return {
        "actions": [names[at] for at in chosen],
        "action_indices": chosen,
        "action_log_probs": [math.log(max(policy[at], 5e-324)) for policy, at in zip(policies, chosen, strict=True)],
        "action_probs": policies,
    }


async def _write(body: ActRequest, ring: Ring, target: Target, prompts: list[list[int]], seed: int) -> dict[str, Any]:
    """Actions that are free text."""
    card, codec, settings = target.served.card, target.served.codec, ring.settings
    check_prompts(prompts, card, settings, "observations")
    sampling = SamplingParams(
        max_tokens=room_for(
            prompts, card, body.max_tokens, settings.default_max_tokens, clamp=settings.clamp_max_tokens
        ),
        seed=seed,
        temperature=0.0 if body.deterministic else body.temperature or 1.0,
        logprobs_mode=body.logprobs_mode or settings.logprobs_mode,
    )
    work = plain_work("act", target, settings, prompts, sampling, seed_by_prompt=True)
    shown: dict[str, list[Any]] = {
        "actions": [], "action_log_probs": [], "action_token_ids": [], "action_token_log_probs": [],
        "finish_reasons": [], "weight_versions": [],
    }  # fmt: skip
    for events in await gather_all(ring, work):
        whole = join(events)
        tokens, logprobs, finish = whole.tokens, whole.logprobs, whole.finish
        assert finish is not None, "gathered before the end"
        text = tokens[:-1] if ends_with_stop_token(tokens, finish, card.eos_token_ids) else tokens
        shown["actions"].append(codec.decode(text))
        shown["action_log_probs"].append(sum(logprobs))
        shown["action_token_ids"].append(tokens)
        shown["action_token_log_probs"].append(logprobs)
        shown["finish_reasons"].append(finish.reason)
        shown["weight_versions"].append(shown_versions(spans_of(events)))
    return shown
