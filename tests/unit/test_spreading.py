"""Which ring gets a request, of several that serve the same model."""

from collections import Counter
from dataclasses import dataclass

from api.generation.target import first_words
from api.openai.bodies import ChatCompletionRequest, CompletionRequest
from api.ring.spreading import Crowd, choose


@dataclass(frozen=True)
class Named:
    name: str


HOME, EAST, WEST = Named("home"), Named("east"), Named("west")
CONVERSATIONS = [f"conversation {i}" for i in range(400)]


def test_a_request_by_itself_goes_where_there_is_room() -> None:
    assert choose([(HOME, Crowd(8, 8, 0)), (EAST, Crowd(8, 7, 0))], "") is EAST
    assert choose([(HOME, Crowd(8, 2, 0)), (EAST, Crowd(32, 4, 0))], "") is EAST, "fuller in number, emptier in share"
    assert choose([(HOME, Crowd(8, 3, 0)), (EAST, Crowd(8, 3, 0))], "") is HOME, "of equals the first"


def test_a_queue_counts_by_the_pace_at_which_it_is_worked_off() -> None:
    slow, fast = Crowd(8, 8, 10, claims_per_s=1.0), Crowd(8, 8, 30, claims_per_s=10.0)
    assert choose([(HOME, slow), (EAST, fast)], "") is EAST


def test_a_ring_that_takes_nothing_gets_nothing_while_another_does() -> None:
    paused = Crowd(0, 0, 0)
    for conversation in ("", *CONVERSATIONS):
        assert choose([(HOME, paused), (EAST, Crowd(8, 8, 500))], conversation) is EAST
    assert choose([(HOME, paused), (EAST, paused)], "") is HOME, "all alike: it waits there"
    assert choose([(HOME, paused), (EAST, paused)], "some") in (HOME, EAST)


def test_what_was_sent_since_the_look_counts() -> None:
    sent: Counter[Named] = Counter()
    for _ in range(20):
        sent[choose([(ring, Crowd(8, 0, 0, sent=sent[ring])) for ring in (HOME, EAST)], "")] += 1
    assert sent == {HOME: 10, EAST: 10}
    at_home = next(
        each for each in CONVERSATIONS if choose([(HOME, Crowd(8, 0, 0)), (EAST, Crowd(8, 0, 0))], each) is HOME
    )
    assert choose([(HOME, Crowd(8, 0, 0, sent=50)), (EAST, Crowd(8, 0, 0))], at_home) is HOME, "it may have ended"


def test_conversations_stay_and_are_spread_by_rows() -> None:
    places = [(HOME, Crowd(8, 4, 0)), (EAST, Crowd(24, 12, 0))]
    chosen = [choose(places, each) for each in CONVERSATIONS]
    assert chosen == [choose(places[::-1], each) for each in CONVERSATIONS], "whatever the order"
    assert 0.68 < Counter(chosen)[EAST] / len(chosen) < 0.82


def test_a_ring_that_joins_or_leaves_moves_only_its_own_share() -> None:
    two = [(HOME, Crowd(8, 4, 0)), (EAST, Crowd(8, 4, 0))]
    for each in CONVERSATIONS:
        now = choose([*two, (WEST, Crowd(8, 4, 0))], each)
        assert now is WEST or now is choose(two, each)


def test_a_conversation_leaves_a_ring_where_it_would_wait_for_longer_than_its_prompt_costs() -> None:
    calm = [(HOME, Crowd(8, 4, 0)), (EAST, Crowd(8, 4, 0))]
    at_home = next(each for each in CONVERSATIONS if choose(calm, each) is HOME)
    a_little = [(HOME, Crowd(8, 7, 0)), (EAST, Crowd(8, 4, 0))]
    assert choose(a_little, at_home) is HOME
    waits = [(HOME, Crowd(8, 8, 4, claims_per_s=2.0)), (EAST, Crowd(8, 4, 0))]
    assert choose(waits, at_home) is EAST
    full = [(HOME, Crowd(8, 8, 0, claims_per_s=100.0)), (EAST, Crowd(8, 1, 0))]
    assert choose(full, at_home) is EAST, "the wait is short, but its steps are much fuller"


def test_what_a_user_says_first_stays_the_same_in_later_turns() -> None:
    system = {"role": "system", "content": "the time is 12:01"}
    turns = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}, {"role": "assistant", "content": "hi"}]
    first = ChatCompletionRequest.model_validate({"messages": [system, turns[0]]})
    later = {"messages": [{**system, "content": "12:02"}, *turns, {"role": "user", "content": "and?"}]}
    assert first.opening == ChatCompletionRequest.model_validate(later).opening == "hello"
    assert first_words([]) == ""
    long = CompletionRequest.model_validate({"prompt": "a" * 100_000})
    assert len(long.opening) < 5000, "hashing it costs no more than this, however long a prompt is"
    assert CompletionRequest.model_validate({"prompt": [[1, 2], [3]]}).opening == "[1, 2]"
