"""The tools of POST /v1/responses, and the functions of a chat that they come to.

A tool of a namespace becomes a function whose name begins with the namespace's, and a custom tool, which takes any
text, a function of that one text, which the model is held to where its form is a regular expression or comes to one; a
call gets its own name and form back (`items.py`). Tools of other types are not served, as in any chat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from api.http.fields import HistoryModel, Off, RequestModel
from api.openai.tools import MAX_TOOLS, CustomDefinition, FunctionDefinition, UnservedTool, by_type, known_type
from shared.errors import InvalidRequestError

_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
_CALLERS: Off = {"allowed_callers": (["direct"], [])}


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    off: ClassVar[Off] = _CALLERS

    type: Literal["function"]
    defer_loading: bool | None = Field(default=None, description="accepted: the model sees all tools from the start")


class CustomTool(CustomDefinition):
    """A tool that takes any text."""

    off: ClassVar[Off] = _CALLERS

    type: Literal["custom"]
    defer_loading: bool | None = None


_own = Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")]


class Namespace(HistoryModel):
    """Functions and custom tools under one name."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    tools: list[Annotated[Annotated[_own, by_type("function")], known_type("function", "custom")]] = Field(
        max_length=MAX_TOOLS
    )


_SERVED = ("function", "custom", "namespace")
ResponseTool = Annotated[
    _own | Annotated[Namespace, Tag("<namespace>")] | Annotated[UnservedTool, Tag("<unserved>")],
    by_type("function", dict(zip(_SERVED, _SERVED, strict=True)), "unserved"),
]


class ToolName(RequestModel):
    """The one tool to call."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


def name_in_chat(namespace: str | None, name: str) -> str:
    """The name of a tool as the model sees it."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


@dataclass(frozen=True)
class OfferedTools:
    """A tool as the model sees it, and what its client calls it."""

    function: FunctionDefinition
    tool: FunctionTool | CustomTool
    namespace: str | None = None


def offered(tools: Sequence[ResponseTool]) -> Iterator[OfferedTools]:
    """Tools as the model sees them. The description of a namespace stands before that of its first tool."""
    for namespace, tool in own_tools(tools):
        about, named = tool.description, None
        if namespace is not None:
            named = namespace.name
            if tool is namespace.tools[0]:
                about = "\n\n".join(filter(None, (namespace.description, about)))
        name = name_in_chat(named, tool.name)
        if isinstance(tool, CustomTool):
            yield OfferedTools(tool.function_named(name, about), tool, named)
            continue
        function = FunctionDefinition.model_construct(
            name=name, description=about or None, parameters=tool.parameters, strict=tool.strict
        )
        yield OfferedTools(function, tool, named)


def own_tools(tools: Sequence[ResponseTool]) -> Iterator[tuple[Namespace | None, FunctionTool | CustomTool]]:
    """The client's own tools, each with its namespace."""
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from ((tool, inner) for inner in tool.tools)
        elif not isinstance(tool, UnservedTool):
            yield None, tool


def chosen(tools: Sequence[ResponseTool], choice: ToolName) -> str:
    """The name, as the model sees it, of the tool that a choice names with its namespace or without;
    InvalidRequestError for a name that several namespaces have."""
    there = {space.name if space else None for space, tool in own_tools(tools) if tool.name == choice.name}
    if choice.namespace is None and len(there) > 1 and None not in there:
        raise InvalidRequestError(
            f"several namespaces have a tool '{choice.name}': name the 'namespace', too", param="tool_choice"
        )
    named = next(iter(there)) if choice.namespace is None and len(there) == 1 else choice.namespace
    return name_in_chat(named, choice.name)


def left_out_of(tools: Sequence[ResponseTool], *, held: bool) -> set[str]:
    """Parts of own tools that the model does not see or need not follow, under the names that the answer's header uses.

    `held`: the model's calls can be held to a form.
    """
    found = {"tools.defer_loading" for _, tool in own_tools(tools) if tool.defer_loading}
    custom = [tool for _, tool in own_tools(tools) if isinstance(tool, CustomTool) and tool.form]
    return found | {"tools.format" for tool in custom if not (held and tool.regex)}


def shown_tool(tool: ResponseTool) -> dict[str, Any]:
    """A tool as a response repeats it."""
    given = tool.model_dump(by_alias=True, exclude_none=True)
    return {"parameters": {}, "strict": False, **given} if isinstance(tool, FunctionTool) else given
