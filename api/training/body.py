"""The body of POST /v1/training/update: trajectories that a trainer can learn from, each checked and blamed by index.

A trajectory here is what GET /v1/training/trajectories and a job's results give, so that either can be posted back.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, FiniteFloat, ValidationError, model_validator

from api.generation.sampling import StrictId
from api.http.errors import from_validation
from api.http.fields import RequestModel, complaint
from api.http.limits import check_shape
from shared.adapters import AdapterRef
from shared.errors import InvalidRequestError
from shared.frames import VersionSpan
from shared.sequences import LogprobsMode, vocabulary_error
from shared.training import ForeignAction, UpdateOrder
from shared.trajectories import Drawing, LiveTrajectory, Reward, Trajectory

MAX_TRAJECTORIES = 4096
_LARGEST = 1e38  # what a trainer computes with has 32 bits
_LOGPROB_SLACK = 1e-3  # a log-probability of 0 may come out a little above
_Carried = Annotated[Any, Field(default=None, description="accepted, as results have it; not used")]


class RewardValue(RequestModel):
    """A reward with its name, as results have it."""

    name: str = "posted"
    value: FiniteFloat | None = None
    components: dict[str, FiniteFloat] = Field(default_factory=dict)
    error: str = ""


def _span(value: Any) -> Any:
    """`["policy@3", 0, 7]`, or an object with these three fields."""
    if isinstance(value, list) and len(value) == 3:
        return {"version": value[0], "start": value[1], "end": value[2]}
    return value


class Span(RequestModel):
    """The adapter version of completion tokens [start, end); "" is the base."""

    version: str = ""
    start: StrictId
    end: StrictId


Spans = list[Annotated[Span, BeforeValidator(_span)]]


class DrawnWith(RequestModel):
    """How a completion was drawn, where that is not the model's own distribution."""

    temperature: FiniteFloat = Field(default=1.0, ge=0, le=2, description="0: greedy")
    top_k: int = Field(default=0, ge=0, lt=2**31)
    top_p: FiniteFloat = Field(default=1.0, ge=0, le=1)
    min_p: FiniteFloat = Field(default=0.0, ge=0, le=1)
    edited: bool = Field(default=False, description="by penalties, biases, min_tokens or a grammar, too")

    def drawing(self) -> Drawing:
        """As the trainer takes it."""
        return Drawing(self.temperature, self.top_k, self.top_p, self.min_p, self.edited)


class PostedTrajectory(RequestModel):
    """One completion and what it was worth."""

    prompt_ids: list[StrictId] = Field(min_length=1)
    completion_ids: list[StrictId] = Field(min_length=1)
    logprobs: list[FiniteFloat] = Field(description="the sampler's, one for each completion token")
    logprobs_mode: LogprobsMode = Field(
        default="raw_logprobs", description="raw: of temperature 1, unfiltered; processed: of what `drawn` says"
    )
    drawn: DrawnWith | None = Field(default=None, description="how it was drawn; default: temperature 1, unfiltered")
    reward: FiniteFloat | RewardValue | None = Field(default=None, description="needed unless `advantage` is given")
    advantage: FiniteFloat | None = Field(default=None, description="in place of reward minus the group's mean")
    group: str = Field(default="", max_length=256, description="samples to compare; default: those of an equal prompt")
    loss_mask: list[StrictId] | None = Field(default=None, description="1: the model's own token, 0: a tool's")
    spans: Spans | None = Field(default=None, description='versions of the tokens, `[["policy@3", 0, 7]]`')
    weight_versions: Spans | None = Field(default=None, description="the same as `spans`")
    finish_reason: Literal["stop", "length"] = "stop"
    metadata: dict[str, Any] = Field(default_factory=dict)
    id: str = Field(default="", max_length=256)
    error: Literal[""] = ""
    prompt_index: _Carried
    sample_index: _Carried
    text: _Carried
    stop_match: _Carried
    top_logprobs: _Carried
    seed: _Carried
    worker: _Carried
    attempt: _Carried
    timings: _Carried
    cached_tokens: _Carried
    policy: _Carried
    model: _Carried
    group_size: _Carried
    temperature: _Carried
    collected_ms: _Carried
    routes: _Carried
    teacher_logprobs: _Carried

    @model_validator(mode="after")
    def _whole(self) -> "PostedTrajectory":
        tokens = len(self.completion_ids)
        if len(self.logprobs) != tokens:
            raise complaint("logprobs", f"{len(self.logprobs)} for {tokens} completion tokens")
        if max(self.logprobs) > _LOGPROB_SLACK:
            raise complaint("logprobs", f"{max(self.logprobs):.4g} is no log-probability: it is above 0")
        if self.loss_mask is not None:
            if len(self.loss_mask) != tokens:
                raise complaint("loss_mask", f"{len(self.loss_mask)} values for {tokens} completion tokens")
            if set(self.loss_mask) - {0, 1} or not any(self.loss_mask):
                raise complaint("loss_mask", "each is 0 or 1, and one at least is 1")
        for name, value in (("reward", self.score), ("advantage", self.advantage)):
            if value is not None and abs(value) > _LARGEST:
                raise complaint(name, f"{value:.4g} is more than single precision holds")
        if self.score is None and self.advantage is None:
            error = self.reward.error if isinstance(self.reward, RewardValue) else ""
            raise complaint("reward", f"no value: {error}" if error else "a finite number, or give 'advantage'")
        if self.spans is not None and self.weight_versions is not None:
            raise complaint("weight_versions", "'spans' says the same: give one of them")
        self._check_spans(tokens)
        return self

    def _check_spans(self, tokens: int) -> None:
        given, name = self.versions, "spans" if self.spans is not None else "weight_versions"
        at = 0
        for span in given:
            if span.start != at or span.end <= span.start:
                raise complaint(name, f"[{span.start}, {span.end}) does not follow position {at}")
            at = span.end
        if given and at != tokens:
            raise complaint(name, f"they end at {at}, the completion has {tokens} tokens")

    @property
    def versions(self) -> Spans:
        """The version spans; none means the base."""
        return self.spans or self.weight_versions or []

    @property
    def score(self) -> float | None:
        """Value of the trajectory's reward, if it has one."""
        return self.reward.value if isinstance(self.reward, RewardValue) else self.reward

    def trajectory(self, index: int, policy: str, model: str) -> LiveTrajectory:
        """As the trainer takes it."""
        named = self.reward if isinstance(self.reward, RewardValue) else RewardValue()
        value = self.score if self.score is not None else self.advantage
        whole = [VersionSpan("", 0, len(self.completion_ids))]
        sampled = Trajectory(
            prompt_index=0,
            sample_index=index,
            prompt_ids=tuple(self.prompt_ids),
            completion_ids=tuple(self.completion_ids),
            text="",
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            spans=tuple([VersionSpan(span.version, span.start, span.end) for span in self.versions] or whole),
            reward=Reward(named.name, value, named.components),
            metadata=self.metadata,
            loss_mask=tuple(self.loss_mask or ()),
            logprobs_mode=self.logprobs_mode,
            drawn=self.drawn.drawing() if self.drawn is not None else None,
        )
        name = self.id or f"posted-{index}"
        return LiveTrajectory(name, policy, model, sampled, group=self.group, advantage=self.advantage)


class UpdateBody(RequestModel):
    """Request body of POST /v1/training/update."""

    trajectories: list[PostedTrajectory] = Field(min_length=1, max_length=MAX_TRAJECTORIES)
    update_inference: bool = Field(default=True, description="serve the result; false: train, and serve it later")
    checkpoint_name: str = Field(default="", description="save a checkpoint of the result under this name")
    policy: str = Field(default="", description="whose trainer; default: the setting `default_adapter`")


class ReadingContext(msgspec.Struct, array_like=True):
    """Context in which a body is read: its bounds, the policy, and facts about the policy's model."""

    most_values: int = 0
    most_objects: int = 0
    policy: str = ""
    model: str = ""
    vocabulary: int = 0
    context: int = 0


class Update(msgspec.Struct, array_like=True):
    """The order for the trainer, and what must exist for it."""

    order: bytes  # JSON
    checkpoint_name: str
    versions: dict[str, tuple[int, str]]  # that trajectories name: index and field of the first


class _Named(msgspec.Struct):
    policy: str = ""


_asked = msgspec.msgpack.Decoder(ReadingContext)
update_decoder = msgspec.msgpack.Decoder(Update)


def policy_named(body: bytes, _: bytes) -> bytes:
    """The policy that a body names, for which the rest is skipped; like `update_read` called by BodyReaders."""
    try:
        return msgspec.json.decode(body, type=_Named).policy.encode()
    except msgspec.ValidationError:  # which `update_read` explains
        return b""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}" if body else "a JSON body is required"
        ) from error


def update_read(data: bytes, asked: bytes) -> bytes:
    """The body as an `Update` in msgpack."""
    known = _asked.decode(asked)
    check_shape(data, known.most_values, known.most_objects)
    body = parsed(data)
    order = UpdateOrder(checked(body, known), body.update_inference, body.checkpoint_name)
    return msgspec.msgpack.encode(Update(msgspec.json.encode(order), body.checkpoint_name, versions_named(body)))


def parsed(data: bytes) -> UpdateBody:
    """A body, read trajectory by trajectory; InvalidRequestError names the field."""
    try:
        fields: dict[str, Any] = dict(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
        given = fields.pop("trajectories", b"null")
        fields = {name: msgspec.json.decode(value) for name, value in fields.items()}
        listed = msgspec.json.decode(given, type=list[msgspec.Raw] | None)
    except msgspec.ValidationError:
        fields, listed = {}, None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if listed is not None and len(listed) > MAX_TRAJECTORIES:
        most = f"at most {MAX_TRAJECTORIES} in an update"
        raise InvalidRequestError(f"{len(listed)} trajectories, and there are {most}", param="trajectories")
    try:
        if listed is None:
            return UpdateBody.model_validate({**fields, "trajectories": listed})
        trajectories = [_posted(index, raw) for index, raw in enumerate(listed)]
        return UpdateBody.model_validate({**fields, "trajectories": trajectories})
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from error


def _posted(index: int, raw: msgspec.Raw) -> PostedTrajectory:
    try:
        return PostedTrajectory.model_validate_json(bytes(raw))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise from_validation(
            [{**problem, "loc": ("trajectories", index, *problem["loc"])} for problem in problems]
        ) from error


class CheckpointBody(RequestModel):
    """Request body of POST /training/checkpoint."""

    name: str = Field(default="", description="default: step-<train step>")
    checkpoint_name: str = Field(default="", description="the same as `name`")
    policy: str = Field(default="", description="whose trainer; default: the setting `default_adapter`")


class ResumeBody(RequestModel):
    """Request body of POST /v1/training/resume."""

    action: ForeignAction = Field(
        description="adopt: train on from the version that is the latest; override: serve the run's own again"
    )
    policy: str = Field(default="", description="whose trainer; default: the setting `default_adapter`")


def versions_named(body: UpdateBody) -> dict[str, tuple[int, str]]:
    """Every adapter version that the trajectories name, with the index and the field that names it first."""
    first: dict[str, tuple[int, str]] = {}
    for index, posted in enumerate(body.trajectories):
        for span in posted.versions:
            if span.version:
                first.setdefault(span.version, (index, "spans" if posted.spans is not None else "weight_versions"))
    return first


def parsed_version(version: str, index: int, field: str) -> tuple[str, int]:
    """Name and number of `name@k`; InvalidRequestError that names the trajectory."""
    where = f"trajectories[{index}].{field}"
    try:
        choices = AdapterRef.parse(version).choices
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error.message}", param=where) from error
    if len(choices) != 1 or choices[0].follows:
        raise InvalidRequestError(f"{where}: {version!r} names no version: write name@k", param=where)
    return choices[0].name, choices[0].version


def checked(body: UpdateBody, asked: ReadingContext) -> tuple[LiveTrajectory, ...]:
    """The trajectories as the trainer takes them, checked against its model; InvalidRequestError names the index."""
    for index, posted in enumerate(body.trajectories):
        where = f"trajectories[{index}]"
        for field, ids in (("prompt_ids", posted.prompt_ids), ("completion_ids", posted.completion_ids)):
            if error := vocabulary_error(ids, asked.vocabulary, f"{where}.{field}", f"{where}.{field}"):
                raise error
        length = len(posted.prompt_ids) + len(posted.completion_ids)
        if length > asked.context:
            raise InvalidRequestError(
                f"{where}: {length} tokens, the model's context is {asked.context}",
                param=f"{where}.completion_ids",
            )
    _check_groups(body.trajectories)
    return tuple(posted.trajectory(i, asked.policy, asked.model) for i, posted in enumerate(body.trajectories))


def _check_groups(trajectories: Sequence[PostedTrajectory]) -> None:
    """The samples of a group share a prompt, and either all or none of them have an advantage."""
    first: dict[object, tuple[int, PostedTrajectory]] = {}
    for index, posted in enumerate(trajectories):
        at, other = first.setdefault(posted.group or tuple(posted.prompt_ids), (index, posted))
        if other.prompt_ids != posted.prompt_ids:
            raise InvalidRequestError(
                f"trajectories[{index}].group: {posted.group!r} has another prompt in trajectories[{at}]",
                param=f"trajectories[{index}].group",
            )
        if (other.advantage is None) != (posted.advantage is None):
            raise InvalidRequestError(
                f"trajectories[{index}].advantage: all samples of a group have one, or none (see trajectories[{at}])",
                param=f"trajectories[{index}].advantage",
            )


def unknown(versions: Collection[str], named: dict[str, tuple[int, str]]) -> InvalidRequestError:
    """The error for versions that the store does not know."""
    version = min(versions, key=lambda name: named[name][0])
    index, field = named[version]
    where = f"trajectories[{index}].{field}"
    return InvalidRequestError(f"{where}: there is no adapter version {version!r}", param=where)
