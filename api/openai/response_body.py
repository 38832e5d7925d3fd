"""The body of POST /v1/responses, and the chat that it comes to.

Nothing is kept between two requests: what would need it (`store`, `previous_response_id`, `conversation`, `background`)
is refused by name, and the client sends the turns so far as `input`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from api.openai.fields import RequestModel, complaint
from api.openai.schemas import ChatCompletionRequest
from api.openai.structured import Schema
from shared.errors import InvalidRequestError
from shared.sequences import AdapterPolicy

MAX_ITEMS = 4096  # a chat has as many messages

Off = dict[str, tuple[Any, ...]]


def _known_type(*known: str) -> BeforeValidator:
    """Refuse things of another `type` by name."""

    def check(value: Any) -> Any:
        kind = value.get("type", known[0]) if isinstance(value, dict) else known[0]
        if kind not in known:
            raise complaint("type", f"type '{kind}' is not supported, only {', '.join(known)}", unsupported=True)
        return value

    return BeforeValidator(check)


class TextPart(RequestModel):
    """A part of a message; text alone."""

    off: ClassVar[Off] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


# A text, or parts of one.
Text = Annotated[
    list[Annotated[TextPart, _known_type("input_text", "output_text", "text")]],
    BeforeValidator(_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


def _joined(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)


class InputMessage(RequestModel):
    """A message of an earlier turn, or the new one."""

    off: ClassVar[Off] = {"phase": ()}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    id: str | None = None
    status: str | None = None


class FunctionCallItem(RequestModel):
    """A call that the model made."""

    off: ClassVar[Off] = {"namespace": (), "caller": (), "async": (False,), "async_": (False,)}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(RequestModel):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: str | None = None
    status: str | None = None


class _Thought(RequestModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(RequestModel):
    """What the model thought; its template decides whether it sees that again."""

    off: ClassVar[Off] = {"encrypted_content": ()}

    type: Literal["reasoning"]
    summary: list[_Thought] = Field(default_factory=list)
    content: list[_Thought] | None = None
    id: str | None = None
    status: str | None = None


def _kind(value: Any) -> Any:
    return {"type": "message", **value} if isinstance(value, dict) and "type" not in value else value


def _tag(value: Any) -> str:
    """Which kind of item it is; not an identifier, so that no error takes it for a field (api/errors.py)."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "message")
    return f"<{kind}>"


Item = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("<message>")]
        | Annotated[FunctionCallItem, Tag("<function_call>")]
        | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
        | Annotated[ReasoningItem, Tag("<reasoning>")],
        Discriminator(_tag),
    ],
    _known_type("message", "function_call", "function_call_output", "reasoning"),
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
            "description": "a text, or the turns so far: messages, function calls, their outputs, reasoning",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
        }
    ),
]


class FunctionTool(RequestModel):
    """A function that the model may call."""

    off: ClassVar[Off] = {"allowed_callers": (), "defer_loading": (False,), "output_schema": ()}

    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(RequestModel):
    """The one function to call."""

    type: Literal["function"]
    name: str


class TextFormat(RequestModel):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise complaint("", "'name' and 'schema' go with type 'json_schema', and with no other")
        return self


class TextConfig(RequestModel):
    """How the text comes."""

    off: ClassVar[Off] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class Reasoning(RequestModel):
    """How the model reasons. Its reasoning comes whole, so `auto` gets no summary besides."""

    off: ClassVar[Off] = {
        "summary": ("auto",),
        "generate_summary": ("auto",),
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: str | None = None


class ResponseRequest(RequestModel):
    """POST /v1/responses."""

    off: ClassVar[Off] = {
        "store": (False,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning comes as text: there is nothing to decrypt
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "service_tier": ("auto", "default"),
        "context_management": (),
        "moderation": (),
        "access_programs": (),
        "image": (),
    }

    input: Items
    model: str | None = None
    instructions: str | None = Field(default=None, description="a system message before the input")
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    stream: bool | None = False
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[Annotated[FunctionTool, _known_type("function")]] | None = Field(default=None, max_length=128)
    tool_choice: Annotated[Literal["none", "auto", "required"] | FunctionChoice | None, _known_type("function")] = None
    parallel_tool_calls: bool | None = True
    metadata: dict[str, str] | None = Field(default=None, description="comes back with the response")
    user: str | None = Field(default=None, description="a session: it stays with its choice of an adapter split")
    safety_identifier: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_key: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_retention: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="accepted, not used")
    # ours
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    adapter: str | None = None
    lora_adapter: str | None = None
    adapter_policy: AdapterPolicy | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatCompletionRequest:
        """The same request to /v1/chat/completions."""
        body: dict[str, Any] = {
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        for name in ("model", "temperature", "top_p", "user", "seed", "adapter", "lora_adapter", "adapter_policy",
                     "chat_template_kwargs", "parallel_tool_calls"):  # fmt: skip
            body[name] = getattr(self, name)
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            body["tools"] = [{"type": "function", "function": each} for each in functions]
        choice = self.tool_choice
        named = isinstance(choice, FunctionChoice)
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice  # type: ignore[union-attr]
        return ChatCompletionRequest.model_validate(body)

    def _format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            return {"type": wanted.type}
        return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}


def _messages(instructions: str | None, given: "list[Item]") -> list[dict[str, Any]]:
    """Items as messages: a call belongs to the assistant's message before it, reasoning to the one after."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    thought = ""
    for item in given:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary)
        elif isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
        else:
            messages.append({"role": item.role, "content": _joined(item.content)})
        if thought and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    if not messages:
        raise InvalidRequestError("'input' has no message", param="input")
    return messages
