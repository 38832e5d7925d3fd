"""The reward pool: a sample may hang, raise or kill its process, and only that sample is marked."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from shared.errors import InvalidRequestError
from shared.jobs import RewardSpec
from shared.rewards import functions
from shared.rewards.kinds import Score, check
from shared.scoring import pool as pool_module
from shared.scoring import process as process_module
from shared.scoring.pool import RewardPool, RewardSample, is_late
from shared.scoring.process import Slice
from shared.scoring.shares import Share
from tests.waiting import HANG_S, NEVER_S, wait_until

CATASTROPHIC = RewardSpec("regex", {"pattern": "^(a+)+$"})
HANGS = "a" * 60 + "!"


@pytest.fixture
async def pool() -> Any:
    pool = RewardPool(2, timeout_s=HANG_S)
    yield pool
    pool.close()


async def test_rewards_come_in_order_across_chunks(pool: RewardPool) -> None:
    samples = [RewardSample(str(i), "7") for i in range(50)]
    values = [reward.value for reward in await pool.score(RewardSpec("exact"), samples)]
    assert values == [float(i == 7) for i in range(50)]


async def test_catastrophic_regex_times_out_and_the_pool_survives(pool: RewardPool) -> None:
    pool.timeout_s = 1.0
    samples = [RewardSample("aaa", None), RewardSample(HANGS, None), RewardSample("b", None)]
    good, hung, bad = await pool.score(CATASTROPHIC, samples)
    assert (good.value, bad.value) == (1.0, 0.0)
    assert hung.value is None and "timed out" in hung.error
    again = await pool.score(RewardSpec("exact"), [RewardSample("x", "x")])
    assert again[0].value == 1.0


async def test_a_reward_that_raises_marks_its_sample_only(pool: RewardPool) -> None:
    good, bad = await pool.score(RewardSpec("gsm8k"), [RewardSample("7", "7"), RewardSample("7", "none")])
    assert good.value == 1.0
    assert bad.value is None and "reference with a number" in bad.error


async def test_killed_processes_cost_no_reward(pool: RewardPool) -> None:
    await pool.score(RewardSpec("exact"), [RewardSample("x", "x")] * 64)
    assert pool.processes
    for process in pool.processes:
        os.kill(process.call.pid, signal.SIGKILL)
    rewards = await pool.score(RewardSpec("exact"), [RewardSample(str(i), str(i)) for i in range(40)])
    assert [reward.value for reward in rewards] == [1.0] * 40


async def test_a_sample_in_which_its_process_is_deaf_to_signals_is_marked_and_the_others_are_not() -> None:
    pool = RewardPool(1, timeout_s=1.0)
    try:
        await pool.score(RewardSpec("exact"), [RewardSample("x", "x")])
        (process,) = pool.processes
        os.kill(process.call.pid, signal.SIGSTOP)
        hung, *good = await pool.score(RewardSpec("exact"), [RewardSample("x", "x")] * 3)
        assert hung.value is None and is_late(hung)
        assert [reward.value for reward in good] == [1.0, 1.0]
        assert process not in pool.processes and not process.call.alive
    finally:
        pool.close()


async def test_a_caller_that_leaves_takes_its_process_along(pool: RewardPool) -> None:
    pool.timeout_s = NEVER_S
    scoring = asyncio.create_task(pool.score(CATASTROPHIC, [RewardSample(HANGS, None)]))
    await wait_until(lambda: bool(pool.processes))
    (process,) = pool.processes
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    assert not process.call.alive and not pool.processes


async def test_a_reward_that_keeps_timing_out_is_given_up(pool: RewardPool) -> None:
    pool.timeout_s = 0.02
    share = Share("alice", "job-1")
    rewards = await pool.score(CATASTROPHIC, [RewardSample(HANGS, None)] * 200, share)
    assert share.given_up
    assert all(reward.value is None for reward in rewards)
    assert sum("not computed: " in reward.error for reward in rewards) > 100


async def test_a_reference_too_deep_to_travel_costs_its_sample_alone(pool: RewardPool) -> None:
    for depth in (200, 900, 945, 950, 956, 5000):
        deep: Any = "1"
        for _ in range(depth):
            deep = [deep]
        good, bad, last = await pool.score(
            RewardSpec("exact"), [RewardSample("1", "1"), RewardSample("1", deep), RewardSample("2", "1")]
        )
        assert (good.value, bad.value, last.value) == (1.0, None, 0.0)
        assert bad.error


async def test_numbers_of_any_size_arrive_as_they_are(pool: RewardPool) -> None:
    (reward,) = await pool.score(RewardSpec("exact"), [RewardSample(str(2**80), 2**80)])
    assert reward.value == 1.0


SLOW_TO_COMPILE = "(?i)" + "[a-\U0010ffff]" * 815


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("regex", {"pattern": "("}, "bad pattern"),
        ("regex", {"pattern": SLOW_TO_COMPILE}, "to compile"),
        ("regex", {"pattern": SLOW_TO_COMPILE[4:], "ignore_case": True}, "to compile"),
        ("format", {"pattern": SLOW_TO_COMPILE}, "to compile"),
        ("weighted", {"parts": [{"name": "regex", "options": {"pattern": "("}}]}, "bad pattern"),
    ],
)
async def test_patterns_are_compiled_in_a_process_within_a_time(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(pool_module, "COMPILE_S", 0.3)
    with pytest.raises(InvalidRequestError, match=reason):
        await pool.check(check(RewardSpec(name, options)))


async def test_a_pattern_that_has_passed_is_not_tried_again(pool: RewardPool) -> None:
    reward = check(RewardSpec("regex", {"pattern": r"(\d+)", "group": 1}))
    await pool.check(reward)
    pool.close()
    await pool.check(reward)
    assert not pool.processes


@pytest.fixture
def infinite_reward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(functions.SCORERS, "exact", lambda completion, reference, options: Score(float(completion)))
    previous = signal.getsignal(signal.SIGALRM)
    process_module.prepare()
    yield
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("infinite_reward")
def test_a_value_that_is_no_number_is_an_error() -> None:
    samples = [(text, b'""') for text in ("2", "inf", "nan")]
    good, infinite, nan = process_module.scored(Slice(RewardSpec("exact"), samples, 1.0, 1.0, 1.0))
    assert good.value == 2.0
    assert infinite.value is None and nan.value is None
