"""Court: a worker with nothing else to do computes again what other workers wrote, and reports whose tokens are wrong.

Which ones: a share of all, which each worker leaves in a stream when it commits them (shared/redis/recordings.py).
Case by case: one that this worker wrote, or has found wrong before, is passed on; another one is replayed here, through
the queue like all work, and the verdict is counted for the worker that wrote it. A case found wrong goes on to one more
worker, since the fault may be this one's.

A worker that two others have found wrong is named in its heartbeat, and with --on-wrong-tokens drain it ends.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.errors import ParallmError
from shared.redis.connection.faults import reason
from shared.redis.queue.replayer import Replayer, replay_calls
from shared.redis.recordings import (
    Court,
    CourtCase,
    Standing,
    add_verdict,
    forget_verdicts,
    standing_of,
    trusted_accusers,
)
from shared.replay import bound_of
from shared.replay_report import ReplayReport
from shared.sequences import ModelCard

log = structlog.get_logger()

LOOK_S = 1.0  # between two looks for a case, while the worker is idle


class CourtDuty:
    """One worker's part in the court. `is_idle` says if it has no rows, `others` names the other live workers."""

    def __init__(
        self,
        redis: Redis,
        card: ModelCard,
        worker_id: str,
        is_idle: Callable[[], bool],
        others: Callable[[], Sequence[str]],
        counts: Callable[[ReplayReport], None] = lambda report: None,
        on_wrong: Callable[[], None] = lambda: None,
        *,
        serves: bool = True,
    ) -> None:
        """`serves`: take part at all. `counts` gets each report; `on_wrong` is called once, when two workers have found
        this one's tokens wrong."""
        self._redis = redis
        self._card = card
        self._id = worker_id
        self._is_idle = is_idle
        self._others = others
        self._counts = counts
        self._on_wrong = on_wrong
        self._court = Court(redis, card.name)
        self._serves = serves
        self._is_new = True
        self.standing: Standing = ""

    @property
    def loops(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The loop to run, by name; none if the worker takes no part."""
        return {"court": self.run} if self._serves else {}

    async def run(self) -> None:
        """Take cases for ever, one at a time, while the worker is idle. Verdicts on an earlier process do not count."""
        if self._is_new:
            await forget_verdicts(self._redis, self._card.name, self._id)
            self._is_new = False
        async with replay_calls(self._redis, self._card.name) as calls:
            replayer = Replayer(calls, self._card)
            while True:
                await self._look_at_own_standing()
                cases = await self._court.take(self._id) if self._is_idle() and self._others() else []
                for case in cases:
                    await self._hear(case, replayer)
                if not cases:
                    await asyncio.sleep(LOOK_S)

    async def _hear(self, case: CourtCase, replayer: Replayer) -> None:
        recording = case.recording
        if self._id in (recording.result.worker, *case.found_wrong_by):
            await self._court.pass_on(case)
            await asyncio.sleep(LOOK_S)  # for another one to take it
            return
        try:
            report = await replayer.replay(recording, bound_of(self._card.dtype), on=self._id)
        except ParallmError as error:  # others took the work, or an adapter version is gone
            log.info("court.not_heard", sequence=recording.spec.id, reason=error.message)
            await self._court.done([case.entry])
            return
        except (RedisError, OSError) as error:
            log.warning("court.not_heard", sequence=recording.spec.id, reason=reason(error))
            return
        self._counts(report)
        await add_verdict(self._redis, self._card.name, self._id, report)
        if report.wrong:
            first = next(each for each in report.differences if each.verdict == "wrong")
            log.error(
                "court.wrong_tokens",
                sequence=report.id,
                worker=report.worker,
                tokens=report.wrong,
                of=report.tokens,
                position=first.position,
                gap=round(first.gap, 4),
            )
        others = set(self._others()) - {report.worker, *case.found_wrong_by}
        if report.wrong and len(case.found_wrong_by) < 1 and others:
            await self._court.pass_on(case, found_wrong_by=self._id)
        else:
            await self._court.done([case.entry])

    async def _look_at_own_standing(self) -> None:
        accusers = await trusted_accusers(self._redis, self._card.name, self._id)
        standing = standing_of(accusers)
        if standing != self.standing:
            self.standing = standing
            log.error("court.standing", worker=self._id, standing=standing, judges=accusers)
            if standing == "wrong":
                self._on_wrong()
