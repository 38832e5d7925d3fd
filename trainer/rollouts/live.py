"""Live traffic as a source of batches: complete groups, or single samples that share a baseline.

**group** the samples that one request asked for with `n` above 1: they share a prompt, and its mean reward is their
baseline, as with groups of our own · **pool** single samples of one reward and one `metadata.environment`: each has a
prompt of its own, so the mean reward of all of them in the train step is the baseline (REINFORCE with a batch baseline,
as REINFORCE++, arXiv 2501.03262). It is unbiased for what the sample itself adds but 1/N, and noisier than a group's:
easy prompts look good and hard ones bad. Ask for `n` samples where that matters. Where the environment is the name of
an agent of a team and `--advantage-scale` is std, these are the agent-wise advantages of Dr. MAS (arXiv 2602.08847).

Invariants. Every delivered trajectory is taken exactly once: into a batch, or dropped and counted. `taken` names those
that the weights have seen since the last acknowledgement, and `books` says of all entries which were taken. A
checkpoint keeps both, so that what comes again is recognised: after a kill, and after Redis was set back to a state in
which it still held entries that were acknowledged since.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import structlog

from shared.redis.connection.background_reader import BackgroundReader
from shared.redis.training.trajectory_queue import CONSUMER, Delivered, TrajectoryQueue, is_not_after, order_of
from shared.trajectories import LiveTrajectory
from trainer.rollouts.groups import Lag, RolloutGroup, usable
from trainer.rollouts.pacing import StaleWatch
from trainer.state import LiveBooks

log = structlog.get_logger()

READ_AT_ONCE = 64
READ_AHEAD = 4  # batches
WAIT_S = 1.0


@dataclass
class _Open:
    """A group whose samples are not all here."""

    since: float
    members: list[Delivered] = field(default_factory=list)


@dataclass(frozen=True)
class _Ready:
    group: RolloutGroup
    entries: tuple[str, ...]


class LiveCollector(BackgroundReader):
    """Makes batches of at least `per_step` trajectories."""

    def __init__(
        self,
        queue: TrajectoryQueue,
        per_step: int,
        max_lag: int,
        deadline_s: float,
        taken: Collection[str] = (),
        watch: StaleWatch | None = None,
        books: LiveBooks | None = None,
    ) -> None:
        self._queue = queue
        self._watch = watch or StaleWatch()
        self._per_step = per_step
        self._max_lag = max_lag
        self._deadline_s = deadline_s
        self._known = set(taken)  # in the checkpoint's weights already
        self._newest = books.newest if books else ""  # entry that was delivered
        self._expected = set(books.waiting if books else ())  # delivered to an earlier start, and not taken by it
        self._open: dict[str, _Open] = {}
        self._ready: list[_Ready] = []
        self._out: list[_Ready] = []  # the last batch
        self._before = ""  # the newest entry when another version was adopted
        self._changed = asyncio.Event()
        self.taken: list[str] = list(taken)
        self.dropped: Counter[str] = Counter()

    async def next_batch(self, lag: Lag) -> list[RolloutGroup]:
        """Wait for a batch; what is too old or has no reward is dropped on the way. May be cancelled without loss."""
        while True:
            self._close_late()
            self._drop_stale(lag)
            if self._waiting >= self._per_step:
                return self._batch()
            self._changed.clear()
            await self._changed.wait()

    @property
    def _waiting(self) -> int:
        return sum(len(ready.group.trajectories) for ready in self._ready)

    async def _read_round(self) -> None:
        """Read ahead, a few batches at most; what is not read survives us in Redis."""
        try:
            deliveries = (
                await self._queue.take(CONSUMER, READ_AT_ONCE) if self._waiting < READ_AHEAD * self._per_step else []
            )
            for delivered in deliveries:
                await self._take(delivered)
            if not deliveries:
                await self._queue.wait(WAIT_S)
        finally:
            self._changed.set()

    def give_back(self, batch: Sequence[RolloutGroup]) -> None:
        """A batch that was handed out and not used comes first again."""
        entries = {group.id: group for group in batch}
        back = [ready for ready in self._out if ready.group.id in entries]
        for ready in back:
            for entry in ready.entries:
                self.taken.remove(entry)
        self._ready = [*back, *self._ready]

    async def adopted(self) -> None:
        """Continue from another version: trajectories so far are too old, and that is no reason for an alert."""
        self._before = await self._queue.newest()

    async def saved(self) -> None:
        """A checkpoint with `taken` is on disk."""
        entries, self.taken = self.taken, []
        await self._queue.done(entries)

    def _batch(self) -> list[RolloutGroup]:
        count = 0
        chosen: list[_Ready] = []
        while count < self._per_step:
            chosen.append(self._ready.pop(0))
            count += len(chosen[-1].group.trajectories)
        self._out = chosen
        self._watch.used()
        for ready in chosen:
            self.taken += ready.entries
        return [ready.group for ready in chosen]

    @property
    def books(self) -> LiveBooks:
        """Which entries were taken: all up to the newest that was delivered, except those that wait."""
        return LiveBooks(self._newest, sorted(self._expected | self._here(), key=order_of))

    def _here(self) -> set[str]:
        """Entries that wait for a batch."""
        members = (member for group in self._open.values() for member in group.members)
        return {entry for ready in self._ready for entry in ready.entries} | {member.entry for member in members}

    def _came_before(self, entry: str) -> bool:
        """True if an entry was delivered earlier, to this start of the run or to one before it, and is not expected."""
        if entry in self._expected:
            self._expected.remove(entry)
            return False
        if self._newest and is_not_after(entry, self._newest):
            return True
        self._newest = entry
        self._expected.clear()  # what an earlier start had read comes first: the others were trimmed
        return False

    async def _take(self, delivered: Delivered) -> None:
        live = delivered.live
        if delivered.entry in self._known:
            await self._queue.done([delivered.entry])
        elif self._came_before(delivered.entry):
            if delivered.entry not in self._here():
                log.warning("live.taken_before", entry=delivered.entry, newest=self._newest, trajectory=live.id)
                self.dropped["taken before"] += 1
                await self._queue.done([delivered.entry])
        elif live.group and live.group_size > 1:
            group = self._open.setdefault(live.group, _Open(time.monotonic()))
            group.members.append(delivered)
            if len(group.members) >= live.group_size:
                self._close(live.group)
        elif usable(live.trajectory):
            self._ready.append(_Ready(group_of([live]), (delivered.entry,)))
        else:
            self._drop("unscored", [delivered.entry])

    def _close(self, name: str) -> None:
        """End a group: the samples that have come are all that it will have."""
        members = self._open.pop(name).members
        good = [member for member in members if usable(member.live.trajectory)]
        self._drop("unscored", [member.entry for member in members if member not in good])
        if good:
            self._ready.append(_Ready(group_of([m.live for m in good]), tuple(m.entry for m in good)))

    def _close_late(self) -> None:
        now = time.monotonic()
        for name in [name for name, group in self._open.items() if now - group.since > self._deadline_s]:
            self._close(name)

    def _drop_stale(self, lag: Lag) -> None:
        fresh: list[_Ready] = []
        for ready in self._ready:
            age = lag(ready.group)
            if age > self._max_lag:
                self._drop("stale", ready.entries)
                if not all(is_not_after(entry, self._before) for entry in ready.entries):
                    self._watch.dropped([ready.group], age)
            else:
                fresh.append(ready)
        self._ready = fresh

    def _drop(self, reason: str, entries: Sequence[str]) -> None:
        if entries:
            log.info("live.dropped", reason=reason, trajectories=len(entries))
            self.dropped[reason] += len(entries)
            self.taken += entries


def group_of(members: Sequence[LiveTrajectory]) -> RolloutGroup:
    """Samples of one prompt, or a single one that shares its pool's baseline."""
    first = members[0]
    pool = ""
    if len(members) == 1:
        reward = first.trajectory.reward
        pool = f"{reward.name if reward else ''}/{first.trajectory.metadata.get('environment', '')}"
    advantages = tuple(member.advantage for member in members)
    return RolloutGroup(
        id=f"live-{first.group or first.id}",
        index=-1,
        trajectories=tuple(member.trajectory for member in members),
        pool=pool,
        advantages=advantages if any(a is not None for a in advantages) else (),
    )


def posted_groups(trajectories: Sequence[LiveTrajectory]) -> list[RolloutGroup]:
    """Groups of posted trajectories: by their group, else by equal prompts."""
    groups: dict[object, list[LiveTrajectory]] = {}
    for live in trajectories:
        groups.setdefault(live.group or live.trajectory.prompt_ids, []).append(live)
    # Numbered, since the ids that users give need not differ.
    return [replace(group_of(members), id=f"posted-{number}") for number, members in enumerate(groups.values())]
