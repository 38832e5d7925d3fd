import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from shared.errors import SetupError
from trainer.rollouts.environments import load_class, read_jsonl
from trainer.rollouts.own.own_code import OwnCodeError
from trainer.rollouts.scorers import Judges, open_scorer

NOBODY = cast(Judges, None)  # no judge is asked
GSM8K = Path("data/gsm8k/test-64.jsonl")


def half_right(completion: str, reference: Any, *, bonus: float = 0.0) -> tuple[float, dict[str, float]]:
    return 0.5 + bonus, {"length": len(completion)}


async def slow_length(completion: str, reference: Any) -> float:
    await asyncio.sleep(0)
    return len(completion)


def not_a_number(completion: str, reference: Any) -> Any:
    return "great"


async def test_answers_to_gsm8k_are_scored_by_the_rings_own_reward() -> None:
    task = read_jsonl(GSM8K)[0]
    wanted = task.reference.rsplit("####", 1)[1].strip()
    async with open_scorer("gsm8k", {"format_score": 0.1}, NOBODY) as scorer:
        scores = await asyncio.gather(*(scorer(text, task.reference) for text in (f"So it is {wanted}.", "-7", "?")))
    assert [value for value, _ in scores] == [1.0, 0.1, 0.0]
    assert scores[2][1] == {"found": 0.0, "marked": 0.0}


async def test_a_sample_that_cannot_be_scored_costs_nobody_else_anything() -> None:
    async with open_scorer("exact", {}, NOBODY) as scorer:
        good, bad = await asyncio.gather(scorer("12", "12"), scorer("12", None), return_exceptions=True)
    assert good == (1.0, {})
    assert isinstance(bad, ValueError) and "needs a reference" in str(bad)


async def test_a_cancelled_group_does_not_take_its_siblings_along() -> None:
    async with open_scorer("exact", {}, NOBODY) as scorer:
        cancelled = asyncio.create_task(scorer("1", "1"))
        other = asyncio.create_task(scorer("2", "2"))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await other == (1.0, {})


async def test_a_function_of_the_users_own_scores() -> None:
    async with open_scorer("tests.unit.test_trainer_scorers:half_right", {"bonus": 0.25}, NOBODY) as scorer:
        assert await scorer("abc", None) == (0.75, {"length": 3.0})
    async with open_scorer("tests.unit.test_trainer_scorers:slow_length", {}, NOBODY) as scorer:
        assert await scorer("abc", None) == (3.0, {})
    async with open_scorer("tests.unit.test_trainer_scorers:not_a_number", {}, NOBODY) as scorer:
        with pytest.raises(OwnCodeError, match="not a finite number"):
            await scorer("abc", None)


@pytest.mark.parametrize(
    ("reward", "options", "reason"),
    [
        ("best", {}, "no reward 'best'"),
        ("exact", {"colour": 1}, "unknown field `colour`"),
        ("regex", {"pattern": "("}, "bad pattern"),
        ("json:nothing", {}, "has no attribute 'nothing'"),
        ("no_such_module:score", {}, "No module named"),
    ],
)
async def test_a_wrong_reward_is_refused_before_anything_starts(
    reward: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SetupError, match=reason):
        async with open_scorer(reward, options, NOBODY):
            pass


@pytest.mark.long
def test_an_environment_without_its_methods_is_refused() -> None:
    with pytest.raises(SetupError, match="needs `async def reset`"):
        load_class("collections:Counter", {})
    with pytest.raises(SetupError, match="task_options"):
        load_class("trainer.rollouts.environments:ArithmeticEnvironment", {"colour": 1})
