"""Admission maths: neither class starves, an idle class lends its share, reserved rows stay free of batch work."""

from hypothesis import given
from hypothesis import strategies as st

from worker.claim_plan import ClassShares, SchedulerState, plan_claims, plan_room

SHARES = ClassShares(interactive_share=0.7, reserved_interactive=2)


def state(interactive: int, batch: int, rows: int = 10, kv: int = 1000) -> SchedulerState:
    return SchedulerState(interactive, batch, rows, kv)


def test_an_empty_worker_offers_shares_first_and_the_rest_to_anyone() -> None:
    plan = plan_claims(state(0, 0), SHARES)
    assert (plan.rows, plan.interactive_first, plan.batch_first, plan.batch_max) == (10, 7, 3, 8)


def test_a_class_over_its_share_waits_for_the_other() -> None:
    plan = plan_claims(state(7, 0), SHARES)
    assert (plan.interactive_first, plan.batch_first) == (0, 3)
    plan = plan_claims(state(0, 8), SHARES)
    assert (plan.rows, plan.interactive_first, plan.batch_first, plan.batch_max) == (2, 2, 0, 0)


def test_nothing_is_claimed_without_rows_or_kv() -> None:
    assert plan_claims(state(5, 5), SHARES).rows == 0
    assert plan_claims(state(1, 1, kv=0), SHARES).rows == 0


def test_one_row_serves_both_classes() -> None:
    assert plan_claims(state(0, 0, rows=1), SHARES).batch_max == 1


@given(
    rows=st.integers(1, 64),
    interactive=st.integers(0, 64),
    batch=st.integers(0, 64),
    share=st.floats(0, 1),
    reserved=st.integers(0, 8),
)
def test_no_plan_takes_more_than_there_is(rows: int, interactive: int, batch: int, share: float, reserved: int) -> None:
    plan = plan_claims(state(interactive, batch, rows), ClassShares(share, reserved))
    free = max(0, rows - interactive - batch)
    assert 0 <= plan.interactive_first + plan.batch_first <= plan.rows == free
    assert 0 <= plan.batch_first <= plan.batch_max <= free


def test_a_full_worker_still_takes_interactive_sequences_up_to_their_share() -> None:
    plan = plan_room(state(2, 8), SHARES)
    assert (plan.rows, plan.interactive_first, plan.batch_first, plan.batch_max) == (5, 5, 0, 0)
    assert plan_room(state(7, 3), SHARES).rows == 0, "they have their share"
    assert plan_room(state(2, 7), SHARES).rows == 0, "there is a free row"
    assert plan_room(state(2, 8, kv=0), SHARES).rows == 0


def test_batch_work_keeps_a_row() -> None:
    assert plan_room(state(0, 1, rows=1), SHARES).rows == 0
    assert plan_room(state(0, 4, rows=4), ClassShares(interactive_share=1.0)).rows == 3
