"""The messages of a chat."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.openai.fields import HistoryModel, complaint

Off = dict[str, tuple[Any, ...]]


class ContentPart(HistoryModel):
    """A part of a message; text alone."""

    type: Literal["text"]
    text: str


class CalledFunction(HistoryModel):
    """What a call names."""

    name: str
    arguments: str


class ToolCall(HistoryModel):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True, description="of a streamed call; not used")


def reasoning_of(message: dict[str, Any]) -> str | None:
    """The reasoning of an earlier turn under any of the names that clients send it back under.

    `reasoning_content` (DeepSeek), `reasoning` (vLLM, OpenRouter), `reasoning_details` (OpenRouter: a list of texts and
    summaries), `thinking_blocks` (Anthropic through litellm). What a provider has encrypted is left out.
    """
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := message.get(name), str):
            return text
    for name, keys in (("reasoning_details", ("text", "summary")), ("thinking_blocks", ("thinking",))):
        parts = message.get(name)
        if isinstance(parts, list):
            texts = [part.get(key) for part in parts if isinstance(part, dict) for key in keys]
            return "".join(text for text in texts if isinstance(text, str)) or None
    return None


class ChatMessage(HistoryModel):
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
        if not isinstance(data, dict):
            return data
        content = data.get("content")
        for i, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                reason = f"parts of type '{kind}' are not supported, only 'text'"
                raise complaint(f"content[{i}]", reason, unsupported=True)
        return {**data, "reasoning_content": reasoning_of(data)}

    @model_validator(mode="after")
    def _complete(self) -> "ChatMessage":
        said_otherwise = self.role == "assistant" and (self.tool_calls or self.reasoning_content)
        if self.content is None and not said_otherwise:
            raise complaint("content", f"a message of role '{self.role}' needs 'content'")
        if self.tool_calls and self.role != "assistant":
            raise complaint("tool_calls", "only a message of role 'assistant' has tool calls")
        self.tool_calls = self.tool_calls or None  # some templates ask whether there are any by asking for the field
        return self
