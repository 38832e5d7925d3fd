"""A trainer's process that is not rank 0: it has its part of the model, and computes what rank 0 computes."""

import asyncio
import signal
from dataclasses import replace
from typing import Any

from shared.process.lifeline import follow_parent
from trainer.learners.ranks import RankLearner
from trainer.settings import TrainSettings
from worker.engine.model.loader import LoadedModel, load_model
from worker.group.following import Follower
from worker.group.messages import Begin, Stopping, Turn, Unit
from worker.group.placement import Placement


class TrainerRank(Follower):
    """Of a group whose rank 0 has the run."""

    def __init__(self, settings: TrainSettings, placed: Placement) -> None:
        super().__init__(settings, placed)
        self._model = settings.model
        self._is_told = False

    def stop(self) -> None:
        """Told to end: rank 0 saves a checkpoint first; told again, at once."""
        if self._talk is None:
            self._end(0)
        elif self._is_told:
            super().stop()
        else:
            self._is_told = True
            self._say(Stopping())

    def leave(self) -> None:
        """From any thread: rank 0's process, which has started this one, is no more."""
        self._loop.call_soon_threadsafe(self._end, 1)

    def _load(self, begin: Begin, group: Any) -> LoadedModel:
        loaded = load_model(replace(begin.config, model=self._model), group)
        self._learner = RankLearner(loaded)
        return loaded

    def _take(self, turn: Turn | Unit) -> None:
        assert isinstance(turn, Unit), "there is no engine"
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
