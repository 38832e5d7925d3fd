"""Reports of a worker, which its heartbeat carries."""

import os
import socket
from dataclasses import asdict, dataclass

from shared.machine.status import MachineStatus
from shared.process.worker_settings import WorkerSettings
from shared.ranks import RankStatus
from shared.redis.processes.worker_registry import WorkerState, WorkerStatus, weights_of
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.replay_report import ReplayReport
from shared.sequences import Claim, ModelCard, SequenceResult
from shared.telemetry import tracing
from shared.telemetry.metrics import Counter, Histogram, Tally
from shared.telemetry.spans import Past
from worker.engine.batch.adapters import AdapterStats
from worker.engine.messages import EngineStats
from worker.rows import ClaimedRow, now_ms
from worker.service_rates import ServiceRates

ROWS_OF = "adapter_rows:"  # before a version: rows that use it
WAITS_FOR = "adapter_waits:"  # before a version: rows wait for it


@dataclass(frozen=True)
class Identity:
    """Facts of a worker that never change while it lives."""

    id: str
    card: ModelCard
    started_ms: int


def worker_status(
    who: Identity,
    settings: WorkerSettings,
    stats: EngineStats,
    adapters: AdapterStats,
    *,
    state: WorkerState,
    pause: str,
    loaded: dict[str, int],
    tokens_per_s: float,
    silent_s: float,
    machine: MachineStatus,
    court: str,
    kv_address: str,
    ranks: tuple[RankStatus, ...],
    peers: dict[str, float],
) -> WorkerStatus:
    """The heartbeat of this moment."""
    return WorkerStatus(
        id=who.id,
        model=who.card.name,
        host=socket.gethostname(),
        pid=os.getpid(),
        state=state,
        pause=pause,
        weights=weights_of(who.card),
        rows=stats.rows,
        max_rows=settings.max_batch_size,
        waiting=stats.waiting,
        kv_bytes=stats.kv_bytes,
        kv_limit_bytes=stats.kv_limit_bytes,
        tokens_per_s=tokens_per_s,
        steps=stats.steps,
        started_ms=who.started_ms,
        heartbeat_ms=now_ms(),
        adapters=loaded,
        engine_silent_s=round(min(silent_s, 1e9), 1),
        versions=tuple(adapters.loaded),
        kv_address=kv_address,
        machine=machine,
        court=court,
        ranks=ranks,
        speculation=_speculation(settings, stats),
        draft_model=stats.speculation.draft_model,
        extra={**_extra(who.card, settings, stats, adapters), **peers},
    )


def _speculation(settings: WorkerSettings, stats: EngineStats) -> str:
    drafts = stats.speculation
    if settings.spec_decode == "draft" and drafts.is_on and not drafts.draft_model:
        return "none: the draft model has failed; the worker's log says how"
    if settings.spec_decode == "none" or drafts.is_on:
        return settings.spec_decode
    return f"none: {settings.spec_decode} needs layers that can forget their latest positions, and not all of these can"


def _extra(card: ModelCard, settings: WorkerSettings, stats: EngineStats, adapters: AdapterStats) -> dict[str, float]:
    prefix: dict[str, float] = {f"prefix_{name}": value for name, value in asdict(stats.prefix).items()}
    if settings.ssd_folder is not None:
        prefix |= {f"disk_{name}": value for name, value in asdict(stats.disk).items() if name != "folder_id"}
    drafts = stats.speculation
    room = max(0, stats.prefix.limit_bytes - stats.prefix.bytes)
    return {
        **prefix,
        "prefix_free_blocks": room // (settings.block_size * max(1, card.kv_bytes_per_token)),
        "kv_bytes_per_token": card.kv_bytes_per_token,
        "kv_spared_bytes": stats.kv_spared_bytes,
        "warms_up": float(stats.warms_up),
        "adapter_slots": settings.adapter_slots,
        "adapter_slots_used": len(adapters.loaded),
        **{f"{ROWS_OF}{version}": rows for version, rows in adapters.loaded.items()},
        **{f"{WAITS_FOR}{version}": 1 for version in adapters.waited_for},
        **({"draft_tokens": drafts.drafted, "draft_tokens_accepted": drafts.accepted} if drafts.is_on else {}),
        **({f"guest_{name}": value for name, value in asdict(stats.guests).items()} if settings.guest else {}),
    }


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
    """Counters that the publisher keeps of sequences."""

    def __init__(self, tally: Tally, model: str) -> None:
        self._tally = tally
        self._model = model
        self.rates = ServiceRates()
        self._classes = {kind: _ClassHistograms.of(tally, model, kind) for kind in ("interactive", "batch")}
        self._prompt_tokens = self._counter("vllm:prompt_tokens_total")
        self._tokens = self._counter("vllm:generation_tokens_total")
        self._queries = self._counter("vllm:prefix_cache_queries_total")
        self._hits = self._counter("vllm:prefix_cache_hits_total")
        self._cached, self._computed = (
            tally.counter("vllm:prompt_tokens_by_source_total", model, source)
            for source in ("local_cache_hit", "local_compute")
        )
        # Published from the start: a counter that appears with its first event has not grown, as a rate sees it.
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

    def token(self, row: ClaimedRow, tokens: int, at: float) -> None:
        """The engine has spoken of a row, at monotonic time `at`."""
        before, row.last_event_s = row.last_event_s, at
        if not before:
            prompt = len(row.claim.spec.prompt_ids)
            self._prompt_tokens.add(prompt)
            self._step_prompts += prompt
            if row.claim.attempt == 1:
                self.rates.first_token(_seconds(row.started_ms, now_ms()), prompt, at)
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


FIGURES_OF_DRAFTS = {
    "steps": "mlx_parallm_spec_decode_steps_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "model_drafted": "mlx_parallm_spec_decode_draft_model_tokens_total",
    "model_accepted": "mlx_parallm_spec_decode_draft_model_accepted_tokens_total",
}  # by the engine's name: the metric's
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FIGURES_OF_DISK = {
    "hits": "hits",
    "hit_tokens": "hit_tokens",
    "written_bytes": "written_bytes",
    "evicted": "evicted_files",
    "dropped": "dropped_files",
    "errors": "errors",
}  # by the engine's name: the metric's


class WorkerCounts:
    """Other counters of the worker, read from their sources before every write."""

    def __init__(self, tally: Tally, model: str) -> None:
        self._tally, self._model = tally, model
        self.sequences = SequenceCounts(tally, model)
        self.memory_handed_back = tally.counter("mlx_parallm_memory_handed_back_total", model)
        self.takeovers = tally.counter("mlx_parallm_takeovers_total", model)
        self._reclaimed = tally.counter("mlx_parallm_leases_reclaimed_total", model)
        self._given_up = tally.counter("mlx_parallm_dead_letters_total", model)
        self._evicted = tally.counter("mlx_parallm_prefix_cache_evicted_blocks_total", model)
        self._evicted_snapshots = tally.counter("mlx_parallm_prefix_cache_evicted_snapshots_total", model)
        self._of_drafts = {figure: tally.counter(name, model) for figure, name in FIGURES_OF_DRAFTS.items()}
        self._accepted_at: list[Counter] = []
        self._of_disk = {
            figure: tally.counter(f"mlx_parallm_ssd_cache_{name}_total", model)
            for figure, name in FIGURES_OF_DISK.items()
        }
        self._court = [
            tally.counter("mlx_parallm_court_tokens_total", model, verdict) for verdict in ("same", "tie", "wrong")
        ]
        self._images = tally.counter("mlx_parallm_images_encoded_total", model)
        self._known_images = tally.counter("mlx_parallm_images_known_total", model)
        self._swaps = tally.counter("mlx_parallm_lora_swaps_total", model)
        self._swap = tally.histogram("mlx_parallm_lora_swap_seconds", model)
        self._swap_s = 0.0

    def heard(self, report: ReplayReport) -> None:
        """Another worker's sequence has been computed again."""
        for counter, tokens in zip(self._court, (report.same, report.ties, report.wrong), strict=True):
            counter.add(tokens)

    def adapters(self, stats: AdapterStats) -> None:
        """The engine has loaded adapters, or failed to."""
        new = stats.swaps - int(self._swaps.value)
        if new > 0:
            self._swap.observe((stats.swap_s - self._swap_s) / new, new)
            self._swaps.value, self._swap_s = float(stats.swaps), stats.swap_s

    def gather(self, queue: SequenceQueue, stats: EngineStats) -> None:
        """Take over what others have counted since the worker's start."""
        self.sequences.settle()
        self._reclaimed.value = float(queue.reclaimed)
        self._given_up.value = float(queue.given_up)
        self._evicted.value = float(stats.prefix.evicted_blocks)
        self._evicted_snapshots.value = float(stats.prefix.evicted_snapshots)
        self._images.value = float(stats.vision.encoded)
        self._known_images.value = float(stats.vision.hits)
        for figure, counter in self._of_disk.items():
            counter.value = float(getattr(stats.disk, figure))
        for figure, counter in self._of_drafts.items():
            counter.value = float(getattr(stats.speculation, figure))
        for at, accepted in enumerate(stats.speculation.accepted_at):
            if at == len(self._accepted_at):
                self._accepted_at.append(self._tally.counter(ACCEPTED_AT, self._model, str(at)))
            self._accepted_at[at].value = float(accepted)


def _seconds(begin_ms: int, end_ms: int) -> float:
    """Never negative: the clocks of two machines differ a little."""
    return max(0, end_ms - begin_ms) / 1000


_NS = 1_000_000  # in a millisecond
_FAILED = frozenset({"error", "deadline", "cancelled"})


def trace_sequence(claim: Claim, result: SequenceResult) -> None:
    """Trace a sequence whose request is traced: how long it waited, prefilled and decoded, and with what."""
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
