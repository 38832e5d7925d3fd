"""What each reward says of a table of completions, and what the registry refuses."""

import re
from typing import Any

import pytest

from shared.errors import InvalidRequestError
from shared.jobs import RewardSpec
from shared.rewards.functions import load
from shared.rewards.kinds import REWARDS, check
from shared.rewards.model_kinds import ModelOptions

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72"


def score(name: str, completion: str, reference: Any = None, **options: Any) -> float:
    return load(name)(completion, reference, check(RewardSpec(name, options)).options).value


@pytest.mark.parametrize(
    ("completion", "reference", "options", "value"),
    [
        ("42", "42", {}, 1),
        (" 42\n", "42", {}, 1),
        (" 42", "42", {"strip": False}, 0),
        ("42", 42, {}, 1),
        ("yes", "Yes", {}, 0),
        ("yes", "Yes", {"ignore_case": True}, 1),
        ("b", ["a", "b"], {}, 1),
        ("c", ["a", "b"], {}, 0),
        ("", "", {}, 1),
    ],
)
def test_exact(completion: str, reference: Any, options: dict[str, Any], value: float) -> None:
    assert score("exact", completion, reference, **options) == value


@pytest.mark.parametrize(
    ("completion", "reference", "options", "value"),
    [
        ("so it is 42.", None, {"pattern": r"\d+"}, 1),
        ("none", None, {"pattern": r"\d+"}, 0),
        ("a 1", None, {"pattern": r"\d+", "full": True}, 0),
        ("ABC", None, {"pattern": "abc", "ignore_case": True}, 1),
        ("a\nb", None, {"pattern": "a.b"}, 1),
        ("a\nb", None, {"pattern": "a.b", "dot_all": False}, 0),
        ("answer: 7", "7", {"pattern": r"answer: (\d+)", "group": 1}, 1),
        ("answer: 8", "7", {"pattern": r"answer: (\d+)", "group": 1}, 0),
        ("answer: 7", 7, {"pattern": r"answer: (?P<n>\d+)", "group": "n"}, 1),
        ("abc", "^a.c$", {}, 1),
    ],
)
def test_regex(completion: str, reference: Any, options: dict[str, Any], value: float) -> None:
    assert score("regex", completion, reference, **options) == value


@pytest.mark.parametrize(
    ("completion", "reference", "options", "value"),
    [
        ("24 + 48 = 72\n#### 72", GSM8K, {}, 1),
        ("The answer is 72.", GSM8K, {}, 1),
        ("The answer is 73.", GSM8K, {}, 0),
        ("The answer is 73.", GSM8K, {"format_score": 0.1}, 0.1),
        ("The answer is 72.", GSM8K, {"strict": True}, 0),
        ("#### 72 because 3", GSM8K, {"strict": True}, 1),
        ("I do not know", GSM8K, {"format_score": 0.1}, 0),
        ("it costs $1,234.50", "1234.5", {}, 1),
        ("-5", "-5", {}, 1),
        ("5 - 3 = 2", 2, {}, 1),
        ("it is 10-4", "4", {}, 1),
        ("a half: 1/2", "0.5", {}, 1),
        (r"so \boxed{7}, not 8", "7", {}, 1),
        ("\u22123", "-3", {}, 1),
        ("1/0", "3", {}, 0),
    ],
)
def test_gsm8k(completion: str, reference: Any, options: dict[str, Any], value: float) -> None:
    assert score("gsm8k", completion, reference, **options) == value


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        (r"The answer is $\frac{1}{2}$", "0.5", 1),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1),
        (r"\boxed{2}", r"2\sqrt{3}", 0),
        ("$x+1$", "1+x", 1),
        ("so 47", "The answer is 47", 1),
        ("x = 3", "4", 0),
        ("words only", "7", 0),
    ],
)
def test_math(completion: str, reference: str, value: float) -> None:
    assert score("math", completion, reference) == value


@pytest.mark.parametrize(
    ("completion", "options", "value"),
    [
        ("<think>a</think><answer>b</answer>", {}, 1),
        ("<think>a</think> b", {}, 0.5),
        ("<think>a</think> b", {"all_or_nothing": True}, 0),
        ("<answer>b</answer><think>a</think>", {}, 0.5),
        ("<think>a<think></think><answer>b</answer>", {}, 0.5),
        ("<think>a</think><answer>1</answer>", {"pattern": r"<answer>\d</answer>"}, 1),
        ("7", {"tags": [], "pattern": r"^\d$"}, 1),
    ],
)
def test_format(completion: str, options: dict[str, Any], value: float) -> None:
    assert score("format", completion, **options) == value


@pytest.mark.parametrize(
    ("completion", "options", "value"),
    [
        ("x" * 10, {"target": 10}, 1),
        ("x" * 15, {"target": 10}, 0.5),
        ("x" * 99, {"target": 10}, 0),
        ("x" * 99, {"target": 10, "floor": -1}, -1),
        ("x" * 12, {"target": 10, "slack": 4}, 0.5),
        ("x" * 5, {"target": 10, "shape": "near"}, 0.5),
        ("one two", {"target": 2, "unit": "words"}, 1),
    ],
)
def test_length(completion: str, options: dict[str, Any], value: float) -> None:
    assert score("length", completion, **options) == value


def test_weighted_sums_its_parts_and_names_them() -> None:
    parts = [
        {"name": "gsm8k", "weight": 2.0},
        {"name": "length", "weight": 0.5, "options": {"target": 2}},
    ]
    result = load("weighted")("72", GSM8K, check(RewardSpec("weighted", {"parts": parts})).options)
    assert result.value == 2.5
    assert result.components == {"gsm8k": 1.0, "length": 1.0}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nonsense", {}, "there are exact, regex"),
        ("exact", {"strp": True}, "strp"),
        ("exact", {"strip": "yes"}, "bool"),
        ("regex", {"pattern": "("}, "bad pattern"),
        ("regex", {"pattern": "a", "group": 1}, "0 groups"),
        ("regex", {"pattern": "a", "group": "n"}, "no group 'n'"),
        ("length", {}, 'write it as {"name": "length", "options": {"target": ...}}'),
        ("judge", {}, '"judge", "options": {"model": ...'),
        ("length", {"target": 0}, "at least 1"),
        ("format", {"tags": []}, "tags, a pattern, or both"),
        ("weighted", {"parts": []}, "at least one"),
        ("weighted", {"parts": [{"name": "weighted"}]}, "not weighted"),
        ("weighted", {"parts": [{"name": "length"}]}, "target"),
    ],
)
def test_bad_options_are_refused_at_submission(name: str, options: dict[str, Any], says: str) -> None:
    spec = RewardSpec(name, options)
    with pytest.raises(InvalidRequestError, match=re.escape(says)):
        check(spec).compile()  # in a process that can be killed (tests/unit/test_rewards_pool.py)


@pytest.mark.parametrize(("name", "reference"), [("exact", None), ("gsm8k", "no number"), ("math", None), ("regex", 3)])
def test_a_reference_that_does_not_fit_raises(name: str, reference: Any) -> None:
    with pytest.raises(ValueError):
        score(name, "72", reference)


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_is_described_and_implemented(name: str) -> None:
    assert REWARDS[name].description
    assert "properties" in next(iter(REWARDS[name].schema["$defs"].values()))
    assert issubclass(REWARDS[name].options, ModelOptions) or callable(load(name))
