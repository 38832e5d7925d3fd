"""The pace that workers measure, and what an api process makes of it."""

from itertools import count

import pytest

from api.ring.first_tokens import FirstTokens, Forecast
from shared.redis.queue.sequence_queue import ClaimPlan
from shared.redis.ring.worker_registry import WorkerState, WorkerStatus
from shared.sequences import Claim, SamplingParams, SequenceClass, SequenceSpec
from worker.claim_plan import NOTHING
from worker.service_rates import ServiceRates

_numbers = count()


def claims(number: int, kind: SequenceClass = "interactive") -> list[Claim]:
    return [
        Claim(SequenceSpec(f"s{next(_numbers)}", "m", (1,), SamplingParams(1, 1), kind), "stream", "0-1", 1)
        for _ in range(number)
    ]


def plan(rows: int) -> ClaimPlan:
    return ClaimPlan(rows, rows, 0, rows, 10**6, False)


def test_the_pace_is_measured_while_more_waits_than_there_are_rows() -> None:
    rates = ServiceRates()
    for second in range(1, 6):
        rates.claimed(plan(4), claims(4), float(second))
    assert "first_token_s" not in rates.figures(5.0)
    assert rates.figures(5.0)["claims_per_s:interactive"] == pytest.approx(4.0)
    assert "claims_per_s:batch" not in rates.figures(5.0), "none was there to measure"


def test_an_idle_worker_does_not_take_what_it_is_asked_for_what_it_can_do() -> None:
    rates = ServiceRates()
    for second in range(1, 60):
        rates.claimed(plan(32), claims(1), float(second))
    assert rates.figures(60.0) == {}
    for second in range(60, 64):
        rates.claimed(plan(8), claims(8), float(second))
    rates.claimed(plan(8), claims(2), 70.0)  # the queue was empty in between
    for second in range(71, 100):
        rates.claimed(plan(8), claims(1), float(second))
    assert rates.figures(100.0)["claims_per_s:interactive"] == pytest.approx(8.0), "it stays what was measured"


def test_a_pause_does_not_count_as_slow_work_and_full_rows_that_never_end_do() -> None:
    rates = ServiceRates()
    for second in range(1, 6):
        rates.claimed(plan(4), claims(4), float(second))
    rates.claimed(NOTHING, [], 6.0)
    rates.claimed(plan(4), claims(4), 100.0)
    assert rates.figures(100.0)["claims_per_s:interactive"] == pytest.approx(4.0)
    rates.claimed(plan(0), [], 110.0)  # all rows are taken, and stay so
    assert rates.figures(160.0)["claims_per_s:interactive"] < 0.4


def test_first_tokens_are_said_with_their_spread_and_prompts_with_their_speed() -> None:
    rates = ServiceRates()
    for number in range(1, 101):
        now = 0.25 * number
        rates.first_token(0.5 if number % 2 else 0.7, 100, now)
    figures = rates.figures(25.0)
    assert 0.6 < figures["first_token_s"] < 0.9, "the mean of 0.6 and two mean deviations of 0.1"
    assert figures["prompt_tokens"] == pytest.approx(100)
    assert figures["prompt_tokens_per_s"] == pytest.approx(400, rel=0.05), "they were fed one behind another"


def worker(name: str, rows: int, state: WorkerState = "ready", **extra: float) -> WorkerStatus:
    figures = {key.replace("_interactive", ":interactive"): value for key, value in extra.items()}
    return WorkerStatus(name, "m", "h", 1, state, 0, rows, 0, 0, 1, 0.0, 0, 1, 1, extra=figures)


MEASURED = {
    "claims_per_s_interactive": 10.0,
    "first_token_s": 0.5,
    "prompt_tokens": 100.0,
    "prompt_tokens_per_s": 2000.0,
}


def test_workers_that_have_measured_nothing_count_by_their_rows_and_without_any_nothing_is_predicted() -> None:
    assert Forecast.of([], "interactive") is None
    assert Forecast.of([worker("a", 8), worker("b", 8)], "interactive") is None
    forecast = Forecast.of([worker("a", 8, **MEASURED), worker("b", 24)], "interactive")
    assert forecast is not None and forecast.claims_per_s == pytest.approx(40)
    assert Forecast.of([worker("a", 8, **MEASURED)], "batch") is None
    assert Forecast.of([worker("a", 8, "paused", **MEASURED)], "interactive") is None, "nobody knows when it goes on"


def test_places_follow_from_the_deadline_the_pace_and_the_prompt() -> None:
    forecast = Forecast.of([worker("a", 8, **MEASURED)], "interactive")
    assert forecast is not None
    tokens = FirstTokens()
    assert tokens.places(forecast, "m", "interactive", 100, 10.0) == (65, 200), "10 a second for 0.7 of 10 s less 0.5 s"
    assert tokens.places(forecast, "m", "interactive", 100, 0.3) == (0, 30)
    long_one = tokens.places(forecast, "m", "interactive", 4100, 10.0).places
    assert long_one < 50, "its own prompt takes 2 s more"
    for _ in range(200):
        tokens.places(forecast, "m", "interactive", 1000, 10.0)
    assert tokens.places(forecast, "m", "interactive", 100, 10.0).places < 25, "such prompts are fed at 2 a second"


def test_who_was_refused_comes_back_in_when_a_tenth_has_been_worked_off() -> None:
    forecast = Forecast.of([worker("a", 8, **MEASURED)], "interactive")
    assert forecast is not None
    tokens = FirstTokens()
    places = tokens.places(forecast, "m", "interactive", 100, 10.0).places
    assert tokens.refused(forecast, "m", "interactive", 21, places) == 3, "21 and a tenth of 65, at 10 a second"
    assert tokens.places(forecast, "m", "interactive", 100, 10.0).places == 58
    assert tokens.places(forecast, "m", "batch", 100, 10.0).places == 65
    tokens.let_in("m", "interactive")
    assert tokens.places(forecast, "m", "interactive", 100, 10.0).places == 65
