"""Tool calls and reasoning: what is told to the model, what is enforced, and how a completion is taken apart."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response

from api.generation.choice import Choice
from api.generation.plan import unchecked_plan
from api.generation.target import Target
from api.openai.bodies import ChatCompletionRequest, ChatMessage
from api.openai.chat import UNUSED_HEADER, prepare, unused_hints, with_unused
from api.openai.conversations import conversation, for_template, template_messages
from api.openai.tools import ToolUse
from api.ring.ring import ServedModel
from shared.errors import InvalidGrammarError, InvalidRequestError
from shared.frames import Finish, TokenEvent
from shared.process.api_settings import ApiSettings
from shared.sequences import ModelCard
from shared.text import grammar
from shared.text.codec import TextCodec, TokenizerBundle
from shared.text.grammar import Spelling
from shared.text.languages.families import HERMES, REASONINGS, recognised
from shared.text.languages.grammars import after_reasoning, framed
from shared.text.languages.pieces import CallPart, ReplyPiece, SplitPlan
from shared.text.languages.splitter import Splitter
from shared.text.languages.tool_forms import form_of
from tests.redis.scripted_worker import CARD
from tests.unit.api_texts import bundle, codec
from worker.engine.batch.stop_text import RowText

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OSLO = ROME.replace("Rome", "Oslo")
HERMES_PLAN = SplitPlan(format=HERMES)
SURE_PLAN = SplitPlan(format=HERMES, sure=True)
THINKING = SplitPlan(format=HERMES, thinking="may", think_start="<think>", think_end="</think>")


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def use_of(**fields: Any) -> ToolUse | None:
    body = request(**fields)
    return ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)


def taken(plan: SplitPlan, *texts: str) -> ReplyPiece:
    splitter, whole = Splitter(plan), ReplyPiece()
    for text in texts:
        whole.add(splitter.push(text))
    whole.add(splitter.flush())
    return whole


@pytest.mark.parametrize(
    ("plan", "text", "content", "reasoning", "cities"),
    [
        (HERMES_PLAN, "plain text \n", "plain text \n", "", []),
        (HERMES_PLAN, ROME, "", "", ["Rome"]),
        (HERMES_PLAN, f"Look:\n{ROME}\n{OSLO}\n", "Look:", "", ["Rome", "Oslo"]),
        (HERMES_PLAN, f"{ROME}\nand then", "\nand then", "", ["Rome"]),
        (HERMES_PLAN, "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", "", []),
        (HERMES_PLAN, '<tool_call>\n{"name": "a"', '<tool_call>\n{"name": "a"', "", []),
        (HERMES_PLAN, "a < b <tool", "a < b <tool", "", []),
        (THINKING, f"<think>\nhm\n\n</think>\n\nSo:\n{ROME}", "So:", "hm", ["Rome"]),
        (THINKING, "no thoughts", "no thoughts", "", []),
        (THINKING, "<think>cut off <tool_call>", "", "cut off <tool_call>", []),
        (THINKING, "<think></think>x", "x", "", []),
        (SplitPlan(thinking="open", think_end="</think>"), "so\n</think>\n\nyes", "yes", "so", []),
        (SplitPlan(thinking="open", think_end="</think>", show_thinking=False), "so\n</think>\n\nyes", "yes", "", []),
        (SplitPlan(format="llama3"), '{"name": "f", "parameters": {"city": "Rome"}}', "", "", ["Rome"]),
        (SplitPlan(format="llama3"), '{"a": 1} is JSON', '{"a": 1} is JSON', "", []),
        (SplitPlan(format="llama3"), 'see {"name": "f"}', 'see {"name": "f"}', "", []),
        (SplitPlan(format=HERMES, parallel=False), ROME + OSLO, "", "", ["Rome"]),
    ],
)
def test_a_completion_is_taken_apart(
    plan: SplitPlan, text: str, content: str, reasoning: str, cities: list[str]
) -> None:
    piece = taken(plan, text)
    assert (piece.content, piece.reasoning) == (content, reasoning)
    assert [json.loads(call.arguments)["city"] for call in piece.calls] == cities


HARD = r'{"a": "}</tool_call>{\"\\", "b": [{}, [1]], "c": {"d": "\u00e9"}}'


def call_text(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def test_a_forced_call_s_arguments_come_as_they_grow() -> None:
    text = f"{call_text(HARD)}\n{call_text('{}')}"
    splitter, whole, shown = Splitter(SURE_PLAN), ReplyPiece(), []
    for letter in text:
        piece = splitter.push(letter)
        shown += piece.calls
        whole.add(piece)
    assert splitter.flush() == ReplyPiece()
    assert whole.content == ""
    assert whole.calls == [CallPart(0, "f", HARD, complete=True), CallPart(1, "f", "{}", complete=True)]
    assert json.loads(HARD)["a"] == '}</tool_call>{"\\'
    assert shown[0] == CallPart(0, "f", "{")
    assert all(0 < len(part.arguments) <= 6 or part.complete for part in shown), "a letter, a number, or an escape"
    assert splitter.calls == 2


@pytest.mark.parametrize("length", range(len(call_text('{"city": "Ro\\"me"}'))))
def test_a_forced_call_that_is_cut_off_shows_what_there_is(length: int) -> None:
    text = call_text('{"city": "Ro\\"me"}')
    piece = taken(SURE_PLAN, *text[:length])
    assert piece == taken(SURE_PLAN, text[:length])
    begun = text.index('{"city"')
    if length <= begun:
        assert (piece.content, piece.calls) == ("", []), "a call cut off before its arguments is no text to read"
    else:
        (part,) = piece.calls
        assert (piece.content, part.name) == ("", "f")
        assert part.arguments == text[begun : min(length, text.rindex("}"))]
        assert part.complete == (length >= text.rindex("}"))
    splitter = Splitter(SURE_PLAN)
    splitter.push(text[:length])
    assert splitter.in_call == (begun < length < text.rindex("}"))


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", ROME, "\n", " ", "word", "<", "{", '{"name": "f"}']


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    cuts=st.lists(st.integers(0, 120), max_size=8),
    plan=st.sampled_from([HERMES_PLAN, SURE_PLAN, THINKING, SplitPlan(format="llama3"), SplitPlan(format="mistral")]),
)
def test_how_the_text_was_cut_makes_no_difference(parts: list[str], cuts: list[int], plan: SplitPlan) -> None:
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert taken(plan, *(text[a:b] for a, b in pairwise(edges))) == taken(plan, text)
    assert taken(plan, *text) == taken(plan, text)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (
            "... <tool_call>\\n<function=",
            "<tool_call>\n<function=f>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
            '{"n": 2}',
        ),
        ("[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"n": 2}', '{"n": 2}'),
        ("<|tool_call_start|>", "<|tool_call_start|>[f(n=2)]<|tool_call_end|>", '{"n": 2}'),
        (
            "<minimax:tool_call>",
            '<minimax:tool_call><invoke name="f">\n<parameter name="n">2</parameter>\n</invoke></minimax:tool_call>',
            '{"n": 2}',
        ),
    ],
)
def test_a_template_says_in_which_form_calls_are_read(template: str, text: str, expected: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    plan = SplitPlan(format=recognised(template).calls, tools=json.dumps(tools).encode())
    assert taken(plan, text).calls == [CallPart(0, "f", expected, complete=True)]


# -- what is enforced


def allows(text: str, completion: str, codec: TextCodec) -> bool:
    tokenizer = grammar.tokenizer_of(codec.bundle, codec.vocab_size)
    grammar.check(text, tokenizer)
    matcher = grammar.matcher_of(text, tokenizer)
    ids = codec.encode(completion, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def with_marks() -> TextCodec:
    """A vocabulary in which the marks are tokens, as Qwen's."""
    document = json.loads(bundle().tokenizer_json)
    size = codec().vocab_size
    for at, mark in enumerate(["<tool_call>", "</tool_call>", "<think>", "</think>"]):
        document["added_tokens"].append(
            {"id": size + at, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": False}
        )  # fmt: skip
    return TextCodec(TokenizerBundle(json.dumps(document), bundle().chat_template, (0,), {}))


@pytest.fixture(params=["letters", "tokens"])
def marked(request: pytest.FixtureRequest) -> TextCodec:
    return codec() if request.param == "letters" else with_marks()


@pytest.mark.parametrize(
    ("choice", "parallel", "completion", "allowed"),
    [
        ("required", None, ROME, True),
        ("required", None, f"{ROME}\n{OSLO}", True),
        ("required", False, f"{ROME}\n{OSLO}", False),
        ("required", None, ROME.replace("Rome", "Bonn"), False),
        ("required", None, "Hello", False),
        ("required", None, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', True),
        ({"type": "function", "function": {"name": "clock"}}, None, ROME, False),
        ({"type": "function", "function": {"name": "get_weather"}}, None, ROME, True),
    ],
)
def test_a_forced_call_is_one(marked: TextCodec, choice: Any, parallel: Any, completion: str, allowed: bool) -> None:
    use = use_of(tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=parallel)
    assert use is not None
    assert allows(use.grammar(marked), completion, marked) is allowed


@pytest.mark.parametrize(
    ("completion", "allowed"),
    [
        ("Just words, a < b.", True),
        (f"Look:\n{ROME}\n and {OSLO} done", True),
        (ROME.replace("Rome", "Bonn"), False),
        ('<tool_call>\n{"name": "clock", "arguments": {"anything": 1}}\n</tool_call>', True),
    ],
)
def test_strict_functions_are_enforced_when_the_model_decides(
    marked: TextCodec, completion: str, allowed: bool
) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    use = use_of(tools=[strict, CLOCK])
    assert use is not None
    assert allows(use.grammar(marked), completion, marked) is allowed


def test_nothing_is_enforced_when_nothing_is_strict() -> None:
    use = use_of(tools=[WEATHER])
    assert use is not None and use.grammar(codec()) == ""


def test_an_answer_in_a_format_may_be_a_call_instead(marked: TextCodec) -> None:
    use = use_of(tools=[WEATHER])
    assert use is not None
    text = use.grammar(marked, grammar.of_schema({"type": "integer"}))
    assert allows(text, "42", marked) and allows(text, ROME, marked)
    assert not allows(text, "words", marked)


@pytest.mark.parametrize(
    ("thinking", "completion", "allowed"),
    [
        ("open", "so it is\n</think>\n\n42", True),
        ("open", "42", False),
        ("may", "<think>so</think>42", True),
        ("may", "42", True),
        ("may", "<think>so</think>words", False),
    ],
)
def test_a_grammar_waits_for_the_reasoning(marked: TextCodec, thinking: Any, completion: str, allowed: bool) -> None:
    text = after_reasoning(grammar.of_regex(r"\d+"), thinking, REASONINGS["think"], marked)
    assert allows(text, completion, marked) is allowed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
    ],
)
def test_choices_without_their_tool_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        use_of(**fields)
    assert raised.value.param == param


def test_schemas_that_no_arguments_could_follow_are_refused() -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    use = use_of(tools=[broken], tool_choice="required")
    assert use is not None
    with pytest.raises(InvalidGrammarError):
        use.grammar(codec())
    use = use_of(tools=[WEATHER], tool_choice="required")
    assert use is not None
    assert use.grammar(codec(), grammar.of_object()) == use.grammar(codec()), "a forced call wins over a format"
    mistral = TextCodec(TokenizerBundle(bundle().tokenizer_json, "tools [TOOL_CALLS]", (0,), {}))
    use = use_of(tools=[WEATHER])
    assert use is not None
    either = use.grammar(mistral, grammar.of_object())
    assert allows(either, '{"a": 1}', mistral)
    assert allows(either, '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', mistral)


# -- what the model is told

TURNS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def test_a_template_that_knows_no_tools_gets_them_as_text() -> None:
    messages = template_messages([ChatMessage.model_validate(turn) for turn in TURNS])
    shown = for_template(messages, use_of(tools=[WEATHER]), codec())
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert json.dumps(WEATHER["function"]["description"]) in shown[0]["content"]
    assert shown[2]["content"] == ROME
    assert "sunny" in shown[3]["content"]


async def test_a_template_that_knows_tools_gets_them_itself() -> None:
    template = (
        "{% for t in tools or [] %}T:{{ t.function.name }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}\n{% endfor %}<think>\n"
    )
    knowing = TextCodec(TokenizerBundle(bundle().tokenizer_json, template + "{# </think> #}", (0,), {}))
    body = request(messages=TURNS, tools=[WEATHER])
    chat = await conversation(knowing, body, ToolUse.of(body.tools, body.tool_choice, None))
    assert knowing.decode(chat.prompt) == "T:get_weather\nuser:Weather?assistant:Rometool:sunny<think>\n"
    split = chat.split
    assert split is not None and split.format == HERMES and split.think_end == "</think>"
    assert split.thinking == "open"


async def test_without_tools_and_marks_nothing_is_taken_apart() -> None:
    chat = await conversation(codec(), request())
    assert chat.split is None


def test_tool_choice_none_hides_the_tools() -> None:
    assert use_of(tools=[WEATHER], tool_choice="none") is None


@pytest.mark.parametrize(
    ("prompt", "thinking"), [("x<think>\n", "open"), ("<think>\n\n</think>\n\n", ""), ("x", "may")]
)
def test_the_prompts_end_tells_what_comes(prompt: str, thinking: str) -> None:
    assert REASONINGS["think"].thinking_after(prompt) == thinking


def test_a_special_mark_is_seen_although_special_tokens_are_hidden() -> None:
    marked, size = _codec_with("[TOOL_CALLS]", template=""), codec().vocab_size
    ids = [size, *codec().encode("f"), 0]
    assert marked.stream().push(ids) == "f"
    assert marked.stream(form_of("mistral").shown).push(ids) == "[TOOL_CALLS]f"


def _codec_with(*special: str, template: str) -> TextCodec:
    document = json.loads(bundle().tokenizer_json)
    for at, content in enumerate(special, codec().vocab_size):
        document["added_tokens"].append(
            {"id": at, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        )  # fmt: skip
    return TextCodec(TokenizerBundle(json.dumps(document), template, (0,), {}))


async def test_a_special_mark_is_seen_in_the_text_of_a_row_with_stop_strings_too() -> None:
    marked = _codec_with(
        "[THINK]", "[/THINK]", template="{% for m in messages %}{{ m.content }}{% endfor %}{# [/THINK] #}"
    )
    card = ModelCard("m", 4096, marked.vocab_size, (0,), "t" * 64, "b" * 64, 8, "float32")
    nobody: Any = None  # nothing is enqueued here
    target = Target(nobody, ServedModel(card, marked, nobody))
    body = request(stop=["END"])
    settings = ApiSettings()
    plan = unchecked_plan(body, target, await prepare(marked, body, settings), settings)
    row = RowText(marked, plan.sequences.template.sampling)
    shown = "".join(row.push(token, may_stop=True)[0] for token in marked.encode("[THINK]hm[/THINK]yesEND"))
    event = TokenEvent(plan.sequences.id_of(0), 1, 0, [5], [0.0], text=shown, finish=Finish("stop", "END"))
    assert Choice(plan, marked).take([event]).piece == ReplyPiece(content="yes", reasoning="hm")
    spelled = codec().encode("[THINK]hm[/THINK]yes")  # by a model that does not write the mark as one token
    choice = Choice(plan, marked)
    choice.take([TokenEvent(plan.sequences.id_of(0), 1, 0, spelled, [0.0] * len(spelled), finish=Finish("length"))])
    assert choice.reasoning == len(spelled) - len("yes")


# -- schemas of which a grammar can enforce only a part


def tool_with(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}


PLAIN = {"a": {"type": "integer"}}
CONDITION = {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "else": {"required": ["c"]}}
PARTLY: list[tuple[dict[str, Any], list[str]]] = [  # parameters of a function, and what of them is not enforced
    ({"properties": PLAIN}, []),
    ({"properties": PLAIN, "not": {"required": ["b"]}}, ["not"]),
    ({"properties": PLAIN, **CONDITION}, ["if", "then", "else"]),
    ({"properties": {"not": {"type": "integer"}, "if": {"enum": [{"not": 1}]}}}, []),
    ({"properties": {"a": {"type": "array", "uniqueItems": True, "items": {"not": {}}}}},
     ["properties.a.uniqueItems", "properties.a.items.not"]),
    ({"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^(?!x)"}]}}},
     ["properties.a.anyOf.1.pattern"]),
    ({"properties": {"a": {"type": "string", "pattern": "^[a-z]+$", "format": "uuid"}}}, []),
    ({"properties": {"a": {"type": "string", "format": "path"}, "b": {"type": "integer", "format": "int32"}}},
     ["properties.a.format"]),
    ({"additionalProperties": {"type": "string"}, "propertyNames": {"type": "string"}}, ["propertyNames"]),
    ({"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "object", "not": {}}}}, ["$defs.d.not"]),
    ({"properties": PLAIN, "minProperties": 1}, ["minProperties"]),
    ({"properties": PLAIN, "required": ["a"], "maxProperties": 2}, []),
    ({"minProperties": 1}, []),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "places"), PARTLY)
def test_what_no_grammar_can_enforce_is_left_out_and_named(parameters: dict[str, Any], places: list[str]) -> None:
    use = use_of(tools=[tool_with(**parameters)], tool_choice="required")
    assert use is not None
    grammar.check(use.grammar(codec()), grammar.tokenizer_of(bundle(), codec().vocab_size))
    assert use.unenforced(codec()) == [f"tools.f.{place}" for place in places]


def test_the_rest_of_a_schema_is_enforced() -> None:
    use = use_of(tools=[tool_with(properties=PLAIN, required=["a"], **CONDITION)], tool_choice="required")
    assert use is not None
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert allows(use.grammar(codec()), call, codec())
    assert not allows(use.grammar(codec()), call.replace("1", '"one"'), codec())


KEYWORDS: dict[str, Any] = {
    "not": {}, "if": {}, "then": {}, "else": {}, "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {},
    "uniqueItems": True, "contains": {}, "minContains": 1, "maxContains": 1, "propertyNames": {},
    "unevaluatedProperties": False, "unevaluatedItems": False, "$dynamicRef": "#a", "$dynamicAnchor": "a",
    "$recursiveRef": "#", "$recursiveAnchor": True, "$anchor": "a", "$comment": "a", "$id": "https://a.example/b",
    "$vocabulary": {}, "contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": {}, "multipleOf": 2,
    "prefixItems": [{}], "additionalItems": False, "items": {}, "oneOf": [{"type": "object"}], "anyOf": [{}],
    "allOf": [{}], "const": {}, "enum": [{}], "patternProperties": {}, "additionalProperties": {}, "definitions": {},
    "$defs": {}, "title": "a", "description": "a", "default": {}, "examples": [], "readOnly": True, "writeOnly": True,
    "deprecated": True, "minLength": 1, "maxLength": 1, "minItems": 1, "maxItems": 1, "minimum": 1, "maximum": 1,
    "exclusiveMinimum": 1, "exclusiveMaximum": 1, "nullable": True, "discriminator": {},
}  # fmt: skip


def test_the_grammar_s_library_enforces_every_other_keyword_of_a_schema() -> None:
    tokenizer = grammar.tokenizer_of(bundle(), codec().vocab_size)
    for name, value in KEYWORDS.items():
        schema = {"type": "object", name: value}
        left_out = grammar.enforceable(schema)[1]
        try:
            grammar.check(grammar.of_schema(schema), tokenizer)
            assert left_out == [], name
        except InvalidGrammarError:
            assert left_out == [name]


def test_only_schemas_that_the_answer_is_held_to_are_named() -> None:
    loose = tool_with(properties=PLAIN, **{"not": {}})
    strict = {**loose, "function": {**loose["function"], "strict": True}}
    assert [use.unenforced(codec()) for use in (use_of(tools=[loose]), use_of(tools=[strict])) if use] == [
        [],
        ["tools.f.not"],
    ]
    named = {"type": "function", "function": {"name": "clock"}}
    use = use_of(tools=[loose, CLOCK], tool_choice=named)
    assert use is not None and use.unenforced(codec()) == []


def test_the_header_s_names_are_letters_that_it_has_a_place_for() -> None:
    names = {f"p{at}": {"not": {}} for at in range(40)}
    body = request(tools=[tool_with(properties={"a\r\nx: y, \u00e9": {"not": {}}, **names})], tool_choice="required")
    shown = with_unused(Response(), unused_hints(body, codec(), CARD)).headers[UNUSED_HEADER]
    assert shown.startswith("tools.f.properties.a??x:?y???.not, tools.f.properties.p0.not, ")
    assert shown.endswith(", and 9 more")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"enum": ["a", "b"]}, "'f' have an 'enum' without an object"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "required property .a. is unsatisfiable"),
        ({"properties": {"a": {"pattern": "["}}}, "unclosed character class"),
    ],
)
def test_an_error_of_a_schema_shows_nothing_of_the_grammar_around_it(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidGrammarError, match=reason) as raised:
        use = use_of(tools=[tool_with(**parameters, required=["a"])], tool_choice="required")
        assert use is not None
        grammar.check(use.grammar(codec()), grammar.tokenizer_of(bundle(), codec().vocab_size))
    assert "x-guidance" not in raised.value.message and "%json" not in raised.value.message


def test_an_error_of_a_grammar_shows_where_in_it() -> None:
    with pytest.raises(InvalidGrammarError, match=r"unknown name: \"foo\"\n +1 \| start: foo"):
        grammar.check(grammar.of_lark("start: foo"), grammar.tokenizer_of(bundle(), codec().vocab_size))


@pytest.mark.parametrize(
    ("thinking", "completion", "allowed"),
    [
        ("may", "<|channel|>final<|message|>42", True),
        ("may", "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>42", True),
        ("may", "<|channel|>analysis<|message|>so<|end|>42", False),
        ("may", "42", False),
        ("open", "so<|end|><|start|>assistant<|channel|>final<|message|>42", True),
        ("", "42", True),
    ],
)
def test_a_grammar_waits_for_harmony_s_final_message(thinking: Any, completion: str, allowed: bool) -> None:
    harmony = REASONINGS["harmony"]
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    for vocabulary in (codec(), _codec_with(*marks, template="")):
        spelled = Spelling(vocabulary)
        answer = framed(grammar.of_regex(r"\d+"), thinking, harmony, spelled)
        assert allows(after_reasoning(answer, thinking, harmony, vocabulary), completion, vocabulary) is allowed


@pytest.mark.parametrize(("template", "says"), [("{{ thinking_effort }}", "high"), ("{{ reasoning_effort }}", "high")])
async def test_a_reasoning_effort_reaches_templates_by_either_name(template: str, says: str) -> None:
    known = TextCodec(msgspec.structs.replace(bundle(), chat_template=template))
    body = request(reasoning_effort="high")
    prepared = await prepare(known, body, ApiSettings())
    assert known.decode(prepared.prompts[0]) == says and not unused_hints(body, known, CARD)
    assert unused_hints(body, codec(), CARD) == ["reasoning_effort"]
