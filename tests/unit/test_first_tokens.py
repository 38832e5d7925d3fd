"""The pace that workers measure, and what an api process makes of it."""

from itertools import count

import pytest

from api.ring.first_tokens import FirstTokens, Forecast
from shared.redis.processes.worker_registry import WorkerState, WorkerStatus
from shared.redis.queue.sequence_queue import CLASSES, ClaimPlan
from shared.sequences import Claim, SamplingParams, SequenceClass, SequenceSpec
from worker.claim_plan import NOTHING, ClassShares, SchedulerState, plan_claims
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
    assert "first_token_s" not in rates.figures(5.0, 4)
    assert rates.figures(5.0, 4)["claims_per_s:interactive"] == pytest.approx(4.0)
    assert "claims_per_s:batch" not in rates.figures(5.0, 4), "none was there to measure"


def test_an_idle_worker_does_not_take_what_it_is_asked_for_what_it_can_do() -> None:
    rates = ServiceRates()
    for second in range(1, 60):
        rates.claimed(plan(32), claims(1), float(second))
    assert rates.figures(60.0, 32) == {}
    for second in range(60, 64):
        rates.claimed(plan(8), claims(8), float(second))
    rates.claimed(plan(8), claims(2), 70.0)  # the queue was empty in between
    for second in range(71, 200):
        rates.claimed(plan(8), claims(1), float(second))
    assert rates.figures(100.0, 8)["claims_per_s:interactive"] == pytest.approx(8.0), "it stays what was measured"
    # Answers may be much shorter by now: a pace that nobody has seen for a minute would refuse what can be served.
    assert rates.figures(200.0, 8) == {}
    for second in range(200, 203):
        rates.claimed(plan(1), claims(1), float(second))
    assert rates.figures(202.0, 8)["claims_per_s:interactive"] == pytest.approx(1.0), "the old pace is forgotten"


def test_a_pause_does_not_count_as_slow_work_and_full_rows_that_never_end_do() -> None:
    rates = ServiceRates()
    for second in range(1, 6):
        rates.claimed(plan(4), claims(4), float(second))
    rates.claimed(NOTHING, [], 6.0)
    rates.claimed(plan(4), claims(4), 50.0)
    assert rates.figures(50.0, 4)["claims_per_s:interactive"] == pytest.approx(4.0)
    rates.claimed(plan(0), [], 60.0)  # all rows are taken, and stay so
    assert rates.figures(110.0, 4)["claims_per_s:interactive"] < 0.4
    assert rates.figures(1000.0, 4)["claims_per_s:interactive"] < 0.1, "however long"


class Rows:
    """A worker's rows with the product's plans, its queues, and time in steps of a tenth of a second."""

    def __init__(self, row_s: float) -> None:
        self.row_s = row_s
        self.rates = ServiceRates()
        self.now = 1.0
        self._ends: list[tuple[float, SequenceClass]] = []

    def run(self, seconds: float, **arrivals_per_s: float) -> dict[str, float]:
        """Under so many arrivals of each class; the queues are empty before. Served in a second, by class."""
        waiting, served, until = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0), self.now + seconds
        while self.now < until:
            self.now += 0.1
            for kind in CLASSES:
                waiting[kind] += 0.1 * arrivals_per_s.get(kind, 0.0)
            self._ends = [(at, kind) for at, kind in self._ends if at > self.now]
            taken = self._claim(waiting)
            while any(taken.values()):
                served = {kind: served[kind] + taken[kind] for kind in CLASSES}
                taken = self._claim(waiting)
        return {kind: served[kind] / seconds for kind in CLASSES}

    def _claim(self, waiting: dict[SequenceClass, float]) -> dict[SequenceClass, int]:
        """In the order of claim.lua: each class up to its share, then the rows that are left."""
        batch = sum(kind == "batch" for _, kind in self._ends)
        state = SchedulerState(len(self._ends) - batch, batch, ROWS, 10**6)
        offer = plan_claims(state, ClassShares())
        taken: dict[SequenceClass, int] = dict.fromkeys(CLASSES, 0)
        first: tuple[tuple[SequenceClass, int], ...] = (
            ("interactive", offer.interactive_first), ("batch", offer.batch_first),
            ("interactive", offer.rows), ("batch", offer.batch_max),
        )  # fmt: skip
        for kind, most in first:
            most = min(most, offer.batch_max - taken["batch"]) if kind == "batch" else most
            number = min(most, offer.rows - sum(taken.values()), int(waiting[kind]))
            waiting[kind] -= number
            taken[kind] += number
            self._ends += [(self.now + self.row_s * (1 + len(self._ends) % 8 / 8), kind)] * number
        self.rates.claimed(offer, claims(taken["interactive"]) + claims(taken["batch"], "batch"), self.now)
        return taken

    def paces(self) -> dict[str, float]:
        figures = self.rates.figures(self.now, ROWS)
        return {kind: figures[f"claims_per_s:{kind}"] for kind in CLASSES if f"claims_per_s:{kind}" in figures}


ROWS = 16


def test_a_class_s_trickle_beside_the_other_s_load_is_not_its_pace() -> None:
    rows = Rows(row_s=1.0)
    served = rows.run(60, interactive=40, batch=0.075)
    assert rows.paces() == {"interactive": pytest.approx(served["interactive"], rel=0.2)}


def test_the_pace_of_batch_alone_is_measured_in_the_rows_that_it_may_have() -> None:
    rows = Rows(row_s=1.0)
    rows.run(60, interactive=40, batch=0.075)
    served = rows.run(60, batch=40)
    assert rows.paces() == {"batch": pytest.approx(served["batch"], rel=0.2)}
    assert served["batch"] > 7, "14 rows of 1 to 2 seconds"


def test_classes_that_both_wait_are_measured_with_their_shares() -> None:
    rows = Rows(row_s=1.0)
    served = rows.run(60, interactive=40, batch=40)
    assert rows.paces() == pytest.approx(served, rel=0.2)
    assert served["interactive"] > 1.5 * served["batch"]


def test_few_first_tokens_say_nothing_and_one_that_took_very_long_changes_nothing() -> None:
    rates = ServiceRates()
    rates.first_token(20.0, 100, 20.0)
    for number in range(1, 19):
        rates.first_token(0.1, 100, 20.0 + 0.1 * number)
    assert rates.figures(22.0, 16) == {}
    rates.first_token(0.1, 100, 22.0)
    assert rates.figures(22.0, 16) == {"first_token_s": 0.1, "prompt_tokens": 100.0}


def test_what_is_fed_is_said_only_where_rows_wait_for_their_prompts() -> None:
    decodes, reads = ServiceRates(), ServiceRates()
    for number in range(1, 101):
        decodes.first_token(0.1, 100, 0.1 * number)  # a claim in 0.1 s, and its prompt is no trouble
        reads.first_token(1.0, 100, 0.1 * number)  # ten wait for their prompts
    assert "prompt_tokens_per_s" not in decodes.figures(10.0, 16), "1,000 a second is only what was asked"
    assert reads.figures(10.0, 16)["prompt_tokens_per_s"] == pytest.approx(1000)


def test_first_tokens_are_said_with_their_spread_and_prompts_with_their_speed() -> None:
    rates = ServiceRates()
    for number in range(1, 101):
        now = 0.25 * number
        rates.first_token(0.5 if number % 2 else 0.7, 100, now)
    figures = rates.figures(25.0, 4)
    assert figures["first_token_s"] == 0.7, "nine in ten come sooner, or then"
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
        tokens.let_in("m", "interactive", 1000)
    assert tokens.places(forecast, "m", "interactive", 100, 10.0).places < 25, "such prompts are fed at 2 a second"
    assert tokens.places(forecast, "m", "batch", 100, 10.0).places == 65, "they do not wait with the other class"


def test_what_was_refused_takes_no_places_from_others() -> None:
    forecast = Forecast(20.0, 0.3, 50.0, 1000.0)
    tokens = FirstTokens()
    places = tokens.places(forecast, "m", "interactive", 50, 300.0).places
    assert places == 4194
    for _ in range(60):
        late = tokens.places(forecast, "m", "interactive", 128_000, 300.0)
        tokens.refused(forecast, "m", "interactive", 1, late.places)
    tokens.let_in("m", "interactive", 50)
    assert tokens.places(forecast, "m", "interactive", 50, 300.0).places == places


def test_a_prompt_however_long_is_let_in_behind_half_as_many() -> None:
    ordinary = FirstTokens().places(Forecast(20.0, 0.3, 50.0, 1000.0), "m", "interactive", 50, 300.0).places
    longest = FirstTokens().places(Forecast(20.0, 0.3, 50.0, 1000.0), "m", "interactive", 250_000, 300.0).places
    assert longest == ordinary // 2
    unknown = FirstTokens().places(Forecast(20.0, 0.3, 50.0, 0.0), "m", "interactive", 250_000, 300.0).places
    assert unknown == ordinary, "prompts do not bound the pace: nobody knows what it takes"


def test_prompts_bound_a_model_s_pace_only_where_they_bound_each_worker_s() -> None:
    decoding = {name: value for name, value in MEASURED.items() if name != "prompt_tokens_per_s"}
    both = Forecast.of([worker("a", 8, **MEASURED), worker("b", 8, **decoding)], "interactive")
    assert both is not None and both.pace(10_000) == both.claims_per_s == pytest.approx(20)
    assert both.own_s(10_000) == 0


@pytest.mark.parametrize("refusals", [0, 1])
@pytest.mark.parametrize("tokens", [50, 5000, 250_000])
def test_what_is_refused_would_come_in_the_share_that_is_kept_free_or_later(tokens: int, refusals: int) -> None:
    forecast, known = Forecast(20.0, 0.3, 50.0, 1000.0), FirstTokens()
    for _ in range(refusals):
        known.refused(forecast, "m", "interactive", 1, 1)
    first_one_too_many = known.places(forecast, "m", "interactive", tokens, 30.0).places + 1
    soonest_s = forecast.seconds(first_one_too_many, known.prompt_tokens("m", "interactive"), tokens)
    assert soonest_s >= 30 * (1 - known.reserved_share("m", "interactive"))


def test_who_was_refused_comes_back_in_when_a_tenth_has_been_worked_off() -> None:
    forecast = Forecast.of([worker("a", 8, **MEASURED)], "interactive")
    assert forecast is not None
    tokens = FirstTokens()
    places = tokens.places(forecast, "m", "interactive", 100, 10.0).places
    assert tokens.refused(forecast, "m", "interactive", 21, places) == 3, "21 and a tenth of 65, at 10 a second"
    assert tokens.places(forecast, "m", "interactive", 100, 10.0).places == 58
    assert tokens.places(forecast, "m", "batch", 100, 10.0).places == 65
    tokens.let_in("m", "interactive", 100)
    assert tokens.places(forecast, "m", "interactive", 100, 10.0).places == 65
