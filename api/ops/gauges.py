"""Gauges: the present state of workers, queues, adapters, jobs and Redis, read from Redis at each scrape."""

import asyncio
import time
from collections import defaultdict

import structlog

from api.ops.snapshot import trainings
from api.ring.first_tokens import Forecast
from api.ring.ring import SERVING, Ring
from shared.machine.memory import LEVELS
from shared.machine.status import MachineStatus
from shared.machine.thermal import STATES
from shared.ranks import RankStatus
from shared.redis import keys
from shared.redis.connection.client import infos, server_time_ms
from shared.redis.connection.faults import reason
from shared.redis.processes.worker_registry import WorkerStatus
from shared.redis.training.board import TrainingBoard
from shared.telemetry.metrics import CATALOGUE, series

log = structlog.get_logger()

Gauges = dict[str, dict[tuple[str, ...], float]]  # metric -> label values -> value

ROWS_OF = "adapter_rows:"  # in a heartbeat's figures, before a version (worker/reports.py)
WAITS_FOR = "adapter_waits:"
SPLITS_AT_ONCE = 16  # that are read


async def read_gauges(ring: Ring, totals: dict[str, float]) -> Gauges:
    """All gauges of the catalogue; counters and histograms are counted by our processes."""
    gauges: Gauges = defaultdict(dict)
    now_ms = await server_time_ms(ring.redis)
    workers: list[WorkerStatus] = []
    gone = 0
    for name in await ring.registry.names():
        live = await ring.registry.workers(name)
        workers += live
        gone += len({*await ring.registry.known(name)} - {worker.id for worker in live})
        await _queue(gauges, ring, name, live)
    for worker in workers:
        _worker(gauges, worker, now_ms)
    await _adapters(gauges, ring, workers)
    await _training(gauges, ring)
    gauges["mlx_parallm_jobs_active"][()] = await ring.redis.zcard(keys.active_jobs())
    await _redis(gauges, ring)
    _seeds(gauges, workers, totals)
    gauges["shutdown_clean"][()] = 0.0 if gone else 1.0
    assert gauges.keys() <= CATALOGUE.keys(), "a gauge that the catalogue does not have"
    return gauges


async def _queue(gauges: Gauges, ring: Ring, model: str, live: list[WorkerStatus]) -> None:
    deferred, queued = sum(worker.waiting for worker in live), 0
    for kind, depth in (await ring.queue(model).depth()).items():
        gauges["mlx_parallm_queue_depth"][model, kind] = depth.waiting
        gauges["mlx_parallm_queue_leased"][model, kind] = depth.leased
        gauges["mlx_parallm_queue_oldest_seconds"][model, kind] = depth.oldest_ms / 1000
        queued += depth.waiting
        if forecast := Forecast.of([worker for worker in live if worker.state in SERVING], kind):
            seconds = forecast.seconds(depth.waiting, ring.first_tokens.prompt_tokens(model, kind))
            gauges["mlx_parallm_queue_predicted_seconds"][model, kind] = seconds
            gauges["mlx_parallm_claims_per_second"][model, kind] = forecast.claims_per_s
    gauges["mlx_parallm_dead_letters"][(model,)] = await ring.redis.xlen(keys.dead_letters(model))
    gauges["vllm:num_requests_running"][(model,)] = sum(worker.rows for worker in live)
    gauges["vllm:num_requests_waiting"][(model,)] = queued + deferred
    gauges["vllm:num_requests_waiting_by_reason"][model, "capacity"] = queued
    gauges["vllm:num_requests_waiting_by_reason"][model, "deferred"] = deferred
    used, limit = sum(worker.kv_bytes for worker in live), sum(worker.kv_limit_bytes for worker in live)
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        gauges[name][(model,)] = used / limit if limit else 0.0
    states: dict[str, int] = defaultdict(int)
    for worker in live:
        states[worker.state] += 1
    for state, count in states.items():
        gauges["mlx_parallm_workers"][model, state] = count
    if live:
        gauges["vllm:lora_requests_info"][_lora_info(model, live)] = time.time()


def _lora_info(model: str, live: list[WorkerStatus]) -> tuple[str, ...]:
    running = {
        name[len(ROWS_OF) :] for w in live for name, rows in w.extra.items() if name.startswith(ROWS_OF) and rows
    }
    waiting = {name[len(WAITS_FOR) :] for w in live for name in w.extra if name.startswith(WAITS_FOR)}
    slots = max(int(worker.extra.get("adapter_slots", 0)) for worker in live)
    return model, str(slots), ",".join(sorted(waiting)), ",".join(sorted(running))


def _worker(gauges: Gauges, worker: WorkerStatus, now_ms: int) -> None:
    figures = {
        "worker_rows": worker.rows,
        "worker_max_rows": worker.max_rows,
        "worker_tokens_per_second": worker.tokens_per_s,
        "worker_kv_bytes": worker.kv_bytes,
        "worker_kv_limit_bytes": worker.kv_limit_bytes,
        "worker_tokens_wrong": ("", "disputed", "wrong").index(worker.court),
        "worker_kv_spared_bytes": worker.extra.get("kv_spared_bytes", 0),
        "worker_ranks": max(1, len(worker.ranks)),
        "worker_ranks_ready": _ready(worker.ranks),
        "worker_heartbeat_age_seconds": max(0, now_ms - worker.heartbeat_ms) / 1000,
        "kv_bytes_per_token": worker.extra.get("kv_bytes_per_token", 0),
        "adapter_slots": worker.extra.get("adapter_slots", 0),
        "adapter_slots_used": worker.extra.get("adapter_slots_used", 0),
        "prefix_cache_bytes": worker.extra.get("prefix_bytes", 0),
        "prefix_cache_snapshot_bytes": worker.extra.get("prefix_snapshot_bytes", 0),
        "ssd_cache_bytes": worker.extra.get("disk_bytes", 0),
        "ssd_cache_limit_bytes": worker.extra.get("disk_limit_bytes", 0),
        "ssd_cache_files": worker.extra.get("disk_files", 0),
        "ssd_cache_waiting_files": worker.extra.get("disk_waiting", 0),
    }
    for name, value in (figures | _machine(worker)).items():
        gauges[f"mlx_parallm_{name}"][worker.model, worker.id] = value
    for rank in worker.ranks:
        if rank.machine.memory_total:
            for name, value in _memory(rank.machine).items():
                gauges[f"mlx_parallm_worker_rank_{name}"][worker.model, worker.id, str(rank.rank)] = value


def _memory(machine: MachineStatus) -> dict[str, float]:
    """Memory where a process has its model: the GPU's, if that has its own."""
    return {
        "memory_bytes": machine.held,
        "memory_available_bytes": machine.available,
        "memory_pressure": LEVELS.index(machine.pressure),
    }


def _machine(worker: WorkerStatus) -> dict[str, float]:
    """The machine that the worker runs on; {} where it reports none."""
    machine = worker.machine
    if not machine.memory_total:
        return {}
    figures: dict[str, float] = {
        "worker_most_rows": worker.max_rows if machine.most_rows < 0 else machine.most_rows,
        "worker_memory_bytes": machine.footprint,
        "worker_memory_available_bytes": machine.memory_available,
        "worker_memory_total_bytes": machine.memory_total,
        "worker_memory_pressure": LEVELS.index(machine.pressure),
        "worker_on_battery": machine.power == "battery",
    }
    if machine.gpu_total:
        figures |= {
            "worker_gpu_memory_bytes": machine.gpu_held,
            "worker_gpu_memory_available_bytes": machine.gpu_available,
            "worker_gpu_memory_total_bytes": machine.gpu_total,
        }
    known = machine.thermal in STATES
    return figures | ({"worker_thermal_state": STATES.index(machine.thermal)} if known else {})


def _ready(ranks: tuple[RankStatus, ...]) -> int:
    """One process alone is ready."""
    return sum(rank.state == "ready" for rank in ranks) if ranks else 1


async def _adapters(gauges: Gauges, ring: Ring, workers: list[WorkerStatus]) -> None:
    pointers = await ring.adapters.pointers()
    for name, latest in reversed(pointers.items()):  # the last published ones first, should there be too many
        gauges["mlx_parallm_adapter_latest_version"][(name,)] = latest
    split = await ring.splits.stored.among(pointers)
    for at in range(0, len(split), SPLITS_AT_ONCE):
        await asyncio.gather(*(_split(gauges, ring, name) for name in split[at : at + SPLITS_AT_ONCE]))
    for worker in workers:
        for name, version in worker.adapters.items():
            gauges["mlx_parallm_adapter_loaded_version"][name, worker.id] = version


async def _split(gauges: Gauges, ring: Ring, name: str) -> None:
    try:
        state = await ring.splits.stored.find(name)
        shares = {} if state is None or state.over else state.shares
    except Exception as error:  # one split that cannot be read costs its own figures, not the scrape
        log.warning("gauges.split_failed", adapter=name, error=reason(error))
        return
    if state is None:
        return
    for version, share in shares.items():
        earned = state.earned[version]
        gauges["mlx_parallm_split_share"][name, str(version)] = share
        gauges["mlx_parallm_split_rewards"][name, str(version)] = earned.count
        gauges["mlx_parallm_split_mean_reward"][name, str(version)] = earned.mean


async def _training(gauges: Gauges, ring: Ring) -> None:
    for service in await ring.learners.services(await ring.registry.names()):
        figures: dict[str, float | None] = {"learners": service.learners, "learners_max": service.max_learners}
        figures |= {f"learners_{name}": value for name, value in _memory(service.machine).items()}
        for name, value in figures.items():
            gauges[f"mlx_parallm_{name}"][(service.model,)] = value or 0
    for training in await trainings(ring):
        status = training.status
        policy = status.policy
        live = await TrainingBoard(ring.redis, policy).trajectories()
        figures = {
            "rl_trajectories_collected": status.trajectories + live.waiting,
            "rl_training_loss": status.loss,
            "rl_updates_per_second": status.updates_per_s,
            "checkpoint_saves_total": status.checkpoint_saves,
            "rl_reward": status.reward,
            "rl_held_out_reward": status.held_out,
            "rl_held_out_true_reward": status.held_out_true,
            "rl_kl": status.kl,
            "rl_value_loss": status.value_loss,
            "rl_value_explained": status.explained,
            "rl_lag": status.lag,
            "rl_train_step": status.train_step,
            "rl_policy_step": status.policy_step,
            "rl_tokens_per_second": status.tokens_per_s,
            "rl_versions_rejected": status.rejected,
            "rl_rollbacks": status.rollbacks,
            "rl_trainer_up": 1.0 if training.alive else 0.0,
            "rl_trainer_ranks": max(1, len(status.ranks)) if training.alive else 0,
            "rl_trainer_ranks_ready": _ready(status.ranks) if training.alive else 0,
            "rl_trajectories_waiting": live.waiting,
            "rl_trajectories_dropped": live.dropped,
        }
        if training.alive and status.machine.memory_total:
            figures |= {f"rl_trainer_{name}": value for name, value in _memory(status.machine).items()}
        for name, value in figures.items():
            if value is not None:
                gauges[f"mlx_parallm_{name}"][(policy,)] = value
        for kind, count in training.alerts.items():
            gauges["mlx_parallm_rl_alerts"][policy, kind] = count


async def _redis(gauges: Gauges, ring: Ring) -> None:
    servers = await infos(ring.redis)
    figures = {"used_memory_bytes": "used_memory", "connected_clients": "connected_clients"}
    for name, figure in {**figures, "commands_per_second": "instantaneous_ops_per_sec"}.items():
        gauges[f"mlx_parallm_redis_{name}"][()] = sum(info.get(figure, 0) for info in servers)


def _seeds(gauges: Gauges, workers: list[WorkerStatus], totals: dict[str, float]) -> None:
    """Some of these figures under the names of other MLX servers."""
    gauges["dist_fatal"][()] = 0.0 if any(worker.state in SERVING for worker in workers) else 1.0
    gauges["active_sequences"][()] = sum(gauges["vllm:num_requests_running"].values())
    gauges["queued_requests"][()] = sum(gauges["vllm:num_requests_waiting"].values())
    for name, figure in (("used_blocks", "prefix_blocks"), ("free_blocks", "prefix_free_blocks")):
        gauges[name][()] = sum(worker.extra.get(figure, 0) for worker in workers)
    queries, hits = (
        sum(value for _, _, value in series(totals, f"vllm:prefix_cache_{name}_total")) for name in ("queries", "hits")
    )
    gauges["cache_hit_rate"][()] = hits / queries if queries else 0.0
