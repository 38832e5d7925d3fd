"""The `input` of POST /v1/responses: a text, or the items of earlier turns, whichever server they came from.

An item of a type that another server made for itself alone is left out of the model's view where the turns around it
say enough without it (`LeftOut`); the answer's header names it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Tag, WithJsonSchema, model_validator

from api.generation.free_text import arguments_of
from api.http.fields import HistoryModel, Off, complaint
from api.openai.responses.items import unsealed
from api.openai.responses.parts import Content, ImagePart, Part, TextPart, text_of
from api.openai.responses.tools import name_in_chat
from api.openai.tools import by_type, known_type

MAX_ITEMS = 4096  # a chat has as many messages
MAX_ID = 256


class InputItem(HistoryModel):
    """Fields that all items have. `prefix` begins the id of one that is stored."""

    prefix: ClassVar[str] = "item"

    id: str | None = None
    status: str | None = None

    @property
    def left_out(self) -> str:
        """Name of the part that the model does not see, as the answer's header has it; "" if the model sees all."""
        return ""

    def shown(self) -> dict[str, Any]:
        """The item as a client gets it back, but for its id."""
        raise NotImplementedError


class InputMessage(InputItem):
    """A message of an earlier turn, or the new one."""

    prefix: ClassVar[str] = "msg"
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def shown(self) -> dict[str, Any]:
        """Texts of the message in the form of its role."""
        written: dict[str, Any] = {"type": "output_text", "annotations": [], "logprobs": []}
        part = written if self.role == "assistant" else {"type": "input_text"}
        return {"type": "message", "role": self.role, "status": "completed", "content": _shown(self.content, part)}


def _shown(parts: list[Part], text: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**text, "text": part.text} if isinstance(part, TextPart) else part.model_dump() for part in parts]


class CallItem(InputItem):
    """A call that the model made, of a function or of a custom tool."""

    off: ClassVar[Off] = {"async": (False,), "async_": (False,)}

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None

    @property
    def name_in_chat(self) -> str:
        """The name that the model knows the tool by."""
        return name_in_chat(self.namespace, self.name)

    def _named(self) -> dict[str, Any]:
        return {"type": self.type, "call_id": self.call_id, "name": self.name} | (
            {} if self.namespace is None else {"namespace": self.namespace}
        )


class FunctionCallItem(CallItem):
    """A call of a function."""

    prefix: ClassVar[str] = "fc"

    type: Literal["function_call"]
    arguments: str

    def shown(self) -> dict[str, Any]:
        """The call as an item of a response, with its arguments."""
        return {**self._named(), "status": "completed", "arguments": self.arguments}


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    prefix: ClassVar[str] = "ctc"

    type: Literal["custom_tool_call"]
    input: str

    @property
    def arguments(self) -> str:
        """The arguments of the function that the model knows it as."""
        return arguments_of(self.input)

    def shown(self) -> dict[str, Any]:
        """The call as an item of a response, with its text."""
        return {**self._named(), "input": self.input}


class CallOutputItem(InputItem):
    """Result of a function call or of a custom call."""

    prefix: ClassVar[str] = "fco"

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content

    def shown(self) -> dict[str, Any]:
        """One text, unless it has more than text."""
        plain = all(isinstance(part, TextPart) for part in self.output)
        output = text_of(self.output) if plain else _shown(self.output, {"type": "input_text"})
        return {"type": self.type, "call_id": self.call_id, "output": output, "status": "completed"}


class _Thought(HistoryModel):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


def places_of_images(items: Sequence[InputItem], earlier: int) -> Iterator[str]:
    """Where the images of items stand in the request, in the order that they have in the chat; the first `earlier`
    items are those of earlier responses, which are not in it."""
    for at, item in enumerate(items):
        if isinstance(item, InputMessage | CallOutputItem):
            name, parts = ("content", item.content) if isinstance(item, InputMessage) else ("output", item.output)
            for number, part in enumerate(parts):
                if isinstance(part, ImagePart):
                    yield "input" if at < earlier else f"input[{at - earlier}].{name}[{number}]"


class ReasoningItem(InputItem):
    """Reasoning of an earlier turn. The model's template decides if the model sees it again."""

    prefix: ClassVar[str] = "rs"

    type: Literal["reasoning"]
    summary: list[_Thought] = Field(default_factory=list)
    content: list[_Thought] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """All of it that can be read here."""
        return "".join(part.text for part in self.content or ()) or (
            unsealed(self.encrypted_content) or "".join(part.text for part in self.summary)
        )

    @property
    def left_out(self) -> str:
        """Thoughts that another server has encrypted."""
        return "input.reasoning.encrypted_content" if self.encrypted_content and not self.text else ""

    def shown(self) -> dict[str, Any]:
        """With what was encrypted, for a server that can read it."""
        content = [part.model_dump() for part in self.content or ()]
        shown = {"type": "reasoning", "summary": [part.model_dump() for part in self.summary], "content": content}
        return {**shown, "status": "completed"} | (
            {} if self.encrypted_content is None else {"encrypted_content": self.encrypted_content}
        )


class ItemReference(InputItem):
    """Stands for an item of a stored response; it is replaced before anything else is done (`references.py`)."""

    type: Literal["item_reference"]

    @model_validator(mode="after")
    def _named(self) -> "ItemReference":
        if not self.id or len(self.id) > MAX_ID:
            raise complaint("id", f"a reference needs the 'id' of an item, of at most {MAX_ID} characters")
        return self


class _AsGiven(InputItem):
    """An item that is stored with all of its fields."""

    model_config = ConfigDict(extra="allow")

    type: str

    def shown(self) -> dict[str, Any]:
        """The item with all fields that came."""
        return self.model_dump(exclude_unset=True, exclude={"id"})


class CompactionItem(_AsGiven):
    """Stands for the turns before it: a summary, if this server made it (`compaction.py`)."""

    prefix: ClassVar[str] = "cmp"

    encrypted_content: str

    @property
    def text(self) -> str:
        """The summary; "" where another server has encrypted it."""
        return unsealed(self.encrypted_content)

    @property
    def left_out(self) -> str:
        """A summary that cannot be read here."""
        return "" if self.text else f"input.{self.type}"


class OtherCallItem(_AsGiven):
    """A call of a tool that has a form of its own with OpenAI: `local_shell_call`, `mcp_call` and the like."""

    call_id: str | None = None
    name: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    given: str | None = Field(default=None, alias="arguments")
    output: str | None = None  # of an `mcp_call`, which has both
    error: Any = None

    @property
    def called(self) -> str:
        """The id by which its output names it."""
        return self.call_id or self.id or ""

    @property
    def name_in_chat(self) -> str:
        """The name of the function that the model sees in its place."""
        return self.name or self.type.removesuffix("_call")

    @property
    def arguments(self) -> str:
        """The arguments of that function."""
        return self.given or json.dumps(self.action or self.operation or {}, ensure_ascii=False)

    @property
    def brought(self) -> str | None:
        """Result of the call, where the item holds that, too."""
        if self.type != "mcp_call":
            return None
        return self.output if self.output is not None else f"Error: {json.dumps(self.error, ensure_ascii=False)}"

    def shown(self) -> dict[str, Any]:
        """With the id by which its output names it, which its own may have been."""
        return self.model_dump(exclude_unset=True, exclude={"id"}, by_alias=True) | (
            {} if self.type == "mcp_call" else {"call_id": self.called}
        )


class OtherOutputItem(_AsGiven):
    """Result of a call of another kind."""

    call_id: str | None = None
    output: Any = None

    @property
    def called(self) -> str:
        """The id of the call."""
        return self.call_id or self.id or ""

    @property
    def text(self) -> str:
        """Text that the model sees of the result."""
        return self.output if isinstance(self.output, str) else json.dumps(self.output, ensure_ascii=False)

    def shown(self) -> dict[str, Any]:
        """With the id of the call, which its own may have been."""
        return {**super().shown(), "call_id": self.called}


class AgentMessage(_AsGiven):
    """Message of one agent of a client to another one."""

    author: str = ""
    recipient: str = ""
    content: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The readable parts of the message."""
        said = "".join(text for part in self.content if isinstance(text := part.get("text"), str))
        return f"Message from {self.author} to {self.recipient}:\n{said}" if said else ""

    @property
    def left_out(self) -> str:
        """Words that another server has encrypted."""
        return "" if self.text else "input.agent_message"


class LeftOut(_AsGiven):
    """An item that the model does not see: what OpenAI's own tools did, whose results stand in the answer after it."""

    @property
    def left_out(self) -> str:
        """Name of the whole item, since the model sees nothing of it."""
        return f"input.{self.type}"


def _kind(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") is not None:
        return value
    return {**value, "type": "item_reference" if value.keys() <= {"id", "type"} and "id" in value else "message"}


_OTHER_CALLS = ("local_shell_call", "shell_call", "apply_patch_call", "mcp_call")
_OTHER_OUTPUTS = ("local_shell_call_output", "shell_call_output", "apply_patch_call_output")
_COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
_LEFT_OUT = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "tool_search_call",
    "tool_search_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "configuration_update",
)
_KNOWN = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")

Item = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("<message>")]
        | Annotated[FunctionCallItem, Tag("<function_call>")]
        | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
        | Annotated[CallOutputItem, Tag("<call_output>")]
        | Annotated[ReasoningItem, Tag("<reasoning>")]
        | Annotated[ItemReference, Tag("<item_reference>")]
        | Annotated[CompactionItem, Tag("<compaction>")]
        | Annotated[OtherCallItem, Tag("<other_call>")]
        | Annotated[OtherOutputItem, Tag("<other_output>")]
        | Annotated[AgentMessage, Tag("<agent_message>")]
        | Annotated[LeftOut, Tag("<left_out>")],
        by_type(
            "message",
            {
                **dict.fromkeys(("function_call_output", "custom_tool_call_output"), "call_output"),
                **dict.fromkeys(_COMPACTIONS, "compaction"),
                **dict.fromkeys(_OTHER_CALLS, "other_call"),
                **dict.fromkeys(_OTHER_OUTPUTS, "other_output"),
                **dict.fromkeys(_LEFT_OUT, "left_out"),
            },
        ),
    ],
    known_type(
        *_KNOWN,
        "reasoning",
        "item_reference",
        "agent_message",
        *_COMPACTIONS,
        *_OTHER_CALLS,
        *_OTHER_OUTPUTS,
        *_LEFT_OUT,
    ),
    BeforeValidator(_kind),
]


def _items(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise complaint("", f"{len(value)} items, and {MAX_ITEMS} is the limit")
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[Item],
    BeforeValidator(_items),
    Field(min_length=1),
    WithJsonSchema(
        {
            "description": "a text, or the turns so far: messages, calls, their outputs, reasoning, references",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
        }
    ),
]
