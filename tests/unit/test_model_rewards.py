from typing import Any

import pytest

from shared.errors import InvalidRequestError
from shared.jobs import RewardSpec
from shared.rewards.kinds import check
from shared.rewards.model_kinds import filled, softmax
from shared.scoring.pool import RewardSample
from shared.scoring.score import SampleScorer
from shared.scoring.served import ServedRewards, shown_chat
from shared.trajectories import Reward


def test_what_is_filled_in_is_not_looked_through_again() -> None:
    assert filled("{prompt}|{completion}|{reference} {x}", "{completion}", "{reference}", "r") == (
        "{completion}|{reference}|r {x}"
    )


def test_softmax_holds_for_very_unlikely_marks() -> None:
    assert softmax([-1000.0, -1000.0]) == [0.5, 0.5]
    assert softmax([0.0, -2000.0]) == [1.0, 0.0]


def test_a_chat_is_shown_as_people_read_it() -> None:
    assert shown_chat([{"role": "user", "content": "hi"}]) == "hi"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": parts}, {"role": "assistant"}]
    assert shown_chat(chat) == "system: be kind\n\nuser: ab\n\nassistant: "


@pytest.mark.parametrize(
    ("name", "options", "prompt", "reference", "models"),
    [
        ("judge", {"model": "a"}, True, False, ("a",)),
        ("judge", {"model": "a", "template": "{completion} {reference}"}, False, True, ("a",)),
        ("likelihood", {"model": "a@2", "against": "b"}, True, False, ("a@2", "b")),
        ("likelihood", {"model": "a", "template": "{completion}", "target": "{reference}"}, False, True, ("a",)),
        ("exact", {}, False, True, ()),
        ("weighted", {"parts": [{"name": "length", "options": {"target": 3}}]}, False, False, ()),
        (
            "weighted",
            {"parts": [{"name": "judge", "options": {"model": "a"}}, {"name": "exact"}]},
            True, True, ("a",),
        ),
    ],
)  # fmt: skip
def test_a_reward_says_what_it_looks_at(
    name: str, options: dict[str, Any], prompt: bool, reference: bool, models: tuple[str, ...]
) -> None:
    reward = check(RewardSpec(name, options))
    assert (reward.needs_prompt, reward.needs_reference, reward.served_models) == (prompt, reference, models)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("judge", {"model": ""}, "model: the name"),
        ("judge", {"model": "a@x"}, "model: "),
        ("judge", {"model": "m", "marks": {"a": 1, "": 2}}, "mark ''"),
        ("judge", {"model": "m", "marks": {"a": 1, "b": float("inf")}}, "a finite number"),
        ("judge", {"model": "m", "marks": {"no": 0, "yes": 1, "not": 2}}, "'not' begins with mark 'no'"),
        ("judge", {"model": "m", "marks": {str(i): 0 for i in range(10, 60)}}, "2 to 32"),
        ("judge", {"model": "m", "rationale_tokens": 100_000}, "0 to 4096"),
        ("judge", {"model": "m", "chat_template_kwargs": {"messages": []}}, "not a template variable"),
        ("judge", {"model": "m", "template": "{completion}" + "x" * 70_000}, "more than 65536"),
        ("judge", {"model": "m", "colour": 1}, "unknown field"),
        ("likelihood", {"model": "m", "target": "x"}, "neither {completion} nor {reference}"),
        ("likelihood", {"model": "m", "target": "{reference}"}, "every text would score the same"),
        ("likelihood", {"model": "m", "scale": float("nan")}, "finite"),
        ("weighted", {"parts": [{"name": "judge", "options": {}}]}, "missing required field `model`"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(RewardSpec(name, options))
    assert reason in refused.value.message


class Fixed:
    """Functions whose value is the length, and a judge that fails on request."""

    async def score(self, spec: RewardSpec, samples: list[RewardSample], share: Any = None) -> list[Reward]:
        return [Reward(spec.name, float(len(each.completion))) for each in samples]


class FixedJudge(ServedRewards):
    def __init__(self) -> None: ...

    async def score(self, name: str, options: Any, samples: Any, **asked: Any) -> list[Reward]:
        return [Reward(name, None, error="asleep") if each.completion == "?" else Reward(name, 0.5) for each in samples]


async def test_functions_and_judges_add_up_and_a_failed_part_names_itself() -> None:
    parts = [{"name": "judge", "weight": 4, "options": {"model": "m"}}, {"name": "exact", "weight": -1}]
    reward = check(RewardSpec("weighted", {"parts": parts}))
    rewards = SampleScorer(Fixed(), FixedJudge())
    good, bad = await rewards.score(reward, [RewardSample("abc", "abc"), RewardSample("?", "abc")])
    assert (good.value, good.components) == (4 * 0.5 - 3, {"judge": 0.5, "exact": 3.0})
    assert (bad.value, bad.error) == (None, "judge: asleep")
    heavy = [{"name": "judge", "weight": 1e308, "options": {"model": "m"}}, {"name": "exact"}]
    (large,) = await rewards.score(check(RewardSpec("weighted", {"parts": heavy})), [RewardSample("abc", "abc")])
    assert large.value is None and "largest" in large.error
