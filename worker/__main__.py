"""`mlx_parallm_worker`: join a ring with one model on this machine.

A worker whose engine has died or is stuck ends with exit code 1 for its supervisor; started by hand it has none, and
begins anew itself.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time

import structlog

from mlx_model import fast_blas
from ranks.children import take_place
from ranks.placement import Placement, placement
from shared.errors import ServiceUnavailableError, SetupError
from shared.machine.awake import stay_awake
from shared.process import start_reports
from shared.process.garbage import no_collections
from shared.process.group_settings import LOST_EXIT_CODE
from shared.process.lifeline import VARIABLE, follow_parent
from shared.process.logs import configure
from shared.process.open_files import many_files
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.redis.connection.client import require
from shared.telemetry import tracing
from worker.host.process import HostProcess
from worker.host.spare import wait_for_model

log = structlog.get_logger()

RESTARTS = "PARALLM_WORKER_RESTARTS"  # how often this process has begun anew
LONGEST_PAUSE_S = 30.0


def main(argv: list[str] | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT; the process's exit code."""
    placed, is_strict = None, False
    wait_for_model()
    try:
        settings = load(WorkerSettings, argv, rehearse=_rehearse)
        configure(settings.log_level, settings.log_json)
        stay_awake(settings.keep_awake)
        asyncio.run(settings.join())
        if not settings.redis:
            raise SetupError(
                "a worker joins a ring: give its Redis with --redis redis://HOST:PORT (mlx_parallm_serve prints it), "
                "or an api of it with --connect-to HOST:PORT"
            )
        placed, is_strict = placement(settings), settings.distributed_strict
        tracing.start(settings.otlp_endpoint, "worker")
        fast_blas.install()
        code = asyncio.run(_host(settings)) if settings.is_host else _work(settings, placed)
    except (SetupError, ServiceUnavailableError) as error:
        print(f"mlx_parallm_worker: {error}", file=sys.stderr)
        start_reports.report(why=str(error))
        code = 2 if isinstance(error, SetupError) else 1  # 1: it may pass, so that a supervisor tries again
        if placed is None:
            return code
    finally:
        tracing.stop()
    if placed is not None:
        _leave_group(code, is_strict=is_strict)
    elif code and os.environ.get(VARIABLE) != "1":
        _begin_anew()
    return code


def _rehearse(settings: WorkerSettings) -> str:
    """Check what can be known before the ring is joined and weights are read; the guest's settings, to be printed."""
    if settings.is_host:
        alone = {"models": [], "from_catalogue": False, "max_loaded_models": 0}
        each = (settings.model_copy(update={**alone, "model": model}) for model in settings.given_models)
        return "".join(map(_rehearse, each))
    placed = placement(settings)
    fast_blas.install()
    # These import mlx, so only after fast_blas.install.
    from mlx_model.loader import check_model
    from worker.engine.messages import engine_config
    from worker.guest import invited, own_settings, rank_of_guest

    if placed is not None:
        rank_of_guest(settings)
    guest = None if placed is not None and placed.rank else invited(settings)
    config = engine_config(settings, int(getattr(guest, "learner_rank", 0)))
    fits = check_model(config, 1 if placed is None or config.sharding == "data" else placed.size)
    return own_settings(guest) + fits


def _leave_group(code: int, *, is_strict: bool) -> None:
    """End a rank: a thread that is stuck in a collective lets no interpreter end in order."""
    code = LOST_EXIT_CODE if code == 1 and is_strict else code
    if code == 1 and os.environ.get(VARIABLE) != "1":
        _begin_anew()
    _end_at_once(code)


def _end_at_once(code: int) -> None:
    """End without taking the interpreter apart, which takes as long as a load where the processors are busy."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _begin_anew() -> None:
    """Replace this process, its stuck threads included, by a fresh one with the same command line."""
    restarts = int(os.environ.get(RESTARTS, "0"))
    pause = min(LONGEST_PAUSE_S, 0.5 * 2**restarts)
    log.warning("worker.restarting", restarts=restarts + 1, in_s=pause)
    time.sleep(pause)
    os.environ[RESTARTS] = str(restarts + 1)
    _close_on_exec()
    os.execv(sys.executable, sys.orig_argv)


def _close_on_exec() -> None:
    """Let no descriptor but the standard ones outlive an exec: others take MLX's sockets for signs of life.

    They are not closed here: macOS kills a process that closes a descriptor which one of its libraries guards.
    """
    for number in [int(each) for each in os.listdir("/dev/fd")]:  # noqa: PTH208  # numbers are wanted
        if number > 2:
            with contextlib.suppress(OSError):  # that of the listing itself is closed by now
                os.set_inheritable(number, False)


async def _host(settings: WorkerSettings) -> int:
    await require(settings.redis)
    host, loop = HostProcess(settings), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop)
    follow_parent()
    return await host.run()


def _work(settings: WorkerSettings, placed: Placement | None) -> int:
    if placed is not None:
        take_place(settings, placed)
    # These import mlx, so only after fast_blas.install.
    with no_collections(), many_files():
        from worker.engine_watch import guard_loop
        from worker.group.engine_rank import EngineRank
        from worker.guest import invited, rank_of_guest
        from worker.process import WorkerProcess

        follows = None if placed is None else rank_of_guest(settings)
        # Before the event loop: a guest may need one of its own.
        guest = None if placed is not None and placed.rank else invited(settings)

    async def run() -> int:
        await require(settings.redis)
        worker: EngineRank | WorkerProcess
        if placed is not None and placed.rank:
            worker = EngineRank(settings, placed, follows)
        else:
            worker = WorkerProcess(settings, guest, placed)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        follow_parent()
        guard = asyncio.create_task(guard_loop(settings.engine_stall_s))
        try:
            code = await worker.run()
        finally:
            guard.cancel()
        if isinstance(worker, WorkerProcess) and worker.stalled and placed is None and os.environ.get(VARIABLE) == "1":
            os._exit(code)  # a thread that is stuck in native code lets no interpreter end in order
        return code

    return asyncio.run(run())


if __name__ == "__main__":
    exit_code = main()
    if start_reports.VARIABLE in os.environ:  # a host waits for our memory
        _end_at_once(exit_code)
    sys.exit(exit_code)
