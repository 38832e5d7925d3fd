"""Rows that a worker has claimed: one sequence from claim to commit, and the table of them that the worker's loops
share.

Tokens arrive as events from the engine. They go three ways: into frames for the api that streams them, into the
sequence's log in chunks, and, at the end, into the result that is committed. `attempt` of everything written is
the claim's, so a later owner's writes win.

Invariants. A sequence is in the table from claim to commit, or until it is given back. What concerns an earlier attempt
never touches the row of a newer one. The table belongs to the event loop.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from shared.frames import TokenEvent
from shared.redis.tokens.writer import Commit
from shared.sequences import Claim, Timings
from shared.token_events import merged
from shared.trajectories import result_of
from worker.engine.reserved import RowTokens


def now_ms() -> int:
    """Unix time in milliseconds, from this machine's clock."""
    return time.time_ns() // 1_000_000


def _given_tokens(claim: Claim) -> list[TokenEvent]:
    """The completion tokens that come with a claim's spec, as an event of an earlier attempt would bring them.

    No log-probability is known of them, so it is 0; none of what is reported of them is drawn here.
    """
    ids = claim.spec.prior_ids
    return [TokenEvent(claim.spec.id, claim.attempt, 0, list(ids), [0.0] * len(ids))] if ids else []


@dataclass(eq=False)
class ClaimedRow:
    """One claimed sequence: its events so far, and which of them the log has."""

    claim: Claim
    api: str
    started_ms: int
    first_token_ms: int = 0
    occupies_row: bool = True  # false once the engine has finished it and only the commit is left
    events: list[TokenEvent] = field(default_factory=list)
    logged: int = 0  # events[:logged] are in the log
    unlogged_tokens: int = 0
    last_event_s: float = 0.0  # monotonic; 0: the engine has not spoken of it yet

    @classmethod
    def after(cls, claim: Claim, prior: list[TokenEvent]) -> "ClaimedRow":
        """A fresh claim, or one taken over with the `prior` tokens of earlier attempts; else with those of its spec.

        Prior events may have been read from an api's frame stream, which is short-lived, so they count as
        unlogged: the log gets them again under this attempt, and readers drop what they have.
        """
        prior = prior or _given_tokens(claim)
        for event in prior:
            event.attempt = claim.attempt
        tokens = sum(len(event.tokens) for event in prior)
        return cls(claim, claim.spec.api, now_ms(), events=list(prior), unlogged_tokens=tokens)

    @property
    def id(self) -> str:
        return self.claim.spec.id

    @cached_property
    def reserved(self) -> RowTokens:
        """Positions of KV that it may come to hold."""
        return RowTokens.of(self.claim.spec, self.claim.spec.adapter)

    def add(self, event: TokenEvent) -> None:
        """Take a new event of the engine."""
        if event.tokens and not self.first_token_ms:
            self.first_token_ms = now_ms()
        self.events.append(event)
        self.unlogged_tokens += len(event.tokens)

    def take_chunk(self) -> list[TokenEvent]:
        """The events that the log lacks, which from now on count as logged."""
        chunk = self.events[self.logged :]
        self.logged = len(self.events)
        self.unlogged_tokens = 0
        return merged(chunk)

    def log_anew(self) -> None:
        """The log has lost something: nothing of it counts."""
        self.logged = 0
        self.unlogged_tokens = sum(len(event.tokens) for event in self.events)

    def commit(self, worker_id: str) -> Commit:
        """The commit of a sequence whose last event carries `finish`."""
        spec = self.claim.spec
        timings = Timings(spec.enqueued_ms, self.started_ms, self.first_token_ms, now_ms())
        result = result_of(spec, self.claim.attempt, worker_id, self.events, timings)
        return Commit(claim=self.claim, result=result, last=self.take_chunk(), said=self.events)


class ClaimedRows:
    """All rows of one worker, by id. `changed` is set when one has left, or there is another reason to look."""

    def __init__(self) -> None:
        self._rows: dict[str, ClaimedRow] = {}
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ClaimedRow]:
        """Those of this moment: the table may change meanwhile."""
        return iter(list(self._rows.values()))

    def __contains__(self, seq: str) -> bool:
        return seq in self._rows

    def get(self, seq: str) -> ClaimedRow | None:
        """The row of a sequence, whatever its attempt."""
        return self._rows.get(seq)

    def attempt(self, seq: str, attempt: int) -> ClaimedRow | None:
        """The row of a sequence, if it is of this attempt."""
        row = self._rows.get(seq)
        return row if row is not None and row.claim.attempt == attempt else None

    def occupying(self) -> list[ClaimedRow]:
        """Those that the engine has."""
        return [row for row in self._rows.values() if row.occupies_row]

    def add(self, row: ClaimedRow) -> None:
        """A sequence has been claimed; the newer attempt is the one that counts."""
        self._rows[row.id] = row

    def leave(self, claim: Claim) -> bool:
        """Forget the row of this claim; whether there was one: a newer attempt, claimed meanwhile, stays."""
        row = self._rows.get(claim.spec.id)
        if row is None or row.claim is not claim:
            return False
        del self._rows[row.id]
        self.changed.set()
        return True
