"""POST /v1/rl/act: a batch of observations in, an action for each out, for loops of reinforcement learning.

Of a language model: with `actions` the action space is discrete: the policy is the model's own distribution over those
texts, and the action's log-probability is exact under it. Without, a head of the version acts, where it has one for
that; else an action is the text that the model writes. Of a network: observations are numbers, and its outputs say what
an action is (policies.py).
"""

import asyncio
import math
import random
import secrets
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field, ValidationError, model_validator
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.generation.choice import ends_with_stop_token, shown_versions
from api.generation.continuations import check_pairs, log_probabilities
from api.generation.heads import heads_of, read_by_head
from api.generation.networks import Format, answer, described, first_stray, manifest_of, question, shown
from api.generation.plan import check_prompts, encoded, plain_sequences, room_for
from api.generation.running import gather_all
from api.generation.sampling import StrictId
from api.generation.target import Target, TargetFields, target_of
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import error_responses, from_validation, json_reply
from api.http.fields import RequestModel, complaint
from api.openai.bodies import ChatMessage
from api.openai.conversations import template_messages
from api.openai.embeddings import LARGE_VECTOR_BYTES, vectors_reply
from api.ring.ring import Ring, TheRing
from api.rl.policies import act_by, check_own_spread, check_policy, outputs_of
from api.rl.sessions import move_on, session_of
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.frames import spans_of
from shared.heads import VALUE, choose_policy
from shared.networks.spec import NetworkSpec
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


class LanguageAct(RequestModel):
    """Fields of ActRequest as a language model takes them."""

    observations: list[Observation] = Field(min_length=1, max_length=1024)


class ActRequest(PolicyFields):
    """Request body of POST /v1/rl/act."""

    observations: list[Any] | dict[str, Any] = Field(
        min_length=1,
        max_length=1024,
        description="of a language model texts, token ids, or chats; of a network numbers, a row for each observation, "
        "by name where it has several inputs",
    )
    hidden_states: dict[str, Any] | None = Field(
        default=None, description="a recurrent network's `new_hidden_states` of the step before; without: zeros"
    )
    session_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="the server keeps a recurrent network's state from one request to the next, under this id of yours",
    )
    reset: bool | None = Field(default=None, description="the session begins here, or begins anew: with zeros")
    session_step: int | None = Field(
        default=None, ge=1, description="409 unless the session has made so many steps: a retry makes none twice"
    )
    encoding_format: Format | None = Field(
        default=None, description="of `new_hidden_states`: float, the default, or base64"
    )
    actions: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="the action space, or names of a network's; without: free text, or a number",
    )
    head: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="the head of a language model's version that acts; default: the one called policy, if it has one "
        "and neither 'actions' nor 'max_tokens' is given",
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
        for name in ("actions", "max_tokens", "logprobs_mode"):
            if self.head is not None and getattr(self, name) is not None:
                raise complaint("head", f"the actions of a 'head' are its own: leave out '{name}'")
        if self.session_id is None and (self.reset is not None or self.session_step is not None):
            raise complaint("session_id", "'reset' and 'session_step' are a session's: give 'session_id'")
        if self.session_id is not None and self.hidden_states is not None:
            raise complaint("hidden_states", "the state travels with the request, or is stored under 'session_id'")
        if self.reset and self.session_step is not None:
            raise complaint("session_step", "a session that begins has made no steps")
        return self

    @property
    def session(self) -> str:
        """A session whose state is kept stays with a version of a split, as one of `user` does."""
        return self.user or self.session_id or ""

    def texts(self) -> list[Observation]:
        """Observations for a language model; InvalidRequestError if they are no texts."""
        for name in ("hidden_states", "session_id", "encoding_format"):
            if getattr(self, name) is not None:
                raise UnsupportedParameterError(f"a language model has no '{name}'", param=name)
        try:
            return LanguageAct.model_validate({"observations": self.observations}).observations
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)) from None


@router.post("/v1/rl/rollout", summary="Act on a batch of observations (another name)", responses=error_responses())
@router.post(
    "/v1/rl/act",
    summary="Act on a batch of observations",
    responses=error_responses(
        400,
        404,
        409,
        413,
        429,
        503,
        504,
        ok="An action for each observation, with its log-probability and the policy's version",
    ),
)
async def act(body: ActRequest, request: Request, ring: TheRing) -> Response:
    """`value_estimates` are those of the head or output `value`, null without one; a language model has no state."""
    target = await target_of(ring, body, request, networks=True)
    ring = target.ring
    seed = secrets.randbits(62) if body.seed is None else body.seed
    if target.network is not None:
        return await _by_network(body, request, ring, target, target.network, seed)
    long = len(await request.body()) > LONG_BYTES
    observations = await aside(body.texts) if long else body.texts()
    if body.actions is not None:
        check_pairs(len(observations), len(body.actions), "observations")
    prompts = await _prompts(target.served.codec, observations)
    choose = _choose if body.actions is not None else _by_head if _acting_head(body, target) else _write
    values = asyncio.create_task(_values(ring, target, prompts))
    try:
        chosen = await choose(body, ring, target, prompts, seed)
        estimates = await values
    finally:
        values.cancel()
        await asyncio.gather(values, return_exceptions=True)
    return json_reply(_answer(body, target, seed, {**chosen, "value_estimates": estimates}))


def _answer(
    body: ActRequest, target: Target, seed: int, chosen: dict[str, Any], state: dict[str, Any] | None = None
) -> dict[str, Any]:
    own = manifest_of(target).name if target.network is not None else target.served.card.name
    return {
        "id": f"act-{uuid.uuid4().hex}",
        "object": "rl.act",
        "model": body.model or own,
        "policy_version": target.admitted.id if target.admitted is not None else "",
        **chosen,
        "new_hidden_states": state,
        "seed": seed,
    }


async def _by_network(
    body: ActRequest, request: Request, ring: Ring, target: Target, network: NetworkSpec, seed: int
) -> Response:
    """Actions of a network, whose state travels with the request or is kept under a session's id."""
    for name in ("max_tokens", "logprobs_mode", "head"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(f"'{name}' is a matter of language models", param=name)
    check_policy(manifest_of(target).id, network, body.actions, body.temperature)
    session, state = None, body.hidden_states or {}
    if body.session_id is not None:
        session, state = await session_of(
            ring, body.session_id, manifest_of(target), reset=bool(body.reset), step=body.session_step
        )
    try:
        asked = await question(request, network, _given(body, network, state), "observations")
    except InvalidRequestError as error:
        error.param = _to_blame(body, network, error.param or "")
        raise
    outputs = await answer(ring, target, "act", asked)
    choose = partial(
        act_by,
        outputs,
        body.actions,
        seed=seed,
        deterministic=bool(body.deterministic),
        temperature=body.temperature or 1.0,
    )
    large = sum(each.nbytes for each in outputs.values()) > LARGE_VECTOR_BYTES
    chosen = await aside(choose) if large else choose()
    step = None
    if session is not None and body.session_id is not None:
        step = await move_on(ring, body.session_id, session, network, outputs)

    def write() -> dict[str, Any]:
        form = body.encoding_format or "float"
        shape = described if form == "base64" else shown
        state = {name: shape(outputs[name], form) for name in network.state} or None
        kept = {} if step is None else {"session_id": body.session_id, "session_step": step}
        return {**_answer(body, target, seed, chosen, state), **kept}

    return await vectors_reply(list(outputs.values()), write)


def _given(body: ActRequest, network: NetworkSpec, state: Mapping[str, Any]) -> dict[str, Any]:
    """Named tensors: observations, and the state."""
    given = body.observations
    if isinstance(given, list):
        if len(network.inputs) > 1:
            raise InvalidRequestError(
                f"this network observes {', '.join(network.inputs)}: give 'observations' by these names",
                param="observations",
            )
        given = {next(iter(network.inputs)): given}
    if stray := sorted(given.keys() & network.state.keys()):
        raise InvalidRequestError(f"{stray[0]!r} belongs to 'hidden_states'", param="observations")
    if (stray_state := first_stray(state, network.state)) is not None:
        known = ", ".join(network.state) or "none"
        raise InvalidRequestError(f"no state {stray_state[:80]!r}; the network has {known}", param="hidden_states")
    if state and (missing := sorted(network.state.keys() - state.keys())):
        raise InvalidRequestError(f"{missing[0]!r} is missing: give all of the state, or none", param="hidden_states")
    return {**given, **state}


def _to_blame(body: ActRequest, network: NetworkSpec, param: str) -> str:
    """The field of the request that a named tensor came in."""
    name = param.removeprefix("observations.")
    if name in network.state:
        return f"hidden_states.{name}" if body.session_id is None else "session_id"
    return "observations" if isinstance(body.observations, list) and name in network.inputs else param


async def _prompts(codec: TextCodec, observations: list[Observation]) -> list[list[int]]:
    """Prompts of texts, chats and ids; chats, of which there may be many, are rendered off the event loop."""
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
    """Outputs of the policy's value head for each observation; None when it has none."""
    spec = heads_of(target).get(VALUE)
    if spec is None or spec.kind != "scalar":
        return None
    check_prompts(prompts, target.served.card, ring.settings, "observations")
    return [float(outputs[0]) for outputs in await read_by_head(ring, target, VALUE, prompts)]


def _acting_head(body: ActRequest, target: Target) -> str:
    """The head that acts; "" when none does; InvalidRequestError when one is named that gives no actions."""
    if body.head is None and any(each is not None for each in (body.actions, body.max_tokens, body.logprobs_mode)):
        return ""
    name = choose_policy(heads_of(target), body.head or "")
    if body.head is not None and not name:
        id = target.served.card.name if target.admitted is None else target.admitted.id
        raise InvalidRequestError(f"{id} has no head {body.head!r} of kind 'categorical' or 'gaussian'", param="head")
    return name


async def _by_head(body: ActRequest, ring: Ring, target: Target, prompts: list[list[int]], seed: int) -> dict[str, Any]:
    """Actions of a head on the hidden state after each observation."""
    name = _acting_head(body, target)
    spec = heads_of(target)[name]
    if spec.kind == "gaussian":
        check_own_spread(f"head {name!r}", body.temperature)
    check_pairs(len(prompts), spec.outputs, "observations")
    check_prompts(prompts, target.served.card, ring.settings, "observations")
    rows = np.stack(await read_by_head(ring, target, name, prompts))
    return act_by(
        outputs_of(spec, rows),
        spec.labels or None,
        seed=seed,
        deterministic=bool(body.deterministic),
        temperature=body.temperature or 1.0,
    )


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
    sequences = msgspec.structs.replace(
        plain_sequences("act", target, settings, prompts, sampling), seed_by_prompt=True
    )
    shown: dict[str, list[Any]] = {
        "actions": [], "action_log_probs": [], "action_token_ids": [], "action_token_log_probs": [],
        "finish_reasons": [], "weight_versions": [],
    }  # fmt: skip
    for events in await gather_all(ring, sequences):
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
