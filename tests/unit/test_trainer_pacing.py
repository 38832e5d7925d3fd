import math

import pytest

from shared.frames import VersionSpan
from trainer.learn.options import Schedule
from trainer.rollouts.pacing import Pace, lag_of, oldest_version


@pytest.mark.parametrize(
    ("max_lag", "steps_done", "accepted", "running", "capacity"),
    [
        (0, 0, 0, 0, 4),  # on-policy: exactly one batch before the first train step
        (0, 0, 3, 1, 0),
        (0, 1, 4, 0, 4),  # and the next one only after it
        (1, 0, 0, 0, 8),  # one batch ahead
        (1, 0, 4, 4, 0),
        (1, 3, 12, 5, 3),
        (1, 0, 9, 4, 0),  # never negative
    ],
)
def test_capacity_lets_generation_run_k_batches_ahead(
    max_lag: int, steps_done: int, accepted: int, running: int, capacity: int
) -> None:
    assert Pace(4, max_lag).capacity(steps_done, accepted, running) == capacity


def test_the_oldest_token_decides() -> None:
    spans = [VersionSpan("policy@7", 0, 3), VersionSpan("policy@6", 3, 3), VersionSpan("policy@9", 3, 8)]
    assert oldest_version(spans, "policy") == 7  # the empty span does not count
    assert oldest_version([VersionSpan("", 0, 1), *spans], "policy") == 0
    assert oldest_version([VersionSpan("other@9", 0, 1)], "policy") == 0
    assert oldest_version([], "policy") is None


def test_lag_counts_policy_steps_not_version_numbers() -> None:
    steps = {1: 0, 2: 1, 5: 2}  # 3 and 4 were rejected
    assert lag_of(5, steps, 2) == 0
    assert lag_of(2, steps, 2) == 1
    assert lag_of(0, steps, 2) == 2  # the base is what the run began with
    assert Pace(4, 1000).too_old(lag_of(3, steps, 0)), "another run's version, or a killed start's"
    assert not Pace(4, 1).too_old(1)
    assert Pace(4, 1).too_old(2)


def test_warm_up_is_linear_and_the_first_step_learns() -> None:
    schedule = Schedule("constant", peak=1.0, warmup_steps=4)
    assert [schedule.rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_final_fraction_and_stays() -> None:
    schedule = Schedule("linear", peak=1.0, warmup_steps=2, total_steps=6, final_fraction=0.2)
    assert [schedule.rate(step) for step in (2, 4, 6, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    schedule = Schedule("cosine", peak=2.0, total_steps=8, final_fraction=0.0)
    assert schedule.rate(4) == pytest.approx(1.0)
    assert schedule.rate(2) == pytest.approx(1 + math.cos(math.pi / 4))


def test_a_decay_needs_its_length() -> None:
    with pytest.raises(ValueError, match="more total steps"):
        Schedule("cosine", warmup_steps=5, total_steps=5)
