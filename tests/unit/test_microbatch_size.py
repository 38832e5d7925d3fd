"""The size of a microbatch, found from the times that others have taken."""

import random
from collections.abc import Callable

import pytest

from trainer.learn.microbatch_size import FIRST, MicrobatchSize

Machine = Callable[[int], float]  # positions -> seconds


def line(start_s: float, each_s: float) -> Machine:
    """A machine that takes start + each n seconds."""
    return lambda n: start_s + each_s * n


def run(machine: Machine, bound_s: float, smallest: int = 1, count: int = 200) -> tuple[MicrobatchSize, list[float]]:
    """What many microbatches come to, and what each of them took."""
    size, took = MicrobatchSize(8192, bound_s), []
    for _ in range(count):
        asked = size.positions
        n = max(asked, smallest)
        took.append(machine(n))
        size.took(asked, n, n, took[-1])
    return size, took


def test_without_a_bound_it_is_the_largest() -> None:
    size = MicrobatchSize(8192)
    size.took(8192, 8192, 8192, 100.0)
    assert size.positions == 8192


def test_it_starts_small_and_grows_by_two() -> None:
    size = MicrobatchSize(8192, 0.05)
    assert size.positions == FIRST
    for _ in range(2):
        size.took(FIRST, FIRST, FIRST, 1e-3)
    assert size.positions == 2 * FIRST


@pytest.mark.parametrize(("start_s", "each_s"), [(0.0, 1e-4), (0.01, 1e-4), (0.02, 1e-5), (0.0, 1e-3)])
def test_a_bound_that_can_be_kept_is_kept(start_s: float, each_s: float) -> None:
    size, _ = run(line(start_s, each_s), 0.05)
    machine = line(start_s, each_s)
    assert machine(size.positions) <= 0.05
    assert machine(2 * size.positions) > 0.05, "and used"


@pytest.mark.parametrize("start_s", [0.1, 0.2, 0.3])
def test_half_of_the_best_rate_where_starting_takes_longer_than_the_bound(start_s: float) -> None:
    machine = line(start_s, 2e-5)  # a GPU: 256 positions take hardly less than 4,096
    size, _ = run(machine, 0.05)
    assert machine(size.positions) < start_s + 0.15
    assert size.positions / machine(size.positions) > 0.4 * 8192 / machine(8192)


def test_what_takes_longer_than_the_bound_takes_little_longer_at_a_far_better_rate() -> None:
    """Times of a 4B on an H200, where a microbatch takes as long as its operations take to be started."""
    times, noise = {128: 0.255, 256: 0.257, 512: 0.207, 1024: 0.229, 2048: 0.296, 4096: 0.6}, random.Random(0)
    for waited_s in (1.0, 0.0) * 10:
        size = MicrobatchSize(8192, 0.05)
        for _ in range(100):
            n = size.positions
            size.took(n, n, n, times[n] * noise.uniform(0.95, 1.05), waited_s=waited_s)
        assert size.positions == 2048


def test_where_nobody_waits_one_slow_moment_does_not_decide() -> None:
    """A size whose first time is that of a busy host would never be taken again."""
    size, asked = MicrobatchSize(8192, 0.05), list[int]()
    for _ in range(100):
        n = size.positions
        asked.append(n)
        slow = 3.0 if n == 2048 and asked.count(n) == 2 else 1.0  # the first time that counts
        size.took(n, n, n, slow * (0.2 + n * 2e-5), waited_s=0.0)
    assert size.positions >= 2048


def test_a_bound_that_a_smaller_size_keeps_is_kept_though_a_larger_one_takes_hardly_longer() -> None:
    times = {32: 0.042, 64: 0.085, 128: 0.169, 256: 0.339, 512: 0.491, 1024: 0.933, 2048: 1.8, 4096: 2.6, 8192: 3.1}
    size, _ = run(lambda n: times[n], 0.05)
    assert size.positions == 32


def test_a_bump_in_the_curve_is_no_end() -> None:
    # Seen on an H200: 512 positions took half as long again as 256, and 4,608 hardly more than those.
    times = {256: 0.105, 512: 0.19, 1024: 0.3, 2048: 0.2, 4096: 0.2, 8192: 0.5}
    size, _ = run(lambda n: times[n], 0.05)
    assert size.positions >= 2048


def test_larger_sizes_are_tried_only_while_time_grows_slowly() -> None:
    _, took = run(line(0.0, 3e-4), 0.05)
    assert max(took) < 0.45, "256 positions take 77 ms, and are as fast as 1,024"


def test_one_sample_is_never_cut_so_nothing_smaller_is_looked_for() -> None:
    size, _ = run(line(0.08, 1e-4), 0.05, smallest=600)
    assert size.positions >= FIRST / 2


def test_compiling_a_kernel_does_not_make_it_small() -> None:
    size = MicrobatchSize(8192, 0.05)
    for seconds in (20.0, 0.02, 0.02):
        size.took(FIRST, FIRST, FIRST, seconds)
    assert size.positions > FIRST


def test_what_new_shapes_take_to_compile_is_no_pace() -> None:
    """A GPU on which a new shape takes 3 s, and any microbatch 0.1 s; train steps are cut into several shapes."""
    size, seen = MicrobatchSize(8192, 0.05), set[int]()
    for _ in range(20):
        left = 4608
        while left:
            asked = size.positions
            n = min(asked, left)
            left -= n
            size.took(asked, n, n, 0.1 + n / 45_000 + (n not in seen) * 3.0, is_new=n not in seen)
            seen.add(n)
    assert size.positions >= 2048


def test_while_nothing_else_computes_they_may_be_longer() -> None:
    size, machine = MicrobatchSize(8192, 0.05), line(0.0, 1e-4)
    chosen = []
    for waited_s in (0.0, 0.2, 0.0):
        for _ in range(100):
            n = size.positions
            size.took(n, n, n, machine(n), waited_s=waited_s)
        chosen.append(size.positions)
    assert chosen == [1024, 256, 1024], "103 and 26 ms: rows wait for the latter"


def test_when_a_row_comes_sizes_are_chosen_again_though_train_steps_are_short() -> None:
    size, machine, largest = MicrobatchSize(8192, 0.05), line(0.03, 4e-5), 0
    while largest < 2:  # its first time does not count
        n = size.positions
        largest += n == 8192
        size.took(n, n, n, machine(n), waited_s=0.0)
    for _ in range(5):
        asked = size.positions
        size.took(asked, min(asked, 3900), min(asked, 3900), machine(min(asked, 3900)), waited_s=1.0)
    assert machine(size.positions) < 0.1, "all 3,900 at once take 0.19 s"


@pytest.mark.parametrize("largest", [3000, 6000, 8192])
def test_the_largest_size_is_measured_again_before_it_is_judged(largest: int) -> None:
    size, asked = MicrobatchSize(largest, 0.05), list[int]()
    for _ in range(100):
        n = size.positions
        asked.append(n)
        slow = 3.0 if n == largest and asked.count(n) == 2 else 1.0
        size.took(n, n, n, slow * (0.2 + n * 1e-6), waited_s=0.0)
    assert size.positions == largest


def test_a_rest_says_nothing() -> None:
    size = MicrobatchSize(8192, 0.05)
    for _ in range(5):
        size.took(FIRST, 10, 10, 0.04)
    assert size.positions == FIRST


def test_it_follows_a_machine_that_has_become_slower() -> None:
    size, _ = run(line(0.0, 1e-5), 0.05)
    fast = size.positions
    for _ in range(100):
        size.took(size.positions, size.positions, size.positions, 8e-5 * size.positions)
    assert 8e-5 * size.positions <= 0.05
    assert size.positions < fast


def test_a_prompt_computed_again_in_each_part_is_no_work_done() -> None:
    size = MicrobatchSize(8192, 0.05)
    for _ in range(100):
        prompts = -(-size.positions // 640) * 128  # 128 positions of prompt before 512 of completions
        size.took(size.positions, size.positions, max(1, size.positions - prompts), 1e-3 * size.positions)
    assert size.positions >= 256, "128 positions would take 128 ms, and be all prompt"


def test_no_size_is_tried_that_memory_has_no_room_for() -> None:
    asked, size = [], MicrobatchSize(8192, 0.05, bound_bytes=4_000_000, expected_bytes=1000)
    for _ in range(100):
        asked.append(size.positions)
        size.took(size.positions, size.positions, size.positions, 1e-4, nbytes=3000 * size.positions)
    assert max(asked) == 1024, "they take 3.1 MB, and a quarter more is to spare"


def test_on_an_idle_device_they_take_more_memory_until_a_row_comes() -> None:
    size = MicrobatchSize(65_536, 0.05, bound_bytes=4_000_000, expected_bytes=1000)
    for _ in range(100):
        size.took(size.positions, size.positions, size.positions, 1e-4, nbytes=3000 * size.positions, waited_s=0.0)
    assert 4_000_000 < 3000 * size.positions <= 16_000_000
    size.took(size.positions, size.positions, size.positions, 1e-4, nbytes=3000 * size.positions, waited_s=1.0)
    assert 3000 * size.positions <= 4_000_000


def test_the_first_one_keeps_the_bound_on_memory_by_what_is_expected() -> None:
    assert MicrobatchSize(8192, 0.05, bound_bytes=1_000_000, expected_bytes=10_000).positions == 80


def test_a_position_that_takes_more_than_expected_makes_it_smaller_at_once() -> None:
    size = MicrobatchSize(8192, 0.05, bound_bytes=1_000_000, expected_bytes=1000)
    size.took(FIRST, FIRST, FIRST, 20.0, nbytes=10_000 * FIRST)  # the first time of a size says nothing of its pace
    assert size.positions == 80
