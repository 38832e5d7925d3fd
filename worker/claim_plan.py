"""What a worker can take now: its settings, its free rows and its free KV, put into a plan for the queue."""

from collections.abc import Iterable

from shared.redis.sequence_queue import ClaimPlan
from shared.settings import WorkerSettings
from worker.engine.scheduler import SchedulerState, Shares, plan_claims, plan_room
from worker.running import Running

NOTHING = ClaimPlan(0, 0, 0, 0, 0, worker_is_empty=False)


def claim_plan(rows: Iterable[Running], settings: WorkerSettings, kv_tokens: int, *, full: bool = False) -> ClaimPlan:
    """`kv_tokens`: positions of KV that this worker has in all. `full`: what to claim for rows that are made free."""
    interactive = batch = longest = 0
    for row in rows:
        if not row.occupies_row:
            continue
        longest = max(longest, row.claim.spec.kv_tokens)
        if row.claim.spec.sequence_class == "interactive":
            interactive += 1
        else:
            batch += 1
    plan = (plan_room if full else plan_claims)(
        SchedulerState(
            interactive_rows=interactive,
            batch_rows=batch,
            max_rows=settings.max_batch_size,
            kv_tokens_free=max(0, kv_tokens - (interactive + batch) * longest),  # the batch pads to its longest
        ),
        Shares(settings.interactive_share, settings.reserved_interactive_rows),
    )
    return ClaimPlan(
        rows=plan.rows,
        interactive_first=plan.interactive_first,
        batch_first=plan.batch_first,
        batch_max=plan.batch_max,
        kv_tokens=plan.kv_tokens,
        worker_is_empty=interactive + batch == 0,
    )
