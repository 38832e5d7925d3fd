"""When drafts pay, of texts and of a draft model, and how long ones: plain times, no model."""

from itertools import pairwise

import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_model.config import SpeculationConfig
from worker.engine.speculation.drafting import Drafting
from worker.engine.speculation.payoff import (
    AT_FIRST,
    EARNED,
    ENOUGH,
    HOPE,
    LEAST_SAMPLES,
    LIKELY,
    LONGEST_PAUSE,
    PLAIN_STALE,
    SAMPLES,
    STALE,
    Account,
    Chance,
    Costs,
    Try,
    best_step,
    brought,
)


def test_a_row_whose_drafts_fail_pauses_ever_longer_and_comes_back() -> None:
    chance = Chance()
    assert not chance.pauses(1)
    apart = []
    for _ in range(6):
        chance.learn(3, 0)
        tries = [step for step in range(1, 513) if not chance.pauses(step)]
        apart.append(tries[1] - tries[0])
        assert tries[0] == apart[-1], "all rows try in the same steps"
    assert apart == sorted(apart) and apart[0] > 1 and apart[-1] == 1 << LONGEST_PAUSE
    assert chance.known < 0.2 and chance.length(5) == 1
    assert not chance.pauses(64) and chance.value == HOPE, "else nobody would find out that it has changed"
    for _ in range(4):
        chance.learn(5, 5)
    assert not chance.pauses(65) and chance.value > 0.8 and chance.length(5) == 5


def test_one_draft_that_fails_does_not_stop_a_row_whose_drafts_hold() -> None:
    chance = Chance()
    for _ in range(10):
        chance.learn(5, 5)
    chance.learn(5, 0)
    assert not chance.pauses(1) and chance.value > 0.8


def test_what_drafts_bring() -> None:
    all_, least = brought([Try(0.5, 2, 1.0), Try(1.0, 5, 1.0), Try(1.0, 0, 1.7)], 3)
    assert all_ == pytest.approx([1.5 + 2 + 1, 1.75 + 3 + 1, 1.75 + 4 + 1])
    assert least == pytest.approx([1.5, 1.7, 1.7]), "one row gains less than the one without a draft is used to"


def best_length(costs: Costs, rows: list[Try], *, alone: bool) -> int:
    """Tokens of a draft, at most, where there is no draft model."""
    return best_step(costs, rows, alone=alone)[0]


def times_of(rows: int, *seconds: float) -> Costs:
    times = Costs()
    for width, each in enumerate(seconds, 1):
        for _ in range(LEAST_SAMPLES if each else 0):
            times.took(rows, width, each)
    return times


def test_the_first_step_of_its_kind_may_take_long() -> None:
    times, one = times_of(1, 1.0), [Try(0.9, 5, 1.0)]
    times.took(1, 2, 900.0)  # a kernel is compiled
    assert best_length(times, one, alone=True) == 1, "tried again at once"
    times.took(1, 2, 1.1)
    assert best_length(times, one, alone=True) == 5
    times.took(1, 1, 1.0)
    times.took(1, 2, 900.0)
    assert best_length(times, one, alone=True) == 5, "twice may be two busy moments"
    times.took(1, 2, 900.0)
    assert best_length(times, one, alone=True) == 0, "thrice is no accident"


def test_drafts_come_only_where_they_pay() -> None:
    four, cheap = [Try(0.9, 5, 1.0)] * 4, times_of(1, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    assert best_length(Costs(), four, alone=True) == 0, "a step without drafts is to be timed first"
    assert best_length(times_of(4, 1.0), four, alone=True) == 1, "who does not try does not know"
    assert best_length(times_of(4, 1.0, 1.2), four, alone=True) == 5, "and it may go on so"
    assert best_length(times_of(4, 1.0, 1.9), four, alone=True) == 2, "the second may take nothing"
    assert best_length(times_of(4, 1.0, 1.9, 2.8), four, alone=True) == 0
    assert best_length(times_of(4, 1.0, 1.9, 1.95), four, alone=True) == 5, "nor may those behind it"
    assert best_length(cheap, [Try(1.0, 5, 1.0)], alone=True) == 5
    assert best_length(cheap, [Try(0.1, 5, 1.0)], alone=True) == 0
    assert best_length(times_of(4, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), four, alone=True) == 0
    assert best_length(times_of(4, 1.0, 1.01, 3.0, 4.0, 5.0, 6.0), four, alone=True) == 1


def test_nobody_waits_long_for_the_drafts_of_others() -> None:
    times = times_of(4, 1.0, 1.05, 1.2, 1.3, 1.4, 1.5)
    three = [Try(1.0, 5, 1.0)] * 3
    assert best_length(times, [*three, Try(1.0, 5, 1.0)], alone=True) == 5
    assert best_length(times, [*three, Try(0.5, 0, 1.0)], alone=True) == 1, "of one that never has a draft"
    assert best_length(times, [*three, Try(0.5, 0, 3.0)], alone=True) == 5, "of one that has none just now"
    assert best_length(times, [*three, Try(1.0, 5, 1.0)], alone=False) == 1, "of a prompt"


def test_widths_between_known_ones_are_not_all_tried() -> None:
    times = times_of(4, 1.0, 0, 0, 0, 0, 11.0)
    assert times.likely(4, 3) == pytest.approx(5.0)
    assert best_length(times, [Try(0.9, 5, 1.0)] * 4, alone=True) == 0


def test_a_step_without_drafts_is_timed_now_and_then_while_all_have_some() -> None:
    times = times_of(4, 1.0, 1.1)
    for _ in range(ENOUGH - 1):
        times.took(4, 1, 1.0)
    for _ in range(PLAIN_STALE):
        assert best_length(times, [Try(0.9, 1, 1.0)] * 4, alone=True) == 1
        times.took(4, 2, 1.1)
    assert best_length(times, [Try(0.9, 1, 1.0)] * 4, alone=True) == 0, "the machine may be busier than it was, or less"


@pytest.mark.parametrize(("seconds", "taken"), [(2.5, ENOUGH + 1), (9.0, ENOUGH + 4)])
def test_old_times_are_taken_again_and_a_single_one_soon(seconds: float, taken: int) -> None:
    """One that is out of line is asked for sooner for longer."""
    times = Costs()
    waits = []
    for _ in range(taken):
        times.took(4, 2, seconds)
        for _ in range(ENOUGH):
            times.took(4, 1, 1.0)
        waits.append(ENOUGH)
        while not best_length(times, [Try(0.9, 1, 1.0)] * 4, alone=True):
            times.took(4, 1, 1.0)
            waits[-1] += 1
    assert waits == sorted(waits) and waits[0] < STALE / 20 and waits[-2:] == [STALE, STALE]


def test_what_has_paid_is_tried_again_in_full_length_however_long_ago_that_was() -> None:
    """The first check after a long time takes longer than others, and one of a short draft seldom pays for it."""
    times, four = times_of(4, 1.0, 1.3, 1.3, 1.3, 1.3, 1.3), [Try(0.7, 5, 1.0)] * 4
    for _ in range(SAMPLES):
        times.took(4, 6, 1.3)
    times.took(4, 1, 1.0, STALE)
    assert times.known(4, 6) is None and best_length(times, four, alone=True) == 5
    times.took(4, 2, 2.9)
    times.took(4, 2, 2.8)
    assert best_length(times, four, alone=True) == 5, "nor does what that one took say much of longer ones"
    for took in (4.0, 4.0):
        assert times.likely(4, 6) == 1.3, "one may be of a busy moment, or the first after a long time"
        times.took(4, 6, took)
    assert times.known(4, 6) == 4.0, "what it took long ago counts no more"
    times = times_of(4, 1.0, 3.5, 3.6, 3.7, 3.8, 3.9)
    times.took(4, 1, 1.0, STALE)
    assert best_length(times, four, alone=True) == 1, "what has not paid is begun anew"


def test_what_longer_drafts_take_is_known_from_steps_amid_prompts() -> None:
    times, beside = times_of(4, 2.0), times_of(4, 1.0, 1.5, 1.6)
    times.beside = beside
    assert times.likely(4, 3) == pytest.approx(2.6) and beside.likely(4, 3) == pytest.approx(1.6)
    beside.beside = times
    assert times.likely(16, 2) is None, "of other sizes nothing is"


def test_two_checks_of_a_moment_in_which_kernels_are_compiled_do_not_end_drafts() -> None:
    account = Account()
    for seconds in (60.0, 45.0, 1.4, 1.4, 1.4):
        account.checked(seconds, 2.9, 1.0)
        assert not account.is_spent
    assert not account.owes


def test_rows_of_batches_wait_for_the_drafts_of_others() -> None:
    times = times_of(4, 1.0, 1.5)
    one = [Try(0.9, 1, 1.0)] * 3
    assert best_length(times, [*one, Try(0.0, 0, 1.0)], alone=True) == 0
    assert best_length(times, [Try(0.9, 1, np.inf)] * 4, alone=True) == 1


def test_rows_that_begin_without_hope_have_some_now_and_then() -> None:
    """What others like them have come to stand for is no reason never to try one."""
    chance = Chance(0.1)
    assert chance.pauses(1) and chance.value == 0.1
    assert not chance.pauses(2) and chance.value == HOPE
    assert not Chance(LIKELY).pauses(1)


def account_of(seconds: float) -> Account:
    account = Account()
    account.plain(seconds, 1.0)
    return account


@pytest.mark.parametrize("took", [1.5, 3.0])
def test_what_drafts_and_looking_for_them_lose_is_a_hundredth_of_all_steps(took: float) -> None:
    """However well they are spoken of: each step that checks some brings one token a row."""
    account, lost, plain = account_of(1.0), 0.0, 20_000
    for _ in range(plain):
        if account.is_spent:
            account.plain(1.0, 1.0)
            continue
        account.checked(took, 1.0, 1.0)
        account.looked(0.1)
        lost += took - 1 + 0.1
    assert plain * EARNED / 3 < lost < AT_FIRST + 2 * took + plain * EARNED


def test_where_a_try_costs_much_it_is_paid_for_before() -> None:
    account, tries, lost = Account(lends=False), [], 0.0
    for step in range(2_000):
        if account.is_spent:
            account.plain(1.0, 1.0)
        else:
            account.checked(2.5, 1.0, 1.0)
            tries.append(step)
            lost += 1.5
            assert lost < 1.5 + 0.02 * (step + 1), "one try more than has been paid for"
    assert tries[0] == 25 and len(tries) > 10
    paying = Account(lends=False)
    for step in range(200):
        if paying.is_spent:
            paying.plain(1.0, 1.0)
        else:
            paying.checked(1.5, 2.0, 1.0)
        assert paying.is_spent == (step < 24), "and goes on if it pays"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_rows_with_texts_and_those_without_have_accounts_of_their_own(on_cpu: bool) -> None:
    """What steps without drafts take is known to both, and of each nothing is lost by what the other's drafts lose."""
    drafting = Drafting(SpeculationConfig(), [KVCache()], on_cpu=on_cpu)
    without = drafting.account(32, has_texts=False)
    for _ in range(400):
        without.plain(2.0, 1.0)
    without.checked(30.0, 1.0, 2.0)
    texts = drafting.account(32, has_texts=True)
    assert without.plain_s == texts.plain_s == 2.0 and texts.is_spent == texts.owes == on_cpu
    texts.plain(4.0, 1.0)
    assert texts.plain_s > without.plain_s == 2.0
    assert drafting.account(20, has_texts=True) is texts and drafting.account(20, has_texts=False) is without


def test_drafts_that_pay_are_made_all_the_time_though_the_machine_is_busy_at_times() -> None:
    account = account_of(1.0)
    for step in range(2_000):
        account.plain(1.0, 1.0)
        account.checked(4.5 if step % 300 > 293 else 1.5, 2.0, 1.0)
        assert not account.is_spent


def test_tries_come_several_at_once() -> None:
    account, tries = account_of(1.0), []
    for step in range(2_000):
        if account.is_spent:
            account.plain(1.0, 1.0)
        else:
            account.checked(1.4, 1.0, 1.0)
            tries.append(step)
    apart = [after - before for before, after in pairwise(tries)]
    assert apart.count(1) > 2 * sum(each > 50 for each in apart) > 10


NONE = [Try(0.0, 0, 1.0)]  # a row without a draft
FREE = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # of steps of each width: a wider one takes no longer


def best(forward_s: float, chance: float, *steps: float, rows: int = 4) -> tuple[int, bool]:
    times, model = times_of(rows, *steps), [Try(chance, 5, 1.0)] * rows
    for _ in range(LEAST_SAMPLES):
        times.took(rows, 0, forward_s)
    return best_step(times, NONE * rows, model, times.forward_s(rows), alone=True)


def test_a_models_own_forwards_count() -> None:
    assert best(0.1, 0.9, *FREE) == (5, True)
    assert best(1.0, 1.0, *FREE) == (0, False), "a draft model as slow as the model itself cannot win"
    assert best(0.1, 0.3, *FREE) == (1, True), "the second token would seldom be reached"
    assert best(0.1, 0.05, *FREE) == (0, False)
    assert best(0.1, 0.9, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0) == (0, False), "steps that check take as much longer"


def test_nothing_pays_before_a_step_without_drafts_is_timed_and_what_is_not_known_is_tried_with_one_token() -> None:
    model = [Try(0.9, 5, 1.0)] * 4
    assert best_step(Costs(), NONE * 4, model, 0.0, alone=True) == (0, False)
    assert best_step(times_of(4, 1.0), NONE * 4, model, 0.0, alone=True) == (1, True)


def test_texts_are_drafted_from_where_the_model_does_not_pay_and_the_other_way_round() -> None:
    times, text = times_of(2, *FREE), [Try(0.9, 3, 1.0), *NONE]
    model = [text[0], Try(0.9, 5, 1.0)]
    assert best_step(times, text, model, 9.0, alone=True) == (3, False)
    assert best_step(times, text, model, 0.01, alone=True) == (5, True)
    unlikely = [Try(0.01, 3, 1.0), *NONE]
    assert best_step(times, unlikely, [unlikely[0], model[1]], 0.01, alone=True) == (5, True)


def test_no_row_waits_long_for_drafts_of_others() -> None:
    model = [Try(1.0, 5, 1.0), *NONE]
    for alone, expected in ((True, (0, False)), (False, (0, False))):
        assert best_step(times_of(2, *FREE), NONE * 2, model, 0.2, alone=alone) == expected
    assert best_step(times_of(2, *FREE), NONE * 2, model, 0.01, alone=True) == (5, True)


def test_a_forward_that_is_timed_first_is_not_believed() -> None:
    times = Costs()
    times.took(1, 0, 60.0)  # a GPU makes its kernels
    assert times.forward_s(1) == 0
    times.took(1, 0, 0.2)
    assert times.forward_s(1) == times.forward_s(30) == pytest.approx(0.2)
