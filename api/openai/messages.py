"""The messages of a chat."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from api.openai.fields import RequestModel, complaint

Off = dict[str, tuple[Any, ...]]

ContinueFinalMessage = Annotated[
    bool | None, Field(description="the answer goes on with the last message, which is left open (vLLM's)")
]


def check_continued(body: BaseModel) -> None:
    """Refuse what contradicts `continue_final_message`: an answer that begins anew, or nothing to go on with."""
    if not getattr(body, "continue_final_message", False):
        return
    if "add_generation_prompt" in body.model_fields_set and getattr(body, "add_generation_prompt", False):
        raise complaint("continue_final_message", "it does not go with 'add_generation_prompt': true")
    messages: list[ChatMessage] = getattr(body, "messages", [])
    if not messages or not messages[-1].content or messages[-1].tool_calls:
        raise complaint("continue_final_message", "the last message must be text")


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
    def _older_calls(cls, data: Any) -> Any:
        """OpenAI's older form of a call and of what it brought."""
        if not isinstance(data, dict):
            return data
        if data.get("role") == "function":
            return {**data, "role": "tool", "tool_call_id": data.get("tool_call_id") or data.get("name")}
        call = data.get("function_call")
        if not isinstance(call, dict) or data.get("tool_calls"):
            return data
        calls = [{"id": call.get("name"), "type": "function", "function": call}]
        return {**{name: value for name, value in data.items() if name != "function_call"}, "tool_calls": calls}

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
