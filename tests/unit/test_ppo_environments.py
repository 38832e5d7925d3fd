"""An environment of one's own that a network acts in: many copies in one process, and whatever they do wrong."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from shared.errors import ParallmError, SetupError
from shared.process.settings import load
from tests.waiting import wait_until
from trainer.rollouts.own.copies import Copies
from trainer.rollouts.own.own_messages import ActCall, CodeCall, CopiesCall, Space, Start, packed
from trainer.runs.numeric_environments import Environments, open_environments
from trainer.settings import TrainSettings

DRIFT = "tests.unit.own_code:Drift"


@asynccontextmanager
async def opened(task: str = DRIFT, **flags: Any) -> AsyncIterator[Environments]:
    given = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    async with open_environments(load(TrainSettings, ["--mode", "ppo", "--task", task, *given])) as environments:
        yield environments


def pushed(copies: int, by: float = 1.0) -> Any:
    return np.full((copies, 1), by, np.float32)


async def test_copies_are_played_side_by_side_and_begin_anew_each_for_itself() -> None:
    async with opened(episode_steps=7) as environments:
        assert environments.space == Space(2, numbers=1)
        drift = await environments.begin("played", 8, [3])
        begun = drift.observations
        assert begun.shape == (8, 2) and len(set(begun[:, 0].tolist())) == 8
        stepped = await drift.act(pushed(8, by=9.0))
        np.testing.assert_allclose(drift.observations[:, 0], begun[:, 0] + 0.5, atol=1e-6)  # held to its bounds
        np.testing.assert_allclose(stepped.rewards, -((begun[:, 0] + 0.5) ** 2), atol=1e-5)
        assert not (stepped.failed | stepped.timed_out).any()
        stepped = await drift.act(pushed(8))
        too_far = begun[:, 0] > 0
        assert (stepped.failed == too_far).all() and 0 < too_far.sum() < 8
        assert (stepped.observations[:, 0] > 0.9).all() and (np.abs(drift.observations[too_far, 0]) < 0.1).all()
        for _ in range(5):
            assert not stepped.timed_out.any()
            stepped = await drift.act(pushed(8, by=0.0))
        assert (stepped.timed_out == ~too_far).all(), "those that have begun anew have made fewer steps"
        again = await environments.begin("played", 8, [3])
        assert (again.observations == begun).all()


def process_of(environments: Environments) -> Any:
    """The one that the environment lives in."""
    assert environments.own is not None
    (place,) = environments.own.places
    assert place.process is not None
    return place.process


async def test_episodes_whose_process_was_killed_are_cut_off_and_new_ones_begin() -> None:
    async with opened() as environments:
        drift = await environments.begin("played", 4, [0])
        other = await environments.begin("evaluated", 2, [0])
        before = (await drift.act(pushed(4, by=0.5))).observations
        first = process_of(environments)
        os.kill(first.process.pid, signal.SIGKILL)
        await wait_until(lambda: first.ended)
        stepped = await drift.act(pushed(4, by=0.5))
        assert stepped.timed_out.all() and not stepped.failed.any() and (stepped.observations == before).all()
        assert (np.abs(drift.observations[:, 0]) < 0.1).all() and process_of(environments) is not first
        assert (await other.act(pushed(2))).timed_out.all(), "the other set went with it"
        assert not (await drift.act(pushed(4, by=0.5))).timed_out.any()


async def test_episodes_that_are_lost_again_and_again_end_the_run() -> None:
    async with opened() as environments:
        drift = await environments.begin("played", 4, [0])
        with pytest.raises(ParallmError, match="3 times in a row, and nothing was played"):
            for _ in range(4):
                now = process_of(environments)
                os.kill(now.process.pid, signal.SIGKILL)
                await wait_until(lambda now=now: now.ended)  # type: ignore[misc]
                assert (await drift.act(pushed(4))).timed_out.all()


@pytest.mark.parametrize(
    ("worst", "said"),
    [
        ("raise", r"KeyError: 'somewhere' \(own_code.py:\d+\)"),
        ("quit", r"SystemExit: enough \(own_code.py:\d+\)"),
        ("sleep", r"`act` blocked for more than 1 s in step \(.*own_code.py:\d+\)"),
    ],
)
async def test_an_environment_that_raises_or_hangs_is_named_with_its_line(worst: str, said: str) -> None:
    async with opened(task_options=f'{{"worst": "{worst}"}}', own_code_timeout_s=1) as environments:
        drift = await environments.begin("played", 3, [0])
        with pytest.raises(ParallmError, match=said):
            for _ in range(3):
                await drift.act(pushed(3))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Drift", {"worst": "three"}, "`step` gave .*, not an observation, a reward"),
        ("Drift", {"worst": "reward"}, "the reward nan, not a finite number"),
        ("Drift", {"worst": "wide"}, "`step` gave .*, not 2 finite numbers"),
        ("Drift", {"worse": 1}, "its options stand in task_options"),
        ("Shapeless", {}, "needs an `observation_space`"),
        ("HARD", {}, "is not callable"),
        ("nothing", {}, "write it as package.module:Name"),
    ],
)
async def test_what_is_no_environment_is_named(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        copies = Copies(Start("copies", f"tests.unit.own_code:{name}", packed(options), 1.0))
        await copies.do(CodeCall(1, CopiesCall("played", 3, (0,), 100)))
        for at in range(3):
            await copies.do(CodeCall(at, ActCall("played", [[1.0]] * 3)))


@pytest.mark.parametrize(
    ("task", "flags", "said"),
    [
        ("pole", {}, "--mode ppo needs --task cart-pole, "),
        ("cart-pole", {"task_options": '{"a": 1}'}, "--task-options go with an environment of your own"),
    ],
)
async def test_what_is_no_task_is_refused(task: str, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        async with opened(task, **flags):
            pass
