"""A user's code in its process: whatever it does costs its sample, and is named."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shared.errors import SetupError
from tests.unit.own_code import HARD
from tests.waiting import HANG_S, wait_until
from trainer.rollouts.environments import Observation
from trainer.rollouts.own import own_code
from trainer.rollouts.own.own_code import (
    TOGETHER,
    BlockedError,
    OwnCodeError,
    OwnEnvironment,
    OwnFunction,
    alerts_of,
    place,
)

WHERE = "tests.unit.own_code:Hazards"


@pytest.fixture
async def hazards() -> AsyncIterator[OwnEnvironment]:
    """No call runs out of its time."""
    async with OwnEnvironment(WHERE, {"start": 5}, timeout_s=HANG_S) as environment:
        yield environment


@pytest.fixture
async def hasty() -> AsyncIterator[OwnEnvironment]:
    """Calls run out of their time."""
    async with OwnEnvironment(WHERE, {"start": 5}, timeout_s=1.5) as environment:
        yield environment


async def test_an_environment_is_what_it_was(hazards: OwnEnvironment) -> None:
    assert hazards.name == "hazards"
    seen = await hazards.reset(3)
    assert seen.prompt == ({"role": "user", "content": "task 8"},) and seen.difficulty == 3.0
    with pytest.raises(SetupError, match="the difficulty 'hard', not a number"):
        await hazards.reset(HARD)
    outcome = await hazards.step(seen, "print")
    assert (outcome.reward, outcome.done, outcome.components) == (3.0, True, {"bytes": 1.0})
    again = await hazards.step(Observation(seen.prompt, outcome.info), "on")
    assert again.reward == 3.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("sleep", r"`step` blocked for more than 1.5 s in step \(.*own_code\.py:\d+\)"),
        ("backtrack", r"`step` blocked for more than 1.5 s in step \(.*own_code\.py:\d+\)"),
        ("exit", "`step` ended its process"),
    ],
)
async def test_code_that_hangs_costs_its_own_call_and_is_named(hasty: OwnEnvironment, action: str, said: str) -> None:
    seen = await hasty.reset(2)
    first = hasty.places[0].process
    steps = [hasty.step(seen, each) for each in ("fine", action, "fine", "wait", "fine")]
    *fine, late = await asyncio.gather(*(steps[i] for i in (0, 2, 4, 1)), steps[3], return_exceptions=True)
    hung = fine.pop()
    assert isinstance(hung, BlockedError) and isinstance(late, BlockedError)
    assert [getattr(outcome, "reward", outcome) for outcome in fine] == [2.0] * 3
    with pytest.raises(BlockedError, match=said):
        raise hung
    assert hasty.places[0].process is not first


async def test_each_cause_sends_one_alert_however_many_samples_it_costs(hasty: OwnEnvironment) -> None:
    seen = await hasty.reset(2)
    alerts: list[tuple[str, str]] = []
    tries = 0

    async def alert(kind: str, message: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionError("the ring is away for a moment")
        alerts.append((kind, message))

    async with OwnEnvironment(WHERE, {}, timeout_s=1.5) as held_out:
        with pytest.MonkeyPatch.context() as quicker:
            quicker.setattr(own_code, "TELL_AGAIN_S", 0.5)
            async with alerts_of([hasty, held_out], alert):
                for action in ("exit", "wait", "exit"):
                    hung = [code.step(seen, action) for code in (hasty, held_out)]
                    assert len(await asyncio.gather(*hung, return_exceptions=True)) == 2
                await wait_until(lambda: len(alerts) == 2)
    assert [kind for kind, _ in alerts] == ["own_code_blocked"] * 2
    assert "`step` ended its process; every such call costs its sample" in alerts[0][1]
    assert "`step` came to no end after 1.5 s" in alerts[1][1]


async def test_a_cause_just_before_the_end_of_a_run_is_told(hazards: OwnEnvironment) -> None:
    alerts: list[str] = []

    async def alert(kind: str, message: str) -> None:
        alerts.append(kind)

    seen = await hazards.reset(2)
    async with alerts_of([hazards], alert):
        with pytest.raises(BlockedError):
            await hazards.step(seen, "exit")
    assert alerts == ["own_code_blocked"]


async def test_code_that_waits_too_long_costs_its_call_and_no_process(hasty: OwnEnvironment) -> None:
    seen = await hasty.reset(2)
    process = hasty.places[0].process
    with pytest.raises(BlockedError, match=r"no end after 1\.5 s"):
        await hasty.step(seen, "wait")
    assert (await hasty.step(seen, "fine")).reward == 2.0
    assert hasty.places[0].process is process


@pytest.mark.long
async def test_many_that_hang_cost_nobody_else_a_call(hazards: OwnEnvironment) -> None:
    seen = await hazards.reset(2)
    actions = ["exit", "fine"] * 5
    outcomes = await asyncio.gather(*(hazards.step(seen, each) for each in actions), return_exceptions=True)
    assert all(isinstance(outcome, BlockedError) for outcome in outcomes[::2])
    assert [getattr(outcome, "reward", outcome) for outcome in outcomes[1::2]] == [2.0] * 5


async def test_a_call_that_blocks_stops_few_others_once_it_is_known_that_calls_do(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with OwnEnvironment("tests.unit.own_code:Shared", {"starts": str(starts)}, 1.0, processes=4) as environment:
        seen = await environment.reset(0)
        actions = [*["fine"] * 20, *["block"] * 4]
        outcomes = await asyncio.gather(*(environment.step(seen, each) for each in actions), return_exceptions=True)
    assert all(isinstance(outcome, BlockedError) for outcome in outcomes[20:])
    assert [getattr(outcome, "reward", outcome) for outcome in outcomes[:20]] == [1.0] * 20
    begun = starts.read_text().split()
    assert begun.count("block") >= 4
    assert begun.count("fine") <= 20 + 20 + 3 * (TOGETHER - 1), "all that shared the first process, then few"


async def test_calls_that_shared_a_process_with_the_one_that_ended_it_are_not_blamed(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with OwnEnvironment("tests.unit.own_code:Shared", {"starts": str(starts)}, 60.0, processes=4) as environment:
        seen = await environment.reset(0)
        actions = [*["fine"] * 6, "end", *["fine"] * 6]
        outcomes = await asyncio.gather(*(environment.step(seen, each) for each in actions), return_exceptions=True)
    assert isinstance(outcomes[6], BlockedError) and "ended its process 3 times" in str(outcomes[6])
    assert [getattr(outcome, "reward", outcome) for outcome in outcomes[:6] + outcomes[7:]] == [1.0] * 12


async def test_code_that_keeps_blocking_ends_the_run_by_name(
    hazards: OwnEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_code, "GIVE_UP_AFTER", 3)
    seen = await hazards.reset(2)
    for action in ("exit", "fine", "fine", "exit"):
        with contextlib.suppress(BlockedError):
            await hazards.step(seen, action)
    with pytest.raises(SetupError, match=r"environment 'tests.unit.own_code:Hazards' keeps blocking: 3 of its last 6"):
        await hazards.step(seen, "exit")


async def test_calls_that_are_slow_one_after_the_other_are_not_taken_for_one_that_hangs(
    hasty: OwnEnvironment,
) -> None:
    seen = await hasty.reset(2)
    process = hasty.places[0].process
    outcomes = await asyncio.gather(*(hasty.step(seen, "busy") for _ in range(8)))
    assert [outcome.reward for outcome in outcomes] == [2.0] * 8
    assert hasty.places[0].process is process


async def test_a_reset_that_hangs_is_late_as_well(hasty: OwnEnvironment) -> None:
    with pytest.raises(BlockedError, match=r"`reset` blocked .* in reset"):
        await hasty.reset(-1)
    assert (await hasty.reset(1)).prompt


async def test_errors_name_the_line_and_mistakes_end_the_run(hazards: OwnEnvironment) -> None:
    seen = await hazards.reset(2)
    with pytest.raises(OwnCodeError, match=r"KeyError: 'raise' \(own_code\.py:\d+\)"):
        await hazards.step(seen, "raise")
    with pytest.raises(OwnCodeError, match=r"SystemExit: 3 \(own_code\.py:\d+\)"):
        await hazards.step(seen, "quit")
    with pytest.raises(SetupError, match=r"`step` gave 1\.0, not a trainer"):
        await hazards.step(seen, "number")
    with pytest.raises(SetupError, match=r"`info` has to travel between processes"):
        await hazards.step(seen, "lock")


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("collections:Counter", {}, "needs `async def reset`"),
        (WHERE, {"colour": 1}, "task_options"),
        ("tests.unit.own_code:Nothing", {}, "write it as package"),
    ],
)
async def test_what_is_no_environment_is_refused(path: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        async with OwnEnvironment(path, options, timeout_s=HANG_S):
            pass


@pytest.mark.long
async def test_a_function_that_never_returns_leaves_nothing_behind() -> None:
    async with OwnFunction("tests.unit.own_code:score", {"bonus": 0.25}, timeout_s=1.5) as function:
        assert await function("abc", None) == (0.75, {"length": 3.0, "reference": 1.0})
        with pytest.raises(BlockedError, match=r"`score` blocked .* in score \(.*own_code\.py:\d+\)"):
            await function("hang", float("nan"))
        hanging = asyncio.create_task(function("hang", 1))
        await wait_until(lambda: function.places[0].process is not None and not function.places[0].process.ended)
        process = function.places[0].process
        assert process is not None
        pid = process.process.pid
    assert not psutil.pid_exists(pid)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


@pytest.mark.long
def test_the_place_is_the_user_s_own_line() -> None:
    stack = (
        'Thread 0x01 (most recent call first):\n  File "/x/shared/process/call_pipe.py", line 9 in read\n\n'
        'Thread 0x02 (most recent call first):\n  File "/usr/lib/python3.11/re/__init__.py", line 166 in match\n'
        '  File "/home/me/env.py", line 7 in step\n'
    )
    assert place(stack) == " in step (/home/me/env.py:7)"
    assert place("") == ""
