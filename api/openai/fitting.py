"""Messages as the chat template of the model takes them: many refuse, or leave out, what OpenAI's clients send.

What a template takes is found out once, by rendering small conversations with it (`Demands.of`). Only where it would
refuse or not show what was said, messages are changed:

- Several system messages at the beginning become one. A later one is said by the user, in one turn with
  what the user says there, since such templates want turns to alternate; after a tool's result it is a part of that.
- Images that tools have brought are shown by the user after the results, for any template.
- Ids of calls become nine letters and digits (Mistral), the same ones for the same id.
- A message with several calls becomes several, each with its result (Llama 3, GPT-OSS).
- Arguments of calls become JSON text (DeepSeek V3.1).
- Reasoning of earlier turns goes into the field in which the template looks for it.

Invariant. Turns that come again make the same messages again, so that what a worker has read of a conversation is found
in its prefix cache when the next turn is asked for.
"""

import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from shared.errors import InvalidRequestError
from shared.text.codec import TextCodec

Message = dict[str, Any]
T = TypeVar("T")

_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


async def fewest_left_out(look: Callable[[int], Awaitable[tuple[bool, T]]], last: int) -> T:
    """The result of `look` for a conversation without as few of its oldest turns as it takes to fit, at most `last`.

    `look` says if the conversation without so many turns fits. If none fits, the shortest is returned.
    """
    skipped, tried = 0, -1
    while True:  # the first look is at all of it, the others halve what is left
        fits, made = await look(skipped)
        if fits and (skipped == 0 or skipped - tried == 1):
            return made
        if not fits and skipped == last:
            return made
        if fits:
            last = skipped
        else:
            tried = skipped
        skipped = last if last - tried == 1 else (tried + last) // 2


@dataclass(frozen=True)
class Demands:
    """Restrictions of a template on messages."""

    one_system_first: bool  # it shows one system message at the beginning, and no second one
    no_late_system: bool  # none after the beginning
    user_after_tool: bool  # the user may speak right after the result of a call
    short_ids: bool  # ids of calls have nine letters and digits
    single_calls: bool  # a message has one call
    text_arguments: bool = False  # it shows the arguments of calls as text only
    thought_field: str = "reasoning_content"  # in which it looks for reasoning of earlier turns

    @classmethod
    @lru_cache(maxsize=16)  # models
    def of(cls, codec: TextCodec) -> "Demands":
        """The demands of the model's template."""

        def shows(messages: list[Message], *texts: str) -> bool:
            try:
                shown = codec.render_chat(as_text(messages) if text_arguments else messages)
            except InvalidRequestError:
                return False
            return all(text in shown for text in texts)

        def as_text(messages: list[Message]) -> list[Message]:
            return [_with_text_arguments(message) for message in messages]

        text_arguments = False

        def thoughtful(field: str) -> list[Message]:
            return [ask, {**_calling(calls[0]), field: "a-thought"}, results[0]]

        begin, ask, answer = (
            _message("system", "first-of-all"),
            _message("user", "a-question"),
            _message("assistant", "a-reply"),
        )
        late = _message("system", "something-late")
        results = [_result("call00001", "result-one"), _result("call00002", "result-two")]
        calls = [_call("call00001", "function_one"), _call("call00002", "function_two")]
        long = [ask, _calling(_call("call_of_twenty_letters", "function_one")), _result("call_of_twenty_letters", "x")]
        single = [ask, _calling(calls[0]), results[0]]
        apart = [*single, _calling(calls[1]), results[1]]
        text_arguments = not shows(single, "function_one") and shows(as_text(single), "function_one")
        both = "function_one", "function_two"
        system = begin["content"], late["content"]  # some show the last one alone
        return cls(
            one_system_first=not shows([begin, late, ask], *system) and shows([begin, ask], begin["content"]),
            no_late_system=not shows([begin, ask, answer, ask, late], *system)
            or not shows([begin, ask, answer, late, ask], *system),
            user_after_tool=shows([*single, ask]) or not shows(single),
            short_ids=shows(single) and not shows(long),
            single_calls=not shows([ask, _calling(*calls), *results], *both) and shows(apart, *both),
            text_arguments=text_arguments,
            thought_field=next((name for name in _THOUGHT_FIELDS if shows(thoughtful(name), "a-thought")), "")
            or _THOUGHT_FIELDS[0],
        )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _call(name: str, function: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": {"key": "value"}}}


def _calling(*calls: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _result(name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": content}


def fitted(messages: list[Message], codec: TextCodec) -> list[Message]:
    """Messages as the model's template takes them."""
    if any(message["role"] == "tool" and isinstance(message["content"], list) for message in messages):
        messages = _with_images_after_results(messages)
    if any(message["role"] == "system" for message in messages[1:]):
        demands = Demands.of(codec)
        if demands.one_system_first:
            messages = _with_one_beginning(messages)
        if demands.no_late_system:
            messages = _without_late_system(messages, demands.user_after_tool)
    if any("tool_calls" in message or "tool_call_id" in message for message in messages):
        demands = Demands.of(codec)
        if demands.short_ids:
            messages = [_with_short_ids(message) for message in messages]
        if demands.single_calls:
            messages = _with_single_calls(messages)
        if demands.text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
    if not any("reasoning_content" in message for message in messages):
        return messages
    field = Demands.of(codec).thought_field
    return messages if field == "reasoning_content" else [_with_thought_in(field, message) for message in messages]


def _with_images_after_results(messages: list[Message]) -> list[Message]:
    shown: list[Message] = []
    brought: list[dict[str, Any]] = []
    for message in messages:
        content, role = message["content"], message["role"]
        if role == "tool" and isinstance(content, list):
            brought = brought + [part for part in content if part["type"] != "text"]
            message = {**message, "content": "\n".join(part["text"] for part in content if part["type"] == "text")}
        elif role == "user" and brought:
            message, brought = {**message, "content": _joined(brought, content)}, []
        elif role != "tool" and brought:
            shown.append({"role": "user", "content": brought})
            brought = []
        shown.append(message)
    return [*shown, {"role": "user", "content": brought}] if brought else shown


def _with_one_beginning(messages: list[Message]) -> list[Message]:
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    first = {**messages[0], "content": "\n\n".join(message["content"] for message in messages[:count])}
    return [first, *messages[count:]]


def _without_late_system(messages: list[Message], user_after_tool: bool) -> list[Message]:
    shown: list[Message] = []
    begun = False  # somebody else than the system has spoken
    joins = False  # what the last message says is in part the system's, so what the user says next goes into it
    for message in messages:
        begun = begun or message["role"] != "system"
        late = begun and message["role"] == "system"
        last = shown[-1]["role"] if shown else ""
        if late and last == "tool" and not user_after_tool:
            shown[-1] = {**shown[-1], "content": _joined(shown[-1]["content"], message["content"])}
        elif (late or (joins and message["role"] == "user")) and last == "user":
            shown[-1] = {**shown[-1], "content": _joined(shown[-1]["content"], message["content"])}
            joins = True
        else:
            shown.append({**message, "role": "user"} if late else message)
            joins = late
    return shown


def _joined(first: Any, second: Any) -> Any:
    """The contents of two messages as one: a line is broken between texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], *parts[1]]


def _with_short_ids(message: Message) -> Message:
    shown = dict(message)
    if "tool_call_id" in message:
        shown["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        shown["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
    return shown


def _short_id(name: str | None) -> str:
    """Nine letters and digits for an id; one that has them already stays."""
    name = name or ""
    if _SHORT_ID.fullmatch(name):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest(), "big")
    return "".join(_LETTERS[number // len(_LETTERS) ** at % len(_LETTERS)] for at in range(9))


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Each call in a message of its own, and its result right after it."""
    shown: list[Message] = []
    at = 0
    while at < len(messages):
        message, behind = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            shown.append(message)
            at = behind
            continue
        while behind < len(messages) and messages[behind]["role"] == "tool":
            behind += 1
        results = messages[at + 1 : behind]
        for number, call in enumerate(calls):
            shown.append({**(message if number == 0 else _calling()), "tool_calls": [call]})
            named = call["id"] is not None
            mine = [each for each in results if each.get("tool_call_id") == call["id"]] if named else results[:1]
            shown += mine
            results = [each for each in results if not any(each is one for one in mine)]
        shown += results
        at = behind
    return shown


def _with_thought_in(field: str, message: Message) -> Message:
    """A message with its reasoning in this field. With a call, what the model said before it is a part of that: the
    template of GPT-OSS refuses to show both."""
    thought = message.get("reasoning_content")
    if thought is None:
        return message
    shown = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message.get("tool_calls") and message["content"]:
        thought, shown["content"] = f"{thought}\n{message['content']}", ""
    return {**shown, field: thought}
