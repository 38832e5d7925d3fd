"""Children that die: which of them end everything, which are tried again, and who says so."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from api.serve import supervisor as module
from api.serve.supervisor import ChildSpec, Supervisor
from shared.redis import keys
from shared.redis.processes.child_troubles import ChildTroubles
from tests.redis.api_servers import api
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_DELAY_S", "LONGEST_DELAY_S", "LONGEST_SETUP_DELAY_S"):
        monkeypatch.setattr(module, name, 0.01)


@pytest.fixture
async def supervising() -> AsyncIterator[Supervisor]:
    made = Supervisor()
    yield made
    await made.stop(at_once=True)


def spec(folder: Path, name: str, *codes: int, ends: bool = False) -> ChildSpec:
    file = folder / name.replace(" ", "-")
    file.write_text("\n".join(map(str, codes)))
    return ChildSpec(name, "tests.redis.fragile_child", {"FRAGILE_CODES": str(file)}, ends=ends)


async def test_a_child_that_is_set_up_wrongly_from_the_start_ends_everything(
    supervising: Supervisor, tmp_path: Path
) -> None:
    await supervising.start(spec(tmp_path, "worker 0", 2))
    assert (await supervising.failed).name == "worker 0"


async def test_a_child_that_ran_and_cannot_restart_is_tried_again_while_others_serve(
    supervising: Supervisor, tmp_path: Path
) -> None:
    other = await supervising.start(spec(tmp_path, "worker 1"))
    child = await supervising.start(spec(tmp_path, "worker 0", 1, 2, 2, 2))
    await wait_until(lambda: child.restarts == 4 and child.runs)
    assert not supervising.failed.done() and other.runs and other.restarts == 0
    (trouble,) = supervising.troubles()
    assert (trouble.child, trouble.exit_code, trouble.times) == ("worker 0", 2, 4)


async def test_a_child_that_has_run_long_enough_is_well(
    supervising: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WELL_AFTER_S", 0.0)
    child = await supervising.start(spec(tmp_path, "worker 0", 1))
    await wait_until(lambda: child.restarts == 1 and child.runs)
    await wait_until(lambda: supervising.troubles() == [])


async def test_a_child_that_ends_with_its_work_is_not_tried_again(supervising: Supervisor, tmp_path: Path) -> None:
    await supervising.start(spec(tmp_path, "worker 0", 1, 2, ends=True))
    assert (await supervising.failed).name == "worker 0"


async def test_health_says_which_child_fails(
    redis: Redis, redis_url: str, supervising: Supervisor, tmp_path: Path
) -> None:
    child = await supervising.start(spec(tmp_path, "worker 0", 1, 2))
    await wait_until(lambda: child.restarts == 2)
    troubles = ChildTroubles(redis)
    await troubles.report("here:1", supervising.troubles())
    async with api(redis_url) as server:
        reasons = (await server.http.get("/health")).json()["reasons"]
        assert any("worker 0 on" in reason and "exit code 2, 2 times in a row" in reason for reason in reasons)
        await troubles.report("here:1", [])
        assert not any("worker 0" in reason for reason in (await server.http.get("/health")).json()["reasons"])
    assert await redis.ttl(keys.child_troubles()) == -2
