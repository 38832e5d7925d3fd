"""Rank 0 of a trainer of several ranks: it lets them come, and ends with a clear word when one of them is lost.

What was learned since the last checkpoint is lost with it, and nothing else: the run goes on from there when it is
started again.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx
import structlog

from mlx_model.config import EngineConfig, memory_config
from mlx_model.loader import LoadedModel, load_model
from ranks.following import Follower
from ranks.lead import GroupLead
from ranks.messages import EngineTurn, LoadModel, Stopping, Unit
from ranks.placement import Placement
from shared.errors import ParallmError, ServiceUnavailableError, SetupError
from shared.process.lifeline import follow_parent
from trainer.learn.compute import ThreadHost, at_once
from trainer.learners.ranks import RankLearner
from trainer.settings import TrainSettings

log = structlog.get_logger()
T = TypeVar("T")

UNWIND_S = 10.0  # for a run to let go of its files and of the ring, once a rank is lost


class LeadingTrainer:
    """The others, for one run."""

    def __init__(self, settings: TrainSettings, placed: Placement) -> None:
        self._settings = settings
        self._config = EngineConfig(
            settings.model,
            dtype=settings.dtype or None,
            sharding=settings.distributed_sharding,
            sees=False,
            memory=memory_config(settings, learner_rank=settings.lora_rank, serves=False),
        )
        self._gone = asyncio.Event()
        self._stop: Callable[[], None] = lambda: None
        self.lead = GroupLead(settings, placed, lambda _: self._gone.set(), self._config, None, self._stop_ordered)
        self.host = ThreadHost(self.lead)

    def begun(self, stop: Callable[[], None]) -> None:
        """From now on any rank may order the run to end."""
        self._stop = stop

    def _stop_ordered(self) -> None:
        log.info("train.stopping", hint="another rank got a signal to end; a checkpoint is saved after this train step")
        self._stop()

    async def loaded(self) -> LoadedModel:
        """Our part of the model, once all ranks have theirs; SetupError when they do not fit together."""
        await self.lead.open(lambda: None)
        return await self.lead.unless_lost(self.host.run(at_once(self._load)))

    def _load(self) -> LoadedModel:
        loaded = load_model(self._config, self.lead.join())
        self.lead.ready(loaded)
        log.info("train.group_ready", model=loaded.card.name)
        return loaded

    async def run(self, training: Coroutine[Any, Any, T]) -> T:
        """Run the training to its result; ServiceUnavailableError when a rank is lost meanwhile."""
        task = asyncio.create_task(training)
        try:
            return await self.lead.unless_lost(task)
        except SetupError:
            raise
        except Exception as error:
            if not isinstance(error, ParallmError):  # of a sum that has broken off, perhaps
                await self._look()
            if not self.lead.lost:
                raise
            raise ServiceUnavailableError(
                f"the group is lost: {self.lead.lost}; started again, the run goes on from its last checkpoint"
            ) from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=UNWIND_S)

    async def _look(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.distributed_silence_s + 1):
                await self._gone.wait()


@asynccontextmanager
async def leading(settings: TrainSettings, placed: Placement) -> AsyncIterator[LeadingTrainer]:
    """The others, who end with us."""
    leads = LeadingTrainer(settings, placed)
    failure: BaseException | None = None
    try:
        async with leads.host:
            try:
                yield leads
            finally:
                if leads.lead.lost:
                    leads.host.abandon()
    except BaseException as error:
        failure = error
        raise
    finally:
        await leads.lead.close(failure)


class TrainerRank(Follower):
    """Follower in a group of processes whose rank 0 has the run."""

    def __init__(self, settings: TrainSettings, placed: Placement) -> None:
        super().__init__(settings, placed)
        self._model = settings.model
        self._is_told = False

    def stop(self) -> None:
        """Order the run to end: rank 0 saves a checkpoint first; a second order ends it at once."""
        if self._talk is None:
            self._end(0)
        elif self._is_told:
            super().stop()
        else:
            self._is_told = True
            self._say(Stopping())

    def leave(self) -> None:
        """Called in any thread when rank 0's process, which has started this one, has ended."""
        self._loop.call_soon_threadsafe(self._end, 1)

    def _load(self, begin: LoadModel, group: Any) -> LoadedModel:
        loaded = load_model(replace(begin.config, model=self._model), group)
        self._learner = RankLearner(loaded)
        return loaded

    def _take(self, turn: EngineTurn | Unit) -> None:
        assert isinstance(turn, Unit), "there is no engine"
        if turn.ask and self.machine.pressure != "normal":
            mx.clear_cache()
        self._learn(turn, self._learner)


async def follow(settings: TrainSettings, placed: Placement) -> int:
    """Until rank 0 ends; the exit code."""
    rank = TrainerRank(settings, placed)
    following = asyncio.create_task(rank.run())
    await asyncio.sleep(0)  # it has its loop
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, rank.stop)
    follow_parent(rank.leave)
    return await following
