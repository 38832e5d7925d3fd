"""The reward pool: a sample may hang, raise or kill its process, and only that sample is marked."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from shared.jobs import RewardSpec
from shared.scoring import pool as pool_module
from shared.scoring.pool import RewardPool, RewardSample, score_samples

CATASTROPHIC = RewardSpec("regex", {"pattern": "^(a+)+$"})
HANGS = "a" * 60 + "!"


@pytest.fixture
async def pool() -> Any:
    pool = RewardPool(2, timeout_s=0.5)
    yield pool
    pool.close()


async def test_rewards_come_in_order_across_chunks(pool: RewardPool) -> None:
    samples = [RewardSample(str(i), "7") for i in range(50)]
    values = [reward.value for reward in await pool.score(RewardSpec("exact"), samples)]
    assert values == [float(i == 7) for i in range(50)]


async def test_catastrophic_regex_times_out_and_the_pool_survives(pool: RewardPool) -> None:
    samples = [RewardSample("aaa", None), RewardSample(HANGS, None), RewardSample("b", None)]
    started = time.monotonic()
    good, hung, bad = await pool.score(CATASTROPHIC, samples)
    assert (good.value, bad.value) == (1.0, 0.0)
    assert hung.value is None and "timed out" in hung.error
    again = await pool.score(RewardSpec("exact"), [RewardSample("x", "x")])
    assert again[0].value == 1.0
    assert time.monotonic() - started < 30


async def test_a_reward_that_raises_marks_its_sample_only(pool: RewardPool) -> None:
    good, bad = await pool.score(RewardSpec("gsm8k"), [RewardSample("7", "7"), RewardSample("7", "none")])
    assert good.value == 1.0
    assert bad.value is None and "reference with a number" in bad.error


async def test_a_killed_process_costs_no_reward(pool: RewardPool) -> None:
    await pool.score(RewardSpec("exact"), [RewardSample("x", "x")])
    executor = pool._many._executor
    assert executor is not None
    for pid in list(executor._processes):
        os.kill(pid, signal.SIGKILL)
    rewards = await pool.score(RewardSpec("exact"), [RewardSample(str(i), str(i)) for i in range(40)])
    assert [reward.value for reward in rewards] == [1.0] * 40


async def test_a_process_deaf_to_signals_is_replaced() -> None:
    pool = RewardPool(2, timeout_s=0.2, grace_s=3.0)
    try:
        await pool.score(RewardSpec("exact"), [RewardSample("x", "x")])
        executor = pool._many._executor
        assert executor is not None
        for pid in list(executor._processes):
            os.kill(pid, signal.SIGSTOP)
        rewards = await pool.score(RewardSpec("exact"), [RewardSample("x", "x")])
        assert rewards[0].value == 1.0
        assert pool._many._executor is not executor
    finally:
        pool.close()


@pytest.fixture
def infinite_reward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("shared.scoring.exact")
    module.score = lambda completion, reference, options: pool_module.scoring.Score(float(completion))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shared.scoring.exact", module)
    previous = signal.signal(signal.SIGALRM, pool_module._on_alarm)
    yield
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("infinite_reward")
def test_a_value_that_is_no_number_is_an_error() -> None:
    good, infinite, nan = score_samples(RewardSpec("exact"), [RewardSample(t, "") for t in ("2", "inf", "nan")], 1.0)
    assert good.value == 2.0
    assert infinite.value is None and nan.value is None
