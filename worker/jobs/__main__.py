"""`python -m worker.jobs`: the job runner."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from shared.errors import ServiceUnavailableError, SetupError
from shared.machine.awake import stay_awake
from shared.process import logs
from shared.process.garbage import leave_out_what_is_loaded, no_collections
from shared.process.lifeline import follow_parent
from shared.process.process_settings import RunnerSettings
from shared.process.settings import load
from shared.redis.connection.client import require
from shared.telemetry import tracing


def main() -> None:
    """Parse the settings and run until a signal; exit code 2 when the settings are wrong, 1 when no Redis answers."""
    try:
        settings = load(RunnerSettings)
        if not settings.redis:
            raise SetupError("the job runner needs --redis URL (or PARALLM_REDIS_URL)")
        logs.configure(settings.log_level, settings.log_json)
        stay_awake(settings.keep_awake)
        tracing.start(settings.otlp_endpoint, "runner")
        follow_parent()
        with no_collections():
            from worker.jobs.runner import run
        leave_out_what_is_loaded()
        asyncio.run(_start(settings, run))
    except SetupError as error:
        print(f"job runner: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ServiceUnavailableError as error:  # may pass, so that a supervisor tries again
        print(f"job runner: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        tracing.stop()


async def _start(settings: RunnerSettings, run: Callable[[RunnerSettings], Awaitable[None]]) -> None:
    await require(settings.redis)
    await run(settings)


if __name__ == "__main__":
    main()
