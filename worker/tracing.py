"""The spans of a sequence, told when its end has been committed, from the times that are kept of every sequence."""

from shared import tracing
from shared.sequences import Claim, SequenceResult
from shared.spans import Past

_NS = 1_000_000  # in a millisecond
_FAILED = frozenset({"error", "deadline", "cancelled"})


def trace_sequence(claim: Claim, result: SequenceResult) -> None:
    """Tell of a sequence whose request is traced: how long it waited, prefilled and decoded, and with what."""
    if claim.spec.trace:
        tracing.record(sequence_spans(claim, result), claim.spec.trace)


def sequence_spans(claim: Claim, result: SequenceResult) -> Past:
    """A sequence from its enqueueing to its end, with its stages inside. Stages that did not happen are left out.

    The names of latencies are vLLM's; seconds.
    """
    spec, times, finish = claim.spec, result.timings, result.finish
    began = times.enqueued_ms or times.started_ms
    started = max(began, times.started_ms)  # the clocks of two machines differ a little
    ended = max(started, times.finished_ms)
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": spec.id,
        "parallm.worker": result.worker,
        "parallm.class": spec.sequence_class,
        "parallm.kind": spec.kind,
        "parallm.attempt": claim.attempt,
        "parallm.model": spec.model,
        "parallm.adapter": ",".join(dict.fromkeys(span.version or "base" for span in result.spans)),
        "parallm.prompt_tokens": result.prompt_tokens,
        "parallm.completion_tokens": len(result.completion_ids),
        "parallm.cached_tokens": finish.cached_tokens,
        "parallm.finish": finish.reason,
        "gen_ai.latency.time_in_queue": (started - began) / 1000,
        "gen_ai.latency.time_in_model_inference": (ended - started) / 1000,
    }
    stages = [Past("queue", began * _NS, started * _NS)]
    first = min(max(times.first_token_ms, started), ended) if times.first_token_ms else ended
    stages.append(Past("prefill", started * _NS, first * _NS))
    attributes["gen_ai.latency.time_in_model_prefill"] = (first - started) / 1000
    if times.first_token_ms:
        stages.append(Past("decode", first * _NS, ended * _NS))
        attributes["gen_ai.latency.time_in_model_decode"] = (ended - first) / 1000
    error = (finish.error_code or finish.reason) if finish.reason in _FAILED else ""
    return Past("sequence", began * _NS, ended * _NS, attributes, tuple(stages), error, consumes=True)
