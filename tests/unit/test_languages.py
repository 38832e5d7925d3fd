"""How a model's language is recognised, and what is mended of what models write."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.process.worker_settings import WorkerSettings
from shared.text.languages import json_text
from shared.text.languages.families import REASONING_FORMATS, REASONINGS, TOOL_FORMATS, recognised
from shared.text.languages.growing_text import GrowingText, finished
from shared.text.languages.tool_forms import FORMS
from shared.text.languages.values import as_wanted, of_text, types_of

LFM = ("<|tool_call_start|>", "<|tool_call_end|>")


def test_every_format_that_a_worker_may_name_has_its_form() -> None:
    assert set(TOOL_FORMATS) == set(FORMS)
    assert set(REASONING_FORMATS) == {"none", *REASONINGS}


@pytest.mark.parametrize(
    ("template", "tokens", "calls", "reasoning"),
    [
        ("{{ messages }}", LFM, "pythonic", None),  # LFM2.5, whose template writes no calls
        ("{{ messages }}", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "kimi_k3", "kimi_k3"),
        ("{{ messages }}", ("<|tool_call|>", "<|/tool_call|>"), "phi4_mini", None),
        ("{{ messages }}", ("｜DSML｜",), "deepseek_v32", None),
        ("{{ messages }}", ("<think>", "</think>"), "hermes", "think"),
        ("<tool_call>", LFM, "hermes", None),  # a template says more than a vocabulary
        ("<|tool|><|/tool|>", (), "phi4_mini", None),
        ("<|start_of_role|> <tool_call>", (), "hermes", None),  # Granite 4.0
        ("<|start_of_role|> </think>", (), "granite3", "granite"),
        ("<|start_of_role|>", (), "granite3", None),
        ("｜DSML｜ tool_calls> </think>", (), "deepseek_v4", "think"),
        ("<｜tool▁sep｜> ```json </think>", (), "deepseek_v3", "think"),
        ("{{ messages }}", (), "hermes", None),
    ],
)
def test_a_template_or_else_the_vocabulary_gives_a_language_away(
    template: str, tokens: tuple[str, ...], calls: str, reasoning: str | None
) -> None:
    language = recognised(template, tokens.__contains__)
    assert (language.calls, language.reasoning and language.reasoning.name) == (calls, reasoning)


@pytest.mark.parametrize(
    ("tool_format", "reasoning_format", "calls", "reasoning"),
    [
        ("qwen3_coder", "", "qwen3_coder", "think"),
        ("", "mistral", "hermes", "mistral"),
        ("", "none", "hermes", None),
        ("harmony", "", "harmony", "harmony"),
        ("", "harmony", "harmony", "harmony"),
    ],
)
def test_a_worker_s_formats_are_above_what_is_recognised(
    tool_format: str, reasoning_format: str, calls: str, reasoning: str | None
) -> None:
    language = recognised("<tool_call> </think>", tool_format=tool_format, reasoning_format=reasoning_format)
    assert (language.calls, language.reasoning and language.reasoning.name) == (calls, reasoning)


@pytest.mark.parametrize("field", ["tool_format", "reasoning_format"])
def test_a_format_that_there_is_not_is_refused_with_those_that_there_are(field: str) -> None:
    with pytest.raises(ValueError, match=r"'nonsense' is none of .*harmony"):
        WorkerSettings(**{field: "nonsense"})
    assert getattr(WorkerSettings(**{field: "harmony"}), field) == "harmony"


@pytest.mark.parametrize(("name", "reasoning"), REASONINGS.items())
def test_what_closes_reasoning_ends_it(name: str, reasoning: Any) -> None:
    assert reasoning.end in reasoning.closes, name
    assert reasoning.thinking_after(f"prompt{reasoning.start}") == "open"


def mended(text: str, *, cut: bool = False) -> Any:
    parts: list[str] = []
    whole = finished(json_text.value(GrowingText(text, ended=True), parts.append))
    assert whole is not cut
    letters: list[str] = []
    growing = GrowingText()
    reader = json_text.value(growing, letters.append)
    for letter in text:
        next(reader, None)
        growing.text += letter
    growing.ended = True
    finished(reader)
    assert letters == parts or "".join(letters) == "".join(parts)
    return None if cut else json.loads("".join(parts))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        ('{"a": "C:\\dir, \\\'b\\\'"}', {"a": "C:\\dir, 'b'"}),
        ('{"a": "\\u00e9\\ud83d\\ude00 \\uzz"}', {"a": "é😀 \\uzz"}),
        ('{"a": [1, 2,], "b": {"c": True,},}', {"a": [1, 2], "b": {"c": True}}),
        ('{"a": None, "b": False}', {"a": None, "b": False}),
        ("{ }", {}),
    ],
)
def test_json_that_models_write_wrong_is_mended(text: str, value: Any) -> None:
    assert mended(text) == value


@pytest.mark.parametrize("text", ['{"a": Rome}', '{"a" 1}', "{a: 1}", '{"a": 01}', "[" * 200, '{"a": 1', '{"a": "b\\'])
def test_what_is_no_json_ends_where_it_is_none(text: str) -> None:
    mended(text, cut=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(value=JSON, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_json_is_shown_as_it_is(value: Any, indent: int | None, ascii_only: bool) -> None:
    assert mended(json.dumps(value, indent=indent, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("2", {"type": "integer"}, 2),
        ("2.0", {"type": "integer"}, 2),
        ("2", {"type": "string"}, "2"),
        ("2", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 2),
        ("two", {"type": ["integer", "string"]}, "two"),
        ("two", {"type": "integer"}, "two"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("{'a': (1, 2)}", {"type": "object"}, {"a": (1, 2)}),
        ("red", {"enum": ["red", 1]}, "red"),
        ("1", {"enum": ["red", 1]}, 1),
        ("[1]", {}, [1]),
        ("words", {}, "words"),
    ],
)
def test_a_text_without_quotes_means_what_its_schema_has_a_place_for(text: str, schema: Any, value: Any) -> None:
    assert of_text(text, schema) == value


def test_types_of_a_schema_that_says_none_are_not_known() -> None:
    assert [types_of(each) for each in (True, {}, {"$ref": "#/x"}, {"anyOf": [{}, {"type": "null"}]})] == [
        frozenset()
    ] * 4
    assert as_wanted("2", {}) == "2" and as_wanted("2", {"const": 2}) == 2
