"""What a worker gives up under memory pressure, look by look."""

from shared.machine.memory import Pressure
from worker.memory_relief import CALM_LOOKS, NO_ROWS_AT, MemoryRelief, Relief


def looks(steps: MemoryRelief, pressure: Pressure, count: int, rows: int) -> list[Relief]:
    """So many looks, after each of which the rows are as many as were left."""
    reliefs = []
    for _ in range(count):
        reliefs.append(steps.look(pressure, rows))
        rows -= reliefs[-1].hand_back
    return reliefs


def test_nothing_is_given_up_without_pressure() -> None:
    steps = MemoryRelief(32)
    assert looks(steps, "normal", 3, 20) == [Relief(most_rows=32)] * 3


def test_first_caches_go_then_no_row_comes_then_the_youngest_go_back() -> None:
    first, second, third, fourth, fifth = looks(MemoryRelief(32), "warning", 5, 20)
    assert (first.drops_caches, first.most_rows, first.hand_back) == (True, 32, 0)
    assert (second.most_rows, second.hand_back) == (20, 0) and second.holds_guests
    assert (third.most_rows, third.hand_back) == (20, 0)
    assert (fourth.most_rows, fourth.hand_back) == (15, 5)
    assert (fifth.most_rows, fifth.hand_back) == (11, 4)


def test_critical_pressure_waits_for_no_step() -> None:
    first = MemoryRelief(32).look("critical", 20)
    assert first.drops_caches and (first.most_rows, first.hand_back) == (10, 10)


def test_one_row_is_kept_until_critical_pressure_lasts() -> None:
    steps = MemoryRelief(32)
    warned = looks(steps, "warning", 40, 20)
    assert warned[-1].most_rows == 1
    lasting = looks(steps, "critical", NO_ROWS_AT, 1)
    assert [relief.most_rows for relief in lasting] == [1] * (NO_ROWS_AT - 1) + [0]
    assert lasting[-1].hand_back == 1


def test_a_worker_without_rows_gives_up_places_all_the_same() -> None:
    steps = MemoryRelief(32)
    assert looks(steps, "warning", 3, 0)[-1].most_rows == 1


def test_rows_come_back_slowly_and_all_of_them() -> None:
    steps = MemoryRelief(32)
    looks(steps, "critical", 3, 16)  # 8, 4, 2 are left
    calm = looks(steps, "normal", 4 * CALM_LOOKS, 2)
    most = [relief.most_rows for relief in calm[CALM_LOOKS - 1 :: CALM_LOOKS]]
    assert most == [4, 8, 16, 32]
    assert calm[-1] == Relief(most_rows=32)
    assert all(relief.drops_caches for relief in calm[:-1])


def test_pressure_that_returns_takes_from_what_has_come_back() -> None:
    steps = MemoryRelief(32)
    looks(steps, "critical", 3, 16)
    looks(steps, "normal", CALM_LOOKS, 2)
    assert looks(steps, "warning", 2, 3)[-1].most_rows == 3
