"""The kinds of runs of `mlx_parallm_train`: what the settings ask for, from its start to its end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from mlx_model.loader import LoadedModel
from trainer.learn.compute import ComputeHost
from trainer.learners.shared_member import RunMember, take_part
from trainer.runs import stopping
from trainer.runs.agents import Agents, train_agents
from trainer.runs.data import DataRun, train_on_data
from trainer.runs.distillation.distilling import DistillRun
from trainer.runs.heads import HeadRun
from trainer.runs.loop import TrainLoop
from trainer.runs.ppo import PpoRun, train_network
from trainer.runs.rl import train
from trainer.runs.tuning import TuneRun
from trainer.settings import TrainSettings

log = structlog.get_logger()


async def learn(
    settings: TrainSettings,
    team: list[TrainSettings],
    host: ComputeHost,
    load: Callable[[], Awaitable[LoadedModel]],
    beginning: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> None:
    """Until all is learned, or a signal ends it; `beginning` gets what ends it in order, before its first step."""
    running = asyncio.current_task()
    assert running is not None

    def begun(training: TrainLoop | DataRun[Any] | PpoRun | RunMember) -> None:
        def stop() -> None:
            log.info("train.stopping", hint="a checkpoint is saved after this train step; again: end at once")
            training.stop()

        stopping.obey(stop, lambda: training.stopping, running.cancel)
        beginning(training.stop)

    def stop_all(agents: Agents) -> None:
        stopping.obey(agents.stop, lambda: agents.stopping, running.cancel)

    log.info("train.starting", policy=settings.adapter, mode=settings.mode, model=settings.model)
    if settings.join_run:
        await take_part(settings, host, load, begun)
    elif team:
        await train_agents(team, host, load, stop_all)
    elif settings.mode == "reward":
        await train_on_data(HeadRun, settings, host, load, begun)
    elif settings.mode == "ppo":
        await train_network(settings, host, begun)
    elif settings.mode == "rl":
        await train(settings, host, load, begun)
    elif settings.mode == "distill":
        await train_on_data(DistillRun, settings, host, load, begun)
    else:
        await train_on_data(TuneRun, settings, host, load, begun)
