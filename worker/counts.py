"""What one worker counts: tokens and their latencies, ends, swaps, leases.

On the path of a token stand one look at a histogram and two adds. The class of a sequence chooses the histograms,
so they are looked up once a class.
"""

from dataclasses import dataclass

from shared.metrics import Counter, Histogram, Tally
from shared.redis.sequence_queue import SequenceQueue
from shared.sequences import Claim, SequenceResult
from worker.engine.adapters import AdapterStats
from worker.engine.messages import PrefixStats
from worker.running import Running

FINISHED_REASONS = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "cancelled": "abort",
    "deadline": "abort",
    "error": "error",
}
REASONS = frozenset(FINISHED_REASONS.values())


@dataclass(frozen=True)
class _ClassHistograms:
    """The latencies of one class of sequences."""

    gap: Histogram
    gap_old_name: Histogram
    first_token: Histogram
    mean_gap: Histogram
    whole: Histogram
    queued: Histogram
    inference: Histogram
    prefill: Histogram
    decode: Histogram

    @classmethod
    def of(cls, tally: Tally, model: str, kind: str) -> "_ClassHistograms":
        names = (
            "inter_token_latency_seconds", "time_per_output_token_seconds", "time_to_first_token_seconds",
            "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
            "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        )  # fmt: skip
        return cls(*(tally.histogram(f"vllm:{name}", model, kind) for name in names))


class SequenceCounts:
    """What the publisher counts of the sequences that it writes."""

    def __init__(self, tally: Tally, model: str) -> None:
        self._tally = tally
        self._model = model
        self._classes = {kind: _ClassHistograms.of(tally, model, kind) for kind in ("interactive", "batch")}
        self._prompt_tokens = self._counter("vllm:prompt_tokens_total")
        self._tokens = self._counter("vllm:generation_tokens_total")
        self._queries = self._counter("vllm:prefix_cache_queries_total")
        self._hits = self._counter("vllm:prefix_cache_hits_total")
        self._cached, self._computed = (
            tally.counter("vllm:prompt_tokens_by_source_total", model, source)
            for source in ("local_cache_hit", "local_compute")
        )
        # Told from the start: a counter that appears with its first event has not grown, as a rate sees it.
        self._ends = {reason: tally.counter("vllm:request_success_total", model, reason) for reason in REASONS}
        self.preemptions = self._counter("vllm:num_preemptions_total")
        self._step = self._histogram("vllm:iteration_tokens_total")
        self._step_prompts = 0  # tokens of prompts whose first token came in the step at hand
        self._prompts = self._histogram("vllm:request_prompt_tokens")
        self._completions = self._histogram("vllm:request_generation_tokens")
        self._most = self._histogram("vllm:request_max_num_generation_tokens")
        self._max_tokens = self._histogram("vllm:request_params_max_tokens")
        self.commits_refused = self._counter("mlx_parallm_commits_refused_total")

    def step(self, tokens: int) -> None:
        """A decode step has brought so many tokens; those of the prompts that it ended count with it, as in vLLM."""
        prompts, self._step_prompts = self._step_prompts, 0
        if tokens:
            self._tokens.add(tokens)
        if tokens or prompts:
            self._step.observe(tokens + prompts)

    def token(self, row: Running, tokens: int, at: float) -> None:
        """The engine has spoken of a row, at monotonic time `at`."""
        before, row.last_event_s = row.last_event_s, at
        if not before:
            prompt = len(row.claim.spec.prompt_ids)
            self._prompt_tokens.add(prompt)
            self._step_prompts += prompt
        elif tokens:
            self._classes[row.claim.spec.sequence_class].gap.observe((at - before) / tokens, tokens)

    def ended(self, claim: Claim, result: SequenceResult) -> None:
        """A sequence's end has been accepted."""
        spec, timings = claim.spec, result.timings
        self._ends[FINISHED_REASONS[result.finish.reason]].add()
        self._prompts.observe(len(spec.prompt_ids))
        if not timings.first_token_ms and spec.kind == "generate":
            return  # it was refused, or ended before its first token
        self._queries.add(len(spec.prompt_ids))
        self._hits.add(result.finish.cached_tokens)
        self._cached.add(result.finish.cached_tokens)
        self._computed.add(len(spec.prompt_ids) - result.finish.cached_tokens)
        self._observe_times(claim, result)
        if spec.kind == "generate":
            self._completions.observe(len(result.completion_ids))
            self._most.observe(spec.sampling.max_tokens)
            self._max_tokens.observe(spec.sampling.max_tokens)

    def _observe_times(self, claim: Claim, result: SequenceResult) -> None:
        times, seen = result.timings, self._classes[claim.spec.sequence_class]
        if times.enqueued_ms:
            seen.whole.observe(_seconds(times.enqueued_ms, times.finished_ms))
        seen.inference.observe(_seconds(times.started_ms, times.finished_ms))
        if claim.attempt > 1 or not times.first_token_ms:
            return  # its first token came from another worker, or there is none
        if times.enqueued_ms:
            seen.queued.observe(_seconds(times.enqueued_ms, times.started_ms))
            seen.first_token.observe(_seconds(times.enqueued_ms, times.first_token_ms))
        seen.prefill.observe(_seconds(times.started_ms, times.first_token_ms))
        decode = _seconds(times.first_token_ms, times.finished_ms)
        seen.decode.observe(decode)
        if len(result.completion_ids) > 1:
            seen.mean_gap.observe(decode / (len(result.completion_ids) - 1))

    def settle(self) -> None:
        """Before a write: what is exposed under two names is counted once."""
        for seen in self._classes.values():
            seen.gap_old_name.counts, seen.gap_old_name.sum = list(seen.gap.counts), seen.gap.sum

    def _counter(self, name: str) -> Counter:
        return self._tally.counter(name, self._model)

    def _histogram(self, name: str) -> Histogram:
        return self._tally.histogram(name, self._model)


class WorkerCounts:
    """What else the worker counts: read from where it is known, before every write."""

    def __init__(self, tally: Tally, model: str) -> None:
        self.sequences = SequenceCounts(tally, model)
        self.takeovers = tally.counter("mlx_parallm_takeovers_total", model)
        self._reclaimed = tally.counter("mlx_parallm_leases_reclaimed_total", model)
        self._given_up = tally.counter("mlx_parallm_dead_letters_total", model)
        self._evicted = tally.counter("mlx_parallm_prefix_cache_evicted_blocks_total", model)
        self._swaps = tally.counter("mlx_parallm_lora_swaps_total", model)
        self._swap = tally.histogram("mlx_parallm_lora_swap_seconds", model)
        self._swap_s = 0.0

    def adapters(self, stats: AdapterStats) -> None:
        """The engine has loaded adapters, or failed to."""
        new = stats.swaps - int(self._swaps.value)
        if new > 0:
            self._swap.observe((stats.swap_s - self._swap_s) / new, new)
            self._swaps.value, self._swap_s = float(stats.swaps), stats.swap_s

    def gather(self, queue: SequenceQueue, prefix: PrefixStats) -> None:
        """Take over what others have counted since the worker's start."""
        self.sequences.settle()
        self._reclaimed.value = float(queue.reclaimed)
        self._given_up.value = float(queue.given_up)
        self._evicted.value = float(prefix.evicted_blocks)


def _seconds(begin_ms: int, end_ms: int) -> float:
    """Never negative: the clocks of two machines differ a little."""
    return max(0, end_ms - begin_ms) / 1000
