"""The messages of a chat."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from api.http.fields import HistoryModel, complaint

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
