"""What signals come to: chances of labels by verdicts, rewards of turns, lessons for a trainer."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.episodes import EpisodePlace, JoinedTurn, Turn
from shared.errors import SetupError
from shared.signals import (
    DECAY,
    FACT,
    LABELS,
    Calibration,
    Signal,
    TurnReward,
    calibrated,
    certainty,
    kept_share,
    rewards_of,
)
from tests.unit.api_texts import EOS, codec, ids
from trainer.learners.distilling import ScoredRow
from trainer.runs.distillation.hindsight import SessionTurn, is_held_out, lesson_of, likelier, quoted
from trainer.settings import TrainSettings

SURE = {"accept": {"accept": 1.0}, "correction": {"correction": 1.0}}


def chain(*names: str) -> list[JoinedTurn]:
    turns = [Turn(name, EpisodePlace("s"), at, "m", "p") for at, name in enumerate(names)]
    return [JoinedTurn(turn, names[at - 1] if at else "", "") for at, turn in enumerate(turns)]


def test_chances_of_labels_follow_the_verdicts() -> None:
    assert calibrated([]).chances == LABELS
    right = calibrated([(SURE["accept"], 1.0), (SURE["correction"], 0.0)] * 200)
    assert right.chances["accept"] > 0.99 and right.chances["correction"] < 0.01 and right.verdicts["accept"] == 200
    noise = calibrated([(SURE[label], float(verdict)) for label in SURE for verdict in (0, 1)] * 500)
    assert math.isclose(noise.chances["accept"], noise.chances["correction"], abs_tol=0.01), "it says nothing any more"
    assert certainty(noise.chances["accept"]) < 0.001
    assert calibrated([({"accept": 1.0}, -7.0)]).chances["accept"] == pytest.approx(0.72)


def test_a_verdict_stands_alone_and_other_signals_are_weighed() -> None:
    signals = {
        "a": [Signal("next_message", labels={"correction": 1.0}), Signal("verdict", 1.0)],
        "b": [Signal("next_message", labels={"accept": 1.0}), Signal("edit", 0.5)],
    }
    rewards = rewards_of(chain("a", "b", "c"), signals, Calibration())
    assert rewards["a"] == (1.0, 1.0) and "c" not in rewards
    sure = certainty(0.9)
    assert rewards["b"] == pytest.approx(((0.9 * sure + 0.5 * FACT) / (sure + FACT), 1 - (1 - sure) * (1 - FACT)))


def test_tests_count_for_the_turns_before_them() -> None:
    rewards = rewards_of(chain("a", "b", "c"), {"c": [Signal("tests", 0.25)]}, Calibration())
    expected = {name: TurnReward(0.25, FACT * DECAY**distance) for distance, name in enumerate("cba")}
    assert rewards.keys() == expected.keys() and all(rewards[n] == pytest.approx(expected[n]) for n in rewards)


def test_an_edit_leaves_a_share() -> None:
    assert kept_share("a b c d", "a b c d") == kept_share("", "") == 1.0
    assert kept_share("a b c d", "w x y z") == kept_share("", "x") == 0.0
    assert kept_share("a b c d", "a b c e") == pytest.approx(2 / 3)


def turn(value: float, *signals: tuple[str, str], finish: str = "stop", said: str = "how many?") -> SessionTurn:
    told = {
        "name": "t",
        "policy": "p",
        "text": "very many",
        "finish_reason": finish,
        "messages": [{"role": "user", "content": said}],
        "signals": [{"kind": kind, "text": text} for kind, text in signals],
        "reward": {"value": value, "confidence": 0.5},
        "prompt_ids": ids("user: how many?\n"),
        "completion_ids": [*ids("very many"), EOS],
    }
    return msgspec.convert(told, SessionTurn)


def test_a_correction_is_shown_to_the_teacher_alone() -> None:
    correction = "a number<eos>, please"
    assert lesson_of("s", turn(0.1, ("exit_code", "")), codec(), correction)[1] is None, "neither judged nor rated"
    kind, lesson = lesson_of("s", turn(0.1, ("verdict", "")), codec(), correction)
    assert kind == "corrected" and lesson is not None
    assert codec().decode(lesson.teacher_ids, False) == "user: how many?\n\na number , please\n"
    assert (lesson.prompt_ids, lesson.reply_ids) == (tuple(ids("user: how many?\n")), ())


def test_an_edited_reply_and_one_that_was_liked_are_lessons_as_they_are() -> None:
    kind, lesson = lesson_of("s", turn(0.3, ("edit", "seven")), codec())
    assert kind == "edited" and lesson is not None and lesson.reply_ids == (*ids("seven"), EOS)
    assert "Reply exactly: seven" in codec().decode(lesson.teacher_ids)
    kind, lesson = lesson_of("s", turn(0.9), codec())
    assert kind == "content" and lesson is not None and lesson.as_it_stands
    row = ScoredRow.as_said("t@1", lesson.prompt_ids, lesson.reply_ids, 20)
    assert [dict(zip(*place, strict=True)) for place in zip(row.top_ids, row.top_logprobs, strict=True)] == [
        {token: 0.0} for token in lesson.reply_ids
    ], "its own tokens and no others"


@pytest.mark.parametrize(
    ("correction", "found"),
    [
        ('No. Say it like this: "In short, it is a tree."', ["In short, it is a tree."]),
        ("Please write\n“it is a tree”\nor «it was a tree».", ["it is a tree", "it was a tree"]),
        ('You said "very many trees", why?', []),  # what the reply had
        ('Do not say "it is a tree" again.', []),
        ('I don\'t want "it is a tree": say "this is a tree".', ["this is a tree"]),
        ('Use "tree" in it.', []),  # a word
        ('Say "it is a tree', []),
    ],
)
def test_a_correction_that_quotes_a_reply_is_one(correction: str, found: list[str]) -> None:
    assert quoted(correction, "There are Very Many Trees.") == found


def test_a_quoted_reply_ends_as_the_model_ends_its_own() -> None:
    said = 'say "it is a tree"'
    for finish in ("stop", "length"):
        _, lesson = lesson_of("s", turn(0.1, ("verdict", ""), finish=finish), codec(), said)
        assert lesson is not None and lesson.quoted == ((*ids("it is a tree"), EOS),)


def test_of_several_drafts_the_one_that_the_correction_adds_most_to_is_learned() -> None:
    assert likelier([(1,), (2, 2), (3,)], [0.5, 9.0, 3.0]) == (2, 2)
    assert likelier([(1,), (2,)], [1.9, -4.0]) is None, "the teacher has not followed it"
    assert likelier([], []) is None


@pytest.mark.parametrize(
    "given",
    [
        turn(0.5),
        turn(0.1),  # neither judged nor rated
        turn(0.9, finish="length"),
        turn(0.1, ("next_message", "no"), said="not in the prompt"),
    ],
)
def test_a_turn_that_teaches_nothing_is_no_lesson(given: SessionTurn) -> None:
    assert lesson_of("s", given, codec(), "no")[1] is None


def test_sessions_are_a_data_set_of_distilling_that_may_wait_for_the_night() -> None:
    asked: dict[str, Any] = {"dataset": Path("sessions:policy"), "teacher": "tiny", "connect_to": "127.0.0.1:8000"}
    TrainSettings(mode="distill", learn_when="idle,23:00-07:00", **asked).check()
    with pytest.raises(SetupError, match="what sessions teach is for --mode distill"):
        TrainSettings(mode="sft", **asked | {"teacher": ""}).check()
    with pytest.raises(SetupError, match="is read through an api"):
        TrainSettings(mode="dpo", **asked | {"teacher": "", "dataset": Path("feedback:p"), "connect_to": ""}).check()


def test_sessions_are_held_out_as_a_whole_and_always_alike() -> None:
    held = [session for session in map(str, range(500)) if is_held_out(session)]
    assert 60 < len(held) < 140 and held == [session for session in map(str, range(500)) if is_held_out(session)]
