import math

import numpy as np

from trainer import gate
from trainer.gate import RewardWatch


def test_each_check_says_its_name_and_what_it_saw() -> None:
    bad = {"a.lora_a": np.array([1.0, math.nan], np.float32)}
    checks = [
        gate.finite_weights(bad),
        gate.finite_gradients(1),
        gate.fits(bad, {"a.lora_a": (3,)}),
        gate.same_base("a" * 64, "b" * 64),
        gate.update_norm(0.2, 0.1),
        gate.probe_kl(math.inf, 0.5),
        gate.reload_parity(0.3, 0.1),
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
        gate.update_norm(0.1, 0.1),
        gate.probe_kl(0.0, 0.5),
        gate.reward_floor(0.56, 0.7, 0.15),
        gate.reward_floor(0.0, None, 0.15),
    ]
    assert gate.passed(checks)
    assert gate.failures(checks) == ""


def test_a_nan_measurement_fails() -> None:
    assert not gate.update_norm(math.nan, 1.0).passed
    assert not gate.reward_floor(math.nan, 0.5, 0.1).passed


def test_a_collapse_names_the_best_version_to_go_back_to() -> None:
    watch = RewardWatch(margin=0.2, min_rewards=4)
    assert watch.add(1, [0.5] * 4) is None
    assert watch.add(2, [0.8] * 4) is None
    assert watch.add(3, [0.7] * 4) is None
    assert watch.add(4, [0.1] * 2) is None  # too few to judge
    assert watch.add(4, [0.1] * 2) == 2


def test_a_slow_decline_is_measured_from_the_best_not_from_the_last() -> None:
    watch = RewardWatch(margin=0.2, min_rewards=1)
    rewards = [0.9, 0.8, 0.72, 0.68]
    assert [watch.add(version, [reward]) for version, reward in enumerate(rewards, 1)] == [None, None, None, 1]


def test_more_rewards_of_a_good_version_only_refine_its_mean() -> None:
    watch = RewardWatch(margin=0.1, min_rewards=2)
    watch.add(1, [1.0, 1.0])
    assert watch.add(1, [0.0, 0.0]) is None
    assert watch.good == {1: 0.5}
