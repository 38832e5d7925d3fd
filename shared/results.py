"""From a sequence's events to its result: the one place that adds them up."""

from shared.frames import TokenEvent, spans_of
from shared.sequences import SequenceResult, SequenceSpec, Timings


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
