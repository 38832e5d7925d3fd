"""A learner as a run sees it, wherever it computes.

A run calls a learner's methods through a `Handle`: `await handle.call(PolicyLearner.train, groups, step, step, [])`.
`HostHandle` has the learner in the thread of its process's host, or of a worker's engine; where ranks divide the model
or the samples, all of them carry out the call (ranks.py). A learner of the training service is called by messages
(trainer/learners/service.py). Where several processes share train steps, or average weights, the handle's `train`
is more than one call (shared.py, federation.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from mlx_model.sites import Whole
from trainer.learn.compute import ComputeHost, Others, Work, at_once
from trainer.learners.calls import called
from trainer.learners.kinds import AnyLearner, Made, made
from trainer.learners.ranks import Leading
from trainer.rollouts.sight import Sight
from trainer.state import Arrays, LearnerSnapshot

L = TypeVar("L")
P = ParamSpec("P")
R = TypeVar("R")


class Handle(ABC, Generic[L]):
    """A way to call one learner."""

    shapes: Mapping[str, tuple[int, ...]]  # of the parameters, by name
    config: bytes  # adapter_config.json

    @overload
    async def call(self, method: Callable[Concatenate[L, P], Work[R]], *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    async def call(self, method: Callable[Concatenate[L, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    async def call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call an exposed method; raises what it raises, and EngineError where it could not be computed."""
        assert not named, "arguments of a call travel by their places"
        return await self._called(method.__name__, args)

    @abstractmethod
    async def _called(self, method: str, args: tuple[Any, ...]) -> Any: ...

    # -- what every learner has

    async def weights(self) -> Arrays:
        """A copy of the present weights."""
        weights: Arrays = await self._called("weights", ())
        return weights

    async def snapshot(self) -> LearnerSnapshot:
        """All of the learner's state, for a checkpoint."""
        snapshot: LearnerSnapshot = await self._called("snapshot", ())
        return snapshot

    async def accept(self) -> None:
        """The present weights are the last good ones."""
        await self._called("accept", ())

    async def revert(self) -> None:
        """Go back to the last good weights and to the moments that made them."""
        await self._called("revert", ())


class Local(Generic[L]):
    """A learner in the thread that computes, and with it those of a group's other ranks, if there are any."""

    def __init__(self, learner: L, leading: Leading | None = None) -> None:
        self.learner, self._leading = learner, leading

    @classmethod
    def open(
        cls, made_with: Made, model: Any, sight: Sight | None = None, whole: Whole | None = None,
        others: Others | None = None,
    ) -> "Local[L]":  # fmt: skip
        """Build the learner on all ranks; ValueError when the model has no layers for the adapter."""

        def build() -> AnyLearner:
            return made(made_with, model, sight, whole)

        leading = None if others is None else Leading(others)
        return cls(cast(L, build() if leading is None else leading.build(made_with, build)), leading)

    @overload
    def work(self, method: Callable[Concatenate[L, P], Work[R]], *args: P.args, **kwargs: P.kwargs) -> Work[R]: ...

    @overload
    def work(self, method: Callable[Concatenate[L, P], R], *args: P.args, **kwargs: P.kwargs) -> Work[R]: ...

    def work(self, method: Callable[..., Any], *args: Any, **named: Any) -> Work[Any]:
        """A call as work of that thread."""
        assert not named, "arguments of a call travel by their places"
        return self.named_work(method.__name__, args)

    def named_work(self, method: str, args: tuple[Any, ...]) -> Work[Any]:
        """The same by the method's name."""
        if self._leading is None:
            return called(self.learner, method, args)
        return self._leading.called(self.learner, method, args)


class HostHandle(Handle[L]):
    """A learner in the thread of a host."""

    def __init__(self, host: ComputeHost, local: Local[L]) -> None:
        self.host, self._local = host, local
        self.learner = local.learner
        plain: Any = local.learner
        self.shapes, self.config = plain.shapes, plain.config()

    @classmethod
    async def open(
        cls, host: ComputeHost, made_with: Made, model: Any, sight: Sight | None = None, whole: Whole | None = None
    ) -> "HostHandle[L]":
        """Build a learner there; ValueError when the model has no layers for the adapter."""
        local: Callable[[], Local[L]] = lambda: Local.open(made_with, model, sight, whole, host.others)  # noqa: E731
        return await host.run(at_once(lambda: cls(host, local())))

    @classmethod
    async def build(cls, host: ComputeHost, build: Callable[[], L]) -> "HostHandle[L]":
        """Build a learner that this process alone has."""
        return await host.run(at_once(lambda: cls(host, Local(build()))))

    async def _called(self, method: str, args: tuple[Any, ...]) -> Any:
        return await self.host.run(lambda: self._local.named_work(method, args))
