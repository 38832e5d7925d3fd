"""A run's learner that averages its weights with those of other runs: `mlx_parallm_train --federation NAME`.

The loop sees a learner as any other: the last of each `--sync-every` train steps ends in the average, which the gate
judges as it would the step alone. The versions in between are the run's own, and it samples from them. Moments stay the
run's own, as in DiLoCo, or are averaged, too (`--sync-moments`). What the gate refuses is taken back to the run's own
last good weights and moments, as ever.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
from redis.exceptions import RedisError

from shared.redis.connection.faults import reason
from trainer.learn.batches import SampleGroup
from trainer.learn.learner import Learner, Trained
from trainer.learners.handle import Handle, HostHandle
from trainer.rounds.average import Learned
from trainer.rounds.federation import Federation
from trainer.state import Arrays, GradientMeans

log = structlog.get_logger()


class RoundHandle(Handle[Learner]):
    """A learner in the thread of the run's host, `mine`, and its place in a federation."""

    def __init__(self, mine: HostHandle[Learner], place: Federation, every: int) -> None:
        self._mine, self._place, self._every = mine, place, every
        self.shapes, self.config = mine.shapes, mine.config
        self._anchor: Arrays = {}  # the last average
        self._steps = self._samples = 0  # since then

    async def _called(self, method: str, args: tuple[Any, ...]) -> Any:
        return await (self._train(*args) if method == Learner.train.__name__ else self._mine._called(method, args))

    async def _train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Trained:
        """One train step, with the average where it is due, and the checks."""
        mine = self._mine
        if not self._anchor:
            self._anchor = await self._place.join(await mine.call(Learner.weights))
            await mine.call(Learner.go_on_from, self._anchor)
        report = await mine.call(Learner.step, groups, step, policy_step)
        self._steps += 1
        self._samples += report.sequences
        if self._steps >= self._every:
            present = await mine.call(Learner.weights)
            delta = {name: value - self._anchor[name] for name, value in present.items()}
            means = await mine.call(Learner.means) if self._place.averages_moments else GradientMeans()
            try:
                average = await self._place.exchange(Learned(delta, self._samples, means))
            except (RedisError, OSError) as error:  # learned alone so far; asked again after the next step
                log.warning("round.redis_away", error=reason(error))
            else:
                self._steps = self._samples = 0
                self._anchor = average.weights
                await mine.call(Learner.put, average.weights, average.means)
                report = replace(report, updated=True)
        return await mine.call(Learner.checked, report, probes)
