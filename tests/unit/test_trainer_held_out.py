"""The second reward of held-out tasks: it measures, and does nothing else."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from shared.jobs import Message
from shared.trajectories import Reward
from tests.unit.trainer_samples import group, trajectory
from trainer.rollouts.environments import Scored
from trainer.rollouts.held_out import TRUE, BothScorers, Evaluated, evaluated


async def learned_from(completion: str, reference: Any, prompt: str | Sequence[Message] = "") -> Scored:
    return float(len(completion)), {"length": 1.0, TRUE: 7.0}


async def true(completion: str, reference: Any, prompt: str | Sequence[Message] = "") -> Scored:
    if completion == "nan":
        return math.nan, {}
    return 1.0 / (completion == reference), {"part": 3.0}


async def test_an_answer_has_both_rewards_and_is_worth_the_first() -> None:
    both = BothScorers(learned_from, true)
    assert await both("47", "47") == (2.0, {"length": 1.0, TRUE: 1.0}), "nobody else's component has this name"


async def test_a_second_reward_that_fails_costs_its_own_figure_alone() -> None:
    both = BothScorers(learned_from, true)
    for answer in ("12", "nan"):
        assert await both(answer, "47") == (float(len(answer)), {"length": 1.0}), answer
    assert TRUE in (await both("47", "47"))[1], "and the next one has it again"


def test_means_are_over_what_was_scored() -> None:
    scored = Reward("x", 0.5, {TRUE: 1.0}), Reward("x", 0.0, {TRUE: 0.0})
    rewards = (*scored, Reward("x", 1.0), Reward("x", None, error="failed"))
    samples = [msgspec.structs.replace(trajectory(0.0), reward=reward) for reward in rewards]
    assert evaluated([group(each) for each in samples]) == Evaluated(0.5, 0.5)
    assert evaluated([group(samples[2])]) == Evaluated(1.0, None), "none is asked for"
    assert evaluated([]) == Evaluated(0.0, None)
