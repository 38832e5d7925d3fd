"""Chunks of a stream: OpenAI's shapes, exact text, and streams that resume anywhere."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from api.generation.choice import Choice, RequestPlan, usage
from api.generation.sequences import Sequences
from api.openai.chunks import ChunkWriter, event_id, seen_until
from api.openai.replies import whole_body
from shared.frames import Finish, TokenEvent, TokenLogprob
from shared.sequences import SamplingParams, SequenceSpec
from shared.text.languages.pieces import SplitPlan
from shared.token_events import join
from tests.unit.api_texts import EOS, codec, ids


def plan(**fields: Any) -> RequestPlan:
    shared = {name: fields.pop(name) for name in ("prompts", "n", "chat") if name in fields}
    template = SequenceSpec(fields.pop("id", "cmpl-1"), "m", (), SamplingParams(9, seed=0))
    sequences = Sequences(template, **{"prompts": (tuple(ids("ab")),), **shared})
    return RequestPlan(sequences, 7, "m", "fp", **{"eos_token_ids": (EOS,), **fields})


def events(text: str, finish: Finish | None, *, top: int | None = None, each: int = 1) -> list[TokenEvent]:
    """One event for every `each` tokens; the last one carries the finish."""
    tokens = ids(text)
    out: list[TokenEvent] = []
    for at in range(0, len(tokens), each):
        part = tokens[at : at + each]
        tops = None if top is None else [tuple(TokenLogprob(token + k, -0.5 - k) for k in range(top)) for token in part]
        out.append(TokenEvent("s", 1, at, part, [-0.5] * len(part), tops))
    if finish is not None:
        out[-1].finish = finish
    return out


def sent(reply: RequestPlan, own: list[TokenEvent]) -> list[dict[str, Any]]:
    writer, choice = ChunkWriter(reply, codec()), Choice(reply, codec())
    chunks = []
    for event in own:
        if data := writer.chunk(0, choice.take([event])):
            choice.begun = True
            assert data.startswith(b"data: ") and data.endswith(b"\n\n")
            chunks.append(json.loads(data[6:]))
    return chunks


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_text_chunks_are_openais() -> None:
    chunks = sent(plan(), events("héllo", Finish("stop", "x")))
    Completion.model_validate(chunks[-1])  # openai's type of a chunk is that of a whole reply: it wants a finish
    assert text_of(chunks) == "héllo"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "x"


def test_chat_chunks_are_openais() -> None:
    reply = plan(chat=True, id="chatcmpl-1", include_usage=True)
    writer = ChunkWriter(reply, codec())
    role = json.loads(writer.role(0)[6:])
    chunks = [role, *sent(reply, events("hi", Finish("length")))]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert chunk["usage"] is None
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "h", "i"]


def test_half_a_character_makes_no_chunk() -> None:
    assert [chunk["choices"][0]["text"] for chunk in sent(plan(), events("👍", Finish("length")))] == ["👍"]


def test_an_eos_token_ends_the_text_silently_and_counts() -> None:
    own = events("a", None)
    own.append(TokenEvent("s", 1, 1, [EOS], [-0.1], finish=Finish("stop")))
    reply = plan(logprobs=0)
    chunks = sent(reply, own)
    assert text_of(chunks) == "a"
    assert chunks[-1]["choices"][0]["logprobs"]["tokens"] == ["<eos>"]


@pytest.mark.parametrize(("show", "expected"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_is_part_of_the_text_only_when_asked_for(show: bool, expected: str) -> None:
    stop = ids("c")[0]
    own = events("abc", Finish("stop", stop))
    assert text_of(sent(plan(show_stop_token=show), own)) == expected


def test_rows_with_stop_strings_are_shown_as_the_worker_says() -> None:
    own = events("abc", Finish("stop", "c"))
    for event, text in zip(own, ["", "a", "b"], strict=True):
        event.text = text
    assert text_of(sent(plan(), own)) == "ab"


def test_legacy_logprobs_carry_offsets_and_the_drawn_token() -> None:
    chunks = sent(plan(logprobs=1), events("aé", Finish("length"), top=1))
    first, second, third = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert first == {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [{"a": -0.5}]}
    assert second["tokens"] == ["bytes:\\xc3"]
    assert (second["text_offset"], third["text_offset"]) == ([1], [1])


def test_echo_shows_the_prompt_and_its_logprobs_once() -> None:
    own = events("cd", Finish("length"))
    own[0].prompt_logprobs = [None, -1.0]
    reply = plan(echo=("ab",), logprobs=0)
    chunks = sent(reply, own)
    assert text_of(chunks) == "abcd"
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 1, 2], [3]]


def test_chat_logprobs_carry_bytes() -> None:
    reply = plan(chat=True, logprobs=1)
    chunk = sent(reply, events("é", Finish("length"), top=1, each=2))[0]
    content = chunk["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[0xC3], [0xA9]]
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5
    ChatCompletionChunk.model_validate(chunk)


def test_logprobs_can_name_tokens_by_id_and_never_hold_infinity() -> None:
    own = events("a", Finish("length"))
    own[0].logprobs = [float("-inf")]
    shown = sent(plan(logprobs=0, name_tokens_by_id=True), own)[0]["choices"][0]["logprobs"]
    assert shown["tokens"] == [f"token_id:{ids('a')[0]}"]
    assert shown["token_logprobs"] == [-9999.0]


def test_token_ids_come_with_every_chunk_and_the_prompts_with_the_first() -> None:
    chunks = sent(plan(token_ids=True), events("ab", Finish("length")))
    first, second = [chunk["choices"][0] for chunk in chunks]
    assert first["prompt_token_ids"] == ids("ab")
    assert "prompt_token_ids" not in second
    assert first["token_ids"] + second["token_ids"] == ids("ab")


def test_usage_counts_a_prompt_once_for_all_its_samples() -> None:
    reply = plan(n=2, prompts=((1, 2, 3), (4,)))
    choices = [Choice(reply, codec()) for _ in range(4)]
    for choice, cached in zip(choices, (0, 2, 1, 0), strict=True):
        choice.take(events("ab", Finish("length", cached_tokens=cached)))
    assert msgspec.to_builtins(usage(reply, choices)) == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_joined_events_lose_nothing() -> None:
    own = events("abc", Finish("length"), top=1)
    own[0].prompt_logprobs = [None]
    joined = join(own)
    assert (joined.tokens, joined.position, joined.finish) == (ids("abc"), 0, Finish("length"))
    assert len(joined.top_logprobs or []) == 3
    assert joined.prompt_logprobs == [None]


@given(
    text=st.text(st.sampled_from("aé👍b\n"), min_size=1, max_size=12),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    cut=st.integers(0, 60),
    mode=st.sampled_from(["plain", "logprobs", "stop text"]),
)
@settings(max_examples=200)
def test_a_stream_resumed_at_any_event_says_exactly_what_was_missing(
    text: str, before: int, after: int, cut: int, mode: str
) -> None:
    """Live frames and log chunks split the tokens differently; the client must not notice."""
    reply = plan(echo=("ab",), logprobs=0 if mode == "logprobs" else None, event_ids=True)

    def own(each: int) -> list[TokenEvent]:
        made = events(text, Finish("length"), each=each)
        if mode == "stop text":
            shown = Choice(plan(), codec())
            for event in made:
                event.text = shown.take([TokenEvent("s", 1, 0, event.tokens, [], finish=event.finish)]).text
        made[0].prompt_logprobs = [None, -1.0]
        return made

    def read(choice: Choice, own: list[TokenEvent]) -> list[tuple[str, dict[str, Any]]]:
        writer, out = ChunkWriter(reply, codec()), []
        for event in own:
            data = writer.chunk(0, choice.take([event]))
            if data and not choice.seen_end:
                choice.begun = True
                out.append((event_id([choice])[4:-1].decode(), json.loads(data[6:])))
        return out

    whole = read(Choice(reply, codec()), own(1))
    first = read(Choice(reply, codec()), own(before))[: cut % (len(text.encode()) + 1)]
    last_id = first[-1][0] if first else ""
    second = read(Choice(reply, codec(), seen_until(last_id, 1)[0]), own(after))
    chunks = [chunk for _, chunk in first + second]

    def joined(field: str, part: list[dict[str, Any]]) -> list[Any]:
        return [value for chunk in part for value in (chunk["choices"][0]["logprobs"] or {}).get(field, [])]

    assert text_of(chunks) == "ab" + codec().decode(ids(text))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("length") == 1
    for field in ("tokens", "text_offset", "token_logprobs"):
        assert joined(field, chunks) == joined(field, [chunk for _, chunk in whole])


@pytest.mark.parametrize("event", ["x", "0:1", "9:1:1", "0:1:1:fin", "0:-1:0", "0:a:b"])
def test_a_malformed_event_id_is_refused(event: str) -> None:
    with pytest.raises(ValueError):
        seen_until(event, 2)


def test_event_ids_tell_what_each_choice_has_shown() -> None:
    reply = plan(n=3)
    choices = [Choice(reply, codec()) for _ in range(3)]
    for index in (0, 2):
        choices[index].take(events("ab", Finish("stop") if index else None))
        choices[index].begun = True
    assert event_id(choices) == b"id: 0:2:2,2:2:2:end\n"
    seen = seen_until("0:2:2,2:2:2:end", 3)
    assert [(p.tokens, p.chars, p.ended, p.begun) for p in seen] == [
        (2, 2, False, True),
        (0, 0, False, False),
        (2, 2, True, True),
    ]


def test_a_whole_reply_says_what_its_stream_says() -> None:
    own = events("héy👍", Finish("length"), top=2)
    own[0].prompt_logprobs = [None, -1.0]
    reply = plan(echo=("ab",), logprobs=2, token_ids=True)
    chunks = [chunk["choices"][0] for chunk in sent(reply, own)]
    whole = json.loads(whole_body(reply, codec(), [join(own)]))
    choice = whole["choices"][0]
    assert choice["text"] == "".join(chunk["text"] for chunk in chunks)
    for field, value in choice["logprobs"].items():
        assert value == [item for chunk in chunks for item in chunk["logprobs"][field]]
    assert choice["token_ids"] == [token for chunk in chunks for token in chunk["token_ids"]]


def test_echo_and_prompt_logprobs_each_show_as_many_competitors_as_they_asked_for() -> None:
    own = events("c", Finish("length"), top=1)
    own[0].prompt_logprobs = [None, -1.0]
    own[0].prompt_top_logprobs = [(), tuple(TokenLogprob(ids(letter)[0], -float(k)) for k, letter in enumerate("xyz"))]
    reply = plan(echo=("ab",), logprobs=1, prompt_logprobs=3)
    choice = json.loads(whole_body(reply, codec(), own))["choices"][0]
    assert choice["logprobs"]["top_logprobs"][1] == {"x": -0.0, "b": -1.0}
    assert len(choice["prompt_logprobs"][1]) == 4
    assert choice["prompt_logprobs"][0] is None


@given(
    thought=st.text("a<é/think", max_size=12).filter(lambda text: "</think>" not in text),
    cuts=st.lists(st.integers(1, 9), min_size=50, max_size=50),
    open_=st.booleans(),
    late=st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_tokens_of_reasoning_are_counted_alike_however_they_come(
    thought: str, cuts: list[int], open_: bool, late: int
) -> None:
    split = SplitPlan(thinking="open" if open_ else "may", think_start="<think>", think_end="</think>")
    text = ("" if open_ else "<think>") + f"{thought}</think>"
    tokens = ids(f"{text}hello")
    counted = []
    for many in (cuts, [len(tokens)]):
        choice, at, shown = Choice(plan(chat=True, split=split), codec()), 0, 0
        for count in many:
            last = at + count >= len(tokens)
            event = TokenEvent("s", 1, at, tokens[at : at + count], [-0.5] * len(tokens[at : at + count]))
            event.finish = Finish("length") if last else None
            if late:  # a row with stop strings shows its text later than its tokens
                whole = codec().decode(tokens[: at + count]).rstrip("\ufffd")
                until = len(whole) if last else max(shown, len(whole) - late)
                event.text, shown = whole[shown:until], until
            choice.take([event])
            at += count
            if last:
                break
        counted.append(choice.reasoning)
    assert counted == [len(ids(text))] * 2
