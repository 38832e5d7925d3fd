"""A run's learner that averages its weights with those of other runs: `mlx_parallm_train --federation NAME`.

The loop sees a learner as any other: the last of each `--sync-every` train steps ends in the average, which the gate
judges as it would the step alone. The versions in between are the run's own, and it samples from them. Moments stay the
run's own, as in DiLoCo, or are averaged, too (`--sync-moments`). What the gate refuses is taken back to the run's own
last good weights and moments, as ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog
from redis.exceptions import RedisError

from shared.redis.connection.faults import reason
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import ComputeHost, at_once
from trainer.learn.learner import Learner, Trained
from trainer.learners.loop_learner import HostLearner
from trainer.rounds.average import Learned
from trainer.rounds.federation import Federation
from trainer.state import Arrays, GradientMeans

log = structlog.get_logger()


class RoundLearner(HostLearner):
    """One in the thread of the run's host."""

    def __init__(self, host: ComputeHost, learner: Learner, config: bytes, place: Federation, every: int) -> None:
        super().__init__(host, learner, config)
        self._place, self._every = place, every
        self._anchor: Arrays = {}  # the last average
        self._steps = self._samples = 0  # since then

    @classmethod
    async def open_in(
        cls, host: ComputeHost, build: Callable[[], Learner], place: Federation, every: int
    ) -> "RoundLearner":
        """Build it; ValueError when the model has no layers for the adapter."""
        learner = await host.run(at_once(build))
        return cls(host, learner, await host.run(at_once(learner.config)), place, every)

    async def train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Trained:
        """One train step, with the average where it is due, and the checks."""
        learner = self._learner
        if not self._anchor:
            mine = await self.weights()
            self._anchor = await self._place.join(mine)
            await self._host.run(at_once(lambda: learner.go_on_from(self._anchor)))
        report = await self._host.run(lambda: learner.step(groups, step, policy_step))
        self._steps += 1
        self._samples += report.sequences
        if self._steps >= self._every:
            present = await self.weights()
            delta = {name: value - self._anchor[name] for name, value in present.items()}
            means = await self._host.run(at_once(learner.means)) if self._place.averages_moments else GradientMeans()
            try:
                average = await self._place.exchange(Learned(delta, self._samples, means))
            except (RedisError, OSError) as error:  # learned alone so far; asked again after the next step
                log.warning("round.redis_away", error=reason(error))
            else:
                self._steps = self._samples = 0
                self._anchor = average.weights
                await self._host.run(at_once(lambda: learner.put(average.weights, average.means)))
                report = replace(report, updated=True)
        return await self._host.run(lambda: learner.checked(report, probes))
