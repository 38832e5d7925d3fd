"""A job's samples between finished and recorded: their rewards are computed in the background of the ticks.

A reward may take longer than a tick, and a runner has a bounded number of ticks at a time: a tick adds what has
finished, records what has been scored meanwhile, and leaves the rest to the job's next one.

Invariants. A sample that was added is handed out, scored or bare, until `recorded` confirms it. What a runner holds
here dies with it, and is finished and not recorded as far as Redis knows: the next runner begins with it.
"""

import asyncio
import time
from collections.abc import Sequence

from shared.jobs import JobSpec
from shared.redis.jobs.ledger import SampleRecord
from shared.rewards.kinds import check
from shared.scoring.pool import CHUNK
from shared.scoring.score import SampleScorer
from shared.scoring.shares import Share
from worker.jobs.outcomes import FinishedSample, rewarded

MOST = 512  # samples of a job that are here at a time


class Rewarding:
    """One job's samples in one runner."""

    def __init__(self, spec: JobSpec, rewards: SampleScorer) -> None:
        self._spec = spec
        self._rewards = rewards
        self._reward = check(spec.reward) if spec.reward is not None else None
        self.share = Share(spec.key, spec.id)
        self.used_at = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self.cursor = "0"  # in the stream of finished sequences
        self.taken_up = False  # given texts that an earlier runner had begun with
        self._pieces: dict[asyncio.Task[list[SampleRecord]], Sequence[FinishedSample]] = {}
        self._records: list[SampleRecord] = []  # handed out, and not known to be recorded; and their entries
        self._entries: list[bytes] = []

    @property
    def room(self) -> int:
        """How many more samples may be added."""
        return MOST - len(self._records) - sum(map(len, self._pieces.values()))

    @property
    def busy(self) -> bool:
        """True if samples are being scored or wait to be recorded."""
        return bool(self._pieces or self._records)

    def add(self, samples: Sequence[FinishedSample]) -> None:
        """Start scoring these samples, CHUNK at a time."""
        for at in range(0, len(samples), CHUNK):
            self._start(samples[at : at + CHUNK])

    def end_bare(self) -> None:
        """From now on hand samples out without rewards, since the job ends."""
        self._reward = None
        pieces = {task: samples for task, samples in self._pieces.items() if not task.done()}
        for task, samples in pieces.items():
            del self._pieces[task]
            task.cancel()
            self._start(samples)

    async def take(self, wait_s: float) -> tuple[list[SampleRecord], list[bytes]]:
        """Records and entries that are ready, after at most `wait_s` seconds.

        The same is handed out again until it is `recorded`: Redis may go away meanwhile. Raises what scoring raised;
        then all samples are dropped and read again.
        """
        self.used_at = time.monotonic()
        if self._pieces and not self._records:
            await asyncio.wait(self._pieces, timeout=wait_s)
        for task in [task for task in self._pieces if task.done()]:
            samples = self._pieces.pop(task)
            try:
                self._records += task.result()
            except BaseException:
                self.close()
                raise
            self._entries += [sample.entry for sample in samples if sample.entry]
        return self._records, self._entries

    def recorded(self) -> None:
        """Confirm that the records handed out last are stored."""
        self._records, self._entries = [], []

    def close(self) -> None:
        """Forget all samples; those that are not recorded are read again, from the first one on."""
        for task in self._pieces:
            task.cancel()
        self._begin()

    def _start(self, samples: Sequence[FinishedSample]) -> None:
        scoring = rewarded(self._spec, samples, self._reward, self._rewards, self.share)
        self._pieces[asyncio.create_task(scoring)] = samples


def unused(known: dict[str, Rewarding], unused_s: float) -> list[str]:
    """Jobs that were not advanced here for so long: another runner has them."""
    before = time.monotonic() - unused_s
    return [job for job, rewarding in known.items() if rewarding.used_at < before]
