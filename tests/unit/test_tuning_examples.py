"""What a policy is tuned on: which tokens count, of chats and texts, and every refusal."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import SetupError
from shared.text.codec import TextCodec
from tests.unit.api_texts import EOS, bundle
from trainer.learn.batches import SampleGroup
from trainer.learners.tuning_examples import Tuning, read_examples

OPENING = "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
TURN = "<start>{{ m.role }}\n{{ m.content }}<eos>\n"
CHAT = "{% for m in messages %}" + TURN + "{% endfor %}" + OPENING
# Earlier replies lose what stands before a bar, as reasoning is left out of earlier turns.
FORGETFUL = (
    "{% for m in messages %}<start>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('|')[-1] }}<eos>\n{% endfor %}" + OPENING
)
DEAF = (
    "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<start>assistant\nthink:{% endif %}"
)
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<start>{{ m.role }}\n"
TOOLS += (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}<eos>\n{% endfor %}"
)
TOOLS += OPENING


def codec(template: str = CHAT) -> TextCodec:
    return TextCodec(msgspec.structs.replace(bundle(), chat_template=template))


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(
    folder: Path, *lines: Any, tuning: Tuning = "sft", template: str = CHAT, longest: int = 500
) -> tuple[SampleGroup, ...]:
    return read_examples(written(folder, *lines), tuning, codec(template), longest).items


def shown(item: SampleGroup, template: str = CHAT) -> tuple[str, list[str]]:
    """The prompt, and each run of tokens that counts."""
    (sample,) = item.samples
    runs: list[list[int]] = [[]]
    for token, counts in zip(sample.completion_ids, sample.mask, strict=True):
        if counts:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])

    def text(ids: Any) -> str:
        return codec(template).decode(ids, skip_special_tokens=False)

    return text(item.prompt_ids), [text(run) for run in runs if run]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_each_assistant_turn_counts_with_its_end_token_and_nothing_else(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, user("a"), said("bc"), user("d"), said("e")]
    (item,) = read(tmp_path, {"messages": turns})
    prompt, counted = shown(item)
    assert counted == ["bc<eos>", "e<eos>"]
    assert prompt == codec().render_chat(turns[:2], add_generation_prompt=True)
    whole = codec().encode_chat(turns, add_generation_prompt=False)
    ids = [*item.prompt_ids, *item.samples[0].completion_ids]
    assert ids == whole[: len(ids)] and len(whole) - len(ids) == 1, "the template's last line break is not learned"


def test_a_turn_of_weight_0_is_read_and_does_not_count(tmp_path: Path) -> None:
    (item,) = read(tmp_path, {"messages": [user("a"), said("b", weight=0), user("c"), said("d", weight=1)]})
    prompt, counted = shown(item)
    assert counted == ["d<eos>"] and "assistant\nb<eos>" in prompt


def test_where_the_template_forgets_each_turn_follows_the_prompt_that_a_worker_would_get(tmp_path: Path) -> None:
    turns = [user("a"), said("why|b"), user("c"), said("so|d")]
    first, second = read(tmp_path, {"messages": turns}, template=FORGETFUL)
    assert shown(first)[1] == ["why|b<eos>"] and shown(second)[1] == ["so|d<eos>"]
    assert "why" not in shown(second)[0] and "assistant\nb<eos>" in shown(second)[0]
    assert list(second.prompt_ids) == codec(FORGETFUL).encode_chat(turns[:3])


def test_tools_reach_the_template_and_call_arguments_are_objects(tmp_path: Path) -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    tool = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    (item,) = read(tmp_path, {"messages": [user("a"), called, tool, said("wet")], "tools": tools}, template=TOOLS)
    prompt, counted = shown(item, TOOLS)
    assert prompt.startswith("[weather]<start>user") and counted == ["Oslo<eos>", "wet<eos>"]
    (item,) = read(tmp_path, {"prompt": [user("a")], "completion": "b", "tools": tools}, template=TOOLS)
    assert shown(item, TOOLS) == ("[weather]<start>user\na<eos>\n<start>assistant\n", ["b<eos>"])


def test_a_completion_counts_whole_and_its_prompt_does_not(tmp_path: Path) -> None:
    chat = [user("a"), said("b"), user("c")]
    items = read(
        tmp_path,
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1=", "completion": "2<eos>"},
        {"prompt": chat, "completion": "d"},
        {"prompt": chat, "completion": [said("d")]},
        {"prompt": "c", "completion": [said("d")]},
    )
    assert [shown(item) for item in items[:2]] == [("1+1=", ["2<eos>"])] * 2, "one end token, not two"
    assert shown(items[2])[1] == ["d<eos>"] and items[2] == items[3]
    assert shown(items[2])[0] == codec().render_chat(chat, add_generation_prompt=True)
    assert shown(items[4])[0] == codec().render_chat([user("c")], add_generation_prompt=True)


def test_what_nothing_stands_before_does_not_count(tmp_path: Path) -> None:
    (item,) = read(tmp_path, {"completion": "abc"})
    assert shown(item) == ("a", ["bc<eos>"])


def test_a_pair_is_two_answers_to_one_prompt(tmp_path: Path) -> None:
    question = [user("2+2?")]
    same = read(
        tmp_path,
        {"prompt": question, "chosen": "4", "rejected": "55"},
        {"chosen": [*question, said("4")], "rejected": [*question, said("55")]},
        {"prompt": "2+2?", "chosen": [said("4")], "rejected": [said("55")]},
        tuning="dpo",
    )
    assert same[0] == same[1] == same[2]
    prompt = codec().render_chat(question, add_generation_prompt=True)
    texts = [codec().decode(each.completion_ids, skip_special_tokens=False) for each in same[0].samples]
    assert (codec().decode(same[0].prompt_ids, skip_special_tokens=False), texts) == (prompt, ["4<eos>", "55<eos>"])
    assert all(all(each.mask) and each.completion_ids[-1] == EOS for each in same[0].samples)


def test_what_is_longer_than_the_context_is_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 100})
    found = read_examples(path, "sft", codec(), 100)
    assert (len(found.items), found.too_long) == (1, 1)
    with pytest.raises(SetupError, match="no example has at most 2 tokens"):
        read_examples(path, "sft", codec(), 2)


GOOD = {"prompt": "a", "completion": "b"}
IDS = {"prompt_ids": [5, 6], "chosen_ids": [7, EOS], "rejected_ids": [8, 9, EOS]}


def test_a_pair_of_token_ids_is_taken_as_it_is(tmp_path: Path) -> None:
    (pair,) = read(tmp_path, IDS, tuning="dpo")
    assert pair.prompt_ids == (5, 6)
    assert [sample.completion_ids for sample in pair.samples] == [(7, EOS), (8, 9, EOS)]
    assert all(all(sample.mask) for sample in pair.samples)


@pytest.mark.parametrize(
    ("tuning", "lines", "words"),
    [
        ("sft", [], "is empty"),
        ("sft", [GOOD, "{"], "line 2"),
        ("sft", [GOOD, "", {"prompt": "a"}], "line 3: it has either 'messages', or 'completion'"),
        ("sft", [{"messages": [user("a"), said("b")], "completion": "c"}], "line 1: it has either"),
        (
            "sft",
            [{"messages": [user("a"), said("b")], "prompt": "c"}],
            "line 1: 'prompt' cannot be used together with 'messages'",
        ),
        ("sft", [{"messages": "hello"}], "line 1: Expected `array | null`, got `str` - at `$.messages`"),
        ("sft", [{"messages": []}], "line 1: no token of it counts"),
        ("sft", [{"messages": [user("a")]}], "line 1: no token of it counts"),
        ("sft", [{"messages": [user("a"), said("b", weight=0)]}], "line 1: no token of it counts"),
        ("sft", [{"messages": [user("a"), said("b", weight=0.5)]}], "line 1: messages[1]: weight is 0 or 1, not 0.5"),
        ("sft", [{"messages": [{"role": "bot", "content": "a"}]}], "line 1: messages[0]: role 'bot' is none of"),
        ("sft", [{"messages": [user("a"), {"role": "assistant"}]}], "line 1: messages[1]: content is a text"),
        ("sft", [{"messages": [user([{"type": "image_url"}]), said("b")]}], "line 1: it has images"),  # type: ignore[arg-type]
        (
            "sft",
            [{"messages": [said("", tool_calls=[{"id": "1"}])]}],
            "line 1: messages[0]: a tool call has a function",
        ),
        ("sft", [{"messages": [said("", tool_calls=5)]}], "line 1: messages[0]: tool_calls is a list"),
        (
            "sft",
            [{"messages": [said("", tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}])]}],
            "line 1: messages[0]: a tool call has a function",
        ),
        (
            "sft",
            [{"prompt": "a", "completion": [said("b", tool_calls=[{"id": "1"}])]}],
            "line 1: the answer's message has 'tool_calls'",
        ),
        (
            "dpo",
            [{"prompt": [user("a")], "chosen": [said("b", reasoning_content="c")], "rejected": "d"}],
            "line 1: the answer's message has 'reasoning_content'",
        ),
        (
            "sft",
            [{"chosen": "a", "rejected": "b"}],
            "line 1: a pair of 'chosen' and 'rejected': that is for --mode dpo",
        ),
        ("sft", [{"prompt": [user("a")], "completion": []}], "line 1: a conversation ends with an assistant's"),
        ("sft", [{"prompt": "a", "completion": [user("b")]}], "line 1: a conversation ends with an assistant's"),
        ("sft", [{**GOOD, "tools": [{"type": "function"}]}], "line 1: 'tools' are for chats"),
        ("sft", [{**GOOD, "functions": []}], "line 1: 'functions' are not read: give them as 'tools'"),
        ("dpo", [IDS, {**IDS, "rejected_ids": []}], "line 2: a pair of token ids has"),
        ("dpo", [{**IDS, "chosen_ids": [300]}], "line 1: the tokenizer knows no token 300"),
        ("dpo", [{**IDS, "chosen_ids": [-1]}], "line 1: the tokenizer knows no token -1"),
        ("dpo", [{**IDS, "chosen_ids": [8, 9, EOS]}], "line 1: 'chosen_ids' and 'rejected_ids' are the same"),
        ("sft", [IDS], "line 1: it has either"),
        ("dpo", [GOOD], "line 1: a pair has 'chosen' and 'rejected'"),
        ("dpo", [{"prompt": "a", "chosen": "b", "rejected": "b"}], "line 1: 'chosen' and 'rejected' are the same"),
        (
            "dpo",
            [{"prompt": "a", "chosen": "b", "rejected": "b<eos>"}],
            "line 1: 'chosen' and 'rejected' are the same to",
        ),
        ("dpo", [{"chosen": "a", "rejected": "b"}], "line 1: a pair needs a 'prompt'"),
        (
            "dpo",
            [{"chosen": [user("a"), said("b")], "rejected": [user("c"), said("d")]}],
            "line 1: 'chosen' and 'rejected' do not answer the same prompt",
        ),
    ],
)
def test_what_is_no_example_is_refused_with_its_line(
    tmp_path: Path, tuning: Tuning, lines: list[Any], words: str
) -> None:
    with pytest.raises(SetupError) as refused:
        read(tmp_path, *lines, tuning=tuning)
    assert words in str(refused.value) and "data.jsonl" in str(refused.value)


def test_a_byte_order_mark_and_lines_of_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(json.dumps(GOOD).encode() + b"\r\n" for _ in range(2)))
    assert read_examples(path, "sft", codec(), 500).items == read(tmp_path, GOOD, GOOD)


def test_a_reply_that_the_template_does_not_put_after_its_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"line 1: messages\[1\]: the chat template does not put this reply after"):
        read(tmp_path, {"messages": [user("a"), said("b")]}, template=DEAF)


def test_a_model_without_a_chat_template_takes_texts_alone(tmp_path: Path) -> None:
    assert len(read(tmp_path, GOOD, template="")) == 1
    with pytest.raises(SetupError, match="line 1: the model has no chat template"):
        read(tmp_path, {"messages": [user("a"), said("b")]}, template="")
