"""From the engine's steps to Redis: frames, log chunks and commits, one pipeline per decode step.

While one write is under way, further steps wait together; under load several steps share a write, so the publisher
never falls behind by more than a round trip.

Invariant: after a stall longer than the lease, nothing is published until ownership has been checked again
(`verify`), because another worker may have taken the sequences over meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from shared.frames import TokenEvent
from shared.redis.token_frames import Commit, FrameWriter
from worker.running import Running

log = structlog.get_logger()


class Publisher:
    """Owns the write side of the ring in one worker."""

    def __init__(
        self,
        writer: FrameWriter,
        running: dict[str, Running],
        worker_id: str,
        *,
        log_every_tokens: int,
        rows_changed: Callable[[], None],
        verify: Callable[[], Awaitable[None]],
        stale_after_s: float,
    ) -> None:
        self._writer = writer
        self._running = running
        self._worker_id = worker_id
        self._log_every_tokens = log_every_tokens
        self._rows_changed = rows_changed
        self._verify = verify
        self._stale_after_s = stale_after_s
        self._waiting: list[TokenEvent] = []
        self._flush: set[str] = set()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.verified_at = time.monotonic()
        self.tokens = 0

    def take(self, events: list[TokenEvent]) -> None:
        """Queue the events of one decode step; called on the event loop."""
        self._waiting += events
        self._idle.clear()
        self._ready.set()

    def flush_log(self, seq: str) -> None:
        """Log what a sequence has so far, for a reader that has just changed."""
        self._flush.add(seq)
        self._idle.clear()
        self._ready.set()

    async def drained(self) -> None:
        """Wait until everything taken has been written."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if time.monotonic() - self.verified_at > self._stale_after_s:
                await self._verify()
            events, self._waiting = self._waiting, []
            await self._write(events)
            if not self._waiting and not self._flush:
                self._idle.set()

    async def _write(self, events: list[TokenEvent]) -> None:
        frames: dict[str, list[TokenEvent]] = {}
        chunks: dict[str, list[TokenEvent]] = {}
        ended: list[Running] = []
        for event in events:
            row = self._running.get(event.seq)
            if row is None or event.attempt != row.claim.attempt or not row.occupies_row:
                continue  # lost its lease meanwhile, or the engine's last word on a row we gave up
            row.add(event)
            if row.api:
                frames.setdefault(row.api, []).append(event)
            if event.finish is not None:
                row.occupies_row = False
                ended.append(row)
            elif row.unlogged_tokens >= self._log_every_tokens:
                chunks[row.id] = row.take_chunk()
        self._add_flushes(chunks)
        if ended:
            self._rows_changed()  # their rows are free already; only the commits are left
        self.tokens += sum(len(event.tokens) for event in events)
        commits = [row.commit(self._worker_id) for row in ended]
        if frames or chunks or commits:
            owned = await self._writer.write(frames, chunks, commits)
            self._forget(commits, owned)
            if commits:
                self._rows_changed()

    def _add_flushes(self, chunks: dict[str, list[TokenEvent]]) -> None:
        for seq in self._flush:
            row = self._running.get(seq)
            if row is not None and row.unlogged_tokens and row.occupies_row:
                chunks[seq] = row.take_chunk()
        self._flush.clear()

    def _forget(self, commits: list[Commit], owned: list[bool]) -> None:
        for commit, ours in zip(commits, owned, strict=True):
            self._running.pop(commit.claim.spec.id, None)
            if not ours:
                log.warning("worker.commit_refused", sequence=commit.claim.spec.id, attempt=commit.claim.attempt)
