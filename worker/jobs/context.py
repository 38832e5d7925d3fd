"""What the ticks of one runner process share."""

import asyncio
from dataclasses import dataclass, field

from redis.asyncio import Redis

from shared.metrics import Tally
from shared.owners import whoever_it_is_for
from shared.redis.adapter_store import AdapterStore
from shared.redis.affinity import Affinity
from shared.redis.job_intake import MAX_N
from shared.redis.job_ledger import JobLedger
from shared.redis.sequence_queue import SequenceQueue
from shared.redis.worker_registry import WorkerRegistry
from shared.scoring.pool import RewardPool
from shared.scoring.rewards import Rewards
from shared.scoring.served import ServedRewards
from shared.text import CodecCache
from worker.jobs.prompts import PromptCache

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
        self.rewards = Rewards(self.pool, self.served)
        self._queues: dict[str, SequenceQueue] = {}

    def queue(self, model: str) -> SequenceQueue:
        """The sequence queue of a model."""
        if model not in self._queues:
            self._queues[model] = SequenceQueue(
                self.redis, model, max_waiting={"batch": max(WAITING_WINDOWS * self.window, MAX_N)}
            )
        return self._queues[model]
