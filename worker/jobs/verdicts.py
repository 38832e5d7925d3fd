"""From a verdict on an answer to a trajectory in the queue of its policy's trainer.

Repeatable at every point: the queue ignores a trajectory that it knows, an answer remembers that it was delivered, and
its entry leaves the due list last.
"""

import msgspec
import structlog
from redis.asyncio import Redis

from shared.process.loops import forever
from shared.redis.adapters.splits import count_for_split
from shared.redis.due.due_list import DueList
from shared.redis.kept.answer_store import LIST, AnswerStore, StoredAnswer, Verdict, due_answer, live_of
from shared.redis.kept.kept_things import Terms
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.trajectories import LiveTrajectory, Reward

log = structlog.get_logger()

AT_ONCE = 64
LOOK_S = 1.0
LEASE_MS = 30_000
AGAIN_MS = 1_000
REWARD = "feedback"  # the reward's name: such samples share a baseline


class Verdicts:
    """Delivers what has been judged, in one runner."""

    def __init__(self, redis: Redis, max_entries: int, max_bytes: int) -> None:
        self._redis = redis
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._due = DueList(redis, LIST)

    async def run(self) -> None:
        """Deliver until cancelled; while Redis is away, wait."""
        await forever("verdicts", "deliver", self._deliver_all, LOOK_S)

    async def deliver(self) -> int:
        """Deliver what is due; returns how many verdicts that were."""
        entries = await self._due.take(AT_ONCE, LEASE_MS)
        for entry in entries:
            try:
                await self._deliver(*due_answer(entry))
            except (ValueError, msgspec.MsgspecError) as error:  # of a newer api, or damaged
                log.error("verdicts.unreadable", error=str(error))
            await self._due.done(entry)
        return len(entries)

    async def _deliver_all(self) -> None:
        while await self.deliver():
            pass

    async def _deliver(self, keeper: str, terms: Terms, name: str) -> None:
        answers = AnswerStore(self._redis, terms)
        first = await answers.find(keeper, name)
        if first is None or first.verdict is None or first.delivered:
            return
        other = await answers.find(keeper, first.verdict.over) if first.verdict.over else None
        judged = [(each, each.verdict) for each in (first, other) if each is not None and each.verdict is not None]
        group = f"{first.id}-preferred" if len(judged) > 1 else ""
        for each, verdict in judged:
            queue = TrajectoryQueue(self._redis, each.policy, max_entries=self._max_entries, max_bytes=self._max_bytes)
            judged_answer = judged_live(each, verdict, group)
            await count_for_split(self._redis, judged_answer)
            await queue.add(judged_answer)
        await answers.delivered(keeper, name)
        log.debug("verdicts.delivered", trajectory=first.id, pair=len(judged) > 1)


def judged_live(answer: StoredAnswer, verdict: Verdict, group: str) -> LiveTrajectory:
    """The trajectory of a judged answer for the trainer: alone, or grouped with the other answer of its pair."""
    live = live_of(answer)
    said = verdict.text or answer.note
    components = {"confidence": verdict.confidence} if verdict.by else {}
    reward = Reward(verdict.by or REWARD, verdict.reward, components)
    metadata = {**live.trajectory.metadata, **({"feedback": said} if said else {})}
    trajectory = msgspec.structs.replace(live.trajectory, reward=reward, metadata=metadata)
    return msgspec.structs.replace(live, trajectory=trajectory, group=group, group_size=2 if group else 1)
