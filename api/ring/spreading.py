"""Which of several rings gets a request, where they serve the same model: what each reports, as of its last look.

A conversation goes to the same ring in all its turns, where its KV is, as long as that ring is not much busier than the
one that has most room. Which ring that is follows from a hash of the conversation, weighted with the rings' rows, so
that all api processes of a front agree without a word, and a ring that comes or goes moves only its own share.

Invariants. Nothing here waits for Redis. A ring that is away, or whose workers rest under a pause, gets nothing while
another has rows. What this process has sent since the looks before counts as if it still waited, so that a second's
requests do not all go where there was room at its begin; it drives no conversation from its ring, since most of it may
have ended.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from api.ring.first_tokens import Forecast
from shared.redis.processes.worker_registry import WorkerStatus

MOST_WAIT_S = 0.25  # longer than elsewhere that a conversation waits for its ring, about what its prompt would cost
MOST_CROWDING = 0.5  # fuller than elsewhere, in rows for each row, that its ring may be
SEQUENCE_S = 1.0  # for which a row is taken, where no worker has measured its pace


@dataclass(frozen=True)
class Crowd:
    """Load that one ring reports of its workers of a model."""

    rows: int  # of workers that take work
    taken: int  # rows in use, and what workers have claimed besides them
    waiting: int  # in the queue, for any worker
    claims_per_s: float = 0.0  # when all rows are full; 0: not measured
    sent: int = 0  # by this process, and perhaps in none of these figures yet

    @classmethod
    def of(cls, workers: Sequence[WorkerStatus], waiting: int, sent: int) -> Self:
        """As the workers' heartbeats have it."""
        ready = [worker for worker in workers if worker.state == "ready"]
        pace = Forecast.of(ready, "interactive")
        return cls(
            rows=sum(worker.max_rows for worker in ready),
            taken=sum(worker.rows + worker.waiting for worker in ready),
            waiting=waiting,
            claims_per_s=pace.claims_per_s if pace else 0.0,
            sent=sent,
        )

    @property
    def with_sent(self) -> "Crowd":
        """The same, as if all that was sent still waited."""
        return Crowd(self.rows, self.taken, self.waiting + self.sent, self.claims_per_s)

    @property
    def crowding(self) -> float:
        """Sequences, running and waiting, for each row."""
        return (self.taken + self.waiting) / self.rows if self.rows else math.inf

    @property
    def wait_s(self) -> float:
        """Until the next sequence has a row."""
        behind = self.taken + self.waiting + 1 - self.rows
        if not self.rows:
            return math.inf
        return max(0, behind) / (self.claims_per_s or self.rows / SEQUENCE_S)


class Sent:
    """Sequences that this process has sent to one ring since the look before the last: workers may not have reported
    them yet."""

    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self._before: Counter[str] = Counter()

    def one(self, model: str) -> None:
        """A request for the model goes there."""
        self._now[model] += 1

    def of(self, model: str) -> int:
        return self._now[model] + self._before[model]

    def looked(self) -> None:
        """The ring has been looked at anew."""
        self._now, self._before = Counter(), self._now


class Reporting(Protocol):
    """A ring, as far as the choice sees it."""

    @property
    def name(self) -> str:
        """Name of the ring in this process."""


Place = TypeVar("Place", bound=Reporting)


def choose(places: Sequence[tuple[Place, Crowd]], conversation: str) -> Place:
    """The ring of a request, of at least one; `conversation`: what its turns have in common, "" for nothing.

    Of equals the first.
    """
    all_sent = [(place, crowd.with_sent) for place, crowd in places]
    best, room = min(all_sent, key=lambda each: (each[1].wait_s, each[1].crowding))
    if not conversation:
        return best
    own, crowd = max(places, key=lambda each: _pull(each[0].name, conversation, each[1].rows))
    late = crowd.wait_s > room.wait_s + MOST_WAIT_S
    return best if late or crowd.crowding > room.crowding + MOST_CROWDING else own


def _pull(name: str, conversation: str, rows: int) -> float:
    """Highest for one ring of several, for each with the chance that its rows are of all (rendezvous hashing)."""
    digest = hashlib.blake2b(f"{name}\n{conversation}".encode(errors="replace"), digest_size=8).digest()
    share = (int.from_bytes(digest) + 0.5) / 2**64
    return rows / -math.log(share)
