"""Writes the ring's history: a sample every few seconds, taken by one of the api processes."""

import asyncio
from collections import defaultdict

import structlog

from api.ops.ring_history import SAMPLE_EVERY_S, RingHistory
from api.ops.ring_view import RingSample, RingSnapshot
from api.ops.snapshot import Snapshots, ended_by_queue
from api.ring.ring import Ring
from shared.redis.connection.faults import reason
from shared.redis.processes.metric_store import read_totals
from shared.telemetry.metrics import SUM, series

log = structlog.get_logger()


def sample_of(snapshot: RingSnapshot, totals: dict[str, float]) -> RingSample:
    """The sample of a snapshot."""
    waiting: dict[str, int] = defaultdict(int)
    for queue in snapshot.queues:
        waiting[queue.sequence_class] += queue.waiting
    used = sum(worker.kv_bytes for worker in snapshot.workers)
    limit = sum(worker.kv_limit_bytes for worker in snapshot.workers)
    first_token, gap = (
        _interactive(totals, f"vllm:{name}_seconds") for name in ("time_to_first_token", "inter_token_latency")
    )
    return RingSample(
        at_ms=snapshot.at_ms,
        running=sum(worker.rows for worker in snapshot.workers),
        waiting=dict(waiting),
        kv_used=used / limit if limit else 0.0,
        tokens=sum(value for _, _, value in series(totals, "vllm:generation_tokens_total")),
        prompt_tokens=sum(value for _, _, value in series(totals, "vllm:prompt_tokens_total")),
        ended=ended_by_queue(totals),
        first_token_s=first_token[0],
        first_tokens=first_token[1],
        gap_s=gap[0],
        gaps=gap[1],
    )


def _interactive(totals: dict[str, float], name: str) -> tuple[float, float]:
    """Sum and number of a histogram's observations of interactive sequences."""
    total = count = 0.0
    for labels, bucket, value in series(totals, name):
        if labels[1] == "interactive":
            total, count = (total + value, count) if bucket == SUM else (total, count + value)
    return total, count


async def sample_forever(ring: Ring, snapshots: Snapshots) -> None:
    """Take a sample whenever it is this process's turn, until cancelled."""
    history = RingHistory(ring.redis)
    while True:
        try:
            if await history.is_my_turn(ring.api_id):
                totals = await read_totals(ring.redis)
                await history.add(sample_of(await snapshots.read(), totals))
        except Exception as error:
            log.warning("api.sample_failed", error=reason(error))
        await asyncio.sleep(SAMPLE_EVERY_S)
