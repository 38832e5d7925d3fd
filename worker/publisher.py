"""From the engine's steps to Redis: frames, log chunks and commits, one pipeline per decode step.

While one write is under way, further steps wait together; under load several steps share a write, so the publisher
never falls behind by more than a round trip.

Invariant: after a stall longer than the lease, nothing is published until ownership has been checked again
(`verify`), because another worker may have taken the sequences over meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from shared.frames import TokenEvent
from shared.redis.tokens.writer import Commit, FrameWriter
from shared.sequences import Claim, SequenceResult, SequenceSpec
from worker.reports import SequenceCounts, trace_sequence
from worker.rows import ClaimedRow, ClaimedRows

log = structlog.get_logger()


@dataclass(frozen=True)
class _Write:
    """One pipeline's worth, kept until Redis has taken it."""

    frames: dict[str, list[TokenEvent]]
    chunks: dict[str, list[TokenEvent]]
    commits: list[Commit]


class TokenPublisher:
    """Owns the write side of the ring in one worker."""

    def __init__(
        self,
        writer: FrameWriter,
        rows: ClaimedRows,
        worker_id: str,
        *,
        log_every_tokens: int,
        verify: Callable[[], Awaitable[None]],
        stale_after_s: float,
        counts: SequenceCounts,
        ended: Callable[[SequenceSpec, SequenceResult], None] = lambda spec, result: None,
    ) -> None:
        """`ended` hears of each end that Redis has accepted."""
        self._writer = writer
        self._ended = ended
        self._counts = counts
        self._rows = rows
        self._worker_id = worker_id
        self._log_every_tokens = log_every_tokens
        self._verify = verify
        self._stale_after_s = stale_after_s
        self._waiting: list[tuple[float, list[TokenEvent]]] = []  # with the monotonic time of each decode step
        self._flush: set[str] = set()
        self._unsent: _Write | None = None
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.verified_at = time.monotonic()
        self.tokens = 0

    def take(self, events: list[TokenEvent]) -> None:
        """Queue the events of one decode step; called on the event loop."""
        self._waiting.append((time.monotonic(), events))
        self._idle.clear()
        self._ready.set()

    async def fence(self, claims: list[Claim]) -> None:
        """Before the tokens of sequences taken over are read: nothing that their old owners still send counts."""
        owners: dict[str, dict[str, int]] = {}
        for claim in claims:
            owners.setdefault(claim.spec.api, {})[claim.spec.id] = claim.attempt
        if owners:
            await self._writer.fence(owners)

    def flush_log(self, seq: str) -> None:
        """Log what a sequence has so far, for a reader that has just changed."""
        self._flush.add(seq)
        self._idle.clear()
        self._ready.set()

    async def log_all(self, rows: Iterable[ClaimedRow]) -> None:
        """Return when the log has everything that the engine has said of these rows."""
        for row in rows:
            self.flush_log(row.id)
        await self.drained()

    async def drained(self) -> None:
        """Wait until everything taken has been written."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write until cancelled. A write that failed is kept and said again: the next run begins with it."""
        while True:
            if self._unsent is None and not self._waiting and not self._flush:
                self._idle.set()
                self._ready.clear()
                await self._ready.wait()
            if time.monotonic() - self.verified_at > self._stale_after_s:
                await self._verify()
            if self._unsent is None:
                steps, self._waiting = self._waiting, []
                self._unsent = self._gather(steps)
            await self._send(self._unsent)
            self._unsent = None

    def _gather(self, steps: list[tuple[float, list[TokenEvent]]]) -> _Write:
        """Take events into their rows; what is to be written of them."""
        write = _Write({}, {}, [])
        ended: list[ClaimedRow] = []
        for at, events in steps:
            self._take_in(at, events, write, ended)
        self._add_flushes(write.chunks)
        write.commits.extend(row.commit(self._worker_id) for row in ended)
        if ended:
            self._rows.changed.set()  # their rows are free already; only the commits are left
        return write

    def _take_in(self, at: float, events: list[TokenEvent], write: _Write, ended: list[ClaimedRow]) -> None:
        count = self._counts.token
        for event in events:
            row = self._rows.attempt(event.seq, event.attempt)
            if row is None or not row.occupies_row:
                continue  # lost its lease meanwhile, or the engine's last word on a row we gave up
            row.add(event)
            count(row, len(event.tokens), at)
            if row.api:
                write.frames.setdefault(row.api, []).append(event)
            if event.finish is not None:
                row.occupies_row = False
                ended.append(row)
            elif row.unlogged_tokens >= self._log_every_tokens:
                write.chunks.setdefault(row.id, []).extend(row.take_chunk())  # after a stall several in one write
        tokens = sum(len(event.tokens) for event in events)
        self.tokens += tokens
        self._counts.step(tokens)

    async def _send(self, write: _Write) -> None:
        if write.frames or write.chunks or write.commits:
            owned = await self._writer.write(write.frames, write.chunks, write.commits)
            self._forget(write.commits, owned)
            while self._writer.gaps:
                seq = self._writer.gaps.pop()
                if (row := self._rows.get(seq)) is not None:
                    log.warning("worker.logged_anew", sequence=seq, tokens=row.unlogged_tokens)
                    row.log_anew()
                    self.flush_log(seq)

    def _add_flushes(self, chunks: dict[str, list[TokenEvent]]) -> None:
        for seq in self._flush:
            row = self._rows.get(seq)
            if row is not None and row.unlogged_tokens and row.occupies_row:
                chunks.setdefault(seq, []).extend(row.take_chunk())
        self._flush.clear()

    def _forget(self, commits: list[Commit], owned: list[bool]) -> None:
        for commit, ours in zip(commits, owned, strict=True):
            self._rows.leave(commit.claim)
            if ours:
                self._counts.ended(commit.claim, commit.result)
                trace_sequence(commit.claim, commit.result)
                self._ended(commit.claim.spec, commit.result)
            else:
                self._counts.commits_refused.add()
                log.warning("worker.commit_refused", sequence=commit.claim.spec.id, attempt=commit.claim.attempt)
