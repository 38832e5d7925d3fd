"""Messages fitted to what a chat template takes. The templates here make the demands of real ones in few lines."""

import re
from typing import Any

import pytest

from api.openai.bodies import ChatCompletionRequest
from api.openai.conversations import conversation, template_messages
from api.openai.fitting import Demands, fitted
from api.openai.responses.body import ResponseRequest
from shared.errors import InvalidRequestError
from shared.text.codec import TextCodec, TokenizerBundle
from tests.unit.api_texts import CHAT, bundle

SHOWN = (
    "{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} [{{ c.function.name }} {{ c.id }}]{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}{{ '\\n' }}"
)
OPEN = "{# tools #}{% for m in messages %}" + SHOWN + "{% endfor %}"
FIRST = (  # Qwen 3.5
    "{# tools #}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + SHOWN + "{% endfor %}"
)
LAST = (  # DeepSeek R1: the last one hides the others
    "{# tools #}{% for m in messages if m.role == 'system' %}{% if loop.last %}" + SHOWN + "{% endif %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}" + SHOWN + "{% endfor %}"
)
HIDES = (  # GPT-OSS: it shows one, at the beginning
    "{# tools #}{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SHOWN + "{% endif %}{% endfor %}"
)
MISTRAL = (  # turns alternate, and calls have ids of nine letters
    "{# tools #}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if not (m.role == 'system' and loop.first) and m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}"
    + SHOWN
    + "{% endfor %}"
)
SINGLE = (  # Llama 3
    "{# tools #}{% for m in messages %}{% if (m.tool_calls or [])|length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}" + SHOWN + "{% endfor %}"
)
THINKING = (  # GPT-OSS
    "{# tools <|channel|>analysis<|message|> <|start|>assistant #}{% for m in messages %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}<{{ m.thinking }}>{% endif %}" + SHOWN + "{% endfor %}"
)


def codec_of(template: str) -> TextCodec:
    return TextCodec(TokenizerBundle(bundle().tokenizer_json, template, (0,), {}))


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calling(*calls: tuple[str, str], content: str = "", **more: Any) -> dict[str, Any]:
    made = [{"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}} for id_, name in calls]
    return said("assistant", content, tool_calls=made, **more)


def result(id_: str, content: str) -> dict[str, Any]:
    return said("tool", content, tool_call_id=id_)


async def shown(template: str, messages: list[dict[str, Any]], **fields: Any) -> list[str]:
    codec = codec_of(template)
    body = ChatCompletionRequest.model_validate({"messages": messages, **fields})
    return codec.decode((await conversation(codec, body)).prompt).splitlines()


@pytest.mark.parametrize(
    ("template", "first", "late", "no_user_after_tool", "short", "single"),
    [
        (CHAT, False, False, False, False, False),
        (OPEN, False, False, False, False, False),
        (FIRST, True, True, False, False, False),
        (LAST, True, True, False, False, False),
        (HIDES, True, True, False, False, False),
        (MISTRAL, True, True, True, True, False),
        (SINGLE, False, False, False, False, True),
        ("{{ raise_exception('no') }}", False, True, False, False, False),
        ("{{ messages[0].content }}{{ messages[1].content }}", False, True, False, False, False),
    ],
)
def test_a_template_is_asked_what_it_takes(
    template: str, first: bool, late: bool, no_user_after_tool: bool, short: bool, single: bool
) -> None:
    assert Demands.of(codec_of(template)) == Demands(first, late, not no_user_after_tool, short, single)


TWO = [said("system", "one"), said("developer", "two"), said("user", "hi")]
MIDDLE = [said("system", "s"), said("user", "a"), said("assistant", "b"), said("system", "late"), said("user", "c")]


@pytest.mark.parametrize("template", [FIRST, LAST, HIDES, MISTRAL])
async def test_what_the_system_says_reaches_a_template_with_one_place_for_it(template: str) -> None:
    assert await shown(template, TWO) == ["system: one", "", "two", "user: hi"]
    assert await shown(template, MIDDLE) == ["system: s", "user: a", "assistant: b", "user: late", "c"]
    assert await shown(template, [said("user", "a"), said("system", "late")]) == ["user: a", "late"]
    around = [said("user", "a"), said("system", "late"), said("user", "b")]
    assert await shown(template, around) == ["user: a", "late", "b"], "one turn, as such templates want"


async def test_a_template_with_places_for_it_shows_it_where_it_was_said() -> None:
    assert await shown(OPEN, TWO) == ["system: one", "system: two", "user: hi"]
    assert await shown(OPEN, MIDDLE) == ["system: s", "user: a", "assistant: b", "system: late", "user: c"]


async def test_two_turns_of_the_user_stay_two_where_the_system_is_not_between_them() -> None:
    turns = [said("user", "a"), said("system", "late"), said("assistant", "b"), said("user", "c"), said("user", "d")]
    assert await shown(FIRST, turns) == ["user: a", "late", "assistant: b", "user: c", "user: d"]


async def test_behind_a_result_the_system_speaks_in_it_where_the_user_must_not_speak() -> None:
    turns = [said("user", "a"), calling(("abcdefghi", "f")), result("abcdefghi", "r"), said("system", "late")]
    call = ["user: a", "assistant:  [f abcdefghi]"]
    assert await shown(MISTRAL, turns) == [*call, "tool: r", "late (abcdefghi)"]
    assert await shown(FIRST, turns) == [*call, "tool: r (abcdefghi)", "user: late"]


@pytest.mark.parametrize("length", range(1, len(MIDDLE) + 1))
def test_more_turns_leave_those_before_as_they_were(length: int) -> None:
    def texts(messages: list[dict[str, Any]]) -> str:
        made = ChatCompletionRequest.model_validate({"messages": messages}).messages
        return "|".join(message["content"] for message in fitted(template_messages(made), codec_of(FIRST)))

    assert texts(MIDDLE).startswith(texts(MIDDLE[:length]))


async def test_an_image_stays_beside_what_the_system_says() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image"}]
    made = fitted([said("user", parts), said("system", "late")], codec_of(FIRST))
    assert made == [said("user", [*parts, {"type": "text", "text": "late"}])]


async def test_images_of_results_come_behind_the_last_one() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    results = [said("tool", [{"type": "text", "text": "one"}, image], tool_call_id="a"), said("tool", "two")]
    made = fitted([*results, said("user", "hi")], codec_of(OPEN))
    assert [message["content"] for message in made] == ["one", "two", [image, {"type": "text", "text": "hi"}]]
    made = fitted([*results, said("assistant", "so")], codec_of(OPEN))
    assert [(message["role"], message["content"]) for message in made[1:]] == [
        ("tool", "two"), ("user", [image]), ("assistant", "so"),
    ]  # fmt: skip


async def test_the_answer_goes_on_behind_what_the_system_said_late() -> None:
    turns = [said("user", "a"), said("system", "late"), said("assistant", "so it")]
    assert (await shown(FIRST, turns, continue_final_message=True))[-1] == "assistant: so it"


async def test_ids_of_calls_become_nine_letters_where_the_template_wants_them() -> None:
    ours, theirs = "call_70567529f7524cff98520000", "a1B2c3D4e"
    turns = [said("user", "a"), calling((ours, "f"), (theirs, "g")), result(ours, "r"), result(theirs, "s")]
    lines = await shown(MISTRAL, turns)
    (short,) = re.findall(r"\[f ([A-Za-z0-9]{9})\]", lines[1])
    assert lines[1:] == [f"assistant:  [f {short}] [g {theirs}]", f"tool: r ({short})", f"tool: s ({theirs})"]
    assert await shown(MISTRAL, turns) == lines, "the same one each time"
    assert ours in (await shown(OPEN, turns))[1]
    others = {(await shown(MISTRAL, [said("user", "a"), calling((f"call_{at}", "f"))]))[1] for at in range(9)}
    assert len(others) == 9


async def test_several_calls_become_several_messages_where_the_template_wants_one() -> None:
    turns = [
        said("user", "a"),
        calling(("1", "f"), ("2", "g"), ("3", "h"), content="I look."),
        result("2", "of g"),
        result("1", "of f"),
        said("user", "b"),
    ]
    one = ["user: a", "assistant: I look. [f 1]", "tool: of f (1)", "assistant:  [g 2]", "tool: of g (2)"]
    assert await shown(SINGLE, turns) == [*one, "assistant:  [h 3]", "user: b"]
    assert await shown(OPEN, turns) == [
        "user: a", "assistant: I look. [f 1] [g 2] [h 3]", "tool: of g (2)", "tool: of f (1)", "user: b"
    ]  # fmt: skip


async def test_earlier_reasoning_is_where_the_family_s_template_looks_for_it() -> None:
    def turns(content: str) -> list[dict[str, Any]]:
        return [said("user", "a"), calling(("1", "f"), content=content, reasoning_content="hm"), result("1", "r")]

    assert (await shown(THINKING, turns("")))[1] == "<hm>assistant:  [f 1]"
    assert (await shown(THINKING, turns("I look.")))[1:3] == ["<hm", "I look.>assistant:  [f 1]"]
    assert "hm" not in "".join(await shown(SHOWN.join(("{% for m in messages %}", "{% endfor %}")), turns("")))


async def test_a_response_s_instructions_and_its_developer_s_message_are_one() -> None:
    """Codex begins so."""
    asked = ResponseRequest.model_validate({"instructions": "i", "input": [said("developer", "d"), said("user", "u")]})
    codec = codec_of(FIRST)
    assert codec.decode((await conversation(codec, asked.chat())).prompt) == "system: i\n\nd\nuser: u\n"


async def test_what_a_template_refuses_for_another_reason_it_refuses_in_its_own_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        await shown(MISTRAL, [said("user", "a"), said("user", "b")])


TEXT_ARGUMENTS = (  # DeepSeek V3.1
    "{# tools #}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}{{ '\\n' }}{% endfor %}"
)
THOUGHTS = (
    "{# tools #}{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.FIELD %}"
    "<think>{{ m.FIELD }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ '\\n' }}{% endfor %}"
)


async def test_arguments_of_calls_become_text_where_a_template_takes_nothing_else() -> None:
    assert Demands.of(codec_of(TEXT_ARGUMENTS)).text_arguments
    assert not Demands.of(codec_of(SINGLE)).text_arguments
    turns = [said("user", "a"), calling(("call00001", "clock")), said("tool", "x", tool_call_id="call00001")]
    assert (await shown(TEXT_ARGUMENTS, turns))[1] == "assistant: <call>clock{}"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
async def test_earlier_reasoning_goes_where_the_template_looks_for_it(field: str) -> None:
    template = THOUGHTS.replace("FIELD", field)
    assert Demands.of(codec_of(template)).thought_field == field
    thoughtful = calling(("call00001", "clock"), reasoning_content="Hm.")
    turns = [said("user", "a"), thoughtful, said("tool", "x", tool_call_id="call00001")]
    assert (await shown(template, turns))[1] == "assistant: <think>Hm.</think>clock"
