"""From a sequence's events to its result, and from its result to a trajectory."""

from typing import Any

from shared.frames import TokenEvent, spans_of
from shared.jobs import SamplingOverrides
from shared.sequences import SamplingParams, SequenceResult, SequenceSpec, Timings
from shared.trajectories import Drawing, Reward, Trajectory


def result_of(
    spec: SequenceSpec, attempt: int, worker: str, events: list[TokenEvent], timings: Timings
) -> SequenceResult:
    """The result of a sequence whose last event carries `finish`."""
    finish = events[-1].finish
    assert finish is not None, "a result before the end"
    text = [event.text for event in events if event.text is not None]
    return SequenceResult(
        id=spec.id,
        finish=finish,
        worker=worker,
        attempt=attempt,
        prompt_tokens=len(spec.prompt_ids),
        completion_ids=tuple(token for event in events for token in event.tokens),
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
        top_logprobs=tuple(tuple(top) for event in events for top in event.top_logprobs or ()),
        spans=spans_of(events),
        text="".join(text) if text else None,
        prompt_logprobs=tuple(events[0].prompt_logprobs or ()),
        prompt_top_logprobs=tuple(tuple(top) for top in events[0].prompt_top_logprobs or ()),
        score_logprobs=tuple(events[-1].score_logprobs or ()),
        embedding=events[-1].embedding or b"",
        timings=timings,
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
    )


def needs_processed(drawing: Drawing | None) -> bool:
    """Whether a trainer can take into account how it was drawn, and so needs log-probabilities of just that."""
    return drawing is not None and drawing.temperature > 0 and not drawing.edited


def drawing_of(s: SamplingParams | SamplingOverrides) -> Drawing | None:
    """What these parameters make of the model's own distribution; None: nothing."""
    penalties = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) != (0.0, 0.0, 1.0)
    grammar = s.grammar if isinstance(s, SamplingParams) else ""
    drawing = Drawing(
        s.temperature, s.top_k, s.top_p, s.min_p, bool(penalties or s.logit_bias or s.min_tokens or grammar)
    )
    return None if drawing == Drawing() else drawing
