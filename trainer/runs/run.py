"""The life that every kind of run shares: begin or resume, offer versions, accept or revert, save, stop.

A kind of run says what it learns from, what it checks of a version, and what it reports. `loop.py` (rl) has more to
serve, because workers sample from its versions (trainer/runs/served.py).

Invariants. What is served is what the learner falls back to. A version that the gate has refused is taken back, weights
and moments; after `max_rejections` of them in a row the run ends. A `latest` that is not the run's own is not moved.
"""

import asyncio
import contextlib
import time
from abc import ABC
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import structlog

from shared.adapters import GateCheck, version_id
from shared.errors import ConflictError, ParallmError
from trainer.learn import gate
from trainer.learn.compute import ComputeHost
from trainer.learn.learn_when import Permission
from trainer.learn.machine_care import MachineCare
from trainer.learners.handle import Handle
from trainer.ring.ring import AdapterSink, TrainerRing
from trainer.settings import TrainSettings
from trainer.state import Arrays, RunState
from trainer.versions.checkpoint import Checkpoint, CheckpointStore
from trainer.versions.disk import Disk
from trainer.versions.publish import Published, Publisher
from trainer.versions.run_folder import WAYS, begin_anew, note_interruption

L = TypeVar("L")


class GaveUpError(ParallmError):
    """Too many candidates in a row have failed the gate."""


log = structlog.get_logger()


@contextlib.asynccontextmanager
async def permitted(settings: TrainSettings, host: ComputeHost, ring: TrainerRing) -> AsyncIterator[None]:
    """Have the host's work follow `--learn-when`, for as long as the run lasts."""
    if not settings.conditions:
        yield
        return

    def changed(hindrance: str) -> None:
        ring.board.note(hindrance)
        if hindrance:
            note_interruption(settings.folder, hindrance)

    async with Permission(settings.conditions, ring.asked, changed) as host.permission:
        try:
            yield
        finally:
            host.permission = None


class Run(ABC, Generic[L]):
    """One run; `state` may be read at any time."""

    learner: Handle[L]
    _publisher: Publisher

    def __init__(self, settings: TrainSettings, host: ComputeHost, sink: AdapterSink, state: RunState) -> None:
        self.settings, self._host, self._sink, self.state = settings, host, sink, state
        self.checkpoints = CheckpointStore(settings.folder / "checkpoints", settings.keep_checkpoints)
        self._stop = asyncio.Event()
        if host.permission is not None:
            host.permission.ends_with(self._stop)
        self._care = MachineCare(settings, host)
        self._disk = Disk(settings.folder, sink.alert, self._stop)
        self._started_ms = time.time_ns() // 1_000_000
        self._rejections = 0  # candidates in a row that failed the gate

    def stop(self) -> None:
        """End after the train step under way."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """True once the run was asked to end."""
        return self._stop.is_set()

    # -- begin, or go on

    def _checkpoint(self) -> Checkpoint | None:
        """Checkpoint to resume from; None: the run begins."""
        return None if self.settings.resume == "no" else self.checkpoints.load(self.settings.resume)

    def _begin_folder_anew(self) -> None:
        """Move the run's former folder aside, for `--resume no`."""
        if self.settings.resume == "no":
            self.checkpoints = begin_anew(self.settings, self.checkpoints)

    def _check_ours(self, latest: int, version: int) -> None:
        """ConflictError when the latest version is neither `version` nor one that this run has served."""
        if latest != version and not self._publisher.moved_by_us(latest):
            raise ConflictError(
                f"{version_id(self.settings.adapter, latest)} is the latest, and not of this run: {WAYS}"
            )

    # -- versions

    async def _offer(
        self,
        weights: Arrays,
        checks: Sequence[GateCheck],
        metrics: dict[str, float],
        judged: Callable[[int], Awaitable[list[GateCheck]]],
        if_latest: int,
    ) -> Published:
        """Publish weights through the gate; ConflictError when another process has moved the latest meanwhile."""
        checks = [gate.finite_weights(weights), *checks]
        published = await self._publisher.publish(
            weights, self.state, checks, metrics, judged, if_latest, promote=not self.settings.candidate
        )
        if published.forestalled:
            raise ConflictError(f"the run ends: {gate.failures(published.checks)}; {WAYS}")
        return published

    async def _accept(self, version: int) -> None:
        """Record that the version is served, and make its weights the learner's last good ones."""
        self._rejections = 0
        self.state.version = version
        self.state.swaps += 1
        await self.learner.accept()

    async def _reject(self, failed: str) -> None:
        """Take the learner back to what is served."""
        self._rejections += 1
        self.state.rejected += 1
        await self.learner.revert()
        log.warning("version.rejected", checks=failed)

    async def _check_patience(self, failed: str) -> None:
        """GaveUpError, and an alert, once too many candidates in a row have failed the gate."""
        if self._rejections >= self.settings.max_rejections:
            message = f"{self._rejections} candidates in a row failed the gate: {failed}"
            await self._sink.alert("gave_up", f"the run ends: {message}")
            raise GaveUpError(message)

    async def _note_best(self, version: int, value: float) -> None:
        """Point `best` at a version that is better on what is held out than all before."""
        if self.state.best_held_out is None or value > self.state.best_held_out:
            self.state.best_version, self.state.best_held_out = version, value
            await self._sink.set_best(version, value)

    # -- checkpoints

    async def _save(self, name: str = "", state: RunState | None = None) -> str:
        """Write a checkpoint of this moment; its name. `state`: a copy of the present one, where that changes."""
        snapshot = await self.learner.snapshot()
        state = state or self.state
        checkpoint = Checkpoint(snapshot.adapter, snapshot.adapter_config, snapshot.optimizer, state)
        saved: str = await self._disk.run(self.checkpoints.save, checkpoint, name)
        if state.version and state.version == state.best_version:
            await self._disk.run(self.checkpoints.set_best, saved)
        return saved

    async def _forget_versions(self, *versions: int) -> None:
        """Delete the files of all versions but these."""
        await asyncio.to_thread(self._publisher.forget, set(versions))
