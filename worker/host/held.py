"""A model in the hands of its host: what the host knows of it, and what it tells the ring."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from shared.catalogue import HeldModel, HeldState, ModelOrder
from worker.host.placement import LOADING
from worker.host.workers import WorkerChild
from worker.rows import now_ms

log = structlog.get_logger()


@dataclass
class Held:
    """A model of this host, from the lease of its load until its memory is free."""

    name: str
    need_bytes: int
    sha256: str = ""  # that the catalogue asks for
    expected_s: float = 0.0  # of its load, as the last one took; 0: not known
    state: HeldState = "loading"
    since_ms: int = 0
    progress: float = 0.0
    load_s: float = 0.0
    used_ms: int = 0
    why: str = ""
    worker: str = ""  # id
    child: WorkerChild | None = None
    steps: int = -1  # of the engine, at the last look
    orders: Sequence[ModelOrder] = ()  # that were there when its load began
    starting: "asyncio.Task[str] | None" = None  # its load
    is_given_up: bool = False  # its load is
    task: "asyncio.Task[None] | None" = None  # its life

    def become(self, state: HeldState, why: str = "") -> None:
        self.state, self.since_ms, self.progress, self.why = state, now_ms(), 0.0, why

    def give_up(self, why: str) -> None:
        """End a download or load that is of no use any more."""
        if self.state in LOADING and self.starting is not None and not self.is_given_up:
            log.info("host.gives_up", model=self.name, why=why)
            self.is_given_up = True
            self.starting.cancel()

    def advance(self, progress: float) -> None:
        """Note how far its download or load is; the next heartbeat says so."""
        self.progress = progress

    @property
    def status(self) -> HeldModel:
        """The model as the next heartbeat reports it."""
        progress = self.progress
        if self.state == "loading" and self.expected_s:  # much of a load is not reading weights
            progress = max(progress, min(0.95, (now_ms() - self.since_ms) / 1000 / self.expected_s))
        return HeldModel(
            self.name,
            self.state,
            min(1.0, progress),
            self.since_ms,
            self.need_bytes,
            self.load_s,
            self.worker,
            self.used_ms,
            self.why,
        )
