"""Several policies that learn at once: `mlx_parallm_train --agents FILE`.

Each is a run as any other (its tasks, seed, rates, gate, versions, checkpoints, its place on the dashboard). They share
the process, one base in memory, and its MLX thread: a train step of one, then of another.

Invariant. A run that ends, by an error or in order, leaves the others learning; the first error is raised at the end.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from mlx_model.loader import LoadedModel
from shared.errors import ParallmError
from trainer.learn.compute import ComputeHost
from trainer.runs.loop import TrainLoop
from trainer.runs.rl import train
from trainer.settings import TrainSettings

log = structlog.get_logger()


class Agents:
    """The loops of all runs, as far as they have begun."""

    def __init__(self) -> None:
        self._loops: list[TrainLoop] = []
        self.stopping = False

    def begun(self, training: TrainLoop) -> None:
        """One more, which ends at once where all are to end."""
        self._loops.append(training)
        if self.stopping:
            training.stop()

    def stop(self) -> None:
        """End all, each after its train step."""
        log.info("train.stopping", hint="each run saves a checkpoint after its train step; again: end at once")
        self.stopping = True
        for training in self._loops:
            training.stop()


async def train_agents(
    team: list[TrainSettings],
    host: ComputeHost,
    load: Callable[[], Awaitable[LoadedModel]],
    beginning: Callable[[Agents], None],
) -> None:
    """Train all until each is done; `beginning` gets what stops them. Raises the first error, once all have ended."""
    agents = Agents()
    beginning(agents)
    loading: asyncio.Task[LoadedModel] | None = None

    async def loaded() -> LoadedModel:
        nonlocal loading
        if loading is None:
            loading = asyncio.ensure_future(load())
        return await asyncio.shield(loading)

    async def run(settings: TrainSettings) -> None:
        structlog.contextvars.bind_contextvars(agent=settings.adapter)  # of this task's context alone
        try:
            await train(settings, host, loaded, agents.begun)
        except Exception as error:
            if isinstance(error, ParallmError):
                log.error("agent.failed", reason=str(error))
            else:
                log.exception("agent.broken")
            raise

    runs = [asyncio.create_task(run(settings)) for settings in team]
    try:
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
    except asyncio.CancelledError:
        for each in runs:
            each.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        raise
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
