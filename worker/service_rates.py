"""At what pace a worker takes sequences while more wait than it has rows, and how soon their first tokens come.

Its heartbeats tell it, and api processes predict from it when a request's first token would come
(api/ring/first_tokens.py).

Invariant. The pace is measured only between two claims that both took all that there was room for: a worker that has
found the queue empty learns how much was asked of it, not how much it can do.
"""

import math
from collections.abc import Sequence

from shared.redis.queue.sequence_queue import CLASSES, ClaimPlan
from shared.sequences import Claim
from worker.claim_plan import NOTHING

MEMORY_S = 5.0  # of full rows: older ones fade
ENOUGH_S = 0.5  # of full rows: before that nothing is said
RECENT = 0.05  # weight of the latest first token
SPREAD = 2.0  # mean deviations above the mean: most first tokens come sooner


class ServiceRates:
    """Measured as the worker goes along. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._full_since = 0.0  # 0: the queue was empty at the last look
        self._full_s = 0.0
        self._claims = dict.fromkeys(CLASSES, 0.0)
        self._first_tokens = 0
        self._wait_s = self._deviation_s = self._prompt = 0.0  # means of late
        self._prefilled = self._prefill_s = 0.0  # prompt tokens of late, and how long they took
        self._last_first = 0.0

    def claimed(self, plan: ClaimPlan, claims: Sequence[Claim], now: float) -> None:
        """The queue was asked for as much as the plan allows, and gave this."""
        if plan is NOTHING:  # paused
            self._full_since = 0.0
        if plan.rows <= 0:
            return
        since, self._full_since = self._full_since, now if len(claims) >= plan.rows else 0.0
        if not since or not self._full_since:
            return
        faded = math.exp((since - now) / MEMORY_S)
        self._full_s = self._full_s * faded + now - since
        for kind in CLASSES:
            mine = sum(claim.spec.sequence_class == kind for claim in claims)
            self._claims[kind] = self._claims[kind] * faded + mine

    def first_token(self, waited_s: float, prompt_tokens: int, now: float) -> None:
        """A sequence's first token has come, so long after its claim."""
        self._first_tokens += 1
        recent = max(RECENT, 1 / self._first_tokens)
        off = waited_s - self._wait_s
        self._wait_s += recent * off
        self._deviation_s += recent * (abs(off) - self._deviation_s) if self._first_tokens > 1 else 0.0
        self._prompt += recent * (prompt_tokens - self._prompt)
        # Prompts are fed one behind another, or together: none before its claim, none before the one that came last.
        took = max(0.0, min(waited_s, now - self._last_first))
        self._prefilled += prompt_tokens - RECENT * self._prefilled
        self._prefill_s += took - RECENT * self._prefill_s
        self._last_first = now

    def figures(self, now: float) -> dict[str, float]:
        """For the heartbeat; what has not been measured is left out."""
        figures: dict[str, float] = {}
        full_s = self._full_s + (now - self._full_since if self._full_since else 0.0)
        if self._full_s >= ENOUGH_S:
            figures |= {f"claims_per_s:{kind}": n / full_s for kind, n in self._claims.items() if n}
        if self._first_tokens:
            figures["first_token_s"] = self._wait_s + SPREAD * self._deviation_s
            figures["prompt_tokens"] = self._prompt
        if self._prefill_s > 0:
            figures["prompt_tokens_per_s"] = self._prefilled / self._prefill_s
        return {name: round(value, 4) for name, value in figures.items()}
