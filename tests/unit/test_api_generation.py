"""From the sequences of a request to what is enqueued, and how one ends."""

import pytest

from api.generation.running import by_choice, raise_failure
from api.generation.sequences import Sequences
from shared.errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    RequestCancelledError,
)
from shared.frames import Finish, TokenEvent
from shared.sequences import SamplingParams, SequenceSpec


def sequences(
    prompts: tuple[tuple[int, ...], ...] = ((1,), (2, 3)),
    n: int = 1,
    grammar: str = "",
) -> Sequences:
    sampling = SamplingParams(4, seed=2**63 - 1, grammar=grammar)
    return Sequences(SequenceSpec("r", "m", (), sampling, deadline_ms=9), prompts, n)


def test_samples_of_one_prompt_share_a_group_and_nothing_else() -> None:
    specs = sequences(n=2).specs("api1")
    assert [spec.id for spec in specs] == ["r-0", "r-1", "r-2", "r-3"]
    assert [spec.prompt_ids for spec in specs] == [(1,), (1,), (2, 3), (2, 3)]
    assert [spec.group for spec in specs] == ["r-p0", "r-p0", "r-p1", "r-p1"]
    assert specs[0].sampling.seed == specs[2].sampling.seed == 2**63 - 1
    assert specs[0].sampling.seed != specs[1].sampling.seed < 2**63
    assert {(spec.api, spec.deadline_ms) for spec in specs} == {("api1", 9)}


def test_a_single_sample_stands_alone() -> None:
    assert {spec.group for spec in sequences().specs("a")} == {""}


def test_a_short_request_for_very_much_is_refused_before_it_is_written_out() -> None:
    long, letters = (tuple([1] * 65_536),), "a" * 262_144
    assert len(sequences(long, 128).specs("a")) == 128
    for many in (
        sequences(long, 129),
        sequences(((1,),) * 256, 4, letters),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            many.specs("a")
        assert caught.value.param == "n"


def test_events_are_grouped_by_choice_in_order() -> None:
    a, b, c = (TokenEvent(seq, 1, 0, [], []) for seq in "aba")
    assert list(by_choice([(1, a), (0, b), (1, c)])) == [(1, [a, c]), (0, [b])]
    assert list(by_choice([(1, a)])) == [(1, [a])]


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (Finish("deadline"), DeadlineExceededError),
        (Finish("cancelled"), RequestCancelledError),
        (Finish("error", None, "context_length_exceeded", "x"), ContextLengthExceededError),
        (Finish("error", None, "no_such_code", "x"), EngineError),
    ],
)
def test_an_end_before_its_time_is_an_error(finish: Finish, error: type[Exception]) -> None:
    with pytest.raises(error):
        raise_failure(finish)


def test_a_regular_end_is_none() -> None:
    raise_failure(Finish("stop"))
    raise_failure(Finish("length"))
