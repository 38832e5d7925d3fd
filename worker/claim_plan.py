"""How many sequences of which class to claim: pure.

Shares are work-conserving: when both classes wait, free rows fill up to `interactive_share` for interactive work and
the rest for batch work; what one class leaves over the other may take, except the rows reserved for interactive. Where
all rows are taken, interactive sequences up to their share still come in, for batch rows that are handed back.
"""

from dataclasses import dataclass

from shared.process.worker_settings import WorkerSettings
from shared.redis.queue.sequence_queue import ClaimPlan
from shared.sequences import ModelCard
from worker.engine.reserved import Reserved
from worker.engine.scheduler import Limits
from worker.rows import ClaimedRows


@dataclass(frozen=True)
class ClassShares:
    """How the rows are divided."""

    interactive_share: float = 0.7  # of all rows, while both classes have work
    reserved_interactive: int = 2  # rows that batch work never takes


@dataclass(frozen=True)
class SchedulerState:
    """Rows and KV that are in use now."""

    interactive_rows: int
    batch_rows: int
    max_rows: int
    kv_tokens_free: int
    kv_window: int = 0  # positions that a row holds at most; 0: all
    kv_state: int = 0  # positions that take as much memory as a row's recurrent states

    @property
    def rows(self) -> int:
        """Rows of both classes together."""
        return self.interactive_rows + self.batch_rows

    def plan(self, rows: int, interactive_first: int, batch_first: int = 0, batch_max: int = 0) -> ClaimPlan:
        """A claim of `rows` sequences within the KV that is free."""
        kv_tokens = max(0, self.kv_tokens_free)
        is_empty = self.rows == 0
        bounds = self.kv_window, self.kv_state
        return ClaimPlan(rows, interactive_first, batch_first, batch_max, kv_tokens, is_empty, *bounds)


NOTHING = ClaimPlan(0, 0, 0, 0, 0, worker_is_empty=False)


def claim_plan(
    rows: ClaimedRows,
    settings: WorkerSettings,
    card: ModelCard,
    kv_limit_bytes: int,
    *,
    most_rows: int,
    full: bool = False,
    shares: bool = False,
) -> ClaimPlan:
    """`kv_limit_bytes`: of this worker in all. `most_rows`: that it fills at present. `full`: what to claim for rows
    that are made free. `shares`: whether rows of one prompt store it once."""
    if most_rows < 1:
        return NOTHING
    token_bytes = max(1, card.kv_bytes_per_token)
    specs = [row.claim.spec for row in rows.occupying()]
    reserved = Reserved(Limits.of(card, kv_limit_bytes), most_rows, shares=shares)
    for row in rows.occupying():
        reserved.add(row.reserved)
    interactive = sum(spec.sequence_class == "interactive" for spec in specs)
    state = SchedulerState(
        interactive_rows=interactive,
        batch_rows=len(specs) - interactive,
        max_rows=most_rows,
        kv_tokens_free=(kv_limit_bytes - reserved.least_bytes) // token_bytes,
        kv_window=card.kv_window,
        kv_state=-(-card.kv_state_bytes // token_bytes),
    )
    classes = ClassShares(settings.interactive_share, settings.reserved_interactive_rows)
    return (plan_room if full else plan_claims)(state, classes)


def plan_claims(state: SchedulerState, shares: ClassShares) -> ClaimPlan:
    """How the free rows are offered to the two classes."""
    free = max(0, state.max_rows - state.rows)
    if free == 0 or state.kv_tokens_free <= 0:
        return state.plan(0, 0)
    reserved = min(shares.reserved_interactive, state.max_rows - 1)
    batch_max = min(free, max(0, state.max_rows - reserved - state.batch_rows))
    interactive_goal = max(round(shares.interactive_share * state.max_rows), reserved)
    interactive_first = min(free, max(0, interactive_goal - state.interactive_rows))
    batch_goal = state.max_rows - interactive_goal
    batch_first = min(free - interactive_first, batch_max, max(0, batch_goal - state.batch_rows))
    return state.plan(free, interactive_first, batch_first, batch_max)


def plan_room(state: SchedulerState, shares: ClassShares) -> ClaimPlan:
    """Plan a claim while all rows are taken: interactive sequences replace batch rows, up to the interactive share.

    One row at least stays with batch work.
    """
    if state.rows < state.max_rows or state.kv_tokens_free <= 0:
        return state.plan(0, 0)
    goal = min(round(shares.interactive_share * state.max_rows), state.max_rows - 1)
    rows = min(state.batch_rows, max(0, goal - state.interactive_rows))
    return state.plan(rows, rows)
