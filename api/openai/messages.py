"""The messages of a chat."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.openai.fields import RequestModel, complaint

Off = dict[str, tuple[Any, ...]]


class ContentPart(RequestModel):
    """A part of a message; text alone."""

    type: Literal["text"]
    text: str


class CalledFunction(RequestModel):
    """What a call names."""

    name: str
    arguments: str


class ToolCall(RequestModel):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True, description="of a streamed call; not used")


class ChatMessage(RequestModel):
    """One message of a chat."""

    off: ClassVar[Off] = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_parts(cls, data: Any) -> Any:
        content = data.get("content") if isinstance(data, dict) else None
        for i, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                reason = f"parts of type '{kind}' are not supported, only 'text'"
                raise complaint(f"content[{i}]", reason, unsupported=True)
        return data

    @model_validator(mode="after")
    def _complete(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise complaint("content", f"a message of role '{self.role}' needs 'content'")
        if self.tool_calls and self.role != "assistant":
            raise complaint("tool_calls", "only a message of role 'assistant' has tool calls")
        self.tool_calls = self.tool_calls or None  # some templates ask whether there are any by asking for the field
        return self
