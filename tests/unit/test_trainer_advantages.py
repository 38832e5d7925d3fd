import math

import pytest

from trainer.learn.batches import group_advantages, has_signal


def test_mean_scale_subtracts_the_groups_mean() -> None:
    assert group_advantages([1, 0, 0, 1]).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_std_scale_divides_by_the_population_std() -> None:
    # mean 1/4, variance (9/16 + 3 * 1/16) / 4 = 3/16
    std = math.sqrt(3 / 16)
    expected = [0.75 / (std + 1e-4)] + [-0.25 / (std + 1e-4)] * 3
    assert group_advantages([1, 0, 0, 0], "std").tolist() == pytest.approx(expected, rel=1e-6)


def test_leave_one_out_compares_with_the_others() -> None:
    # 3 - (1 + 2)/2, 1 - (3 + 2)/2, 2 - (3 + 1)/2
    assert group_advantages([3, 1, 2], "leave_one_out").tolist() == pytest.approx([1.5, -1.5, 0.0])


def test_maximum_likelihood_divides_by_the_share_that_is_right() -> None:
    # one of four is right: (1 - 1/4) / (1/4) and (0 - 1/4) / (1/4); the gradient of log p by 4 samples, times 4
    assert group_advantages([1, 0, 0, 0], "maximum_likelihood").tolist() == [3, -1, -1, -1]
    assert group_advantages([1, 1, 1, 0], "maximum_likelihood").tolist() == pytest.approx([1 / 3] * 3 + [-1])
    assert group_advantages([-1, 0, 0], "maximum_likelihood").tolist() == [0, 0, 0], "none is right"


def test_equal_rewards_have_no_signal() -> None:
    assert not has_signal([0.3, 0.3, 0.3])
    assert not has_signal([1.0])
    assert has_signal([0.0, 1.0])


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [[1.0]]])
def test_bad_rewards_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="rewards"):
        group_advantages(rewards)
