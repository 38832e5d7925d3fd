"""`mlx_parallm_train --learner service`: another process computes the train steps, and both are killed (kill -9)."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from shared.redis.connection.client import connect
from tests.e2e.rings import MODEL, Process, Ring
from tests.training.kills import check, train
from trainer.runs.metrics import read

STEPS = 4


def started(served: Ring) -> Process:
    arguments = ("--redis", served.redis_url, "--model", f"models/{MODEL}", "--log-json", "true")
    return Process.start("trainer.service", *arguments, "--state-every", "5")


@contextlib.contextmanager
def services(served: Ring, metrics: Path) -> Iterator[list[Process]]:
    """A service that is killed once the run has made two train steps, and the next one."""
    running, over = [started(served)], threading.Event()

    def kill_and_start() -> None:
        while not over.wait(0.01):
            if len(read(metrics)) >= 2:
                running[-1].stop(signal.SIGKILL)
                running.append(started(served))
                return

    running[0].wait_for_line('"learners.ready"')
    thread = threading.Thread(target=kill_and_start)
    thread.start()
    try:
        yield running
    finally:
        over.set()
        thread.join()
        for process in running:
            process.stop()


async def learners(served: Ring) -> list[bytes]:
    """What is left of runs' learners but answers, and bytes of a killed service that nothing points to: they go."""
    async with contextlib.aclosing(connect(served.redis_url)) as redis:
        left = [key async for key in redis.scan_iter("parallm:learner:{run-*")]
        return [key for key in left if not any(part in key for part in (b":answer:", b":state:", b":saved:"))]


def test_a_run_that_a_service_computes_makes_the_bytes_of_one_of_its_own(served: Ring, tmp_path: Path) -> None:
    whole = train(served, tmp_path, "own", steps=STEPS, max_lag=0)
    with services(served, tmp_path / "hired" / "metrics.jsonl") as running:
        hired = train(served, tmp_path, "hired", steps=STEPS, max_lag=0, kills=1, learner="service")
        assert asyncio.run(learners(served)) == [], "at its end a run gives its place back"
    assert len(running) == 2, "the service was killed, too"
    check(hired, STEPS, on_policy=True)
    assert [line.loss for line in hired.lines] == [line.loss for line in whole.lines]
    assert hired.adapter == whole.adapter
