"""The context that the ticks of one runner process share."""

import asyncio
from dataclasses import dataclass, field

from redis.asyncio import Redis

from shared.jobs import JobSpec
from shared.owners import whoever_it_is_for
from shared.redis.adapters.store import AdapterStore
from shared.redis.jobs.intake import MAX_N
from shared.redis.jobs.ledger import JobLedger
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.affinity import Affinity
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.scoring.pool import RewardPool
from shared.scoring.score import SampleScorer
from shared.scoring.served import ServedRewards
from shared.telemetry.metrics import Tally
from shared.text.codec import CodecCache
from worker.jobs.expansion import PromptCache
from worker.jobs.rewarding import Rewarding, unused

UNUSED_S = 60.0  # after which what a runner holds of a job that it does not advance any more is dropped
WAITING_WINDOWS = 16  # so many jobs' windows may wait in one model's queue; the rest of all jobs waits in its inputs


@dataclass
class TickContext:
    """Connections, caches and rewards of one runner."""

    runner: str
    redis: Redis
    blocking: Redis  # for reads that wait
    pool: RewardPool
    window: int = 512
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    prompts: PromptCache = field(default_factory=PromptCache)
    tally: Tally = field(default_factory=Tally)
    repaired: dict[str, float] = field(default_factory=dict)  # job -> monotonic time of the last repair

    def __post_init__(self) -> None:
        self.ledger = JobLedger(self.redis)
        self.registry = WorkerRegistry(self.redis)
        self.adapters = AdapterStore(self.redis)
        self.affinity = Affinity(self.redis, self.registry)
        self.codecs = CodecCache(self.registry)
        self.served = ServedRewards(self.redis, f"reward-{self.runner}", whoever_it_is_for)
        self.rewards = SampleScorer(self.pool, self.served)
        self._rewarding: dict[str, Rewarding] = {}
        self._queues: dict[str, SequenceQueue] = {}

    def rewarding(self, spec: JobSpec) -> Rewarding:
        """The job's samples that are finished and not recorded yet, in this runner."""
        for job_id in unused(self._rewarding, UNUSED_S):
            self.forget(job_id)
        if spec.id not in self._rewarding:
            self._rewarding[spec.id] = Rewarding(spec, self.rewards)
        return self._rewarding[spec.id]

    def forget(self, job_id: str) -> None:
        """Drop what is kept of a job that has ended, or that another runner has."""
        self.repaired.pop(job_id, None)
        self.prompts.forget(job_id)
        if (rewarding := self._rewarding.pop(job_id, None)) is not None:
            rewarding.close()

    def close(self) -> None:
        """Drop all that is being scored."""
        for job_id in list(self._rewarding):
            self.forget(job_id)

    def queue(self, model: str) -> SequenceQueue:
        """The sequence queue of a model."""
        if model not in self._queues:
            self._queues[model] = SequenceQueue(
                self.redis, model, max_waiting={"batch": max(WAITING_WINDOWS * self.window, MAX_N)}
            )
        return self._queues[model]
