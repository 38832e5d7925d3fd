"""How tool calls are written and read back, form by form. Which family writes which stands in `families.py`.

Hermes' form (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes, and whatever a template does not
say) and Llama's bare JSON are read here, Harmony's in `channels.py`, all other forms by `mlx_lm.tool_parsers`. Those
modules are plain Python and are loaded past `mlx_lm` itself, which would bring MLX into the api.

Where a schema wants a number, a truth value, a list or an object, and the model wrote a string that spells one, the
call has what the schema wants.
"""

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from shared.errors import InvalidRequestError
from shared.text.languages.families import HERMES

_TOKENS = {  # within calls: decoding must not hide them
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "mistral": ("[CALL_ID]", "[ARGS]"),
}
Definitions = list[dict[str, Any]]  # of tools, as OpenAI has them

_PACKAGE = "_parsers_of_mlx_lm"
_READ = frozenset(("function_gemma", "gemma4", "glm47", "kimi_k2", "longcat", "minicpm5", "minimax_m2", "mistral"))
_READ |= frozenset(("kimi_k3", "muse_spark", "pythonic", "qwen3_coder"))
_CALL_ID = re.compile(r"\[CALL_ID\]\s*\w+")  # Mistral's own name of a call, which clients get ours of
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*")  # of a function, as every parser takes it


@dataclass(frozen=True)
class ParsedCall:
    """One call as a model made it; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """The marks around calls, and what reads the text between them; ValueError when it is none."""

    name: str
    start: str
    end: str  # "": the end of the completion
    parse: Callable[[str, Definitions], list[ParsedCall]]
    bare: tuple[str, str] | None = None  # marks within those, which make a call by themselves: some models forget them
    lead: str = ""  # a mark that may come before a call, and is no part of it
    tokens: tuple[str, ...] = ()  # within calls: decoding must not hide them
    between: str = ""  # letters that may separate calls, besides blanks


@functools.cache
def tool_format(name: str) -> ToolFormat:
    """A form by its name; InvalidRequestError when the module that reads it is not installed."""
    if name == HERMES:
        return ToolFormat(HERMES, "<tool_call>", "</tool_call>", _json_calls)
    if name == "llama3":  # an object anywhere in the text
        return ToolFormat(name, "", "", _json_calls, lead="<|python_tag|>", between=";")
    if name == "harmony":
        return ToolFormat(name, "", "", _json_calls)
    if name not in _READ:
        return tool_format(HERMES)
    module = _parser_module(name)
    bare = ("<function=", "</function>") if name == "qwen3_coder" else None
    read, tokens = functools.partial(_by_module, module), _TOKENS.get(name, ())
    return ToolFormat(name, module.tool_call_start, module.tool_call_end, read, bare, tokens=tokens)


def names_of(tools: Definitions) -> frozenset[str]:
    """Names of the functions that may be called."""
    return frozenset(tool["function"]["name"] for tool in tools)


def _parser_module(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        found = importlib.util.find_spec("mlx_lm")
        if found is None or not found.submodule_search_locations:
            raise InvalidRequestError(f"tool calls in the form '{name}' need mlx-lm beside the api", param="tools")
        package = ModuleType(_PACKAGE)
        package.__path__ = [str(Path(found.submodule_search_locations[0]) / "tool_parsers")]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _by_module(module: ModuleType, text: str, tools: Definitions) -> list[ParsedCall]:
    """Calls that a module of mlx-lm reads. Most modules accept only letters in a function's name, so others get another
    name there."""
    aliases = {f"alias{at}_of_{len(text)}": name for at, name in enumerate(sorted(names_of(tools)))}
    aliases = {alias: name for alias, name in aliases.items() if not _PLAIN_NAME.fullmatch(name)}
    text, tools = _CALL_ID.sub("", text.strip()), msgspec.json.decode(msgspec.json.encode(tools)) if aliases else tools
    for alias, name in aliases.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", alias, text)
        for tool in tools:
            tool["function"]["name"] = alias if tool["function"]["name"] == name else tool["function"]["name"]
    try:
        made = module.parse_tool_call(text, tools)
    except Exception as error:  # whatever a parser trips over is a malformed call
        raise ValueError(str(error)) from error
    calls = [_call(each, tools) for each in (made if isinstance(made, list) else [made])]
    for alias, name in aliases.items():
        calls = [ParsedCall(call.name.replace(alias, name), call.arguments.replace(alias, name)) for call in calls]
    return calls


def _json_calls(text: str, tools: Definitions) -> list[ParsedCall]:
    try:
        made = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return [_call(each, tools) for each in (made if isinstance(made, list) else [made])]


def _call(made: Any, tools: Definitions) -> ParsedCall:
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        raise ValueError("a call needs a name")
    return called(made["name"], made.get("arguments", made.get("parameters", {})), tools)


def called(name: str, arguments: Any, tools: Definitions) -> ParsedCall:
    """A call with its arguments as its function's schema wants them; ValueError when they are no object."""
    if isinstance(arguments, str):  # some models write the object as a string
        try:
            arguments = msgspec.json.decode(given := arguments)
        except (msgspec.DecodeError, RecursionError):
            return ParsedCall(name, given)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    schema = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    wanted = schema.get("properties") if isinstance(schema, dict) else None
    if isinstance(wanted, dict):
        arguments = {key: _as_wanted(value, wanted.get(key)) for key, value in arguments.items()}
    try:
        return ParsedCall(name, msgspec.json.encode(arguments).decode())
    except (TypeError, OverflowError, RecursionError) as error:  # a complex number, one of more than 64 bits
        raise ValueError(str(error)) from error


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _as_wanted(value: Any, schema: Any) -> Any:
    """A string as what it spells, where the schema has types and none of them is a string."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(value, str) or not isinstance(kinds, list) or "string" in kinds or not kinds:
        return value
    try:
        read = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
    fits = any(isinstance(read, _TYPES.get(kind, ())) for kind in kinds if isinstance(kind, str))
    return read if fits and (not isinstance(read, bool) or "boolean" in kinds) else value
