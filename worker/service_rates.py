"""At what pace a worker takes sequences while more wait than it has rows, and how soon their first tokens come.

Its heartbeats publish it, and api processes predict from it when a request's first token would come
(api/ring/first_tokens.py).

Invariants. A class's pace is measured only between two claims that both took all that was offered to the class: where
it left rows over, the worker learns how much was asked of it, not how much it can do. So for prompts: what is fed in a
second is said only while so many rows wait for their prompts that these are what the worker is busy with. Nothing is
said from few first tokens, nor of a pace that was measured long ago.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.redis.queue.sequence_queue import CLASSES, ClaimPlan
from shared.sequences import Claim, SequenceClass
from worker.claim_plan import NOTHING

MEMORY_S = 5.0  # of full rows: older ones fade
ENOUGH_S = 0.5  # of full rows: before that nothing is said
STALE_S = 60.0  # without full rows: what they were before says nothing any more
FIRST_TOKENS, ENOUGH_FIRST_TOKENS = 40, 20  # as many are remembered; before so many nothing is said
SOONER = 0.9  # share of first tokens that come sooner than is said; one that takes very long changes nothing
PROMPTS_BOUND = 0.5  # share of the rows that wait for their prompts at a time, where prompts are what takes the time


@dataclass
class _Pace:
    """Service rate of one class."""

    full_since: float = 0.0  # 0: at the last look there was less than the offer
    full_s: float = 0.0
    claims: float = 0.0
    measured_at: float = 0.0

    def look(self, offer: int, claims: int, now: float) -> None:
        """So many rows were offered, and so many taken. No offer says nothing: all rows of the class may be taken."""
        if offer <= 0:
            return
        since, self.full_since = self.full_since, now if claims >= offer else 0.0
        if not since or not self.full_since:
            return
        faded = math.exp((since - now) / MEMORY_S) if since - self.measured_at <= STALE_S else 0.0
        self.full_s = self.full_s * faded + now - since
        self.claims = self.claims * faded + claims
        self.measured_at = now

    def per_second(self, now: float) -> float:
        """0: not measured of late."""
        if self.full_s < ENOUGH_S or (self.full_since or now) - self.measured_at > STALE_S:
            return 0.0
        return self.claims / (self.full_s + (now - self.full_since if self.full_since else 0.0))


class _FirstToken(NamedTuple):
    waited_s: float  # since the claim
    prompt_tokens: int
    took_s: float  # of this, no other prompt's


class ServiceRates:
    """Measured as the worker goes along. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._paces: dict[SequenceClass, _Pace] = {kind: _Pace() for kind in CLASSES}
        self._first_tokens: deque[_FirstToken] = deque(maxlen=FIRST_TOKENS)
        self._last_first = 0.0

    def claimed(self, plan: ClaimPlan, claims: Sequence[Claim], now: float) -> None:
        """The queue was asked for as much as the plan allows, and gave this."""
        if plan is NOTHING:  # paused
            for pace in self._paces.values():
                pace.full_since = 0.0
        batch = sum(claim.spec.sequence_class == "batch" for claim in claims)
        interactive = len(claims) - batch
        # Offered is the class's own share, and what the other one left.
        self._paces["interactive"].look(max(plan.interactive_first, plan.rows - batch), interactive, now)
        self._paces["batch"].look(max(plan.batch_first, min(plan.batch_max, plan.rows - interactive)), batch, now)

    def first_token(self, waited_s: float, prompt_tokens: int, now: float) -> None:
        """A sequence's first token has come, so long after its claim."""
        # Prompts are fed one after another, or together: none before its claim, none before the one that came last.
        took_s = max(0.0, min(waited_s, now - self._last_first))
        self._first_tokens.append(_FirstToken(waited_s, prompt_tokens, took_s))
        self._last_first = now

    def figures(self, now: float, rows: int) -> dict[str, float]:
        """For the heartbeat of a worker with so many rows; what has not been measured is left out."""
        paces = {f"claims_per_s:{kind}": pace.per_second(now) for kind, pace in self._paces.items()}
        figures = {name: pace for name, pace in paces.items() if pace}
        latest = self._first_tokens
        if len(latest) >= ENOUGH_FIRST_TOKENS:
            waits = sorted(each.waited_s for each in latest)
            prompts, took_s = sum(each.prompt_tokens for each in latest), sum(each.took_s for each in latest)
            figures["first_token_s"] = waits[math.ceil(SOONER * len(waits)) - 1]
            figures["prompt_tokens"] = prompts / len(latest)
            if took_s > 0 and sum(waits) / took_s >= PROMPTS_BOUND * rows:  # so many wait at a time
                figures["prompt_tokens_per_s"] = prompts / took_s
        return {name: round(value, 4) for name, value in figures.items()}
