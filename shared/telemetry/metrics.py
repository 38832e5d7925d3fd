"""Metrics: the catalogue of all metrics, and the tally that each process keeps of its own.

The catalogue is the one place where a metric is named; docs/reference/metrics.md is written from it, and a test
fails when something else is exposed. Names with `vllm:` and their meaning are vLLM's, so that its
boards work on our figures.

A tally only grows. Its hot path is one add: a counter or histogram is looked up once and stored by its user. The
tallies of all processes are summed in Redis (shared/redis/processes/metric_store.py), field by field; a histogram's
field holds the observations of one bucket alone, not of those below it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

MetricKind = Literal["counter", "gauge", "histogram"]

SUM = "sum"  # in the place of a bucket: the sum of a histogram's observations
INF = "+Inf"
MOST_SERIES = 1000  # label sets of a metric that are exposed: adapters may be as many as clients make

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
            60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
          7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_LENGTH = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_STEP = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_SWAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_HTTP_REQUEST = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)  # few: each is a line for each route
_INSTRUMENTED = (0.1, 0.5, 1.0)  # as prometheus-fastapi-instrumentator has them
_LAG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REWARD = (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0, 5.0)

_MODEL = ("model_name",)
_CLASS = ("model_name", "class")
_WORKER = ("model_name", "worker")
_RANK = ("model_name", "worker", "rank")
_POLICY = ("policy",)
_ARM = ("adapter", "version")


class Metric(NamedTuple):
    """Definition of one family of metrics."""

    name: str  # as it is exposed, a counter's `_total` included
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


def _counter(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(name, "counter", labels, meaning)


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(name, "gauge", labels, meaning)


def _histogram(name: str, labels: tuple[str, ...], buckets: tuple[float, ...], meaning: str) -> Metric:
    return Metric(name, "histogram", labels, meaning, buckets)


_VLLM = (
    _gauge("vllm:num_requests_running", _MODEL, "sequences in the workers' batches"),
    _gauge("vllm:num_requests_waiting", _MODEL, "sequences that wait, in the queue or in a worker for a row"),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        (*_MODEL, "reason"),
        "the same, by reason: capacity (in the queue), deferred (in a worker, for an adapter or a grammar)",
    ),
    _counter("vllm:num_preemptions_total", _MODEL, "rows of jobs that went back to the queue for interactive ones"),
    _gauge("vllm:kv_cache_usage_perc", _MODEL, "KV memory in use, 0 to 1, over all workers"),
    _gauge("vllm:gpu_cache_usage_perc", _MODEL, "the same under vLLM's older name"),
    _gauge(
        "vllm:lora_requests_info",
        (*_MODEL, "max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        "Unix time; the labels say which adapter versions rows use and wait for",
    ),
    _counter("vllm:prompt_tokens_total", _MODEL, "prompt tokens of sequences that have begun, cached ones included"),
    _counter(
        "vllm:prompt_tokens_by_source_total",
        (*_MODEL, "source"),
        "prompt tokens of sequences that have ended: local_cache_hit (from the prefix cache), local_compute",
    ),
    _counter("vllm:generation_tokens_total", _MODEL, "tokens decoded"),
    _counter(
        "vllm:request_success_total",
        (*_MODEL, "finished_reason"),
        "sequences that have ended: stop, length, abort (cancelled or past their deadline), error",
    ),
    _counter("vllm:prefix_cache_queries_total", _MODEL, "prompt tokens that were looked for in the prefix cache"),
    _counter("vllm:prefix_cache_hits_total", _MODEL, "prompt tokens that were found in it"),
    _counter("vllm:spec_decode_num_drafts_total", _MODEL, "drafts that were checked, each of one row in one step"),
    _counter("vllm:spec_decode_num_draft_tokens_total", _MODEL, "tokens of these drafts"),
    _counter("vllm:spec_decode_num_accepted_tokens_total", _MODEL, "of them, those that the model drew itself"),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        (*_MODEL, "position"),
        "the same by place in the draft, from 0",
    ),
    _histogram("vllm:time_to_first_token_seconds", _CLASS, _FIRST_TOKEN, "from the request to its first token"),
    _histogram("vllm:inter_token_latency_seconds", _CLASS, _TOKEN, "between two tokens of a sequence"),
    _histogram("vllm:time_per_output_token_seconds", _CLASS, _TOKEN, "the same under vLLM's older name"),
    _histogram(
        "vllm:request_time_per_output_token_seconds", _CLASS, _TOKEN, "mean time between two tokens, by sequence"
    ),
    _histogram("vllm:e2e_request_latency_seconds", _CLASS, _LATENCY, "from the request to its last token"),
    _histogram("vllm:request_queue_time_seconds", _CLASS, _LATENCY, "from the request to its claim by a worker"),
    _histogram("vllm:request_inference_time_seconds", _CLASS, _LATENCY, "from the claim to the last token"),
    _histogram("vllm:request_prefill_time_seconds", _CLASS, _LATENCY, "from the claim to the first token"),
    _histogram("vllm:request_decode_time_seconds", _CLASS, _LATENCY, "from the first token to the last"),
    _histogram("vllm:request_prompt_tokens", _MODEL, _LENGTH, "length of prompts"),
    _histogram("vllm:request_generation_tokens", _MODEL, _LENGTH, "length of completions"),
    _histogram("vllm:request_max_num_generation_tokens", _MODEL, _LENGTH, "tokens that a request asked for at most"),
    _histogram("vllm:request_params_max_tokens", _MODEL, _LENGTH, "the parameter max_tokens"),
    _histogram("vllm:request_params_n", _MODEL, _SAMPLES, "the parameter n of requests over HTTP"),
    _histogram("vllm:iteration_tokens_total", _MODEL, _STEP, "tokens that one step took in, of prompts, and brought"),
)

_OURS = (
    _gauge("mlx_parallm_queue_depth", _CLASS, "sequences that no worker has taken yet"),
    _gauge("mlx_parallm_queue_leased", _CLASS, "sequences in workers' hands"),
    _gauge("mlx_parallm_queue_oldest_seconds", _CLASS, "age of the sequence that waits longest"),
    _gauge(
        "mlx_parallm_queue_predicted_seconds",
        _CLASS,
        "until the first token of who came now, as full workers' pace has it; absent while it is not measured",
    ),
    _gauge("mlx_parallm_claims_per_second", _CLASS, "sequences that the workers take while all their rows are taken"),
    _gauge("mlx_parallm_dead_letters", _MODEL, "sequences given up and not yet requeued or dropped"),
    _gauge("mlx_parallm_workers", (*_MODEL, "state"), "live workers"),
    _gauge("mlx_parallm_worker_rows", _WORKER, "rows in use"),
    _gauge("mlx_parallm_worker_max_rows", _WORKER, "rows there are"),
    _gauge("mlx_parallm_worker_tokens_per_second", _WORKER, "tokens decoded, over the last heartbeat"),
    _gauge("mlx_parallm_kv_bytes_per_token", _WORKER, "KV memory that a token takes, quantised if KV is"),
    _gauge("mlx_parallm_worker_kv_bytes", _WORKER, "KV memory that rows hold"),
    _gauge("mlx_parallm_worker_kv_limit_bytes", _WORKER, "KV memory there is"),
    _gauge("mlx_parallm_worker_kv_spared_bytes", _WORKER, "KV memory that rows do not take, as they share prompts"),
    _gauge("mlx_parallm_worker_ranks", _WORKER, "processes that hold the worker's model together"),
    _gauge("mlx_parallm_worker_ranks_ready", _WORKER, "of them, those that take its turns"),
    _gauge(
        "mlx_parallm_worker_most_rows", _WORKER, "rows that the worker fills at present: fewer under memory pressure"
    ),
    _gauge("mlx_parallm_worker_memory_bytes", _WORKER, "memory that the worker's process holds"),
    _gauge("mlx_parallm_worker_memory_available_bytes", _WORKER, "memory of its machine that is available"),
    _gauge("mlx_parallm_worker_memory_total_bytes", _WORKER, "memory of its machine, or of its control group"),
    _gauge("mlx_parallm_worker_memory_pressure", _WORKER, "0 normal, 1 warning, 2 critical"),
    _gauge(
        "mlx_parallm_worker_gpu_memory_bytes", _WORKER, "memory of its GPU that the process holds, if that has its own"
    ),
    _gauge("mlx_parallm_worker_gpu_memory_available_bytes", _WORKER, "memory of that GPU that is available"),
    _gauge("mlx_parallm_worker_gpu_memory_total_bytes", _WORKER, "memory of that GPU"),
    _gauge(
        "mlx_parallm_worker_rank_memory_bytes",
        _RANK,
        "memory that another rank of the worker holds, of its GPU if that has its own",
    ),
    _gauge("mlx_parallm_worker_rank_memory_available_bytes", _RANK, "memory that is available there"),
    _gauge("mlx_parallm_worker_rank_memory_pressure", _RANK, "0 normal, 1 warning, 2 critical"),
    _gauge("mlx_parallm_worker_on_battery", _WORKER, "1 while its machine runs on battery"),
    _gauge("mlx_parallm_worker_thermal_state", _WORKER, "0 nominal, 1 fair, 2 serious, 3 critical; absent: unknown"),
    _gauge(
        "mlx_parallm_worker_tokens_wrong",
        _WORKER,
        "0 right or not checked, 1 wrong to one other worker, 2 to two of them",
    ),
    _gauge("mlx_parallm_worker_heartbeat_age_seconds", _WORKER, "since the worker's last heartbeat"),
    _gauge("mlx_parallm_adapter_slots", _WORKER, "adapter slots there are"),
    _gauge("mlx_parallm_adapter_slots_used", _WORKER, "adapter slots that hold a version"),
    _gauge("mlx_parallm_prefix_cache_bytes", _WORKER, "stored KV of earlier prompts and answers"),
    _gauge("mlx_parallm_prefix_cache_snapshot_bytes", _WORKER, "of it, states of layers that cannot be cut"),
    _gauge("mlx_parallm_ssd_cache_bytes", _WORKER, "files of KV in the worker's folder, which others may share"),
    _gauge("mlx_parallm_ssd_cache_limit_bytes", _WORKER, "what they may come to; 0: no bound, or no folder"),
    _gauge("mlx_parallm_ssd_cache_files", _WORKER, "of them, files of the worker's model"),
    _gauge("mlx_parallm_ssd_cache_waiting_files", _WORKER, "files that wait to be written"),
    _gauge("mlx_parallm_adapter_latest_version", ("adapter",), "the version that a bare name means"),
    _counter(
        "mlx_parallm_split_requests_total",
        ("to",),
        "requests that a split has sent to the latest version, or a candidate",
    ),
    _gauge(
        "mlx_parallm_split_share", _ARM, "share of requests that a split gives this version; absent when it is over"
    ),
    _gauge("mlx_parallm_split_rewards", _ARM, "rewards that this version has in its split"),
    _gauge("mlx_parallm_split_mean_reward", _ARM, "their mean"),
    _gauge("mlx_parallm_adapter_loaded_version", ("adapter", "worker"), "the version that a worker computes with"),
    _gauge("mlx_parallm_jobs_active", (), "jobs that have not ended"),
    _gauge("mlx_parallm_ring_up", ("ring",), "whether a ring answers, of a process that serves several"),
    _gauge(
        "mlx_parallm_series_left_out",
        ("metric",),
        f"label sets left out, where there are more than {MOST_SERIES}; absent where none is",
    ),
    _gauge("mlx_parallm_redis_used_memory_bytes", (), "memory of Redis"),
    _gauge("mlx_parallm_redis_connected_clients", (), "connections to Redis"),
    _gauge("mlx_parallm_redis_commands_per_second", (), "commands that Redis runs"),
    _counter("mlx_parallm_spec_decode_steps_total", _MODEL, "decode steps that checked drafts"),
    _counter("mlx_parallm_spec_decode_draft_model_tokens_total", _MODEL, "drafted tokens that a draft model said"),
    _counter("mlx_parallm_spec_decode_draft_model_accepted_tokens_total", _MODEL, "of them, those that were accepted"),
    _counter("mlx_parallm_leases_reclaimed_total", _MODEL, "leases that ran out, whose sequences were taken back"),
    _counter("mlx_parallm_takeovers_total", _MODEL, "sequences that a worker went on with after another one"),
    _counter(
        "mlx_parallm_memory_handed_back_total", _MODEL, "sequences that went back to the queue for want of memory"
    ),
    _counter(
        "mlx_parallm_court_tokens_total", (*_MODEL, "verdict"), "tokens that were computed again: same, tie or wrong"
    ),
    _counter("mlx_parallm_dead_letters_total", _MODEL, "sequences given up since the beginning"),
    _counter("mlx_parallm_commits_refused_total", _MODEL, "ends that came from a worker that had lost the lease"),
    _counter("mlx_parallm_lora_swaps_total", _MODEL, "adapter versions loaded into a slot"),
    _histogram("mlx_parallm_lora_swap_seconds", _MODEL, _SWAP, "from the start of a slot's writing to its remap"),
    _counter("mlx_parallm_prefix_cache_evicted_blocks_total", _MODEL, "blocks that the prefix cache has dropped"),
    _counter("mlx_parallm_prefix_cache_evicted_snapshots_total", _MODEL, "snapshots that it has dropped"),
    _counter("mlx_parallm_images_encoded_total", _MODEL, "images that a model's tower has seen"),
    _counter("mlx_parallm_images_known_total", _MODEL, "images of sequences whose vectors were there, or under way"),
    _counter("mlx_parallm_ssd_cache_hits_total", _MODEL, "prompts for which KV came from files"),
    _counter("mlx_parallm_ssd_cache_hit_tokens_total", _MODEL, "their tokens that came from there"),
    _counter("mlx_parallm_ssd_cache_written_bytes_total", _MODEL, "bytes of KV written to files"),
    _counter(
        "mlx_parallm_ssd_cache_evicted_files_total", _MODEL, "files removed to make room, or because of their age"
    ),
    _counter("mlx_parallm_ssd_cache_dropped_files_total", _MODEL, "files not written: too many waited, or no room"),
    _counter("mlx_parallm_ssd_cache_errors_total", _MODEL, "errors of the disk, and damaged files that were removed"),
    _counter(
        "mlx_parallm_kv_fetches_total",
        (*_MODEL, "outcome"),
        "KV asked of another worker: fetched, computed (which was quicker), refused, failed",
    ),
    _counter("mlx_parallm_kv_fetched_tokens_total", _MODEL, "tokens whose KV came from another worker"),
    _counter("mlx_parallm_kv_fetched_bytes_total", _MODEL, "KV received from other workers"),
    _counter("mlx_parallm_kv_given_bytes_total", _MODEL, "KV sent to other workers"),
    _histogram("mlx_parallm_kv_fetch_seconds", _MODEL, _FIRST_TOKEN, "of one transfer of KV between two workers"),
    _histogram(
        "mlx_parallm_api_loop_lag_seconds", (), _LAG, "how late event loops of api processes come, 20 times a second"
    ),
    _counter(
        "mlx_parallm_first_token_deadlines_total",
        (*_CLASS, "outcome"),
        "requests by the outcome of their first token's deadline: in time (`kept`), missed, refused in advance",
    ),
    _counter("mlx_parallm_http_requests_total", ("method", "route", "status"), "HTTP requests answered"),
    _histogram(
        "mlx_parallm_http_request_seconds", ("route",), _HTTP_REQUEST, "HTTP requests, streams to their last byte"
    ),
    _histogram(
        "mlx_parallm_reward", ("reward",), _REWARD, "rewards that the job runners have given; the sum may shrink"
    ),
    _counter("mlx_parallm_reward_errors_total", ("reward",), "rewards that raised or took too long"),
)

_TRAINING = (
    _gauge(
        "mlx_parallm_rl_trajectories_collected",
        _POLICY,
        "trajectories that the run has learned from, and live ones that wait for it",
    ),
    _gauge("mlx_parallm_rl_training_loss", _POLICY, "loss of the last train step"),
    _gauge("mlx_parallm_rl_updates_per_second", _POLICY, "policy steps, over the time that the run has trained"),
    _counter("mlx_parallm_checkpoint_saves_total", _POLICY, "checkpoints that trainers have saved"),
    _gauge("mlx_parallm_rl_reward", _POLICY, "mean reward of the last train step"),
    _gauge("mlx_parallm_rl_held_out_reward", _POLICY, "reward of the last good version on held-out tasks"),
    _gauge("mlx_parallm_rl_held_out_true_reward", _POLICY, "its --held-out-reward on the same tasks"),
    _gauge("mlx_parallm_rl_kl", _POLICY, "KL to the base in the last train step (k3)"),
    _gauge("mlx_parallm_rl_value_loss", _POLICY, "with loss ppo: loss of the values in the last train step"),
    _gauge("mlx_parallm_rl_value_explained", _POLICY, "share of the returns' variance that its values explained"),
    _gauge("mlx_parallm_rl_lag", _POLICY, "versions between the oldest token and the trainer in the last train step"),
    _gauge("mlx_parallm_rl_train_step", _POLICY, "batches consumed by the run"),
    _gauge("mlx_parallm_rl_policy_step", _POLICY, "train steps whose result is part of the present policy"),
    _gauge("mlx_parallm_rl_tokens_per_second", _POLICY, "completion tokens that the run learns from"),
    _gauge("mlx_parallm_rl_versions_rejected", _POLICY, "versions of the run that did not pass the gate"),
    _gauge("mlx_parallm_rl_rollbacks", _POLICY, "rollbacks by the run's trainer"),
    _gauge("mlx_parallm_rl_alerts", ("policy", "kind"), "alerts so far"),
    _gauge("mlx_parallm_rl_trainer_up", _POLICY, "1 while a trainer lives, else 0"),
    _gauge("mlx_parallm_rl_trainer_ranks", _POLICY, "processes that are the trainer together; 0: it does not live"),
    _gauge("mlx_parallm_rl_trainer_ranks_ready", _POLICY, "of them, those that do its work"),
    _gauge(
        "mlx_parallm_rl_trainer_memory_bytes", _POLICY, "memory that the trainer holds, of its GPU if that has its own"
    ),
    _gauge("mlx_parallm_rl_trainer_memory_available_bytes", _POLICY, "memory that is available there"),
    _gauge("mlx_parallm_rl_trainer_memory_pressure", _POLICY, "0 normal, 1 warning, 2 critical"),
    _gauge("mlx_parallm_learners", _MODEL, "learners in the memory of the model's training service"),
    _gauge("mlx_parallm_learners_max", _MODEL, "learners that it holds at most"),
    _gauge("mlx_parallm_learners_memory_bytes", _MODEL, "memory that it holds, of its GPU if that has its own"),
    _gauge("mlx_parallm_learners_memory_available_bytes", _MODEL, "memory that is available there"),
    _gauge("mlx_parallm_learners_memory_pressure", _MODEL, "0 normal, 1 warning, 2 critical"),
    _gauge("mlx_parallm_rl_trajectories_waiting", _POLICY, "live trajectories that no train step has consumed"),
    _gauge("mlx_parallm_rl_trajectories_dropped", _POLICY, "live trajectories dropped because too many waited"),
)

_SEEDS = (
    _gauge("active_sequences", (), "vllm:num_requests_running of all models"),
    _gauge("queued_requests", (), "vllm:num_requests_waiting of all models"),
    _gauge("used_blocks", (), "blocks in the prefix caches"),
    _gauge("free_blocks", (), "blocks for which the prefix caches have room"),
    _gauge("dist_fatal", (), "1 while no worker takes work, so that no request can be answered; else 0"),
    _gauge("shutdown_clean", (), "0 while a worker that went without leaving in order is known, for an hour; else 1"),
    _gauge("cache_hit_rate", (), "prompt tokens found in the prefix caches, of those looked for, since the beginning"),
)

# What vLLM's server has from prometheus-fastapi-instrumentator, on which its boards build; derived from ours when read.
_HTTP = (
    _counter("http_requests_total", ("method", "status", "handler"), "requests but for probes; status: 2xx, 4xx, 5xx"),
    _histogram("http_request_duration_seconds", ("handler",), _INSTRUMENTED, "requests but for probes"),
)

CATALOGUE: dict[str, Metric] = {metric.name: metric for metric in (*_VLLM, *_OURS, *_TRAINING, *_SEEDS, *_HTTP)}


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """Number of observations in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Tally:
    """One process's counters and histograms."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def counter(self, name: str, *labels: str) -> Counter:
        """The counter of these label values, in the catalogue's order."""
        _checked(name, "counter", labels)
        return self._counters.setdefault(field_of(name, *labels), Counter())

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram of these label values."""
        metric = _checked(name, "histogram", labels)
        return self._histograms.setdefault(field_of(name, *labels), Histogram(metric.buckets))

    def fields(self) -> dict[str, float]:
        """Everything that was counted; empty histograms are left out."""
        fields = {field: counter.value for field, counter in self._counters.items()}
        for field, histogram in self._histograms.items():
            if not any(histogram.counts):
                continue
            for bound, count in zip((*histogram.bounds, INF), histogram.counts, strict=True):
                if count:
                    fields[f"{field}|{bound}"] = count
            fields[f"{field}|{SUM}"] = histogram.sum
        return fields


def field_of(name: str, *labels: str) -> str:
    """`name|value|value`: how a metric is called in Redis."""
    return "|".join((name, *(quote(label, safe=" /:@.,") for label in labels)))


def parse_field(field: str) -> tuple[str, tuple[str, ...], str]:
    """Name, label values, and of a histogram the bucket (its bound, `+Inf` or `sum`); KeyError when it is not ours."""
    name, *rest = field.split("|")
    count = len(CATALOGUE[name].labels)
    labels = tuple(unquote(label) for label in rest[:count])
    return name, labels, rest[count] if len(rest) > count else ""


def series(totals: Mapping[str, float], name: str) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """(label values, bucket, value) of one metric among the totals of all."""
    for field, value in totals.items():
        if field.partition("|")[0] == name:
            _, labels, bucket = parse_field(field)
            yield labels, bucket, value


def _checked(name: str, kind: MetricKind, labels: tuple[str, ...]) -> Metric:
    metric = CATALOGUE[name]
    assert metric.kind == kind and len(metric.labels) == len(labels), f"{name} is a {metric.kind} of {metric.labels}"
    return metric
