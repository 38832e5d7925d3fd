"""Curricula in the whole loop, in one process: resumed exactly, without a word in what versions are compared by."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_trainer_loop import settings
from tests.training.run import train
from trainer.rollouts.environments import ArithmeticEnvironment, Observation
from trainer.runs.metrics import StepMetrics, read
from trainer.settings import TrainSettings


class Asked(ArithmeticEnvironment):
    """Remembers which tasks were asked for."""

    def __init__(self) -> None:
        super().__init__(0, "train", 24)
        self.asked: list[int] = []

    async def reset(self, index: int) -> Observation:
        self.asked.append(index)
        return await super().reset(index)


def curriculum(folder: Path, **changes: Any) -> TrainSettings:
    small = {"task_count": 24, "curriculum": "reward", "curriculum_floor": 0.25, "max_lag": 0, "parity_every": 0}
    return settings(folder, **(small | changes))


def lines(folder: Path) -> list[StepMetrics]:
    return read(folder / "policy" / "metrics.jsonl")


@pytest.mark.long
async def test_a_run_in_pieces_draws_the_same_tasks_and_gives_the_same_bytes_as_one_run(tmp_path: Path) -> None:
    await train(curriculum(tmp_path / "whole"))
    for steps in (2, 4, 6):
        await train(curriculum(tmp_path / "pieces", steps=steps))
    name = "policy/checkpoints/step-000006/adapters.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()
    whole, pieces = lines(tmp_path / "whole"), lines(tmp_path / "pieces")
    assert [line.tasks for line in whole] == [line.tasks for line in pieces]
    assert [line.tasks_unseen for line in whole] == [line.tasks_unseen for line in pieces]
    assert whole[-1].tasks_unseen == 1 - len({task for line in whole for task in line.tasks}) / 24


@pytest.mark.long
@pytest.mark.parametrize("max_lag", [0, 2])
async def test_each_group_is_of_the_task_that_was_drawn(tmp_path: Path, max_lag: int) -> None:
    environment = Asked()
    await train(curriculum(tmp_path, max_lag=max_lag, evaluate_every=0, probe_prompts=1), environment=environment)
    taught = [task for line in lines(tmp_path) for task in line.tasks]
    assert len(taught) == 24 and len(set(taught)) < 24, "some are drawn again"
    assert set(taught) <= set(environment.asked)


@pytest.mark.long
async def test_evaluations_on_held_out_tasks_change_no_draw(tmp_path: Path) -> None:
    await train(curriculum(tmp_path / "without"))
    await train(curriculum(tmp_path / "with", evaluate_every=1, evaluate_prompts=4))
    assert [line.tasks for line in lines(tmp_path / "without")] == [line.tasks for line in lines(tmp_path / "with")]


@pytest.mark.long
async def test_tasks_that_were_chosen_for_their_rewards_judge_no_version(tmp_path: Path) -> None:
    chosen, _ = await train(curriculum(tmp_path / "chosen", curriculum_floor=0.0))
    evenly, _ = await train(curriculum(tmp_path / "evenly", curriculum_floor=1.0))
    assert chosen.good_on == {} and evenly.good_on["prompts"]


async def test_without_a_curriculum_lines_say_nothing_of_one(tmp_path: Path) -> None:
    await train(settings(tmp_path, steps=1))
    (line,) = lines(tmp_path)
    assert line.tasks == () and line.tasks_solved is line.tasks_unseen is line.difficulty is None


async def test_a_run_that_begins_without_a_curriculum_may_go_on_with_one_and_back(tmp_path: Path) -> None:
    await train(curriculum(tmp_path, curriculum="uniform", max_lag=1, steps=2))
    await train(curriculum(tmp_path, max_lag=1, steps=4))
    await train(curriculum(tmp_path, curriculum="uniform", max_lag=1))
    assert [bool(line.tasks) for line in lines(tmp_path)] == [False, False, True, True, False, False]
    consumed = [index for line in lines(tmp_path) for index in line.indices]
    assert len(consumed) == len(set(consumed)) == 24
