"""How a model writes its tool calls, told from its chat template, and how they are read back.

Hermes' form (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes, and whatever a template does not
say) and Llama's bare JSON are read here; all other forms by `mlx_lm.tool_parsers`. Those modules are plain Python and
are loaded past `mlx_lm` itself, which would bring MLX into the api.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from shared.errors import InvalidRequestError

HERMES = "hermes"
_PACKAGE = "_parsers_of_mlx_lm"

# What gives a template away, as in `mlx_lm.tokenizer_utils._infer_tool_parser`, in its order; then Llama 3.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
    (("<tool_call>",), HERMES),
    (('{"name": function name, "parameters":',), "llama3"),
)


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
    parse: Callable[[str, list[dict[str, Any]]], list[ParsedCall]]
    begins: bool = False  # a call is the beginning of a completion, or there is none; the mark is a part of it


def format_name(template: str) -> str:
    """The form in which a model with this chat template calls tools."""
    return next((name for signs, name in _SIGNS if all(sign in template for sign in signs)), HERMES)


@functools.cache
def tool_format(name: str) -> ToolFormat:
    """A form by its name; InvalidRequestError when the module that reads it is not installed."""
    if name == HERMES:
        return ToolFormat(HERMES, "<tool_call>", "</tool_call>", lambda text, tools: _json_calls(text))
    if name == "llama3":
        return ToolFormat("llama3", "{", "", lambda text, tools: _json_calls("{" + text), begins=True)
    module = _parser_module(name)
    return ToolFormat(name, module.tool_call_start, module.tool_call_end, functools.partial(_by_module, module))


def _parser_module(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        found = importlib.util.find_spec("mlx_lm")
        if found is None or not found.submodule_search_locations:
            raise InvalidRequestError(f"tool calls in the form '{name}' need mlx-lm beside the api", param="tools")
        package = ModuleType(_PACKAGE)
        package.__path__ = [str(Path(found.submodule_search_locations[0]) / "tool_parsers")]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _by_module(module: ModuleType, text: str, tools: list[dict[str, Any]]) -> list[ParsedCall]:
    try:
        made = module.parse_tool_call(text.strip(), tools)
    except Exception as error:  # whatever a parser trips over is a malformed call
        raise ValueError(str(error)) from error
    return [_call(each) for each in (made if isinstance(made, list) else [made])]


def _json_calls(text: str) -> list[ParsedCall]:
    try:
        made = msgspec.json.decode(text.strip())
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    return [_call(each) for each in (made if isinstance(made, list) else [made])]


def _call(made: Any) -> ParsedCall:
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        raise ValueError("a call needs a name")
    arguments = made.get("arguments", made.get("parameters", {}))
    if isinstance(arguments, str):
        return ParsedCall(made["name"], arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return ParsedCall(made["name"], msgspec.json.encode(arguments).decode())
