"""What a draft model takes, and whether its drafts pay for that. Pure.

A step with its drafts brings what is accepted of them, as with those of a text (payoff.py); but it takes the time of
the step that checks them and, besides, one forward of the draft model a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_low

from worker.engine.speculation.payoff import ENOUGH, MARGIN, SHARED_RECENT, SLOWED, STALE, StepTimes, Try, brought


class DraftTimes:
    """What the draft model has taken lately."""

    def __init__(self) -> None:
        self.id_s = 0.0  # an id of a prompt
        self._forwards: dict[int, deque[float]] = {}  # by rows, about
        self._idle = 0  # steps since the last draft

    def step(self) -> bool:
        """A step begins; whether what was known is forgotten with it, being old."""
        self._idle += 1
        if self._idle < STALE:
            return False
        self._idle = 0
        self._forwards.clear()
        return True

    def read(self, ids: int, seconds: float) -> None:
        """A piece of prompts."""
        self.id_s += ((seconds / ids) - self.id_s) * (SHARED_RECENT if self.id_s else 1.0)

    def drafted(self, rows: int, forwards: int, seconds: float) -> None:
        """Drafts of so many tokens for a batch of so many rows."""
        self._idle = 0
        self._forwards.setdefault(_about(rows), deque(maxlen=ENOUGH)).append(seconds / forwards)

    def seconds(self, rows: int, forwards: int) -> float:
        """Of drafts, by those of about as many rows; 0: nothing is known yet, the first one makes what it needs."""
        about = _about(rows)
        known = {each: times for each, times in self._forwards.items() if len(times) > 1}
        if not known:
            return 0.0
        nearest = min(known, key=lambda each: abs(each - about))
        return median_low(known[nearest]) * forwards


def _about(rows: int) -> int:
    return max(0, rows - 1).bit_length()


def best_step(
    times: StepTimes,
    by_text: Sequence[Try],
    by_model: Sequence[Try],
    seconds: Callable[[int], float],
    *,
    alone: bool,
) -> tuple[int, bool]:
    """How long the drafts of this step should be at most, and whether those of a model, which take `seconds`, pay.

    `by_text`: all rows, with the drafts of texts; `by_model`: with the model's besides. (0, False): none pays.
    `alone`: no prompt is in a hurry.
    """
    rows = len(by_text)
    plain = times.known(rows, 1)
    if plain is None:
        return 0, False
    best, best_rate = (0, False), MARGIN * rows / plain
    most = max(row.length for row in (*by_text, *by_model))
    brings = zip(*brought(by_text, most), *brought(by_model, most), strict=True)
    for longest, (of_text, least_of_text, of_model, least_of_model) in enumerate(brings, 1):
        checks = times.likely(rows, longest + 1)
        if checks is None:
            break
        for with_model, tokens, least, took in (
            (False, of_text, least_of_text, checks),
            (True, of_model, least_of_model, checks + seconds(longest)),
        ):
            if tokens / took > best_rate and took <= SLOWED * (least if alone else 1.0) * plain:
                best, best_rate = (longest, with_model), tokens / took
    return best
