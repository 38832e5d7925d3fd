"""One run on a ring, from its settings to its end: the same for a process of its own and for a trainer in a worker."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from trainer.conversation import Conversation
from trainer.environments import Environment, Scorer
from trainer.host import ComputeHost
from trainer.joining import way_to_ring
from trainer.loop import Parts, TrainLoop
from trainer.own_code import OwnEnvironment
from trainer.run_lock import run_lock
from trainer.scorers import Judges, check_judges, open_scorer
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.tasks import held_out_tasks, scored_tasks, training_tasks
from worker.engine.loader import LoadedModel

log = structlog.get_logger()


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
        way = await stack.enter_async_context(way_to_ring(settings))
        environment, held_out = await stack.enter_async_context(tasks(settings, way.judges))
        loaded = await load()
        ring = await stack.enter_async_context(way.join(loaded))
        if scored_tasks(settings):
            await check_judges(settings.reward_name, settings.reward_options, way.judges)
        parts = Parts(
            host=host,
            load_model=lambda: loaded.model,
            base_sha256=ring.base_sha256,
            conversation=Conversation(ring.codec, settings.chat_template_kwargs),
            source=ring.source,
            sink=ring.sink,
            environment=environment,
            held_out=held_out,
            board=ring.board,
            live=ring.live,
            mailbox=ring.mailbox,
            ring=ring.id,
        )
        await stack.enter_async_context(run_lock(settings.folder))
        training = TrainLoop(settings, parts)
        begun(training)
        state = await training.run()
    log.info("train.ended", steps=state.train_step, version=state.version, held_out=state.held_out)
    return state


@asynccontextmanager
async def tasks(settings: TrainSettings, judges: Judges) -> AsyncIterator[tuple[Environment, Environment | None]]:
    """What the run learns from and what it is measured on; SetupError when something is missing."""
    settings.check()
    async with AsyncExitStack() as stack:
        scorer: Scorer | None = None
        if scored_tasks(settings):
            scorer = await stack.enter_async_context(
                open_scorer(settings.reward_name, settings.reward_options, judges, settings.own_code_timeout_s)
            )
        found = training_tasks(settings, scorer), held_out_tasks(settings, scorer)
        for environment in found:
            if isinstance(environment, OwnEnvironment):
                await stack.enter_async_context(environment)
        yield found
