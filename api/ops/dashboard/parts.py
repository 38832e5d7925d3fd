"""Parts of the pages beyond the ring's snapshot, read when somebody looks."""

import time
from typing import NamedTuple

from api.callers.caller import asker
from api.ops.dashboard.curves import TrainingChart, charts_of
from api.ops.dashboard.samples import RewardHistogram, metadata, reward_histogram
from api.ops.ring_view import TrainingView
from api.ops.snapshot import trainings
from api.ring.ring import Ring
from shared.adapters import AdapterManifest
from shared.errors import UnknownAdapterError
from shared.jobs import TERMINAL, JobSpec, JobStatus
from shared.night import NightReport
from shared.redis.adapters.catalog import Acknowledgement, AdapterFlip, AdapterSummary
from shared.redis.adapters.splits import SplitState
from shared.redis.queue.dead_letters import DeadLetter
from shared.redis.training.board import TrainingBoard, trained_policies
from shared.training import Alert, TrainingPoint

LETTERS_SHOWN = 100
HISTORY_SHOWN = 20
ALERTS_SHOWN = 10
REWARDS_EVERY_S = 5.0


class JobView(NamedTuple):
    """Figures of the page of one job."""

    status: JobStatus
    spec: JobSpec
    metadata: str
    rewards: RewardHistogram | None
    ended: bool


class AdapterDetail(NamedTuple):
    """Figures of the page of one adapter."""

    summary: AdapterSummary
    versions: list[AdapterManifest]  # newest first
    history: list[AdapterFlip]
    acks: dict[str, Acknowledgement]  # of live workers
    gone: int  # workers that had loaded a version and live no more
    split: SplitState | None  # of its requests, for who may change it


class RunView(NamedTuple):
    """Figures of one policy's training."""

    view: TrainingView
    points: list[TrainingPoint]
    alerts: list[Alert]

    @property
    def charts(self) -> tuple[TrainingChart, ...]:
        """Charts of the run's mode of learning."""
        return charts_of(self.view.status.mode)


class RewardsCache:
    """A job's histogram for an open page: it reads many samples, so it is made anew only now and then."""

    def __init__(self) -> None:
        self._rewards: RewardHistogram | None = None
        self._of: tuple[str, float] = ("", -1.0)  # state and progress that it was made of
        self._made_at = float("-inf")

    async def read(self, ring: Ring, status: JobStatus) -> RewardHistogram | None:
        """The histogram, at most REWARDS_EVERY_S older than the job while it runs."""
        now, stage = time.monotonic(), (status.status, status.progress)
        due = now - self._made_at > REWARDS_EVERY_S or status.status in TERMINAL
        if stage != self._of and due:
            self._rewards, self._of, self._made_at = await reward_histogram(ring, status), stage, now
        return self._rewards


async def job_view(ring: Ring, job_id: str, kept: RewardsCache | None = None) -> JobView:
    """UnknownJobError when there is none."""
    status = await ring.jobs.status(job_id)
    spec = await ring.jobs.spec(job_id)
    rewards = await (kept or RewardsCache()).read(ring, status)
    return JobView(
        status, spec, metadata(status.metadata) if status.metadata else "", rewards, status.status in TERMINAL
    )


def eta_ms(status: JobStatus, now_ms: int) -> float | None:
    """How long a running job will take at its pace so far; None when that is not known."""
    if status.status != "running" or not status.started_ms or status.progress <= 0:
        return None
    return (now_ms - status.started_ms) * (1 - status.progress) / status.progress


async def adapter_view(ring: Ring, name: str) -> AdapterDetail:
    """UnknownAdapterError when there is none."""
    summary = await ring.adapters.summary(name)
    versions = []
    for version in sorted(summary.versions, reverse=True):
        try:
            versions.append(await ring.adapters.manifest(name, version))
        except UnknownAdapterError:  # deleted just now
            continue
    live = {worker for model in await ring.registry.names() for worker in await ring.registry.live(model)}
    said = await ring.adapters.acks(name)
    acks = {worker: ack for worker, ack in said.items() if worker in live}
    history = await ring.adapters.history(name, HISTORY_SHOWN)
    split = await ring.splits.read(name) if asker().owns(summary.tenant) else None
    return AdapterDetail(summary, versions, history, acks, len(said) - len(acks), split)


async def training_views(ring: Ring) -> list[RunView]:
    """Every policy that was ever trained, the newest first."""
    runs = []
    for view in await trainings(ring):
        board = TrainingBoard(ring.redis, view.status.policy)
        runs.append(RunView(view, await board.points(), await board.alerts(ALERTS_SHOWN)))
    return runs


class NightView(NamedTuple):
    """A policy's last night, and which version is the latest now."""

    report: NightReport
    latest: int


async def night_views(ring: Ring) -> list[NightView]:
    """Every policy that has a night's report, the newest first."""
    found = []
    for policy in await trained_policies(ring.redis):
        report = await TrainingBoard(ring.redis, policy).night()
        if report is not None:
            found.append(NightView(report, await ring.adapters.latest(policy)))
    return sorted(found, key=lambda view: -view.report.ended_ms)


class RingView(NamedTuple):
    """A ring of a front, as of this process's last look."""

    name: str
    away: str  # why it is not reached; "": it is
    models: list[str]


def ring_views(ring: Ring) -> list[RingView]:
    """The rings that this process serves, where it serves several; a page shows them as they are when it is opened."""
    return [RingView(each.name, each.away, sorted(each.models_seen)) for each in ring.all] if ring.others else []


async def letters(ring: Ring) -> list[DeadLetter]:
    """The newest dead letters, up to the length of a page."""
    return await ring.dead_letters.list(limit=LETTERS_SHOWN)
