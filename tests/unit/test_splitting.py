"""Completions of each family taken apart: reasoning, content and calls, and the same however the text was cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.text.languages.channels import splitter_of
from shared.text.languages.families import FAMILIES, REASONINGS, recognised
from shared.text.languages.pieces import ReplyPiece, SplitPlan
from shared.text.languages.reasoning_count import ReasoningCount
from shared.text.languages.tool_forms import form_of
from tests.unit.api_texts import codec, ids

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"type": ["boolean", "null"]},
                    "where": {"type": "object"},
                    "either": {"type": ["string", "integer"]},
                },
            },
        },
    }
    for name in ("get_weather", "world.clock", "list-files")
]
ROME = '{"city": "Rome", "days": 2}'


def plan_of(family: str, thinking: Any = "", **more: Any) -> SplitPlan:
    entry = next(each for each in FAMILIES if each.form == family)
    reasoning = REASONINGS[entry.reasoning or "think"]
    start, end = reasoning.start, reasoning.end
    thinks = bool(thinking) or reasoning.again or reasoning.channels
    plan = SplitPlan(
        format=entry.form, tools=json.dumps(TOOLS).encode(), thinking=thinking, reasoning=entry.reasoning or "think"
    )
    return SplitPlan(
        **{each: getattr(plan, each) for each in plan.__struct_fields__}
        | ({"think_start": start, "think_end": end} if thinks else {})
        | more
    )


def taken(plan: SplitPlan, *texts: str) -> ReplyPiece:
    splitter, whole = splitter_of(plan), ReplyPiece()
    for text in texts:
        whole.add(splitter.push(text))
    whole.add(splitter.flush())
    assert splitter.calls == len(whole.calls)
    return whole


def said(plan: SplitPlan, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    piece = taken(plan, text)
    assert taken(plan, *text) == piece, "letter by letter"
    return piece.content, piece.reasoning, [(call.name, json.loads(call.arguments)) for call in piece.calls]


# -- the forms of calls

CALLS = {  # a call of each family, without reasoning
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="NAME">'
    "]<]minimax[>[<city>Rome]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=NAME>\n<parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n"
    "</function>\n</seed:tool_call>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="city" type="string"'
    '<|sep|>Rome<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
    f"{ROME}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="NAME">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>",
    "deepseek_v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="NAME">\n'
    '<｜DSML｜ parameter name="city" string="true">Rome</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>",
    "hy_v3": "<tool_calls>\n<tool_call>NAME<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n</tool_calls>",
    "hy_v3_opensource": "<tool_calls:opensource>\n<tool_call:opensource>NAME<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Rome</arg_value:opensource>\n"
    "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>2</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource>",
    "hy_v4": "<tool_calls:opensource>\n<tool_call:opensource>NAME<arg_key:opensource>city</arg_key:opensource>"
    "<arg_value:opensource>Rome</arg_value:opensource><arg_key:opensource>days</arg_key:opensource>"
    "<arg_value:opensource>2</arg_value:opensource></tool_call:opensource>\n</tool_calls:opensource>",
    "cohere_xml": '<cofl:tool_calls><cofl:tool_call id="0" name="NAME"><cofl:tool_param name="city" string="true">'
    'Rome</cofl:tool_param><cofl:tool_param name="days" string="false">2</cofl:tool_param></cofl:tool_call>'
    "</cofl:tool_calls>",
    "cohere_values": '<cofl:tool_calls><cofl:tool_call id="0" name="NAME"><cofl:value name="city" type="raw">Rome'
    '</cofl:value><cofl:value name="days" type="json">2</cofl:value></cofl:tool_call></cofl:tool_calls>',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": '
    f"{ROME}}}\n]<|END_ACTION|>",
    "nemotron2": f'<TOOLCALL>[{{"name": "NAME", "arguments": {ROME}}}]</TOOLCALL>',
    "hunyuan": f'<tool_calls>[{{"name": "NAME", "arguments": {ROME}}}]</tool_calls>',
    "olmo3": "<function_calls>\nNAME(city='Rome', days=2)\n</function_calls>",
    "phi4_mini": f'<|tool_call|>[{{"name": "NAME", "arguments": {ROME}}}]<|/tool_call|>',
    "granite3": f'<|tool_call|>[{{"name": "NAME", "arguments": {ROME}}}]',
    "llama4": '[NAME(city="Rome", days=2)]',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "gemma4": '<|tool_call>call:NAME{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    "function_gemma": "<start_function_call>call:NAME{city:<escape>Rome<escape>,days:2}<end_function_call>",
    "longcat": "<longcat_tool_call>NAME\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Rome"
    "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n"
    "</longcat_tool_call>",
    "glm47": "<tool_call>NAME\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "pythonic": '<|tool_call_start|>[NAME(city="Rome", days=2)]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"
    f"{ROME}<|tool_call_end|><|tool_calls_section_end|>",
    "minicpm5": '<function name="NAME"><param name="city">Rome</param><param name="days">2</param></function>',
    "mistral": f"[TOOL_CALLS]NAME[ARGS]{ROME}",
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="NAME">\n<atem:parameter name="city">'
    'Rome</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "harmony": f"<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ROME}<|call|>",
    "hermes": f'<tool_call>\n{{"name": "NAME", "arguments": {ROME}}}\n</tool_call>',
    "llama3": f'{{"name": "NAME", "parameters": {ROME}}}',
}
# What may be at the beginning of a completion, or between its parts.
PARTS = {
    "gemma4": ["<|channel>thought\n", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{ROME}"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=get_weather>", "</function>", "<function="],
    "llama3": ["<|python_tag|>", ";", "{", "}", '"', '{"name": ', '{"city": 1}', '{"name": "Bob", "parameters": {}}'],
    "harmony": [
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>",
        "<|start|>assistant", "<|channel|>", "<|message|>", "<|call|>", " to=functions.get_weather", "to=python",
    ],
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "get_weather"}'],
}  # fmt: skip


def sample(family: str, name: str = "get_weather") -> str:
    return CALLS[family].replace("NAME", name)


def test_every_family_has_a_sample() -> None:
    assert {family.form for family in FAMILIES} == set(CALLS)


@st.composite
def completions(draw: st.DrawFn) -> tuple[SplitPlan, str]:
    family = draw(st.sampled_from(sorted(CALLS)))
    call = sample(family)
    broken = st.integers(0, len(call)).map(lambda at: call[:at])
    form = form_of(family)
    parts = [call, sample(family, "no_such"), "<think>", "</think>", "\n", " ", "word", "<", *PARTS.get(family, ())]
    parts += [*form.openers, *form.shown, '"', "'", "\\", "{", "}", "]", ",", "Zürich", '{"city": "<b>"}']
    text = "".join(draw(st.lists(st.sampled_from(parts) | broken, max_size=8)))
    thinking = draw(st.sampled_from(["", "open", "may"]))
    return plan_of(family, thinking, parallel=draw(st.booleans()), show_thinking=draw(st.booleans())), text


@given(completed=completions(), cuts=st.lists(st.integers(0, 400), max_size=8))
@example((plan_of("llama3"), f"<|python_tag|>{sample('llama3')}"), [5])
@example((plan_of("hermes"), f"{sample('hermes')}and "), [])
def test_how_a_completion_was_cut_makes_no_difference(completed: tuple[SplitPlan, str], cuts: list[int]) -> None:
    plan, text = completed
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = taken(plan, text)
    assert taken(plan, *(text[a:b] for a, b in pairwise(edges))) == whole
    assert taken(plan, *text) == whole


@pytest.mark.parametrize("name", ["get_weather", "world.clock", "list-files"])
@pytest.mark.parametrize("family", sorted(CALLS))
def test_a_call_is_read_whatever_its_function_is_called(family: str, name: str) -> None:
    content, _, calls = said(plan_of(family, "may" if family == "harmony" else ""), sample(family, name))
    assert (content, calls) == ("", [(name, {"city": "Rome", "days": 2})])


@pytest.mark.parametrize("family", sorted(CALLS))
def test_a_call_that_is_cut_off_shows_what_there_is(family: str) -> None:
    text, plan = sample(family), plan_of(family, "may" if family == "harmony" else "")
    (whole,) = taken(plan, text).calls
    begun = 0
    for length in range(len(text)):
        piece = taken(plan, *text[:length])
        assert piece == taken(plan, text[:length])
        if piece.calls:
            (part,) = piece.calls
            begun += 1
            assert (part.name, piece.content) == ("get_weather", ""), text[:length]
            if family in ("glm47", "longcat") and part.complete:  # theirs may be whole without their end
                part.arguments = part.arguments.removesuffix("}")
            assert whole.arguments.startswith(part.arguments)
            assert not part.complete or part.arguments.strip("}") in (whole.arguments.strip("}"), '{"city": "Rome"')
    assert begun > 8, "it is a call before it is whole"


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('<cofl:value name="tags" type="list"><cofl:value type="raw">a</cofl:value>', '{"where": {"tags": ["a"'),
        ('<cofl:value name="tags" type="list"></cofl:value>', '{"where": {"tags": []'),
        ('<cofl:value name="lat" type="json">1.5', '{"where": {"lat": '),
        ('<cofl:value name="of" type="raw">R <b', '{"where": {"of": "R <b'),
        ("broken", '{"where": {'),
    ],
)
def test_values_within_values_that_are_cut_off_show_what_there_is(inside: str, arguments: str) -> None:
    text = f'<cofl:tool_calls><cofl:tool_call id="0" name="get_weather"><cofl:value name="where" type="dict">{inside}'
    plan = plan_of("cohere_values")
    piece = taken(plan, text)
    assert taken(plan, *text) == piece
    assert [(call.name, call.arguments, call.complete) for call in piece.calls] == [("get_weather", arguments, False)]


@pytest.mark.parametrize("number", ["1e400", "-0.12345678901234567890123", "123456789012345678901234567890"])
@pytest.mark.parametrize("family", ["qwen3_coder", "glm47", "kimi_k3", "deepseek_v41", "hy_v4", "cohere_values"])
def test_a_number_beyond_a_double_has_all_its_digits(family: str, number: str) -> None:
    plan = plan_of(family)
    tools = json.loads(plan.tools)
    tools[0]["function"]["parameters"]["properties"]["days"] = {"type": "number"}
    plan = plan_of(family, tools=json.dumps(tools).encode())
    at = sample(family).rindex("2")
    (call,) = taken(plan, sample(family)[:at] + number + sample(family)[at + 1 :]).calls
    assert f'"days": {number}' in call.arguments


@pytest.mark.parametrize("family", sorted(CALLS))
def test_a_call_s_name_comes_first_and_its_arguments_as_they_grow(family: str) -> None:
    splitter, parts = splitter_of(plan_of(family, "may" if family == "harmony" else "")), []
    for letter in sample(family):
        parts += splitter.push(letter).calls
    assert parts[0].name == "get_weather" and not any(part.name for part in parts[1:])
    assert not parts[0].complete
    grown = "".join(part.arguments for part in parts)
    assert json.loads(grown) == json.loads(ROME)
    assert sum(bool(part.arguments) for part in parts) >= 5


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<|python_tag|>CALL", "", 1),
        ("<|python_tag|> \nCALL", "", 1),
        ("CALL; CALL", "", 2),
        ("CALL;CALL\n\nCALL;", "", 3),
        ("Let me look it up.\n\nCALL", "Let me look it up.", 1),
        ("Sure. <|python_tag|>CALL", "Sure.", 1),
        ("CALL and then", " and then", 1),
        ("CALL; and then", "; and then", 1),
        ("I would call OTHER, or not", "I would call OTHER, or not", 0),
        ('Say {"name": "get_weather"} or {"city": "Rome"}', 'Say {"name": "get_weather"} or {"city": "Rome"}', 0),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', 0),
        ("int f() { return 1; }", "int f() { return 1; }", 0),
        ("a {", "a {", 0),
        ("<|python_tag|>print(1)", "print(1)", 0),
    ],
)
def test_llama_s_calls_are_found_where_they_stand(text: str, content: str, calls: int) -> None:
    text, content = (
        each.replace("CALL", sample("llama3")).replace("OTHER", sample("llama3", "other")) for each in (text, content)
    )
    shown, _, made = said(plan_of("llama3"), text)
    assert (shown, made) == (content, [("get_weather", json.loads(ROME))] * calls)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"days": "2"}, {"days": 2}),
        ({"days": "two"}, {"days": "two"}),
        ({"days": "2.5"}, {"days": "2.5"}),
        ({"days": "true"}, {"days": "true"}),
        ({"city": "2"}, {"city": "2"}),
        ({"either": "2"}, {"either": "2"}),
        ({"metric": "true"}, {"metric": True}),
        ({"metric": "null"}, {"metric": None}),
        ({"where": '{"lat": 1}'}, {"where": {"lat": 1}}),
        ({"unknown": "2"}, {"unknown": "2"}),
    ],
)
@pytest.mark.parametrize("family", ["llama3", "hermes"])
def test_a_string_becomes_what_the_schema_wants_if_it_spells_one(
    family: str, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    text = sample(family).replace(ROME, json.dumps(given))
    assert said(plan_of(family), text)[2] == [("get_weather", wanted)]


def test_arguments_that_are_broken_come_as_they_were_written() -> None:
    for family, text in (("pythonic", sample("pythonic")), ("hermes", sample("hermes"))):
        piece = taken(plan_of(family), text.replace("2", "2j"))
        assert (piece.content, [(call.name, call.complete) for call in piece.calls]) == ("", [("get_weather", True)])
        assert piece.calls[0].arguments.startswith('{"city": "Rome", "days": 2j')


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("BARE\n</tool_call>", "", ["get_weather"]),
        ("BARE", "", ["get_weather"]),
        ("Look.\nBARE\n</tool_call>\nWHOLE", "Look.", ["get_weather"] * 2),
        ("BARE\nso", "\nso", ["get_weather"]),
        ("<tool_call>\nBARE", "", ["get_weather"]),  # and without the closing one
        ("OTHER", "OTHER", []),
        ("see <function=get_weather> there", "see <function=get_weather> there", []),
    ],
)
def test_a_call_of_qwen_coder_may_lack_its_opening_mark(text: str, content: str, names: list[str]) -> None:
    whole = sample("qwen3_coder")
    bare = whole.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    for name, part in (("BARE", bare), ("WHOLE", whole), ("OTHER", bare.replace("get_weather", "other"))):
        text, content = text.replace(name, part), content.replace(name, part)
    shown, _, calls = said(plan_of("qwen3_coder"), text)
    assert (shown, [name for name, _ in calls]) == (content, names)


@pytest.mark.parametrize("family", ["qwen3_coder", "hermes", "mistral", "glm47"])
def test_a_call_in_reasoning_counts_if_nothing_closes_that(family: str) -> None:
    call, plan = sample(family), plan_of(family, "open")
    assert said(plan, f"I must look.\n{call}") == ("", "I must look.", [("get_weather", json.loads(ROME))])
    rehearsed = said(plan, f"I could say {call} then.</think>No.")
    assert rehearsed == ("No.", f"I could say {call} then.", [])
    other = sample(family, "other")
    assert said(plan, f"I must look. {other}") == ("", f"I must look. {other}", [])
    cut = call[: len(call) // 2]
    assert said(plan, f"I must look. {cut}") == ("", f"I must look. {cut}", [])


def test_reasoning_that_only_names_a_mark_goes_on_growing() -> None:
    splitter = splitter_of(plan_of("hermes", "open"))
    assert splitter.push("about <tool_call>x</tool_call> ").reasoning == "about <tool_call>x</tool_call> "


@pytest.mark.parametrize("text", ['{"type": "Feature', '{"city": "Ro', "{ return", '{"names": [', "{}"])
def test_an_object_that_cannot_be_a_call_is_not_held_back(text: str) -> None:
    assert splitter_of(plan_of("llama3")).push(text).content == text


def test_what_is_no_call_keeps_the_blanks_before_it() -> None:
    assert said(plan_of("hermes"), "a \n<tool_call>b</tool_call>")[0] == "a \n<tool_call>b</tool_call>"


# -- reasoning of the families that write it in their own way

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is sunny."
GEMMA = "<|channel>thought\nHm.\n<channel|>"


@pytest.mark.parametrize(
    ("thinking", "text", "content", "reasoning", "calls"),
    [
        ("may", ANALYSIS + FINAL, "It is sunny.", "Hm.", 0),
        ("may", ANALYSIS + FINAL + "<|return|>", "It is sunny.", "Hm.", 0),
        ("may", FINAL.removeprefix("<|start|>assistant"), "It is sunny.", "", 0),
        ("may", f"{ANALYSIS}CALL", "", "Hm.", 1),
        ("may", f"{ANALYSIS}CALL".removesuffix("<|call|>"), "", "Hm.", 1),
        ("may", f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}", "", "", 1),
        ("may", f"<|channel|>analysis to=functions.get_weather code<|message|>{ROME}<|call|>", "", "", 1),
        ("may", f"<|channel|>commentary to=get_weather<|constrain|>json<|message|>{ROME}", "", "", 1),
        ("may", "<|channel|>commentary to=python code<|message|>print(1)<|call|>", "", "print(1)", 0),
        ("may", "<|channel|>commentary to=assistant<|message|>Look.", "Look.", "", 0),
        ("may", "<|channel|>commentary<|message|>I look.<|end|>CALL", "I look.", "", 1),
        ("may", f"{ANALYSIS}<|start|>assistant{ANALYSIS}{FINAL}", "It is sunny.", "Hm.\nHm.", 0),
        ("may", f"<|channel|>commentary<|message|>Wait.<|end|>{FINAL}", "Wait.\nIt is sunny.", "", 0),
        ("may", "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", "Yes.", "Hm.", 0),
        ("may", f"<|channel|>?? {ANALYSIS.removesuffix('Hm.<|end|>')}Hm.<|end|>{FINAL}", "It is sunny.", "Hm.", 0),
        ("may", f"<|channel|>what now?<|end|><|start|>assistant{ANALYSIS}{FINAL}", "It is sunny.", "Hm.", 0),
        ("may", "CALL<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>Sun.", "", "Sun.", 1),
        ("may", "<|channel|>ana", "", "", 0),
        ("may", "<|channel|>analysis<|message|>Hm", "", "Hm", 0),
        ("may", "plain words", "plain words", "", 0),
        ("may", "1 < 2", "1 < 2", "", 0),
        ("open", f"Hm.<|end|>{FINAL}", "It is sunny.", "Hm.", 0),
        ("", "It is sunny.", "It is sunny.", "", 0),
    ],
)
def test_harmony_s_channels_are_told_apart(thinking: Any, text: str, content: str, reasoning: str, calls: int) -> None:
    text = text.replace("CALL", sample("harmony"))
    shown = said(plan_of("harmony", thinking), text)
    assert shown == (content, reasoning, [("get_weather", json.loads(ROME))] * calls)


@pytest.mark.parametrize("arguments", ["[1]", "", "print(1)"])
def test_a_message_of_harmony_without_arguments_is_no_call(arguments: str) -> None:
    text = sample("harmony").replace(ROME, arguments).removesuffix("<|call|>")
    assert said(plan_of("harmony", "may"), text) == (text, "", [])
    assert said(plan_of("harmony", "may", format=""), sample("harmony"))[2] == [], "none was offered"


@pytest.mark.parametrize(
    ("thinking", "text", "content", "reasoning", "calls"),
    [
        ("may", f"{GEMMA}It is sunny.", "It is sunny.", "Hm.", 0),
        ("may", f"{GEMMA}CALL", "", "Hm.", 1),
        ("", "It is sunny.", "It is sunny.", "", 0),
        ("", f"So. {GEMMA}It is sunny.", "So. It is sunny.", "Hm.", 0),
        ("", f"{GEMMA}A.{GEMMA}B.", "A.B.", "Hm.Hm.", 0),
        ("", "<|channel>thought\n<channel|>A.", "A.", "", 0),
        ("may", "<|channel>thought\nHm", "", "Hm", 0),
        ("may", "<|channel>thought\nHm.\nCALL", "", "Hm.", 1),
    ],
)
def test_gemma_s_thoughts_are_told_apart(thinking: Any, text: str, content: str, reasoning: str, calls: int) -> None:
    text = text.replace("CALL", sample("gemma4"))
    shown = said(plan_of("gemma4", thinking), text)
    assert shown == (content, reasoning, [("get_weather", json.loads(ROME))] * calls)


@pytest.mark.parametrize(
    ("plan", "text", "thought"),
    [
        (plan_of("hermes", "may"), "<think>so</think>yes", "<think>so</think>"),
        (plan_of("hermes", "open"), "so</think>yes", "so</think>"),
        (plan_of("hermes", "may"), "yes <think>so</think>", ""),
        (plan_of("hermes", "may"), "<thin", ""),
        (plan_of("hermes"), "<think>so</think>", ""),
        (plan_of("hermes", "open"), "so it goes", "so it goes"),
        (plan_of("gemma4"), "a<|channel>thought\nb<channel|>c" * 2, "<|channel>thought\nb<channel|>" * 2),
        (plan_of("harmony", "may"), ANALYSIS + FINAL, ANALYSIS),
    ],
)
def test_the_tokens_of_reasoning_are_counted_with_its_marks(plan: SplitPlan, text: str, thought: str) -> None:
    whole, single = ReasoningCount(plan, codec()), ReasoningCount(plan, codec())
    whole.take(ids(text))
    for token in ids(text):
        single.take([token])
    assert whole.tokens == single.tokens == len(ids(thought))


# -- which family a template is of


@pytest.mark.parametrize(
    ("template", "family", "form"),
    [
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", "harmony", "harmony"),
        ("<|tool_call>call:f{}<tool_call|>", "gemma4", "gemma4"),
        ("{{ messages }}", "", "hermes"),
        ("<tool_call>", "hermes", "hermes"),
    ],
)
def test_a_template_gives_its_family_away(template: str, family: str, form: str) -> None:
    assert (recognised(template).family, recognised(template).calls) == (family, form)


@pytest.mark.parametrize(
    ("family", "prompt", "thinking"),
    [
        ("harmony", "<|start|>user<|message|>hi<|end|><|start|>assistant", "may"),
        ("harmony", "<|start|>user<|message|>hi<|end|>", "may"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>So it", ""),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>So it", "open"),
        ("gemma4", "<|turn>model\n", "may"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", ""),
    ],
)
def test_the_end_of_a_prompt_says_how_an_answer_begins(family: str, prompt: str, thinking: str) -> None:
    assert REASONINGS[family].thinking_after(prompt) == thinking


def test_the_tokens_of_a_family_s_language_are_not_hidden() -> None:
    assert {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"} <= set(plan_of("mistral").marks)
    assert {"<|channel>", "<channel|>", '<|"|>', "<|tool_call>", "<tool_call|>"} <= set(plan_of("gemma4").marks)
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>"} <= set(plan_of("harmony").marks)
