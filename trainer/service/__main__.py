"""`mlx_parallm_learners`: train many learners at once over one base, as others ask for it over the ring.

A process of its own, on any machine that reaches the ring's Redis and has the model's files.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time

import structlog

from mlx_model import fast_blas
from shared.errors import ParallmError, ServiceUnavailableError, SetupError
from shared.process import logs
from shared.process.discovery import ring_url
from shared.process.garbage import no_collections
from shared.process.loops import until_taken
from shared.process.open_files import many_files
from shared.process.settings import load
from shared.redis.connection.client import connect, require
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.sequences import ModelCard
from trainer.runs import stopping
from trainer.service.settings import LearnersSettings

log = structlog.get_logger()

LOOK_S = 1.0  # while no worker has served the model
SAY_EVERY_S = 10.0


def main(argv: list[str] | None = None) -> int:
    """Train until SIGTERM comes; a second one ends at once. The process's exit code."""
    try:
        settings = load(LearnersSettings, argv)
        logs.configure(settings.log_level, settings.log_json)
        fast_blas.install()
        return asyncio.run(_serve(settings))
    except ServiceUnavailableError as error:  # may pass, so that a supervisor tries again
        print(f"mlx_parallm_learners: {error}", file=sys.stderr)
        return 1
    except ParallmError as error:
        print(f"mlx_parallm_learners: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("mlx_parallm_learners: interrupted; what was answered counts", file=sys.stderr)
        return 130
    finally:
        stopping.ended()


async def _serve(settings: LearnersSettings) -> int:
    # These import mlx, so only after fast_blas.install.
    with no_collections(), many_files():
        from mlx_model.config import EngineConfig
        from mlx_model.loader import load_model
        from trainer.learn.compute import ThreadHost, at_once
        from trainer.service.service import LearnerService

    url = await ring_url(settings)
    if not url:
        raise SetupError("a service joins a ring: give its Redis (--redis redis://HOST:PORT) or an api (--connect-to)")
    await require(url)
    async with ThreadHost() as host, contextlib.aclosing(connect(url)) as redis:
        config = EngineConfig(settings.model, dtype=settings.dtype or None)
        loaded = await host.run(at_once(lambda: load_model(config)))
        running, stop = asyncio.current_task(), asyncio.Event()
        assert running is not None
        stopping.obey(stop.set, stop.is_set, running.cancel)
        card = await _served(WorkerRegistry(redis), loaded.card, settings.model, stop)
        if card is None:
            return 0
        id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        service = LearnerService(settings, host, loaded, card, redis, id)
        stopping.obey(service.stop, lambda: service.stopping, running.cancel)
        log.info("learners.ready", model=card.name, places=settings.max_learners)
        await service.run()
        log.info("learners.ended")
    return 0


async def _served(registry: WorkerRegistry, ours: ModelCard, model: str, stop: asyncio.Event) -> ModelCard | None:
    """How the ring calls our model, once a worker has served it; None: stopped before."""
    said = 0.0
    while not stop.is_set():
        cards = await until_taken("learners", registry.models)
        same = [card for card in cards if card.base_sha256 == ours.base_sha256]
        if same:
            return next((card for card in same if card.name == ours.name), same[0])  # else by whichever name
        if not said or time.monotonic() - said > SAY_EVERY_S:
            said, served = time.monotonic(), sorted(card.name for card in cards)
            hint = "no worker of this ring has served this model yet: start one"
            log.warning("learners.waits_for_worker", model=model, base=ours.base_sha256[:12], served=served, hint=hint)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    return None


if __name__ == "__main__":
    sys.exit(main())
