"""What to draft and when it pays: plain ids and plain times, no model."""

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sequences import SamplingParams, SequenceSpec
from worker.engine.speculation.alignment import MISSES, WINDOW, Course, End
from worker.engine.speculation.lookup import (
    AT_ONCE,
    BREAK,
    NOTHING,
    VOTERS,
    Beginnings,
    Guess,
    History,
    Ids,
    Text,
    goes_on,
    nearest,
    occurrences,
)
from worker.engine.speculation.memory import (
    AT_ONCE as JOINED_AT_ONCE,
)
from worker.engine.speculation.memory import (
    FARTHEST,
    IDLE,
    JOINED_SHARE,
    KEPT,
    LATER,
    LATER_IDS,
    Completions,
    Joined,
    Key,
    Memory,
    bytes_of,
    key_of,
    mark_of,
    owner_of,
)
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
    Accounts,
    Chance,
    StepTimes,
    Try,
    best_length,
    brought,
)


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def test_a_history_grows_and_shows_its_latest_ids() -> None:
    history = History(range(50))
    for each in range(50, 400):
        history.add([each])
    assert len(history) == 400 and history.end(3) == [397, 398, 399]
    assert history.end(1000) == history.ids.tolist() == list(range(400))


@given(st.lists(st.integers(0, 3), max_size=3 * AT_ONCE), st.integers(1, 4))
def test_no_run_that_goes_on_is_overlooked(ids: list[int], begun: int) -> None:
    history = History(ids[:begun])
    for each in ids[begun:]:
        history.add([each])
    for text in (history, Text(np.array(ids, np.int32))):
        for length in (1, 3):
            ends = [ids[max(0, end - 3) : end] for end in range(length, len(ids))]
            assert all(text.may_have(end, length) for end in ends)


def test_most_runs_that_do_not_occur_are_known_not_to() -> None:
    row = History([])
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
        course.follow([id_], History(source.tolist()))
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
        row = History(list(range(100, 120)))
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
    course.follow([9], History(text))
    assert found(course, ids(*text), ids(*text), 3, 1, 4) == Guess([111, 112, 113], 1)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_place_in_a_text_that_repeats_itself_is_kept_however_short_its_period(period: int) -> None:
    text, course = History([*range(period)] * 9), Course(is_own=True)
    for turn in range(4):
        guess = course.draft(text, slice(None), End(text.end(4), 1), 5)
        assert guess.ids == [at % period for at in range(5)]
        assert guess.matched == min(WINDOW, 4 + 6 * turn), "it is not looked for again"
        drawn = [*guess.ids, (guess.ids[-1] + 1) % period]
        text.add(drawn)
        course.follow(drawn, text)


def test_a_row_that_has_gone_on_far_is_looked_for_again_in_place_of_being_followed() -> None:
    row = History(TEXT[:5].tolist())
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
    course.follow([9], History(source.tolist()))
    assert found(course, source, ids(*row, 9), 2, 1, WINDOW).ids == [31, 32]
    course.follow([41], History(source.tolist()))
    assert found(course, source, ids(*row, 9, 41), 2, 1, WINDOW).ids == [42]


def test_a_draft_is_worth_as_much_as_texts_agree_on() -> None:
    def agreed(*votes: tuple[int, int], chance: float = 0.5) -> tuple[int, float]:
        return Guess([1] * len(votes), 1, votes).agreed(chance, 0.1)

    assert agreed((30, 30), (30, 30), (28, 30))[0] == 3 and agreed((30, 30), (1, 30), (1, 1))[0] == 1
    assert agreed((1, 1))[1] == pytest.approx(2 / 3), "one text says little"
    assert agreed((8, 8), (2, 8))[1] == pytest.approx((0.9 * 0.3) ** 0.5)
    assert agreed((1, 30), chance=0.0) == (0, 1.0)
    assert agreed(*[(1, 1)] * 9, chance=0.1)[0] < agreed(*[(1, 1)] * 9, chance=0.9)[0] == 9


def of(tenant: str, prompt: tuple[int, ...], model: str = "m") -> Key:
    return key_of(SequenceSpec("s", model, prompt, SamplingParams(1, 0), tenant=tenant))


def written(key: Key, *texts: Ids, begin: int = 0) -> Completions:
    """By sequences that are numbered, behind one prompt of twenty ids."""
    return Completions(key, range(20), [(mark_of(str(at)), text) for at, text in enumerate(texts, begin)])


def test_prompts_of_other_tenants_and_models_are_other_prompts() -> None:
    keys = {of("a", (1, 2)), of("", (1, 2)), of("a", (1,)), of("", (1, 2), "am"), of("m", (1, 2), "")}
    assert len(keys) == 5 and of("a", (1, 2)) in keys


def asked(memory: Memory, key: Key) -> Joined | None:
    """By a row, in a step of its own."""
    memory.begin()
    return memory.joined(key)


def test_memory_keeps_to_its_bytes_and_to_tenants() -> None:
    prompt, size = tuple(range(20)), bytes_of(ids(*[0] * 100_000))
    memory = Memory(3 * size, (1,))
    for tenant in ("a", "b"):
        memory.add(written(of(tenant, prompt), ids(*[ord(tenant)] * 7)))
    theirs = asked(memory, of("a", prompt))
    assert theirs is not None and ord("a") in theirs.text.ids and ord("b") not in theirs.text.ids
    assert asked(memory, of("", prompt)) is None and asked(memory, of("a", prompt[:-1])) is None
    assert memory.bytes == 2 * bytes_of(ids(*[0] * 7)) + theirs.bytes
    for at in range(2):
        memory.add(written(of("c", prompt), ids(*[5] * 100_000), begin=at))
    assert asked(memory, of("b", prompt)) is not None and asked(memory, of("a", prompt)) is not None
    memory.add(written(of("d", prompt), ids(*[5] * 90_000)))
    assert asked(memory, of("c", prompt)) is not None, "one of two was written last"
    assert memory.bytes <= 3 * size
    memory.add(written(of("f", prompt), ids(*[5] * 300_000)))
    assert asked(memory, of("f", prompt)) is None, "larger than all that is kept"
    for at in range(9):
        memory.add(written(of("e", prompt), ids(*[5] * 100_000), begin=at))
    assert len(memory._shelves[owner_of(of("e", prompt))].known[of("e", prompt)]) == 2, "who writes most loses its own"
    assert memory.bytes <= 3 * size and all(asked(memory, of(each, prompt)) is not None for each in "ab")


def test_memory_keeps_the_latest_completions_of_a_prompt() -> None:
    memory, key = Memory(1 << 20, (1,)), of("", (1,))
    for each in range(KEPT + 3):
        memory.add(written(key, ids(100 + each), begin=each))
    known = asked(memory, key)
    assert known is not None and known.text.ids[20::22].tolist() == [19] * KEPT, "each behind the prompt's end"
    assert known.text.ids[known.text.ids >= 100].tolist() == list(range(103, 100 + KEPT + 3))
    assert known.beginnings.draft([], 1) == Guess([100 + KEPT + 2], 0, [(1, KEPT)])


def test_no_more_is_held_than_is_counted() -> None:
    memory = Memory(1 << 20, (1,))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(300):
        memory.add(written(at.to_bytes(16), np.arange(at, at + 64, dtype=np.int32), begin=at))
    held = tracemalloc.get_traced_memory()[0] - before
    assert 300 * 64 * 4 < held < memory.bytes <= 1 << 20
    for at in range(300):
        asked(memory, at.to_bytes(16))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert memory._joined_bytes and held < memory.bytes <= 1 << 20, "what is joined, too"


@pytest.mark.parametrize("prompts", [JOINED_AT_ONCE, 130])
def test_what_rows_ask_for_in_every_step_is_joined_once_and_a_little_of_it_in_a_step(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, made = Memory(64 << 20, (1, 4)), 0
    keys = [of("", (at,)) for at in range(prompts)]
    for key in keys:
        memory.add(written(key, ids(1, 2, 3)))

    def count(self: Joined, *given: Any) -> None:
        nonlocal made
        made += 1
        init(self, *given)

    init = Joined.__init__
    monkeypatch.setattr(Joined, "__init__", count)
    steps = -(-prompts // JOINED_AT_ONCE)
    for step in range(1, steps + 4):
        memory.begin()
        ready = sum(memory.joined(key) is not None for key in keys)
        assert made == min(prompts, step * JOINED_AT_ONCE) and ready <= made
    assert ready == prompts
    (known,) = (shelf.known for shelf in memory._shelves.values())
    for _ in range(3):  # sequences of all prompts end all the time: each has its turn
        for key in keys:
            memory.add(Completions(key, (1,), [(mark_of(f"{len(known[key])}"), ids(1, 2, 4))]))
        for _ in range(steps):
            memory.begin()
            assert all(memory.joined(key) is not None for key in keys), "an older one until then"
    assert made == 4 * prompts and all(each.is_joined for each in known.values())


def test_what_rows_look_through_is_not_joined_again_and_again_where_there_is_no_room_for_all() -> None:
    memory = Memory(1 << 20, (1,))
    keys = [of("", (at,)) for at in range(60)]
    for key in keys:
        memory.add(written(key, ids(1, 2, 3)))
    for _ in range(20):
        memory.begin()
        ready = [memory.joined(key) for key in keys]
    memory.begin()
    assert [memory.joined(key) for key in keys] == ready and 3 < len([each for each in ready if each]) < 60
    assert memory._joined_bytes <= (1 << 20) // JOINED_SHARE
    for _ in range(3):
        memory.begin()
        others = [memory.joined(key) for key in keys[-3:]]
    assert all(others), "nobody has asked for those of the others since"


def test_a_tenant_that_writes_and_asks_for_much_leaves_others_theirs() -> None:
    """What both have written while nobody asked, what is kept of it, and what their rows look through."""
    memory = Memory(1 << 20, (1,))
    prompts = {"few": range(2), "many": range(300)}
    memory.add_later(SequenceSpec("few", "m", (9,), SamplingParams(1, 0), tenant="few"), [5, 6])
    for at in range(LATER + 9):
        memory.add_later(SequenceSpec(str(at), "m", (at,), SamplingParams(1, 0), tenant="many"), [7, 8])
    assert asked(memory, of("few", (9,))) is not None
    for tenant, each in prompts.items():
        for at in each:
            memory.add(written(of(tenant, (at,)), np.arange(900, dtype=np.int32), begin=at))
    ready = dict.fromkeys(prompts, 0)
    for _ in range(60):
        memory.begin()
        for tenant in ("many", "few"):
            asks = [of(tenant, (at,)) for at in prompts[tenant]]
            ready[tenant] = sum(memory.joined(key) is not None for key in asks)
    assert ready["few"] == len(prompts["few"]) and 2 < ready["many"] < len(prompts["many"]) / 5
    keys = [of(tenant, (at,)) for tenant in ("many", "few") for at in prompts[tenant]]
    before = [memory.joined(key) for key in keys]
    for _ in range(3):
        memory.begin()
        assert [memory.joined(key) for key in keys] == before, "nobody takes it back"


def test_tenants_wait_in_turn_for_what_they_look_through() -> None:
    memory = Memory(64 << 20, (1,))
    keys = [of("many", (at,)) for at in range(5 * JOINED_AT_ONCE)]
    for key in (*keys, of("few", (1,))):
        memory.add(written(key, ids(1, 2, 3)))
    memory.begin()
    assert sum(memory.joined(key) is not None for key in keys) > 0
    memory.joined(of("few", (1,)))
    assert asked(memory, keys[0]) is not None and memory.joined(of("few", (1,))) is not None


def test_what_a_tenant_has_not_asked_for_for_long_goes_before_what_others_ask_for() -> None:
    memory = Memory(1 << 20, (1,))
    for at in range(10):
        memory.add(written(of("gone", (at,)), np.arange(9_000, dtype=np.int32), begin=at))
    memory._step += IDLE + 1
    for at in range(30):
        memory.add(written(of("here", (at,)), np.arange(9_000, dtype=np.int32), begin=at))
    assert [len(shelf.known) for shelf in memory._shelves.values()] == [(1 << 20) // bytes_of(ids(*range(9_000)))]


def test_no_more_is_joined_than_is_looked_through() -> None:
    memory, key = Memory(1 << 20, (1,)), of("", (1,))
    memory.add(written(key, *(np.full(FARTHEST // 2, at, np.int32) for at in range(30, 35))))
    known = asked(memory, key)
    assert known is not None and len(known.text.ids) == FARTHEST
    assert sorted(set(known.text.ids[20:].tolist()) - {BREAK, *range(20)}) == [33, 34]


def test_what_comes_again_from_elsewhere_is_kept_once() -> None:
    memory, key = Memory(1 << 20, (1,)), of("", (1,))
    memory.add(written(key, ids(5), ids(6)))
    known = asked(memory, key)
    assert known is not None
    memory.add(written(key, ids(5), ids(6)))
    assert asked(memory, key) is known and memory.bytes == 2 * bytes_of(ids(5)) + known.bytes
    memory.add(Completions(of("", (2,)), (2,), []))
    assert asked(memory, of("", (2,))) is None


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


def times_of(rows: int, *seconds: float) -> StepTimes:
    times = StepTimes()
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
    assert best_length(StepTimes(), four, alone=True) == 0, "a step without drafts is to be timed first"
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
    times = StepTimes()
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
    accounts = Accounts(on_cpu=on_cpu)
    without = accounts.of(32, has_texts=False)
    for _ in range(400):
        without.plain(2.0, 1.0)
    without.checked(30.0, 1.0, 2.0)
    texts = accounts.of(32, has_texts=True)
    assert without.plain_s == texts.plain_s == 2.0 and texts.is_spent == texts.owes == on_cpu
    texts.plain(4.0, 1.0)
    assert texts.plain_s > without.plain_s == 2.0
    assert accounts.of(20, has_texts=True) is texts and accounts.of(20, has_texts=False) is without


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


def test_what_was_written_while_nobody_asked_is_taken_in_when_a_row_does_the_latest_of_it() -> None:
    memory = Memory(1 << 22, (1,))
    specs = [SequenceSpec(str(at), "m", (at % 2,), SamplingParams(1, 0)) for at in range(LATER + 2)]
    for each in specs:
        memory.add_later(each, [7, 8])
    assert memory.bytes == 0
    assert asked(memory, key_of(specs[0])) is not None and not len(memory._later)
    assert [len(each) for shelf in memory._shelves.values() for each in shelf.known.values()] == [KEPT, KEPT]
    memory.add_later(SequenceSpec("long", "m", (5,) * LATER_IDS, SamplingParams(1, 0)), [7, 8])
    memory.add_later(specs[0], [7, 8])
    assert len(memory._later) == 1 and memory._later.ids == 3, "no more is held than that"
