"""`collect_trajectory`, `scoring_function`, `metadata`: what a request says of its sequences' life as trajectories.

Checked at admission, so that an unknown scoring function or a missing reference is the client's error at once and not a
hole in the training data later.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from api.callers.caller import asker, key_name, may_judge, may_record, named_session
from api.callers.fair_pool import LARGE_CHARS, LARGE_COUNT, aside
from api.generation.sampling import SamplingFields
from api.generation.target import Target
from api.ring.ring import Ring
from shared.adapters import AdapterRef, unknown_adapter
from shared.episodes import EpisodePlace, PlainMessage, place_of, session_id
from shared.errors import InvalidRequestError, ParallmError
from shared.jobs import RewardSpec
from shared.rewards.kinds import CheckedReward, check
from shared.sequences import Collection, ModelCard

MAX_METADATA_BYTES = 16_384
REFERENCE = "reference"  # the key of `metadata` that a scoring function compares with


async def collection_of(ring: Ring, body: SamplingFields, target: Target, prompts: int) -> Collection | None:
    """How the sequences of a request are collected; None when they are not. InvalidRequestError names the field.

    NotFoundError when the policy that is to learn from them, or a model that the reward asks, is not there.
    """
    if not body.collect_trajectory:
        if body.scoring_function is not None:
            raise InvalidRequestError("'scoring_function' needs 'collect_trajectory': true", param="scoring_function")
        return None
    metadata = dict(body.metadata or {})
    if _packed_size(metadata, "metadata") > MAX_METADATA_BYTES:
        raise InvalidRequestError(f"'metadata' of a trajectory may have {MAX_METADATA_BYTES} bytes", param="metadata")
    reference = metadata.pop(REFERENCE, None)
    scoring = scoring_reward(body.scoring_function) if body.scoring_function is not None else None
    if scoring is not None and scoring.needs_reference:
        _check_reference(scoring.spec, reference, prompts)
    policy = _policy(ring, target)
    if not await _may_learn(ring, policy):
        raise unknown_adapter(policy)
    if scoring is not None:
        await check_scoring(ring, scoring, "scoring_function")
    return Collection(
        policy=policy,
        scoring=scoring.spec.name if scoring else "",
        options=scoring.spec.options if scoring else {},
        reference=reference,
        metadata=metadata,
        samples=body.n or 1,
        arm=target.choice.arm if target.choice else None,
    )


async def collection_for_feedback(
    ring: Ring, body: SamplingFields, target: Target, answer: str, chat: Sequence[PlainMessage]
) -> Collection | None:
    """How an answer is kept for a verdict in retrospect; None when it is not, by the server's or the key's setting.

    `chat`: messages of the request, by which it finds its place in an episode.
    """
    settings = ring.settings
    if not settings.feedback_ttl_s or not may_record():
        return None
    policy = _policy(ring, target)
    if not await _may_learn(ring, policy):
        return None
    return Collection(
        policy=policy,
        samples=body.n or 1,
        answer=answer,
        answer_ttl_s=settings.feedback_ttl_s,
        answers_bytes=settings.feedback_store_mb << 20,
        arm=target.choice.arm if target.choice else None,
        place=await _place(body, chat),
        judged=may_judge(),
    )


async def _place(body: SamplingFields, chat: Sequence[PlainMessage]) -> EpisodePlace | None:
    """The request's place in its episode; None for a prompt without messages whose client names no session."""
    session = session_id(named_session.get(), body.session, body.cache_key)
    if not chat:
        return EpisodePlace(session, user=body.session[:128]) if session else None
    work = partial(place_of, chat, session=session, user=body.session, owner=key_name())
    chars = sum(len(message.text) + sum(len(arguments) for _, arguments in message.calls) for message in chat)
    large = len(chat) > LARGE_COUNT or chars > LARGE_CHARS
    return await aside(work) if large else work()


def _policy(ring: Ring, target: Target) -> str:
    return AdapterRef.parse(target.adapter).choices[0].name if target.adapter else ring.settings.default_adapter


async def _may_learn(ring: Ring, policy: str) -> bool:
    """True if the policy belongs to the caller or is shared."""
    who = asker()
    return not who.limited or who.sees(await ring.adapters.owner(policy) or "")


def scoring_reward(given: str | dict[str, Any], param: str = "scoring_function") -> CheckedReward:
    """A scoring function by name, or as an object with its options, as a job's `reward`; checked."""
    spec = named_scoring(given, param)
    if not isinstance(given, str):
        _packed_size(spec.options, param)
    try:
        return check(spec)
    except InvalidRequestError as error:
        error.param = param
        raise


def named_scoring(given: str | dict[str, Any], param: str) -> RewardSpec:
    """The scoring function that `given` names, before its options are checked."""
    if isinstance(given, str):
        return RewardSpec(given)
    fields = dict(given)
    name, options = fields.pop("name", None), fields.pop("options", {})
    if not isinstance(name, str) or not isinstance(options, dict):
        raise InvalidRequestError(f"'{param}' is a name, or an object with 'name' and options", param=param)
    return RewardSpec(name, {**options, **fields})


async def check_scoring(ring: Ring, scoring: CheckedReward, param: str) -> list[ModelCard]:
    """The models that the reward asks, after a trial of its patterns, in a process that can be killed.

    InvalidRequestError for a pattern that cannot be compiled, UnknownModelError for a model that was never served;
    both name `param`.
    """
    try:
        await ring.patterns.check(scoring, key_name())
        return await ring.judges.check(scoring)
    except ParallmError as error:
        error.param = "reward" if error.param == "head" and param == "model" else param  # an option of the reward
        raise


def _packed_size(value: Any, param: str) -> int:
    """Bytes of a value on its way to the worker; InvalidRequestError for a number that no message can hold."""
    try:
        return len(msgspec.msgpack.encode(value))
    except (OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"'{param}' has an integer of more than 64 bits", param=param) from error


def _check_reference(scoring: RewardSpec, reference: Any, prompts: int) -> None:
    if reference is None:
        raise InvalidRequestError(
            f"scoring function '{scoring.name}' compares with 'metadata.{REFERENCE}', which is not there",
            param=f"metadata.{REFERENCE}",
        )
    if prompts > 1:
        raise InvalidRequestError(
            f"scoring function '{scoring.name}' compares with one reference: send one prompt a request", param="prompt"
        )
