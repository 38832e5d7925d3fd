"""Whether a draft model's drafts pay: plain times, no model."""

import pytest

from tests.unit.test_speculation import times_of
from worker.engine.speculation.draft_times import DraftTimes, best_step
from worker.engine.speculation.payoff import STALE, StepTimes, Try

NONE = [Try(0.0, 0, 1.0)]  # a row without a draft
FREE = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # of steps of each width: a wider one takes no longer


def drafted(rows: int, forward_s: float) -> DraftTimes:
    times = DraftTimes()
    for _ in range(2):
        times.drafted(rows, 5, 5 * forward_s)
    return times


def best(forward_s: float, chance: float, *steps: float, rows: int = 4) -> tuple[int, bool]:
    seconds = drafted(rows, forward_s).seconds
    times, model = times_of(rows, *steps), [Try(chance, 5, 1.0)] * rows
    return best_step(times, NONE * rows, model, lambda length: seconds(rows, length), alone=True)


def test_a_models_own_forwards_count() -> None:
    assert best(0.1, 0.9, *FREE) == (5, True)
    assert best(1.0, 1.0, *FREE) == (0, False), "a draft model as slow as the model itself cannot win"
    assert best(0.1, 0.3, *FREE) == (1, True), "the second token would seldom be reached"
    assert best(0.1, 0.05, *FREE) == (0, False)
    assert best(0.1, 0.9, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0) == (0, False), "steps that check take as much longer"


def test_nothing_pays_before_a_step_without_drafts_is_timed_and_what_is_not_known_is_tried_with_one_token() -> None:
    model = [Try(0.9, 5, 1.0)] * 4
    assert best_step(StepTimes(), NONE * 4, model, lambda length: 0.0, alone=True) == (0, False)
    assert best_step(times_of(4, 1.0), NONE * 4, model, lambda length: 0.0, alone=True) == (1, True)


def test_texts_are_drafted_from_where_the_model_does_not_pay_and_the_other_way_round() -> None:
    times, text = times_of(2, *FREE), [Try(0.9, 3, 1.0), *NONE]
    model = [text[0], Try(0.9, 5, 1.0)]
    assert best_step(times, text, model, lambda length: 9.0 * length, alone=True) == (3, False)
    assert best_step(times, text, model, lambda length: 0.01 * length, alone=True) == (5, True)
    unlikely = [Try(0.01, 3, 1.0), *NONE]
    assert best_step(times, unlikely, [unlikely[0], model[1]], lambda length: 0.01 * length, alone=True) == (5, True)


def test_no_row_waits_long_for_drafts_of_others() -> None:
    model = [Try(1.0, 5, 1.0), *NONE]
    for alone, expected in ((True, (0, False)), (False, (0, False))):
        assert best_step(times_of(2, *FREE), NONE * 2, model, lambda length: 0.2 * length, alone=alone) == expected
    assert best_step(times_of(2, *FREE), NONE * 2, model, lambda length: 0.01 * length, alone=True) == (5, True)


def test_a_first_time_is_not_believed_and_an_old_one_is_forgotten() -> None:
    times = DraftTimes()
    times.drafted(1, 1, 60.0)  # a GPU makes its kernels
    assert times.seconds(1, 5) == 0
    times.drafted(1, 5, 1.0)
    assert times.seconds(1, 5) == pytest.approx(1.0) and times.seconds(30, 1) == pytest.approx(0.2)
    assert [times.step() for _ in range(STALE)].index(True) == STALE - 1
    assert times.seconds(1, 5) == 0
