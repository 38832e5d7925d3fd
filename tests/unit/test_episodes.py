"""Turns of conversations joined by what their clients send back."""

import random

import pytest

from shared.episodes import (
    MOST_MARKS,
    MOST_SAID,
    EpisodePlace,
    PlainMessage,
    Turn,
    digest_of_ids,
    joined,
    parent_by_ids,
    place_of,
    session_id,
)

UUID = "0b0e7a52-33aa-4c1e-9a56-1f5b7a3d9c11"


def user(text: str) -> PlainMessage:
    return PlainMessage("user", text)


def reply(text: str, *calls: tuple[str, str]) -> PlainMessage:
    return PlainMessage("assistant", text, calls)


def turn(name: str, messages: list[PlainMessage], text: str, at: int, session: str = "", **who: str) -> Turn:
    place = place_of(messages, session=session, user=who.get("user", ""), owner=who.get("owner", ""))
    return Turn(name, place, at, "m", "p", text=text)


def parents(turns: list[Turn]) -> dict[str, tuple[str, str]]:
    random.Random(3).shuffle(turns)
    return {each.turn.name: (each.parent, each.branch) for each in joined(turns)}


def test_an_agent_s_requests_follow_one_another_by_their_history() -> None:
    system, ask, result = (
        PlainMessage("system", "Be brief. 08:00"),
        user("list files"),
        PlainMessage("tool", "a.py b.py"),
    )
    call = reply("", ("ls", '{"path": "."}'))
    resent = reply("", ("ls", '{"path":"."}'))  # written with other spaces
    later = PlainMessage("system", "Be brief. 09:00")
    first = turn("a-0", [system, ask], 'I look. {"name": "ls"}', 1)
    second = turn("b-0", [later, ask, resent, result], "Two files.", 2)
    third = turn("c-0", [later, ask, call, result, reply("Two files."), user("thanks")], "You are welcome.", 3)
    assert parents([first, second, third]) == {"a-0": ("", ""), "b-0": ("a-0", ""), "c-0": ("b-0", "")}
    assert len({each.place.session for each in (first, second, third)}) == 1
    assert [(each.role, each.text) for each in second.place.said] == [("tool", "a.py b.py")]
    assert [each.text for each in third.place.said] == ["thanks"]


def test_of_several_replies_the_one_that_came_back_is_followed() -> None:
    ask = [user("a joke")]
    choices = [turn(f"a-{i}", ask, text, 1) for i, text in enumerate(["Knock knock.", "A horse walks into a bar."])]
    again = turn("b-0", ask, "Why did the hen?", 2)
    on = turn("c-0", [*ask, reply("A horse walks into a bar."), user("ha")], "Glad.", 3)
    gone = turn("d-0", [*ask, reply("edited by hand"), user("ha")], "Glad.", 4)
    found = parents([*choices, again, on, gone])
    assert found["a-1"] == ("", ""), "choices of one request are no repetition"
    assert found["b-0"] == ("", "again")
    assert (found["c-0"], found["d-0"]) == (("a-1", ""), ("b-0", ""))


def test_a_rewritten_history_and_a_sub_agent_begin_branches_of_a_named_session() -> None:
    main, sub = PlainMessage("system", "main"), PlainMessage("system", "sub")
    first = turn("a-0", [main, user("do it")], "working", 1, "s")
    inner = turn("b-0", [sub, user("look for x")], "found", 2, "s")
    compacted = turn("c-0", [main, user("Summary: it was begun."), reply("ok"), user("go on")], "done", 3, "s")
    after = turn("d-0", [sub, user("look for x"), reply("found"), user("and y")], "found", 4, "s")
    found = parents([first, inner, compacted, after])
    assert found == {"a-0": ("", ""), "b-0": ("", "agent"), "c-0": ("", "rewritten"), "d-0": ("b-0", "")}


def test_users_and_keys_share_no_conversation() -> None:
    ask = [user("hi")]
    ours = place_of(ask, session="", user="ann", owner="k1")
    assert len({ours, *(place_of(ask, session="", user=u, owner=o) for u, o in [("bob", "k1"), ("ann", "k2")])}) == 3
    assert ours == place_of(ask, session="", user="ann", owner="k1")


def test_what_a_turn_stores_is_bounded() -> None:
    long = [message for i in range(500) for message in (user(f"{i}" * 1000), reply("r" * 5000))]
    place = place_of([*long, user("x" * 99_999)], session="s" * 128, user="u" * 9999, owner="")
    assert len(place.before) == MOST_MARKS and len(place.user) == 128 and len(place.reply) == 200
    assert sum(len(said.text) for said in place.said) == MOST_SAID


def test_prompts_without_messages_follow_by_their_ids() -> None:
    def plain(name: str, ids: tuple[int, ...]) -> Turn:
        return Turn(name, EpisodePlace("s"), 1, "m", "p", ids_digest=digest_of_ids(ids), ids_length=len(ids))

    turns = [plain("a-0", (1, 2, 3)), plain("b-0", (1, 2, 3, 4, 5)), plain("c-0", (1, 2, 9, 9, 9, 9))]
    assert parent_by_ids(turns, (1, 2, 3, 4, 5, 6)) == "b-0"
    assert parent_by_ids(turns, (1, 2, 3, 7)) == "a-0"
    assert parent_by_ids(turns, (1, 2)) == parent_by_ids([], (1,)) == ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("ses_4f",), "ses_4f"),
        (("", f'{{"device_id":"d","session_id":"{UUID}"}}'), UUID),
        (("", f"user_ab_account__session_{UUID}"), UUID),
        (("", "ann@example.org", UUID), UUID),
        (("", "", "my-app"), ""),
    ],
)
def test_clients_name_their_sessions_in_several_ways(given: tuple[str, ...], expected: str) -> None:
    assert session_id(*given) == expected


def test_a_name_that_is_no_id_becomes_one() -> None:
    names = [session_id("a/b c"), session_id("a/b d"), session_id("x" * 500)]
    assert len(set(names)) == 3 and all(name.startswith("sess_") and len(name) < 40 for name in names)
