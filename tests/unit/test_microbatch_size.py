"""The size of a microbatch, found from the times that others have taken."""

import pytest

from trainer.microbatch_size import FIRST, MicrobatchSize


def settled(start_s: float, each_s: float, bound_s: float, smallest: int = 1, steps: int = 60) -> int:
    """The size after some train steps of four microbatches, on a machine that takes start + each n seconds."""
    size = MicrobatchSize(100_000, bound_s)
    for _ in range(steps):
        n = max(size.positions, smallest)
        for _ in range(4):
            size.took(n, start_s + each_s * n)
    return max(size.positions, smallest)


def test_without_a_bound_it_is_the_largest() -> None:
    size = MicrobatchSize(8192)
    size.took(8192, 100.0)
    assert size.positions == 8192


def test_it_starts_small_and_grows_step_by_step() -> None:
    size = MicrobatchSize(8192, 0.05)
    assert size.positions == FIRST
    for _ in range(5):
        size.took(FIRST, 1e-3)
    assert size.positions == 2 * FIRST


@pytest.mark.parametrize(("start_s", "each_s"), [(0.0, 1e-4), (0.01, 1e-4), (0.02, 1e-5)])
def test_a_microbatch_takes_as_long_as_it_may(start_s: float, each_s: float) -> None:
    took = start_s + each_s * settled(start_s, each_s, 0.05)
    assert 0.04 < took < 0.06


@pytest.mark.parametrize("smallest", [1, 200, 600])
def test_half_of_the_time_is_work_where_starting_takes_longer_than_the_bound(smallest: int) -> None:
    start_s, each_s = 0.08, 1e-4
    n = settled(start_s, each_s, 0.05, smallest)
    assert 0.35 < each_s * n / (start_s + each_s * n) < 0.65


def test_compiling_a_kernel_does_not_make_it_small() -> None:
    size = MicrobatchSize(8192, 0.05)
    for seconds in (20.0, 8.0, 0.02, 0.02, 0.02):
        size.took(FIRST, seconds)
    assert size.positions > FIRST


def test_a_rest_says_nothing() -> None:
    size = MicrobatchSize(8192, 0.05)
    for _ in range(5):
        size.took(10, 0.04)
    assert size.positions == FIRST
