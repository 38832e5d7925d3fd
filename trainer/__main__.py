"""`mlx_parallm_train`: learn from rollouts of a running ring, and publish what was learned to it.

A process of its own, on any machine that reaches the ring's Redis and has the model's files.
"""

# ruff: noqa: E402  (the faster BLAS has to be in place before mlx is imported)
from worker.engine import fast_blas

fast_blas.install()

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

import structlog

from shared import logs
from shared.errors import ParallmError
from shared.settings import load
from trainer.conversation import Conversation
from trainer.environments import Scorer
from trainer.host import ThreadHost, at_once
from trainer.joining import joined, ring_url
from trainer.loop import Parts, TrainLoop
from trainer.scorers import open_scorer
from trainer.settings import TrainSettings
from trainer.tasks import held_out_tasks, scored_tasks, training_tasks
from worker.engine.loader import LoadedModel, load_model
from worker.engine.messages import EngineConfig

log = structlog.get_logger()


def main(argv: list[str] | None = None) -> int:
    """Train until all steps are done or SIGTERM; the process's exit code."""
    try:
        settings = load(TrainSettings, argv)
        logs.configure(settings.log_level, settings.log_json)
        return asyncio.run(_train(settings))
    except ParallmError as error:
        print(f"mlx_parallm_train: {error}", file=sys.stderr)
        return 2


async def _train(settings: TrainSettings) -> int:
    settings.check()
    url = ring_url(settings)
    async with AsyncExitStack() as stack:
        scorer: Scorer | None = None
        if scored_tasks(settings):
            scorer = await stack.enter_async_context(open_scorer(settings.reward_name, settings.reward_options))
        environment, held_out = training_tasks(settings, scorer), held_out_tasks(settings, scorer)
        host = await stack.enter_async_context(ThreadHost())
        config = EngineConfig(settings.model, dtype=settings.dtype or None)
        loaded: LoadedModel = await host.run(at_once(lambda: load_model(config)))
        ring = await stack.enter_async_context(joined(url, settings, loaded.card))
        parts = Parts(
            host=host,
            load_model=lambda: loaded.model,
            base_sha256=ring.card.base_sha256,
            conversation=Conversation(ring.codec),
            source=ring.source,
            sink=ring.sink,
            environment=environment,
            held_out=held_out,
            board=ring.board,
            live=ring.live,
            mailbox=ring.mailbox,
        )
        training = TrainLoop(settings, parts)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, training.stop)
        state = await training.run()
    log.info("train.ended", steps=state.train_step, version=state.version, held_out=state.held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
