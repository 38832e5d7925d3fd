"""When a run may train: the conditions, and that work is held between two units while one does not hold."""

import asyncio
import datetime
import itertools
import threading

import pytest

from shared.machine.power import Source
from tests.waiting import wait_until
from trainer.learn.compute import ThreadHost, Work
from trainer.learn.learn_when import QUIET_S, LearnWhen, Permission

NIGHT = LearnWhen.parse("23:00-07:00")


@pytest.mark.parametrize(
    ("hour", "allowed"), [((23, 0), True), ((2, 30), True), ((6, 59), True), ((7, 0), False), ((12, 0), False)]
)
def test_a_window_may_span_midnight(hour: tuple[int, int], allowed: bool) -> None:
    assert (NIGHT.hindrance(datetime.time(*hour), "unknown", 0) == "") is allowed


def test_all_conditions_must_hold_and_one_window_is_enough() -> None:
    when = LearnWhen.parse(" idle, plugged,09:00-10:00,20:00-24:00 ")
    evening = datetime.time(23, 59)
    assert when.hindrance(evening, "mains", QUIET_S) == ""
    assert "20:00 to 00:00" in when.hindrance(datetime.time(12), "mains", QUIET_S)
    assert "mains" in when.hindrance(evening, "battery", QUIET_S)
    assert "interactive" in when.hindrance(evening, "unknown", QUIET_S - 1)
    assert not LearnWhen.parse("") and LearnWhen().hindrance(evening, "battery", 0) == ""


@pytest.mark.parametrize("text", ["night", "23-07", "25:00-07:00", "idle;plugged", "23:00-07:61"])
def test_an_unknown_condition_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=text.split(";")[0]):
        LearnWhen.parse(text)


async def test_work_is_held_between_two_units_until_the_condition_holds_again() -> None:
    hour, units, second = [datetime.time(1)], 0, threading.Event()
    problems: list[str] = []

    def work() -> Work[str]:
        nonlocal units
        for _ in itertools.repeat(None):
            units += 1
            if units == 2:
                second.set()
            if units == 200:
                return "done"
            yield

    async def asked() -> bool:
        return False

    async with ThreadHost() as host, Permission(NIGHT, asked, problems.append, clock=lambda: hour[0]) as permission:
        host.permission = permission
        hour[0] = datetime.time(12)
        await wait_until(lambda: bool(problems))
        running = asyncio.create_task(host.run(work))
        step = asyncio.create_task(permission.wait())
        await wait_until(lambda: units > 0)
        assert not second.wait(0) and units == 1 and not step.done(), "held after its first unit"
        hour[0] = datetime.time(2)
        assert await running == "done"
        await step
    assert problems == ["it trains from 23:00 to 07:00", ""]


async def test_a_run_that_ends_is_not_held() -> None:
    stop = asyncio.Event()

    async def asked() -> bool:
        return True

    def work() -> Work[int]:
        yield
        return 1

    power: Source = "battery"
    async with ThreadHost() as host, Permission(LearnWhen(idle=True, plugged=True), asked, power=lambda: power) as held:
        host.permission = held
        held.ends_with(stop)
        running = asyncio.create_task(host.run(work))
        stop.set()
        assert await running == 1
        await held.wait()


async def test_a_ring_that_is_away_counts_as_asked_and_one_that_never_answers_is_refused() -> None:
    answers = iter([False])

    async def asked() -> bool:
        try:
            return next(answers)
        except StopIteration:
            raise ConnectionRefusedError from None

    problems: list[str] = []
    async with Permission(LearnWhen(idle=True), asked, problems.append):
        await wait_until(lambda: bool(problems))
    assert problems == ["it trains while no interactive request is there"]
    with pytest.raises(ConnectionRefusedError):
        async with Permission(LearnWhen(idle=True), asked):
            pass
