"""`mlx_parallm top` against an api process."""

import asyncio
import json

from redis.asyncio import Redis
from typer.testing import CliRunner

from api.cli import app
from api.commands.top import rates, sparkline
from shared.redis.ring_history import RingSample
from shared.redis.worker_registry import WorkerRegistry, WorkerStatus
from tests.redis.api_servers import api
from tests.redis.scripted_worker import CARD, MODEL
from tests.unit.api_texts import bundle


async def test_it_shows_the_ring_once(redis_url: str, redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.register_model(CARD, bundle())
    await registry.heartbeat(
        WorkerStatus("w[1]", MODEL, "h", 1, "ready", 2, 8, 0, 5, 9, 41.6, 0, 1, 2**40, {"policy": 3})
    )
    async with api(redis_url) as server:
        shown = await asyncio.to_thread(
            CliRunner(env={"COLUMNS": "120"}).invoke, app, ["top", "--once", "--url", server.url]
        )
        told = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--json", "--url", server.url])
    assert shown.exit_code == 0, shown.output
    for words in ("42 tok/s", "w[1]", "2/8", "policy@3", "interactive"):
        assert words in shown.output
    assert json.loads(told.stdout)["workers"][0]["adapters"] == {"policy": 3}


def test_a_server_that_is_away_is_an_error_in_a_line() -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert (result.exit_code, result.stdout) == (1, "")


def test_rates_are_differences_and_a_restart_is_no_negative_one() -> None:
    samples = [RingSample(0, tokens=10), RingSample(5000, tokens=110), RingSample(10_000, tokens=0)]
    assert rates(samples) == [20, 0]
    assert sparkline([20, 0, 10]) == "█ ▄"
    assert sparkline([]) == sparkline([0, 0]) == ""
