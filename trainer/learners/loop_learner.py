"""A run's learner as the loop sees it: in a thread of the run's host, or of the training service's (trainer/ring)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shared.trajectories import Trajectory
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import ComputeHost, at_once
from trainer.learn.learner import Learner, Trained
from trainer.learners.asks import LearnerOptions
from trainer.state import Arrays, Snapshot
from trainer.vision.sight import Sight
from worker.engine.model.sites import Whole


class LoopLearner(Protocol):
    """The methods of `Learner`, wherever it is; EngineError where it could not compute."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the adapter's parameters."""

    @property
    def config(self) -> bytes:
        """Its `adapter_config.json`."""

    async def train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Trained: ...

    async def accept(self) -> None: ...

    async def revert(self) -> None: ...

    async def parity(self, trajectories: Sequence[Trajectory]) -> float: ...

    async def gaps(self, samples: Sequence[SampleGroup], weights: Arrays | None) -> list[float]: ...

    async def anchor(self, best: Arrays | None) -> None: ...

    async def begin_with(self, weights: Arrays) -> None: ...

    async def load(self, weights: Arrays) -> None: ...

    async def weights(self) -> Arrays: ...

    async def snapshot(self) -> Snapshot: ...

    async def restore(self, snapshot: Snapshot) -> None:
        """ValueError when it is another adapter's."""


class HostLearner:
    """One in the thread of a host: of a process of its own, or a worker's."""

    def __init__(self, host: ComputeHost, learner: Learner, config: bytes) -> None:
        self._host, self._learner = host, learner
        self.shapes, self.config = learner.shapes, config

    @classmethod
    async def open(cls, host: ComputeHost, build: Callable[[], Learner]) -> "HostLearner":
        """Build it there; ValueError when the model has no layers for the adapter."""
        learner = await host.run(at_once(build))
        return cls(host, learner, await host.run(at_once(learner.config)))

    async def train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Trained:
        """One train step and its checks."""
        return await self._host.run(lambda: self._learner.train(groups, step, policy_step, probes))

    async def accept(self) -> None:
        """The present weights are the last good ones."""
        await self._host.run(at_once(self._learner.accept))

    async def revert(self) -> None:
        """Back to the last good ones."""
        await self._host.run(at_once(self._learner.revert))

    async def parity(self, trajectories: Sequence[Trajectory]) -> float:
        """Mean difference to a worker's log-probabilities."""
        return await self._host.run(lambda: self._learner.parity(trajectories))

    async def gaps(self, samples: Sequence[SampleGroup], weights: Arrays | None) -> list[float]:
        """Mean difference of each sample's log-probabilities to those of these weights; None is the base."""
        return await self._host.run(lambda: self._learner.gaps(samples, weights))

    async def anchor(self, best: Arrays | None) -> None:
        """Later versions must stay near these."""
        await self._host.run(at_once(lambda: self._learner.anchor(best)))

    async def begin_with(self, weights: Arrays) -> None:
        """What the run begins, or began, with in place of the base."""
        await self._host.run(at_once(lambda: self._learner.begin_with(weights)))

    async def load(self, weights: Arrays) -> None:
        """Go on from older weights, without momentum."""
        await self._host.run(at_once(lambda: self._learner.load(weights)))

    async def weights(self) -> Arrays:
        """The present adapter."""
        return await self._host.run(at_once(self._learner.weights))

    async def snapshot(self) -> Snapshot:
        """All of the state, for a checkpoint."""
        return await self._host.run(at_once(self._learner.snapshot))

    async def restore(self, snapshot: Snapshot) -> None:
        """Go on exactly where a checkpoint was taken."""
        await self._host.run(at_once(lambda: self._learner.restore(snapshot)))


def build_learner(
    model: Any, options: LearnerOptions, sight: Sight | None = None, whole: Whole | None = None
) -> Learner:
    """A learner as a run wants it, which sees with `sight`; ValueError when the model has no layers for the adapter.

    `whole`: what a model was that ranks divide, all of which build one.
    """
    return Learner(
        model,
        options.shape,
        options.optimize,
        options.limits,
        seed=options.seed,
        checkpoint_layers=options.checkpoint_layers,
        remembered=options.remembered,
        sight=sight,
        whole=whole,
    )
