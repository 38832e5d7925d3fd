"""Admission maths, pure: how many sequences of which class to claim, and how to share prefill time.

Shares are work-conserving: when both classes wait, free rows fill up to `interactive_share` for interactive work and
the rest for batch work; what one class leaves over the other may take, except the rows reserved for interactive, which
batch work never takes because it is not preempted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SMALLEST_CHUNK = 128  # tokens of a long prompt in one turn: less wastes a forward
UNDISTURBED = 4  # chunks of prompt at once while nothing decodes; still short enough for cancels and arrivals


@dataclass(frozen=True)
class Shares:
    """How the rows are divided."""

    interactive_share: float = 0.7  # of all rows, while both classes have work
    reserved_interactive: int = 2  # rows that batch work never takes


@dataclass(frozen=True)
class SchedulerState:
    """What runs now."""

    interactive_rows: int
    batch_rows: int
    max_rows: int
    kv_tokens_free: int


@dataclass(frozen=True)
class Plan:
    """What to claim now; the queue's `ClaimPlan` has the same fields.

    Claiming goes: up to `interactive_first`, up to `batch_first`, then the rows left over to interactive and to batch,
    never more than `batch_max` of batch.
    """

    rows: int
    interactive_first: int
    batch_first: int
    batch_max: int
    kv_tokens: int


def plan_claims(state: SchedulerState, shares: Shares) -> Plan:
    """How the free rows are offered to the two classes."""
    free = max(0, state.max_rows - state.interactive_rows - state.batch_rows)
    if free == 0 or state.kv_tokens_free <= 0:
        return Plan(0, 0, 0, 0, max(0, state.kv_tokens_free))
    reserved = min(shares.reserved_interactive, state.max_rows - 1)
    batch_max = min(free, max(0, state.max_rows - reserved - state.batch_rows))
    interactive_goal = max(round(shares.interactive_share * state.max_rows), reserved)
    interactive_first = min(free, max(0, interactive_goal - state.interactive_rows))
    batch_goal = state.max_rows - interactive_goal
    batch_first = min(free - interactive_first, batch_max, max(0, batch_goal - state.batch_rows))
    return Plan(free, interactive_first, batch_first, batch_max, state.kv_tokens_free)


@dataclass(frozen=True)
class PrefillShare:
    """Prompt tokens for one turn of the loop: in the batch, and in our own lane."""

    batch: int
    lane: int


def share_prefill(chunk: int, *, decoding: bool, batch_waits: bool, lane_waits: bool) -> PrefillShare:
    """Divide a chunk of prompt tokens; half each when both wait, and more at once when no stream would stall."""
    if not decoding:
        chunk *= UNDISTURBED
    if batch_waits and lane_waits:
        return PrefillShare(chunk - chunk // 2, max(1, chunk // 2))
    return PrefillShare(chunk, chunk)


@dataclass(frozen=True)
class Together:
    """What the batch feeds in one turn."""

    prompts: int  # rows that may be in the prefill batch
    chunk: int  # tokens of each


def feed_together(left: Iterable[int], budget: int, most: int) -> Together:
    """How many prompts to feed in one turn, of which these numbers of tokens are `left`, in order of arrival.

    As many as the budget feeds to their end, at least one and at most `most`; long ones share it by pieces of
    `SMALLEST_CHUNK`, so that a short prompt behind them need not wait for their end. Those with one token left (forks,
    and prompts that are through) feed nothing: all of them begin to decode.
    """
    fed = through = longest = 0
    for tokens in left:
        if tokens <= 1:
            through += 1
            continue
        longest = max(longest, min(tokens, SMALLEST_CHUNK))
        if fed < most and (fed + 1) * longest <= budget:
            fed += 1
    fed = max(1, fed)
    return Together(through + fed, max(1, budget // fed))
