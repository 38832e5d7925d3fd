"""`mlx_parallm top` against an api process."""

import asyncio
import json
import os
import sys
from pathlib import Path

from redis.asyncio import Redis
from typer.testing import CliRunner

from api.cli.main import app
from api.cli.ring_screen import rates, sparkline
from api.ops.ring_view import RingSample
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from tests.redis.api_servers import api
from tests.redis.scripted_worker import CARD, MODEL
from tests.unit.api_texts import bundle

ROOT = Path(__file__).parents[2]


async def test_it_shows_the_ring_once(redis_url: str, redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.register_model(CARD, bundle())
    worker = WorkerStatus("w[1]", MODEL, "h", 1, "ready", 2, 8, 0, 5, 9, 41.6, 0, 1, 2**40, {"policy": 3})
    await registry.heartbeat(worker)  # before the api reads its first snapshot, which it keeps for a second
    async with api(redis_url) as server:
        shown = await top("--once", "--url", server.url)
        await registry.heartbeat(worker)  # the first one lives 10 s, which a busy machine takes to start the command
        told = await top("--json", "--url", server.url)
    for words in ("42 tok/s", "w[1]", "2/8", "policy@3", "interactive"):
        assert words in shown
    assert json.loads(told)["workers"][0]["adapters"] == {"policy": 3}


async def top(*arguments: str) -> str:
    """What the command prints, as a process of its own: the api of this one logs to stdout, too."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "api.cli.main", "top", *arguments,
        stdout=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


def test_a_server_that_is_away_is_an_error_in_a_line() -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert (result.exit_code, result.stdout) == (1, "")


def test_rates_are_differences_and_a_restart_is_no_negative_one() -> None:
    samples = [RingSample(0, tokens=10), RingSample(5000, tokens=110), RingSample(10_000, tokens=0)]
    assert rates(samples) == [20, 0]
    assert sparkline([20, 0, 10]) == "█ ▄"
    assert sparkline([]) == sparkline([0, 0]) == ""
