"""Each family in its own language: what its template writes of earlier turns is what we read, and what we force."""

import json
from functools import cache
from typing import Any

import pytest

from api.openai.bodies import ChatCompletionRequest
from api.openai.conversations import conversation
from api.openai.tools import ToolUse
from shared.text import grammar
from shared.text.codec import TextCodec, TokenizerBundle
from shared.text.languages.channels import splitter_of
from shared.text.languages.families import FAMILIES
from shared.text.languages.language import language_of
from shared.text.languages.pieces import ReplyPiece
from shared.text.languages.tool_forms import form_of
from tests.unit.api_texts import bundle
from tests.unit.family_templates import SHAPES

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "items": {"type": "string"}}},
            "required": ["lat", "tags"],
        },
    },
    "required": ["city", "days", "metric", "where"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("get_weather", "other")
]
PLAIN = {"city": "Rome", "days": 2, "metric": True, "where": {"lat": 1.5, "tags": ["a", "b"]}}
HARD = {
    "city": 'Zürich 日本 <b>&amp;</b> {x} [y] "it\'s"\n  two, lines; \\d',
    "days": -20,
    "metric": False,
    "where": {"lat": 1e-3, "tags": ["<c>", "", "e = mc²"]},
}
FAMILY = pytest.mark.parametrize("family", sorted(SHAPES))


@cache
def codec_of(family: str, tokens: bool = False) -> TextCodec:
    """The codec of a model of this family, whose marks are letters, or special tokens as in the real vocabularies."""
    document, marks = json.loads(bundle().tokenizer_json), []
    if tokens:
        letters = TextCodec(TokenizerBundle(bundle().tokenizer_json, SHAPES[family].template, (0,), {}))
        language = language_of(letters)
        written = language.reasoning.tokens if language.reasoning is not None else ()
        known = dict.fromkeys((*form_of(language.calls).shown, *written))
        marks = [mark for mark in known if not any(other in mark and other != mark for other in known)]
    size = TextCodec(bundle()).vocab_size
    for at, mark in enumerate(marks, size):
        document["added_tokens"].append(
            {"id": at, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        )  # fmt: skip
    return TextCodec(TokenizerBundle(json.dumps(document), SHAPES[family].template, (0,), {}))


def call(arguments: dict[str, Any], name: str = "get_weather", at: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call0000{at}", "type": "function", "function": function}


def body_of(*turns: dict[str, Any], **more: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "hi"}, *turns]
    return ChatCompletionRequest.model_validate({"messages": messages, "tools": TOOLS} | more)


def use_of(body: ChatCompletionRequest) -> ToolUse:
    use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    assert use is not None
    return use


async def written(codec: TextCodec, message: dict[str, Any]) -> str:
    """What the template writes of an assistant's message."""
    body = body_of({"role": "assistant", **message}, add_generation_prompt=False)
    chat = await conversation(codec, body, use_of(body))
    text = codec.decode(chat.prompt, skip_special_tokens=False).rpartition("[assistant]")[2]
    return text.removesuffix("[over]")


def read(codec: TextCodec, plan: Any, *texts: str) -> ReplyPiece:
    splitter, whole = splitter_of(plan), ReplyPiece()
    for text in texts:
        whole.add(splitter.push(text))
    whole.add(splitter.flush())
    return whole


def test_every_family_has_a_template() -> None:
    assert set(SHAPES) == {family.form for family in FAMILIES}


@FAMILY
def test_a_family_s_template_gives_it_away(family: str) -> None:
    language = language_of(codec_of(family))
    assert language.calls == family
    assert language.reasoning is not None and language.reasoning.start in SHAPES[family].template


@FAMILY
@pytest.mark.parametrize(("arguments", "count"), [({**PLAIN, "city": ""}, 1), (HARD, 2)], ids=["plain", "hard"])
async def test_what_a_template_writes_of_a_turn_is_read_as_that_turn(
    family: str, arguments: dict[str, Any], count: int
) -> None:
    count = 1 if family == "harmony" else count  # GPT-OSS calls one function a message
    codec, shape = codec_of(family), SHAPES[family]
    turn: dict[str, Any] = {"content": "I look.", "reasoning_content": "Hm.\nSo."}
    turn["tool_calls"] = [call(arguments, at=at) for at in range(count)]
    text = await written(codec, turn)
    if shape.opens_thought:
        text = text.removeprefix(shape.thought[0])
    plan = (await conversation(codec, body_of(), use_of(body_of()))).split
    assert plan is not None
    piece = read(codec, plan, text)
    assert read(codec, plan, *text) == piece, "letter by letter"
    assert (piece.content, piece.reasoning) == ("I look.", "Hm.\nSo."), text
    calls = [(each.name, json.loads(each.arguments), each.complete) for each in piece.calls]
    assert calls == [("get_weather", arguments, True)] * count, text


def allows(codec: TextCodec, text: str, completion: str) -> bool:
    tokenizer = grammar.tokenizer_of(codec.bundle, codec.vocab_size)
    grammar.check(text, tokenizer)
    matcher = grammar.matcher_of(text, tokenizer)
    ids = codec.encode(completion, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@FAMILY
@pytest.mark.parametrize("tokens", [False, True], ids=["letters", "tokens"])
async def test_a_forced_call_is_what_the_template_writes_after_free_reasoning(family: str, tokens: bool) -> None:
    codec, shape = codec_of(family, tokens), SHAPES[family]
    count = 1 if family == "harmony" else 2
    calls = {"content": "", "tool_calls": [call(PLAIN, at=at) for at in range(count)]}
    text = await written(codec, calls)
    thoughtful = await written(codec, {**calls, "reasoning_content": "Hm."})
    body = body_of(tool_choice="required")
    chat = await conversation(codec, body, use_of(body))
    if family == "harmony":
        text, thoughtful = (
            each.removeprefix("<|start|>assistant").removesuffix("<|call|>") for each in (text, thoughtful)
        )
    text, thoughtful = (each.removesuffix(shape.after) if shape.after else each for each in (text, thoughtful))
    if shape.opens_thought:
        text = shape.thought[1].lstrip("\n") + text
        thoughtful = thoughtful.removeprefix(shape.thought[0])
    assert allows(codec, chat.grammar, thoughtful), thoughtful
    assert allows(codec, chat.grammar, text), text
    assert not allows(codec, chat.grammar, "Hello")
    assert not allows(codec, chat.grammar, text.replace("get_weather", "get_whether"))
    assert not allows(codec, chat.grammar, text.replace("2", "two"))
    named = body_of(tool_choice={"type": "function", "function": {"name": "other"}})
    assert not allows(codec, (await conversation(codec, named, use_of(named))).grammar, text)
    single = body_of(tool_choice="required", parallel_tool_calls=False)
    assert allows(codec, (await conversation(codec, single, use_of(single))).grammar, text) is (count == 1)


@FAMILY
async def test_strict_arguments_follow_their_schema_when_the_model_decides(family: str) -> None:
    codec = codec_of(family, tokens=True)
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    use = use_of(body_of(tools=strict))
    text = await written(codec, {"content": "I look.", "tool_calls": [call(PLAIN)]})
    text = text.removesuffix(SHAPES[family].after) if SHAPES[family].after else text
    held = use.grammar(codec)
    if not held:
        assert use.unenforced(codec) == ["tools.get_weather.strict", "tools.other.strict"]
        assert family in ("llama3", "llama4", "minicpm5", "harmony")
        return
    assert use.unenforced(codec) == []
    assert allows(codec, held, text), text
    assert allows(codec, held, "I do not know.")
    assert not allows(codec, held, text.replace("2", "two"))
