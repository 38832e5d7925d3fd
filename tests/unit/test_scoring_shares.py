"""Turns in the reward pool: by key, then by job, by the time that each has had."""

import asyncio

import pytest

from shared.scoring.shares import GIVE_UP_AFTER, Lateness, Share
from shared.turns import MOST_KNOWN, FairTurns
from tests.waiting import HANG_S


class Clock:
    """Time that passes when a turn says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Table:
    """Turns one after the other, and who has had them."""

    def __init__(self, room: int = 1) -> None:
        self.clock = Clock()
        self.turns = FairTurns(room, self.clock)
        self.had: list[str] = []

    async def have(self, key: str, job: str, took_s: float, times: int = 1) -> None:
        for _ in range(times):
            async with self.turns.turn(key, job):
                self.had.append(f"{key}{job}")
                self.clock.now += took_s
                await asyncio.sleep(0)


async def test_a_key_with_many_slow_jobs_gets_the_time_of_one_key() -> None:
    table = Table()
    bad = [table.have("bad", f"-{i}", 5.0, times=4) for i in range(16)]
    await asyncio.gather(*bad, *(table.have("good", "", 0.01) for _ in range(8)))
    assert table.had[1:9] == ["good"] * 8  # all eight cost less than one turn of the others


async def test_jobs_of_a_key_share_its_time() -> None:
    table = Table()
    await asyncio.gather(
        *(table.have("k", "-slow", 1.0) for _ in range(20)), *(table.have("k", "-quick", 0.1) for _ in range(20))
    )
    assert table.had[:12].count("k-quick") >= 9


async def test_nobody_saves_time_up() -> None:
    table = Table()
    await table.have("early", "", 1.0)
    await table.have("busy", "", 100.0)
    await asyncio.gather(
        *(table.have("busy", "", 1.0) for _ in range(6)), *(table.have("early", "", 1.0) for _ in range(6))
    )
    assert {table.had[2:8].count(key) for key in ("busy", "early")} <= {2, 3, 4}


@pytest.mark.parametrize("as_its_turn_comes", [False, True])
async def test_who_leaves_blocks_nobody(as_its_turn_comes: bool) -> None:
    table, held = Table(), asyncio.Event()

    async def hold() -> None:
        async with table.turns.turn("a"):
            await held.wait()

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(table.have("b", "", 1.0))
    await asyncio.sleep(0)
    if as_its_turn_comes:
        held.set()
        await asyncio.sleep(0)
    waiting.cancel()
    held.set()
    await asyncio.gather(holding, waiting, return_exceptions=True)
    await asyncio.wait_for(table.have("c", "", 1.0), HANG_S)
    assert table.had == ["c"]


async def test_a_key_s_jobs_are_forgotten_while_they_rest() -> None:
    table = Table()
    for i in range(3 * MOST_KNOWN):
        await table.have("k", f"-{i}", 0.1)
    assert len(table.turns._all.jobs["k"].jobs) <= MOST_KNOWN + 1


def test_a_share_that_was_given_up_gets_one_more_try() -> None:
    share = Share()
    for _ in range(GIVE_UP_AFTER):
        assert not share.given_up
        share.saw(late=True)
    assert share.given_up
    share.try_again()
    assert not share.given_up
    share.saw(late=True)
    assert share.given_up
    share.try_again()
    share.saw(late=False)
    for _ in range(GIVE_UP_AFTER - 1):
        share.saw(late=True)
    assert not share.given_up


def test_jobs_with_one_hanging_reward_are_given_up_together_and_a_good_one_among_them_is_not() -> None:
    together = Lateness()
    bad = [Share("k", f"job-{i}", of_all=together) for i in range(GIVE_UP_AFTER)]
    good = Share("k", "good", of_all=together)
    for share in bad:
        share.saw(late=True)
    assert not any(share.given_up for share in (*bad, good))  # once may be chance
    bad[0].saw(late=True)
    assert bad[0].given_up and not good.given_up
    good.saw(late=False)
    assert not bad[0].given_up
