"""What a head learns from: lines of pairs, scores and labels, and every refusal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import SetupError
from shared.text.codec import TextCodec
from tests.unit.api_texts import codec as byte_codec
from trainer.learners.head_examples import HeadExample, HeadText, read_examples
from trainer.learners.lines import batch_of, hold_out


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return byte_codec()


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_pairs_of_texts_chats_and_whole_conversations_are_the_same_pair(tmp_path: Path, codec: TextCodec) -> None:
    question = [{"role": "user", "content": "2+2?"}]
    answers = {"chosen": "4", "rejected": "5"}
    whole = {name: [*question, {"role": "assistant", "content": text}] for name, text in answers.items()}
    last = {name: conversation[1:] for name, conversation in whole.items()}
    data = read_examples(
        written(
            tmp_path, {"prompt": question, **answers}, whole, {"prompt": question, **whole}, {"prompt": "2+2?", **last}
        ),
        codec,
        100,
    )
    assert data.form == "pairs" and len(data.items) == 4
    assert len({item.texts for item in map(_ids, data.items)}) == 1
    rendered = codec.render_chat([*question, {"role": "assistant", "content": "4"}], add_generation_prompt=False)
    assert data.items[0].texts[0].ids == tuple(codec.encode(rendered, add_special_tokens=False))


def _ids(example: HeadExample) -> HeadExample:
    return HeadExample(tuple(HeadText(None, text.answer, text.ids) for text in example.texts))


def test_scores_and_labels(tmp_path: Path, codec: TextCodec) -> None:
    scores = read_examples(written(tmp_path, {"completion": "a", "score": -1, "source": "x"}), codec, 100)
    assert (scores.form, scores.items[0].target, scores.labels) == ("scores", -1.0, ())
    labels = written(tmp_path, {"completion": "a", "label": "no"}, {"prompt": "p", "completion": "b", "label": "aye"})
    found = read_examples(labels, codec, 100)
    assert (found.form, found.labels, [item.target for item in found.items]) == ("labels", ("aye", "no"), [1.0, 0.0])


def test_actions_of_texts_and_chats(tmp_path: Path, codec: TextCodec) -> None:
    chat = [{"role": "user", "content": "where?"}]
    lines = ({"observation": "wall ahead", "action": "turn", "weight": 0.5}, {"observation": chat, "action": "go"})
    found = read_examples(written(tmp_path, *lines), codec, 100)
    assert (found.form, found.labels) == ("actions", ("go", "turn"))
    assert [(item.target, item.weight) for item in found.items] == [(1.0, 0.5), (0.0, 1.0)]
    assert [item.texts[0].ids for item in found.items] == [
        tuple(codec.encode("wall ahead")),
        tuple(codec.encode_chat(chat)),
    ]
    vectors = read_examples(written(tmp_path, {"observation": "a", "action": [0.5, -1]}), codec, 100)
    assert (vectors.form, vectors.labels, vectors.items[0].action) == ("vectors", (), (0.5, -1.0))


def test_texts_beyond_the_context_are_left_out_and_counted(tmp_path: Path, codec: TextCodec) -> None:
    path = written(tmp_path, {"completion": "a", "score": 1}, {"completion": "b" * 500, "score": 1})
    found = read_examples(path, codec, 100)
    assert (len(found.items), found.too_long) == (1, 1)


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ([], "is empty"),
        (["{"], "line 1"),
        ([{"prompt": "a"}], "line 1: neither 'chosen'"),
        ([{"chosen": "a", "rejected": "b"}, {"completion": "a", "score": 1}], "line 2: one of scores among pairs"),
        ([{"completion": "a", "score": "high"}], "line 1"),
        ([{"completion": "a", "score": 1, "weight": 2}], "line 1: 'weight'"),
        ([{"observation": "a", "action": "b", "weight": 0}], "line 1: 'weight'"),
        ([{"observation": "a", "action": ""}], "line 1: action ''"),
        ([{"observation": "a", "action": []}], "line 1: 'action' is"),
        ([{"observation": "a", "action": [1e16]}], "line 1: 'action' is"),
        ([{"observation": "a", "action": [1]}, {"observation": "a", "action": [1, 2]}], "line 2: an action of 2"),
        ([{"observation": "a", "action": [1]}, {"observation": "a", "action": "b"}], "line 2: one of actions"),
        ([{"observation": "a"}], "line 1: neither"),
        ([{"chosen": [{"role": "user"}], "rejected": "b"}], "line 1: a conversation ends"),
        ([{"chosen": [], "rejected": "b"}], "line 1: a conversation ends"),
        ([{"completion": "b" * 500, "score": 1}], "at most 100 tokens"),
        ([{"completion": "", "score": 1}, {"completion": "", "score": 2}], "each example has a text without tokens"),
        ([{"completion": "", "score": 1}, {"completion": "b" * 500, "score": 2}], "at most 100 tokens"),
    ],
)
def test_what_is_no_example_is_refused_with_its_line(
    tmp_path: Path, codec: TextCodec, lines: list[Any], word: str
) -> None:
    with pytest.raises(SetupError) as refused:
        read_examples(written(tmp_path, *lines), codec, 100)
    assert word in str(refused.value) and "data.jsonl" in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, codec: TextCodec) -> None:
    with pytest.raises(SetupError, match="no data set"):
        read_examples(tmp_path / "nothing.jsonl", codec, 100)


def test_a_label_that_training_does_not_know_is_refused(tmp_path: Path, codec: TextCodec) -> None:
    with pytest.raises(SetupError, match="label 'c' is none of a, b"):
        read_examples(written(tmp_path, {"completion": "x", "label": "c"}), codec, 100, ("a", "b"))


def examples(count: int) -> list[HeadExample]:
    return [HeadExample((HeadText(None, str(at), (at,)),), float(at)) for at in range(count)]


def test_a_split_parts_the_data_in_the_same_way_each_time() -> None:
    learned, held_out = hold_out(examples(50), seed=3)
    assert len(held_out) == 5 and set(learned).isdisjoint(held_out)
    assert len(learned) == 45 and hold_out(examples(50), seed=3) == (learned, held_out)
    with pytest.raises(SetupError, match="too few"):
        hold_out(examples(1), seed=3)


def test_each_pass_has_every_example_once_whatever_step_a_run_resumes_at() -> None:
    data = examples(10)
    steps = [batch_of(data, 4, step, seed=1) for step in range(5)]
    seen = [example.target for batch in steps for example in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(np.arange(10.0)) and seen[:10] != seen[10:]
