import math

import numpy as np

from trainer.learn import gate
from trainer.learn.gate import RewardWatch


def test_each_check_says_its_name_and_what_it_saw() -> None:
    bad = {"a.lora_a": np.array([1.0, math.nan], np.float32)}
    checks = [
        gate.finite_weights(bad),
        gate.finite_gradients(1),
        gate.fits(bad, {"a.lora_a": (3,)}),
        gate.same_base("a" * 64, "b" * 64),
        gate.at_most("update_norm", 0.2, 0.1),
        gate.at_most("probe_kl", math.inf, 0.5),
        gate.at_most("base_kl", 2.1, 2.0),
        gate.at_most("best_kl", math.nan, 1.0),
        gate.at_most("reload_parity", 0.3, 0.1),
        gate.reward_floor(0.4, 0.7, 0.15),
    ]
    assert not any(check.passed for check in checks)
    assert [check.name for check in checks] == [
        "finite_weights",
        "finite_gradients",
        "shapes",
        "base_model",
        "update_norm",
        "probe_kl",
        "base_kl",
        "best_kl",
        "reload_parity",
        "reward_floor",
    ]
    assert "a.lora_a: (2,) in place of (3,)" in gate.failures(checks)
    assert "0.2, bound 0.1" in gate.failures(checks)


def test_a_good_version_passes() -> None:
    good = {"a.lora_a": np.zeros((2, 3), np.float32)}
    checks = [
        gate.finite_weights(good),
        gate.finite_gradients(0),
        gate.fits(good, {"a.lora_a": (2, 3)}),
        gate.same_base("", "b"),
        gate.at_most("update_norm", 0.1, 0.1),
        gate.at_most("probe_kl", 0.0, 0.5),
        gate.reward_floor(0.56, 0.7, 0.15),
        gate.reward_floor(0.0, None, 0.15),
    ]
    assert gate.passed(checks)
    assert gate.failures(checks) == ""


def test_a_nan_measurement_fails() -> None:
    assert not gate.at_most("update_norm", math.nan, 1.0).passed
    assert not gate.reward_floor(math.nan, 0.5, 0.1).passed


SPREAD = (-0.02, 0.02)  # two groups around a mean, error 0.014


def earn(watch: RewardWatch, version: int, mean: float) -> int | None:
    return watch.add(version, [mean + off for off in SPREAD])


def test_a_collapse_names_the_best_version_to_go_back_to() -> None:
    watch = RewardWatch(margin=0.2, min_groups=2)
    assert [earn(watch, v, mean) for v, mean in ((1, 0.5), (2, 0.8), (3, 0.7))] == [None] * 3
    assert watch.add(4, [0.1]) is None  # too few to judge
    assert watch.add(4, [0.1]) == 2


def test_a_slow_decline_is_measured_from_the_best_not_from_the_last() -> None:
    watch = RewardWatch(margin=0.2, min_groups=2)
    assert [earn(watch, v, mean) for v, mean in enumerate((0.9, 0.8, 0.7, 0.6), 1)] == [None, None, None, 1]


def test_an_unlucky_batch_is_no_collapse() -> None:
    """Seen in training: batches of 64 tasks at 0.74 and 0.55 by one policy rolled good versions back."""
    watch = RewardWatch(margin=0.15, min_groups=64)
    lucky, unlucky = [1.0] * 47 + [0.0] * 17, [1.0] * 35 + [0.0] * 29
    assert watch.add(1, lucky) is None
    assert watch.add(2, unlucky) is None
    assert watch.add(3, [0.0] * 60 + [1.0] * 4) == 1


def test_small_batches_are_pooled_until_they_can_judge() -> None:
    watch = RewardWatch(margin=0.2, min_groups=4)
    assert [watch.add(version, [0.9]) for version in range(1, 5)] == [None] * 4
    assert watch.good.keys() == {4}
    assert [watch.add(version, [0.1]) for version in range(5, 9)] == [None, None, None, 4]


def test_after_a_rollback_what_was_good_stays_the_measure() -> None:
    """Rewards that were inverted midway: nonsense was learned after one rollback, since the measure was forgotten."""
    watch = RewardWatch(margin=0.2, min_groups=2)
    earn(watch, 1, 0.9)
    assert earn(watch, 2, 0.1) == 1
    watch.rolled_back(target=1, served=1)
    assert earn(watch, 1, 0.1) == 1, "the best version itself: rewards or tasks have changed"
    watch.rolled_back(target=1, served=3)  # its number was gone from the store
    assert earn(watch, 4, 0.5) == 3
    assert earn(watch, 4, 0.8) is None
    watch.forget()
    assert earn(watch, 5, 0.1) is None


def test_the_best_version_is_the_measure_however_long_ago_it_was() -> None:
    watch = RewardWatch(margin=0.2, min_groups=2, memory=2)
    assert [earn(watch, v, mean) for v, mean in ((1, 0.9), (2, 0.8), (3, 0.8), (4, 0.8), (5, 0.8))] == [None] * 5
    assert watch.good.keys() == {1, 4, 5}
    assert earn(watch, 6, 0.5) == 1


def test_a_version_that_is_judged_again_keeps_its_better_standing() -> None:
    watch = RewardWatch(margin=0.2, min_groups=2)
    assert [earn(watch, 1, mean) for mean in (0.9, 0.75)] == [None, None]
    assert earn(watch, 2, 0.55) == 1


def test_a_version_whose_weights_are_gone_is_no_measure() -> None:
    watch = RewardWatch(margin=0.2, min_groups=2)
    assert [earn(watch, v, mean) for v, mean in ((1, 0.9), (2, 0.8))] == [None, None]
    watch.keep_only({2, 3})
    assert earn(watch, 3, 0.1) == 2
