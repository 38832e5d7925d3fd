"""`mlx_parallm_train`: learn from rollouts of a running ring, and publish what was learned to it.

A process of its own, on any machine that reaches the ring's Redis and has the model's files.
"""

# ruff: noqa: E402  (the faster BLAS has to be in place before mlx is imported)
from worker.engine import fast_blas

fast_blas.install()

import asyncio
import signal
import sys

import structlog

from shared import logs
from shared.errors import ParallmError, SetupError
from shared.redis.client import connect
from shared.redis.worker_registry import WorkerRegistry
from shared.settings import load
from shared.text import CodecCache
from trainer.board import RingBoard
from trainer.conversation import Conversation
from trainer.host import ThreadHost, at_once
from trainer.loop import Parts, TrainLoop
from trainer.ring import RingSource, StoreSink
from trainer.settings import TrainSettings
from trainer.tasks import held_out_tasks, training_tasks
from worker.engine.loader import LoadedModel, load_model
from worker.engine.messages import EngineConfig

log = structlog.get_logger()


def main(argv: list[str] | None = None) -> int:
    """Train until all steps are done or SIGTERM; the process's exit code."""
    try:
        settings = load(TrainSettings, argv)
        logs.configure(settings.log_level, settings.log_json)
        if not settings.redis:
            raise SetupError("a trainer joins a ring: give its Redis with --redis redis://HOST:PORT")
        return asyncio.run(_train(settings))
    except ParallmError as error:
        print(f"mlx_parallm_train: {error}", file=sys.stderr)
        return 2


async def _train(settings: TrainSettings) -> int:
    redis = connect(settings.redis)
    try:
        async with ThreadHost() as host:
            config = EngineConfig(settings.model, dtype=settings.dtype or None)
            loaded: LoadedModel = await host.run(at_once(lambda: load_model(config)))
            registry = WorkerRegistry(redis)
            card = next((c for c in await registry.models() if c.base_sha256 == loaded.card.base_sha256), None)
            if card is None:
                raise SetupError(f"no worker of this ring has ever served {settings.model}: start one first")
            codec = await CodecCache(registry).codec(card)
            async with (
                RingBoard(redis, settings.adapter) as board,
                RingSource(redis, card, codec, settings.run_name) as source,
            ):
                parts = Parts(
                    host=host,
                    load_model=lambda: loaded.model,
                    base_sha256=card.base_sha256,
                    conversation=Conversation(codec),
                    source=source,
                    sink=StoreSink(redis, settings.adapter, card),
                    environment=training_tasks(settings, None),
                    held_out=held_out_tasks(settings, None),
                    board=board,
                )
                training = TrainLoop(settings, parts)
                loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, training.stop)
                state = await training.run()
        log.info("train.ended", steps=state.train_step, version=state.version, held_out=state.held_out)
        return 0
    finally:
        await redis.aclose()


if __name__ == "__main__":
    sys.exit(main())
