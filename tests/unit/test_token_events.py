"""Token events are taken apart and put together again, and not one field is lost."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared.frames import Finish, TokenEvent, TokenLogprob
from shared.sequences import SamplingParams, SequenceSpec, Timings
from shared.token_events import by_token, join, merged, part, splice
from shared.trajectories import Trajectory, event_of, result_of

# What each field is in the pieces of one event, by where they stand; a field that is not here fails the first test.
WHOLE = {"seq", "attempt", "version"}
BY_POSITION = {"position", "tokens", "logprobs", "top_logprobs", "routes"}
WITH_FIRST = {"prompt_logprobs", "prompt_top_logprobs", "prompt_others"}
WITH_LAST = {"text", "finish", "score_logprobs", "embedding"}


def full() -> TokenEvent:
    """Every field says something."""
    return TokenEvent(
        seq="s",
        attempt=3,
        position=5,
        tokens=[7, 8, 9],
        logprobs=[-0.5, -1.5, -2.5],
        top_logprobs=[(TokenLogprob(token, -0.1 * token),) for token in (7, 8, 9)],
        text="abc",
        version="policy@4",
        finish=Finish("stop", 9, cached_tokens=2),
        prompt_logprobs=[None, -0.25],
        score_logprobs=[-4.0],
        prompt_top_logprobs=[(), (TokenLogprob(1, -0.75),)],
        embedding=b"\0\0\x80\x3f",
        prompt_others=[(), (TokenLogprob(2, -1.75),)],
        routes=b"aAbBcC",
    )


def without_text() -> TokenEvent:
    """Events with text are never joined in the log."""
    return msgspec.structs.replace(full(), text=None)


def test_every_field_has_a_rule_and_is_tried() -> None:
    rules = [WHOLE, BY_POSITION, WITH_FIRST, WITH_LAST]
    assert sorted(name for rule in rules for name in rule) == sorted(TokenEvent.__struct_fields__)
    empty = TokenEvent("", 0, 0, [], [])
    untried = [name for name in TokenEvent.__struct_fields__ if getattr(full(), name) == getattr(empty, name)]
    assert untried == []


def values(event: TokenEvent, names: set[str]) -> dict[str, Any]:
    return {name: getattr(event, name) for name in names}


@pytest.mark.parametrize("cut", [6, 7])
def test_a_part_has_what_belongs_to_its_place_and_both_make_the_whole(cut: int) -> None:
    whole = full()
    head, tail = part(whole, 5, cut), part(whole, cut, 8)
    assert values(head, WHOLE) == values(tail, WHOLE) == values(whole, WHOLE)
    assert values(head, WITH_FIRST) == values(whole, WITH_FIRST)
    assert values(tail, WITH_LAST) == values(whole, WITH_LAST)
    assert set(values(head, WITH_LAST).values()) == set(values(tail, WITH_FIRST).values()) == {None}
    assert (head.position, tail.position, len(head.tokens)) == (5, cut, cut - 5)
    assert join([head, tail]) == whole


MAKE_WHOLE: dict[str, Callable[[TokenEvent], TokenEvent]] = {
    "join": lambda event: join([part(event, 5, 6), part(event, 6, 8)]),
    "merged": lambda event: merged([part(event, 5, 6), part(event, 6, 8)])[0],
    "by token": lambda event: join(list(by_token([event]))),
    "splice, log alone": lambda event: join(splice([event], [], 5)),
    "splice, log and frames": lambda event: join(splice([part(event, 5, 7)], [event], 5)),
}


@pytest.mark.parametrize("way", MAKE_WHOLE)
@pytest.mark.parametrize("field", TokenEvent.__struct_fields__)
def test_a_field_survives_every_way_of_cutting_and_joining(field: str, way: str) -> None:
    assert getattr(MAKE_WHOLE[way](without_text()), field) == getattr(without_text(), field)


def test_merging_leaves_its_events_as_they_were() -> None:
    pieces = list(by_token([without_text()]))
    before = [msgspec.json.encode(event) for event in pieces]
    assert merged(pieces) == [without_text()]
    assert [msgspec.json.encode(event) for event in pieces] == before


def test_an_event_with_text_is_one_piece() -> None:
    assert list(by_token([full()])) == [full()]
    assert merged([full()]) == [full()]


def test_a_result_is_the_same_from_the_whole_and_from_its_pieces() -> None:
    spec = SequenceSpec(id="s", model="m", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=3, seed=0))
    whole = msgspec.structs.replace(full(), position=0)
    result = result_of(spec, 3, "w", [whole], Timings())
    assert result == result_of(spec, 3, "w", [part(whole, 0, 1), part(whole, 1, 3)], Timings())
    said = {"text": whole.text, "embedding": whole.embedding, "finish": whole.finish}
    assert {name: getattr(result, name) for name in said} == said
    lists = {"completion_ids": whole.tokens, "logprobs": whole.logprobs, "score_logprobs": whole.score_logprobs}
    assert {name: list(getattr(result, name)) for name in lists} == lists
    assert list(result.top_logprobs) == whole.top_logprobs
    assert list(result.prompt_logprobs) == whole.prompt_logprobs
    assert list(result.prompt_top_logprobs) == whole.prompt_top_logprobs


def test_a_trajectory_is_an_event_again() -> None:
    whole = msgspec.structs.replace(full(), position=0)
    spec = SequenceSpec(id="s", model="m", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=3, seed=0))
    result = result_of(spec, 3, "w", [whole], Timings())
    trajectory = Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=spec.prompt_ids,
        completion_ids=result.completion_ids,
        text="abc",
        logprobs=result.logprobs,
        finish_reason=result.finish.reason,
        spans=result.spans,
        top_logprobs=result.top_logprobs,
        stop_match=result.finish.stop_match,
        attempt=3,
        prompt_logprobs=result.prompt_logprobs,
        prompt_top_logprobs=result.prompt_top_logprobs,
        embedding=result.embedding,
        cached_tokens=result.finish.cached_tokens,
        routes=result.routes,
    )
    # A line of a batch is never scored, and asks about no other tokens of its prompt.
    scoreless = msgspec.structs.replace(whole, score_logprobs=None, prompt_others=None)
    assert event_of("s", trajectory, with_text=True) == scoreless
    assert event_of("s", trajectory, with_text=False) == msgspec.structs.replace(scoreless, text=None)
