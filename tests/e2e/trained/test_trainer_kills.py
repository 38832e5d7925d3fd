"""kill -9 of the trainer at random moments; `python -m tests.training.kills` is the long version."""

from pathlib import Path

from tests.e2e.rings import Ring
from tests.training.kills import check, train


def test_killed_and_resumed_a_run_ends_with_the_bytes_of_one_that_was_not(served: Ring, tmp_path: Path) -> None:
    whole = train(served, tmp_path, "whole", steps=6, max_lag=0)
    killed = train(served, tmp_path, "killed", steps=6, max_lag=0, kills=2)
    check(whole, 6, on_policy=True)
    check(killed, 6, on_policy=True)
    assert [line.loss for line in killed.lines] == [line.loss for line in whole.lines]
    assert killed.adapter == whole.adapter


def test_killed_while_it_runs_ahead_a_run_consumes_no_group_twice_and_loses_none(served: Ring, tmp_path: Path) -> None:
    check(train(served, tmp_path, "ahead", steps=6, max_lag=1, kills=1), 6, on_policy=False)
