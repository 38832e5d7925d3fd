"""`mlx_parallm_worker`: join a ring with one model on this machine."""

import asyncio
import signal
import sys

import structlog

from shared.errors import ServiceUnavailableError, SetupError
from shared.lifeline import follow_parent
from shared.logs import configure
from shared.redis.client import require
from shared.settings import WorkerSettings, load
from worker.engine import fast_blas

log = structlog.get_logger()


def main(argv: list[str] | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT; the process's exit code."""
    try:
        settings = load(WorkerSettings, argv)
        configure(settings.log_level, settings.log_json)
        if not settings.redis:
            raise SetupError(
                "a worker joins a ring: give its Redis with --redis redis://HOST:PORT (mlx_parallm_serve prints it)"
            )
        fast_blas.install()
        return asyncio.run(_run(settings))
    except SetupError as error:
        print(f"mlx_parallm_worker: {error}", file=sys.stderr)
        return 2
    except ServiceUnavailableError as error:  # may pass, so that a supervisor tries again
        print(f"mlx_parallm_worker: {error}", file=sys.stderr)
        return 1


async def _run(settings: WorkerSettings) -> int:
    await require(settings.redis)
    from worker.process import WorkerProcess  # imports mlx, so only after fast_blas.install

    worker = WorkerProcess(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    follow_parent()
    return await worker.run()


if __name__ == "__main__":
    sys.exit(main())
