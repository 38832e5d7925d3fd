"""A trajectory: the record of a rollout, for a trainer and for people."""

from typing import Any

import msgspec

from shared.frames import Finish, FinishReason, TokenEvent, TokenLogprobs, VersionSpan, spans_of
from shared.images.refs import ImageRef
from shared.jobs import SamplingOverrides
from shared.sequences import LEAST_TEMPERATURE, LogprobsMode, SamplingParams, SequenceResult, SequenceSpec, Timings
from shared.splits import Arm
from shared.token_events import join


class Reward(msgspec.Struct, frozen=True, omit_defaults=True):
    """A score of one completion; `error` is set, and `value` None, when the reward raised or timed out."""

    name: str
    value: float | None
    components: dict[str, float] = {}
    error: str = ""


class Drawing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters by which a completion was drawn, where that is not the model's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    edited: bool = False  # by penalties, biases, min_tokens or a grammar, too


class Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a job's results (JSON), ordered by prompt and sample index."""

    prompt_index: int
    sample_index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]  # one per completion token, fp32, in the mode `logprobs_mode`
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...] = ()
    top_logprobs: tuple[TokenLogprobs, ...] = ()
    stop_match: str | int | None = None
    reward: Reward | None = None
    error: str = ""
    seed: int = 0
    worker: str = ""
    attempt: int = 0
    timings: Timings = Timings()
    metadata: dict[str, Any] = {}
    prompt_logprobs: tuple[float | None, ...] = ()  # kind "batch", where the line asks for them
    prompt_top_logprobs: tuple[TokenLogprobs, ...] = ()  # likewise
    embedding: bytes = b""  # kind "batch", likewise: fp32, little-endian (base64 in JSON)
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    loss_mask: tuple[int, ...] = ()  # per completion token: 1 the model's own, 0 a tool's words; (): all 1
    # Raw: the model's own, temperature 1 without filters. Processed: of the distribution drawn from, see `drawn`
    logprobs_mode: LogprobsMode = "raw_logprobs"
    drawn: Drawing | None = None  # None: from the model's own distribution
    images: tuple[ImageRef, ...] = ()  # of the prompt
    image_token: int = 0  # that stands for each vector of them
    teacher_logprobs: tuple[float, ...] = ()  # a teacher's, of each completion token
    routes: bytes = b""  # experts that each completion token was computed with (base64 in JSON): TokenEvent.routes


class LiveTrajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trajectory from live traffic, as its trainer gets it."""

    id: str  # of the sequence: "<completion's id>-<choice>"
    policy: str
    model: str
    trajectory: Trajectory
    group: str = ""  # samples of one prompt share it; "": alone
    group_size: int = 1
    temperature: float = 1.0  # that it was drawn with
    collected_ms: int = 0
    advantage: float | None = None  # in place of what the group's rewards would give
    tenant: str = ""  # who owns it (shared/owners.py)
    arm: Arm | None = None  # the version that a split of the policy has chosen, which the reward counts for


class ScoreOrder(msgspec.Struct, frozen=True):
    """Texts that a job runner is to score at once; the answer is a list of `Reward`."""

    name: str  # of the reward
    options: dict[str, Any]
    samples: tuple[tuple[str, Any], ...]  # text, reference
    key: str = ""  # name of the API key whose order it is


def result_of(
    spec: SequenceSpec, attempt: int, worker: str, events: list[TokenEvent], timings: Timings
) -> SequenceResult:
    """The result of a sequence whose last event carries `finish`."""
    whole = join(events)
    assert whole.finish is not None, "a result before the end"
    return SequenceResult(
        id=spec.id,
        finish=whole.finish,
        worker=worker,
        attempt=attempt,
        prompt_tokens=len(spec.prompt_ids),
        completion_ids=tuple(whole.tokens),
        logprobs=tuple(whole.logprobs),
        top_logprobs=tuple(whole.top_logprobs or ()),
        spans=spans_of(events),
        text=whole.text,
        prompt_logprobs=tuple(whole.prompt_logprobs or ()),
        prompt_top_logprobs=tuple(whole.prompt_top_logprobs or ()),
        score_logprobs=tuple(whole.score_logprobs or ()),
        embedding=whole.embedding or b"",
        timings=timings,
        routes=whole.routes or b"",
    )


def trajectory_of(
    spec: SequenceSpec,
    result: SequenceResult,
    text: str,
    sample: int,
    metadata: dict[str, Any],
    reward: Reward | None = None,
) -> Trajectory:
    """The trajectory of a generated sequence that is sample number `sample` of its prompt."""
    return Trajectory(
        prompt_index=0,
        sample_index=sample,
        prompt_ids=spec.prompt_ids,
        completion_ids=result.completion_ids,
        text=text,
        logprobs=result.logprobs,
        finish_reason=result.finish.reason,
        spans=result.spans,
        stop_match=result.finish.stop_match,
        reward=reward,
        error=result.finish.failure,
        seed=spec.sampling.seed,
        worker=result.worker,
        attempt=result.attempt,
        timings=result.timings,
        metadata=metadata,
        logprobs_mode=spec.sampling.logprobs_mode,
        drawn=drawing_of(spec.sampling),
        images=spec.images,
        image_token=spec.image_token,
        routes=result.routes,
    )


def event_of(seq: str, trajectory: Trajectory, *, with_text: bool) -> TokenEvent:
    """A trajectory as one event; without `with_text` its reader decodes the tokens."""
    t = trajectory
    return TokenEvent(
        seq=seq,
        attempt=t.attempt,
        position=0,
        tokens=list(t.completion_ids),
        logprobs=list(t.logprobs),
        top_logprobs=list(t.top_logprobs) or None,
        text=t.text if with_text else None,
        version=t.spans[-1].version if t.spans else "",
        finish=Finish(t.finish_reason, t.stop_match, cached_tokens=t.cached_tokens),
        prompt_logprobs=list(t.prompt_logprobs) or None,
        prompt_top_logprobs=list(t.prompt_top_logprobs) or None,
        embedding=t.embedding or None,
        routes=t.routes or None,
    )


def needs_processed(drawing: Drawing | None) -> bool:
    """True if a trainer can account for how a token was drawn, and so needs log-probabilities of that distribution."""
    return drawing is not None and drawing.temperature >= LEAST_TEMPERATURE and not drawing.edited


def drawing_of(s: SamplingParams | SamplingOverrides) -> Drawing | None:
    """Changes that these parameters make to the model's own distribution; None: none."""
    penalties = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) != (0.0, 0.0, 1.0)
    grammar = s.grammar if isinstance(s, SamplingParams) else ""
    drawing = Drawing(
        s.temperature, s.top_k, s.top_p, s.min_p, bool(penalties or s.logit_bias or s.min_tokens or grammar)
    )
    return None if drawing == Drawing() else drawing
