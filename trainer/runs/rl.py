"""One run on a ring, from its settings to its end: the same for a process of its own and for a trainer in a worker."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any, NamedTuple

import structlog

from mlx_model.loader import LoadedModel
from shared.errors import SetupError
from shared.process.process_settings import JoinSettings
from trainer.learn.compute import ComputeHost
from trainer.loggers.loggers import Loggers
from trainer.loggers.tracked_run import config_of
from trainer.ring.join import way_to_ring
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import ArithmeticEnvironment, DatasetEnvironment, Environment, Scorer, read_jsonl
from trainer.rollouts.held_out import BothScorers
from trainer.rollouts.own.own_code import OwnCode, OwnEnvironment, alerts_of
from trainer.rollouts.pictures import ChatPictures
from trainer.rollouts.scorers import Judges, check_judges, open_scorer
from trainer.rollouts.sight import sight_of
from trainer.runs.loop import TrainLoop
from trainer.runs.parts import Parts
from trainer.runs.run import permitted
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.run_lock import run_lock

log = structlog.get_logger()

_HELD_OUT_SEED = 7


def training_tasks(settings: TrainSettings, scorer: Scorer | None) -> Environment:
    """Tasks that the run learns from; data sets need a `scorer`."""
    if settings.task == "arithmetic":
        return ArithmeticEnvironment(settings.seed, "train", settings.task_count)
    if settings.task in ("jsonl", "gsm8k"):
        if settings.dataset is None:
            raise SetupError(f"task {settings.task!r} needs a dataset")
        tasks = read_jsonl(settings.dataset, settings.task_count, settings.difficulty_field())
        return DatasetEnvironment(settings.task, tasks, _needed(scorer), settings.seed, settings.system_prompt)
    return _own(settings, settings.task_options)


def held_out_tasks(settings: TrainSettings, scorer: Scorer | None) -> Environment | None:
    """Tasks that the run is measured on; the training tasks when there are a few fixed ones; None when there are
    none.
    """
    if settings.task == "arithmetic":
        if settings.task_count:
            return ArithmeticEnvironment(settings.seed, "train", settings.task_count)
        return ArithmeticEnvironment(_HELD_OUT_SEED, "held_out")
    if settings.held_out_dataset is not None:
        tasks = read_jsonl(settings.held_out_dataset)
        return DatasetEnvironment("held-out", tasks, _needed(scorer), system_prompt=settings.system_prompt)
    if settings.held_out_options:
        return _own(settings, settings.held_out_options)
    return None


def scored_tasks(settings: TrainSettings) -> bool:
    """True if the tasks need a scorer: data sets do, environments judge by themselves."""
    return settings.task in ("jsonl", "gsm8k") or settings.held_out_dataset is not None


def _own(settings: TrainSettings, options: Mapping[str, Any]) -> Environment:
    """To be entered before it is asked anything: then it is loaded."""
    if ":" not in settings.task:
        raise SetupError(f"no task {settings.task!r}: arithmetic, jsonl, gsm8k, or package.module:Class")
    return OwnEnvironment(settings.task, options, settings.own_code_timeout_s, settings.own_code_processes)


def loggers_of(settings: TrainSettings) -> Loggers:
    """Whom the run logs to, and which of its settings they see."""
    config = config_of(settings, without={*JoinSettings.model_fields, "system_prompt"})
    return Loggers(
        settings.logger, project=settings.logger_project, run_name=settings.run_name, config=config,
        with_samples=settings.logger_samples,
    )  # fmt: skip


def _needed(scorer: Scorer | None) -> Scorer:
    if scorer is None:
        raise SetupError("a data set needs a reward")
    return scorer


async def train(
    settings: TrainSettings,
    host: ComputeHost,
    load: Callable[[], Awaitable[LoadedModel]],
    begun: Callable[[TrainLoop], None],
) -> RunState:
    """Train until all steps are done or the loop is stopped; `begun` gets the loop before its first step."""
    for caution in settings.cautions():
        log.warning("train.caution", about=caution)
    async with AsyncExitStack() as stack:
        loggers = await stack.enter_async_context(loggers_of(settings))
        way = await stack.enter_async_context(way_to_ring(settings))
        found = await stack.enter_async_context(tasks(settings, way.judges))
        loaded = None if settings.learner == "service" else await load()
        ring = await stack.enter_async_context(way.join(loaded))
        await stack.enter_async_context(permitted(settings, host, ring))
        await stack.enter_async_context(alerts_of(found.own_code, ring.sink.alert))
        if scored_tasks(settings):
            await check_judges(settings.reward_name, settings.reward_options, way.judges)
        if settings.held_out_reward:
            await check_judges(settings.held_out_reward, settings.held_out_reward_options, way.judges)
        sight = None if loaded is None else sight_of(loaded)
        pictures = None if sight is None else stack.enter_context(closing(ChatPictures(sight)))
        conversation = ChatEncoder(ring.codec, settings.chat_template_kwargs, pictures)
        model = None if loaded is None else loaded.model
        whole = None if loaded is None else loaded.whole
        parts = Parts(host, model, ring, conversation, found.environment, found.held_out, loggers, sight, whole)
        await stack.enter_async_context(run_lock(settings.folder))
        training = TrainLoop(settings, parts)
        begun(training)
        state = await training.run()
        loggers.ending = "stopped" if training.stopping else "finished"
        if ring.lead is not None and not training.stopping:
            ring.lead.end()
    log.info(
        "train.ended", steps=state.train_step, version=state.version, held_out=state.held_out,
        samples=state.trajectories, failed=state.failed,
    )  # fmt: skip
    return state


class Tasks(NamedTuple):
    """Training and held-out tasks, and the user's own code among them."""

    environment: Environment
    held_out: Environment | None
    own_code: list[OwnCode]


@asynccontextmanager
async def tasks(settings: TrainSettings, judges: Judges) -> AsyncIterator[Tasks]:
    """Open training and held-out tasks; SetupError when something is missing."""
    settings.check()
    async with AsyncExitStack() as stack:

        async def opened(reward: str, options: Mapping[str, Any]) -> Scorer:
            own = settings.own_code_timeout_s, settings.own_code_processes
            return await stack.enter_async_context(open_scorer(reward, options, judges, *own))

        scorer = second = measured = None
        if scored_tasks(settings):
            scorer = measured = await opened(settings.reward_name, settings.reward_options)
        if settings.held_out_reward:
            second = await opened(settings.held_out_reward, settings.held_out_reward_options)
            measured = BothScorers(_needed(scorer), second)
        environments = training_tasks(settings, scorer), held_out_tasks(settings, measured)
        for environment in environments:
            if isinstance(environment, OwnEnvironment):
                await stack.enter_async_context(environment)
        used: tuple[object, ...] = (scorer, second, *environments)
        yield Tasks(*environments, [code for code in used if isinstance(code, OwnCode)])
