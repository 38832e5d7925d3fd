"""Splicing a log and a frame stream into one run of tokens, against the definition said position by position."""

from hypothesis import given
from hypothesis import strategies as st

from shared.frames import Finish, TokenEvent
from shared.token_events import part, splice


def event(attempt: int, start: int, end: int, *, mark: int = 0, finish: bool = False) -> TokenEvent:
    """Tokens that tell their position, attempt and origin."""
    found = [10_000 * mark + 100 * attempt + position for position in range(start, end)]
    return TokenEvent("s", attempt, start, found, [-float(t) for t in found], finish=Finish("stop") if finish else None)


@st.composite
def pieces(draw: st.DrawFn, mark: int) -> list[TokenEvent]:
    """Events that overlap and repeat, in any order."""
    made = draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(0, 5), st.booleans()), max_size=12)
    )
    return [
        event(attempt, start, start + length, mark=mark, finish=finish and length == 0)
        for attempt, start, length, finish in made
        if length or finish
    ]


def defined(logged: list[TokenEvent], live: list[TokenEvent], start: int) -> tuple[list[int], bool]:
    """What stands first in the log counts; where it has nothing, the newest attempt; attempts never go back."""
    out: list[int] = []
    position, attempt = start, 0
    while True:
        found = [e for e in logged if e.position <= position < e.end][:1]
        if not found:
            found = [e for e in live if e.position <= position < e.end]
            newest = max((e.attempt for e in found), default=0)
            found = [e for e in found if e.attempt == newest][:1]
        if not found or found[0].attempt < attempt:
            break
        attempt = found[0].attempt
        out.append(found[0].tokens[position - found[0].position])
        position += 1
    ends = [e for e in [*logged, *live] if e.finish is not None and e.end == position][:1]
    return out, bool(ends) and ends[0].attempt >= attempt


@given(logged=pieces(mark=0), live=pieces(mark=1), start=st.integers(0, 14))
def test_splicing_gives_what_its_definition_says(logged: list[TokenEvent], live: list[TokenEvent], start: int) -> None:
    events = splice(logged, live, start)
    tokens, finished = defined(logged, live, start)
    assert [token for e in events for token in e.tokens] == tokens
    assert [token for e in events for token in e.logprobs] == [-float(token) for token in tokens]
    assert (bool(events) and events[-1].finish is not None) == finished
    position = start
    for e in events:
        assert e.position == position
        position = e.end


@given(logged=pieces(mark=0), start=st.integers(0, 14))
def test_splicing_leaves_its_input_alone(logged: list[TokenEvent], start: int) -> None:
    before = [(e.position, list(e.tokens)) for e in logged]
    splice(logged, [], start)
    assert [(e.position, list(e.tokens)) for e in logged] == before


def test_what_is_logged_stays_whatever_a_newer_attempt_says() -> None:
    found = splice([event(1, 0, 4)], [event(2, 0, 6)], 0)
    assert [token for e in found for token in e.tokens] == [100, 101, 102, 103, 204, 205]


def test_beyond_the_log_the_newest_attempt_wins_and_no_older_one_follows_it() -> None:
    live = [event(1, 0, 3), event(1, 3, 6), event(2, 3, 4)]
    assert [token for e in splice([], live, 0) for token in e.tokens] == [100, 101, 102, 203]


def test_a_part_keeps_what_belongs_to_it() -> None:
    whole = event(1, 4, 8)
    whole.prompt_logprobs, whole.text, whole.finish = [None], "text", Finish("stop")
    head, tail = part(whole, 4, 6), part(whole, 6, 8)
    assert (head.prompt_logprobs, head.text, head.finish, head.tokens) == ([None], None, None, [104, 105])
    assert (tail.prompt_logprobs, tail.text, tail.finish, tail.tokens) == (None, "text", Finish("stop"), [106, 107])
    assert part(whole, 0, 9) is whole


def test_prompt_logprobs_alone_are_read_once_and_only_from_the_start() -> None:
    bare = TokenEvent("s", 1, 0, [], [], prompt_logprobs=[None])
    assert splice([bare, event(1, 0, 2)], [bare], 0) == [bare, event(1, 0, 2)]
    assert splice([bare, event(1, 0, 2)], [bare], 1) == [part(event(1, 0, 2), 1, 2)]
