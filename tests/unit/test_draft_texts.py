"""How a text goes on, and where a row is in it: plain ids, no model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.speculation.alignment import MISSES, WINDOW, Course, End
from worker.engine.speculation.lookup import (
    AT_ONCE,
    BREAK,
    NOTHING,
    VOTERS,
    Beginnings,
    Guess,
    Ids,
    Text,
    goes_on,
    nearest,
    occurrences,
)


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def test_a_history_grows_and_shows_its_latest_ids() -> None:
    history = Text(range(50))
    for each in range(50, 400):
        history.add([each])
    assert len(history) == 400 and history.end(3) == [397, 398, 399]
    assert history.end(1000) == history.ids.tolist() == list(range(400))


@given(st.lists(st.integers(0, 3), max_size=3 * AT_ONCE), st.integers(1, 4))
def test_no_run_that_goes_on_is_overlooked(ids: list[int], begun: int) -> None:
    history = Text(ids[:begun])
    for each in ids[begun:]:
        history.add([each])
    for text in (history, Text(np.array(ids, np.int32))):
        for length in (1, 3):
            ends = [ids[max(0, end - 3) : end] for end in range(length, len(ids))]
            assert all(text.may_have(end, length) for end in ends)


def test_most_runs_that_do_not_occur_are_known_not_to() -> None:
    row = Text([])
    for each in range(1000):
        row.add([each])
    for text, most in ((Text(np.arange(1000, dtype=np.int32)), 100), (row, 100 + AT_ONCE)):
        strange = sum(text.may_have([at, at + 2], 2) for at in range(998))
        assert strange < most and not text.may_have([5], 2)


@pytest.mark.parametrize(
    ("text", "end", "least", "most", "places", "matched"),
    [
        ((1, 2, 3, 9, 2, 3, 4), (7, 2, 3), 1, 4, [3, 6], 2),  # all of equally long ones
        ((1, 2, 3, 9, 5, 3, 4), (1, 2, 3), 1, 4, [3], 3),  # the longer one, though it is older
        ((1, 2, 3, 9, 5, 3, 4), (1, 2, 3), 1, 1, [3, 6], 1),  # no more than one is compared
        ((1, 2, 3), (4, 3), 2, 4, [], 0),  # too short
        ((1, 2, 3), (8,), 1, 4, [], 0),
        ((), (8,), 1, 4, [], 0),
        ((3, 1), (2, 3), 1, 4, [1], 1),  # nothing lies before it
    ],
)
def test_the_longest_end_is_found(
    text: tuple[int, ...], end: tuple[int, ...], least: int, most: int, places: list[int], matched: int
) -> None:
    found, length = occurrences(ids(*text), ids(*end), least, most)
    assert (found.tolist(), length) == (places, matched)


@given(
    st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 24)
)
def test_of_the_places_of_the_longest_end_the_nearest_is_found(text: list[int], end: list[int], to: int) -> None:
    places, matched = occurrences(ids(*text), end, 1, 4)
    assert nearest(text, end, to, 4) == (min(places.tolist(), key=lambda at: abs(at - to), default=0), matched)


def found(course: Course, source: Ids, row: Ids, count: int, least: int, most: int) -> Guess:
    return course.draft(Text(source), slice(None), End(row[-most:].tolist(), least), count)


def own_draft(text: Ids, count: int, least: int, most: int) -> Guess:
    return found(Course(is_own=True), text, text, count, least, most)


def draft_from(source: Ids, row: Ids, count: int, least: int, most: int) -> Guess:
    return found(Course(), source, row, count, least, most)


def test_a_text_goes_on_as_it_did_before() -> None:
    assert own_draft(ids(1, 2, 3, 4, 5, 1, 2), 3, 1, 4) == Guess([3, 4, 5], 2)
    assert own_draft(ids(1, 2, 3, 4), 3, 1, 4) == NOTHING
    assert own_draft(ids(7, 7, 7), 4, 1, 4) == Guess([7, 7, 7, 7], 2), "a loop goes on"
    assert own_draft(ids(1, 2, 1), 5, 1, 4) == Guess([2, 1, 2, 1, 2], 1)


def test_nothing_is_drafted_across_two_texts() -> None:
    assert draft_from(ids(BREAK, 1, 2, 3, BREAK, 9), ids(5, 1, 2), 4, 1, 8) == Guess([3], 2, [(1, 1)])
    assert draft_from(ids(BREAK, 1, 2, BREAK, 9), ids(5, 1, 2), 4, 1, 8).ids == []


def test_of_several_texts_the_draft_says_what_most_of_them_say_and_then_the_latest() -> None:
    texts = ids(BREAK, 7, 1, 4, BREAK, 7, 1, 5, BREAK, 7, 2, 6, BREAK, 7, 1)
    assert draft_from(texts, ids(7), 4, 1, 8) == Guess([1, 5], 1, [(3, 4), (1, 2)])
    loud = ids(*[BREAK, 7, 1] * VOTERS, *[BREAK, 7, 2] * (VOTERS // 2 + 1))
    assert draft_from(loud, ids(7), 1, 1, 8).ids == [2], "the latest ones are asked"


@given(st.lists(st.integers(0, 2) | st.just(BREAK), min_size=1, max_size=30), st.data())
def test_what_several_places_say_is_what_each_says_by_itself(text: list[int], data: st.DataObject) -> None:
    """Voted for one id after the other."""
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), min_size=1, max_size=6)))
    draft, votes, at = [], [], places
    for _ in range(4):
        at = [place for place in at if place < len(text)]
        nexts = [text[place] for place in at if text[place] != BREAK]
        if not nexts:
            break
        id_ = max(reversed(nexts), key=nexts.count)
        draft.append(id_)
        votes.append((nexts.count(id_), len(at)))
        at = [place + 1 for place in at if text[place] == id_]
    guess = goes_on(ids(*text), places, 3, 4)
    assert guess.ids == draft and guess.matched == 3 and list(guess.votes) == votes


TEXT = ids(*range(100, 200))
BEGUN = 20  # ids of it that rows have written, before they go on in another way


def along(*more: int, source: Ids = TEXT, begun: int = BEGUN, least: int = 1) -> list[int]:
    """What a row is to go on with that has copied the beginning of a text, and then drawn these."""
    course, row = Course(), [1, *source[:begun].tolist()]
    assert found(course, source, np.array(row, np.int32), 3, least, WINDOW).ids == source[begun : begun + 3].tolist()
    for id_ in more:
        course.follow([id_], Text(source.tolist()))
        row.append(id_)
        guess = found(course, source, np.array(row, np.int32), 3, least, WINDOW)
    return guess.ids


@pytest.mark.parametrize(
    ("drawn", "goes_on"),
    [
        ((9,), 121),  # in the place of one
        ((9, 121), 122),
        ((9, 8), 122),  # of two
        ((9, 121, 7, 123, 8), 125),
        ((9, 120), 121),  # put in
        ((9, 8, 120), 121),
        ((121,), 122),  # one is left out
        ((122,), 123),
        ((126, 127), 128),  # several are
        ((9, 126), 127),
        ((170, 171), 172),  # many are
        ((103, 104), 105),  # said once more
        ((9, 8, 7, 6, 170), 171),  # by one id, since the place is lost
    ],
)
def test_a_row_goes_on_along_a_text_behind_what_the_text_does_not_say(drawn: tuple[int, ...], goes_on: int) -> None:
    assert along(*drawn) == [goes_on, goes_on + 1, goes_on + 2]


def test_a_place_is_lost_behind_too_many_misses_and_where_little_has_held() -> None:
    assert along(*[9] * MISSES) and not along(*[9] * (MISSES + 1))
    assert along(9, begun=4) and not along(9, begun=3)


def test_a_row_that_slips_is_looked_for_elsewhere_only_if_it_seldom_does() -> None:
    text = Text(ids(*range(100, 180), 119, 9, 50, 51, 9, 9, 60, 61))

    def draft(course: Course, *drawn: list[int]) -> list[int]:
        row = Text(list(range(100, 120)))
        for each in ([], *drawn):
            row.add(each)
            course.follow(each, row)
            guess = course.draft(text, slice(None), End(row.end(WINDOW), 1), 2)
        return guess.ids

    course = Course()
    assert draft(course, [9]) == [121, 122] and course.has_slipped, "though 119 and 9 are followed by 50 elsewhere"
    assert draft(course := Course(), [9], [9]) == [60, 61] and not course.has_slipped
    assert draft(course := Course(), [9], [*range(121, 126)], [9], [9]) == [128, 129] and course.has_slipped


def test_a_row_goes_on_along_its_own_text() -> None:
    course, text = Course(is_own=True), [*range(100, 130), *range(100, 110)]
    assert found(course, ids(*text), ids(*text), 2, 1, 4) == Guess([110, 111], 4)
    text.append(9)
    course.follow([9], Text(text))
    assert found(course, ids(*text), ids(*text), 3, 1, 4) == Guess([111, 112, 113], 1)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_place_in_a_text_that_repeats_itself_is_kept_however_short_its_period(period: int) -> None:
    text, course = Text([*range(period)] * 9), Course(is_own=True)
    for turn in range(4):
        guess = course.draft(text, slice(None), End(text.end(4), 1), 5)
        assert guess.ids == [at % period for at in range(5)]
        assert guess.matched == min(WINDOW, 4 + 6 * turn), "it is not looked for again"
        drawn = [*guess.ids, (guess.ids[-1] + 1) % period]
        text.add(drawn)
        course.follow(drawn, text)


def test_a_row_that_has_gone_on_far_is_looked_for_again_in_place_of_being_followed() -> None:
    row = Text(TEXT[:5].tolist())
    course, text = Course(), Text(TEXT)
    assert course.draft(text, slice(None), End(row.end(4), 1), 1) == Guess([105], 4, [(1, 1)])
    row.add(TEXT[5:50].tolist())
    course.follow(TEXT[5:50].tolist(), row)
    assert course._now is None and not row._marked, "nor is it asked yet where its runs are"
    assert course.draft(text, slice(None), End(row.end(4), 1), 1) == Guess([150], 4, [(1, 1)])
    assert row.may_have([148], 1) and not row.may_have([149], 1) and row._marked == {1: 50}


def test_of_several_texts_those_count_that_say_what_is_drawn_and_all_of_them_where_none_does() -> None:
    source = ids(*[BREAK, *range(20), 30, 31, 32] * 2, BREAK, *range(20), 40, 41, 42)
    course, row = Course(), list(range(20))
    assert found(course, source, ids(*row), 1, 1, WINDOW).votes == [(2, 3)]
    course.follow([9], Text(source.tolist()))
    assert found(course, source, ids(*row, 9), 2, 1, WINDOW).ids == [31, 32]
    course.follow([41], Text(source.tolist()))
    assert found(course, source, ids(*row, 9, 41), 2, 1, WINDOW).ids == [42]


def test_a_draft_is_worth_as_much_as_texts_agree_on() -> None:
    def agreed(*votes: tuple[int, int], chance: float = 0.5) -> tuple[int, float]:
        return Guess([1] * len(votes), 1, votes).agreed(chance, 0.1)

    assert agreed((30, 30), (30, 30), (28, 30))[0] == 3 and agreed((30, 30), (1, 30), (1, 1))[0] == 1
    assert agreed((1, 1))[1] == pytest.approx(2 / 3), "one text says little"
    assert agreed((8, 8), (2, 8))[1] == pytest.approx((0.9 * 0.3) ** 0.5)
    assert agreed((1, 30), chance=0.0) == (0, 1.0)
    assert agreed(*[(1, 1)] * 9, chance=0.1)[0] < agreed(*[(1, 1)] * 9, chance=0.9)[0] == 9


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12), st.lists(st.integers(0, 2), max_size=3))
def test_beginnings_say_what_most_texts_go_on_with(texts: list[list[int]], end: list[int]) -> None:
    beginnings = Beginnings([ids(*text) for text in texts])
    nexts = [text[len(end)] for text in texts if text[: len(end)] == end and len(text) > len(end)]
    guess = beginnings.draft(end, 1)
    if not nexts:
        assert guess.ids == []
        return
    most = max(map(nexts.count, nexts))
    latest = next(each for each in reversed(nexts) if nexts.count(each) == most)
    assert guess.ids == [latest] and guess.votes[0][0] == most
