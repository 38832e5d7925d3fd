"""`mlx_parallm_learners`: train many learners at once over one base, as others ask for it over the ring.

A process of its own, on any machine that reaches the ring's Redis and has the model's files.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import sys

import structlog

from shared.errors import ParallmError, ServiceUnavailableError, SetupError
from shared.process import logs
from shared.process.discovery import ring_url
from shared.process.garbage import no_collections
from shared.process.open_files import many_files
from shared.process.settings import load
from shared.redis.connection.client import connect, require
from shared.redis.ring.worker_registry import WorkerRegistry
from trainer.runs import stopping
from trainer.service.settings import LearnersSettings
from worker.engine.model import fast_blas

log = structlog.get_logger()


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
        from trainer.learn.compute import ThreadHost, at_once
        from trainer.service.service import LearnerService
        from worker.engine.messages import EngineConfig
        from worker.engine.model.loader import load_model

    url = await ring_url(settings)
    if not url:
        raise SetupError("a service joins a ring: give its Redis (--redis redis://HOST:PORT) or an api (--connect-to)")
    await require(url)
    async with ThreadHost() as host, contextlib.aclosing(connect(url)) as redis:
        config = EngineConfig(settings.model, dtype=settings.dtype or None)
        loaded = await host.run(at_once(lambda: load_model(config)))
        cards = await WorkerRegistry(redis).models()
        same = [card for card in cards if card.base_sha256 == loaded.card.base_sha256]
        if not same:
            raise SetupError(f"no worker of this ring has ever served {settings.model}: start one first")
        named = [card for card in same if card.name == loaded.card.name]  # else by whichever name it is served
        card = (named or same)[0]
        id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        service = LearnerService(settings, host, loaded, card, redis, id)
        running = asyncio.current_task()
        assert running is not None
        stopping.obey(service.stop, lambda: service.stopping, running.cancel)
        log.info("learners.ready", model=card.name, places=settings.max_learners)
        await service.run()
        log.info("learners.ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
