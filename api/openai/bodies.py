"""The bodies of POST /v1/completions and /v1/chat/completions, and the messages of a chat."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from api.generation.free_text import arguments_of
from api.generation.sampling import MAX_REASONING, SAMPLING_OFF, SamplingFields, TopLogprobs, check_whole
from api.generation.structured import ResponseFormat
from api.generation.target import BEGINNING, first_words
from api.http.content import MessagePart
from api.http.fields import HistoryModel, Off, Prompts, RequestModel, complaint
from api.openai.tools import MAX_TOOLS, ChatTools, FunctionDefinition, FunctionName, NamedChoice, Tool, ToolChoice


class CompletionRequest(SamplingFields):
    """Request body of POST /v1/completions."""

    off: ClassVar[Off] = {**SAMPLING_OFF, "suffix": ("",), "store": (False,)}

    prompt: Prompts
    max_tokens: int | None = Field(
        default=None, ge=0, description="default: `--default-max-tokens`; 0 goes with `echo` and scores the prompt"
    )
    logprobs: TopLogprobs | None = Field(
        default=None, description="log-probabilities, with the k most likely tokens; -1: with the whole vocabulary"
    )
    echo: bool | None = Field(default=False, description="the prompt comes before the completion")
    best_of: int | None = Field(default=None, ge=1, description="accepted when equal to n")

    @property
    def opening(self) -> str:
        return str(self.prompt[0][:BEGINNING]) if self.prompt else ""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return None if value is False else value  # a chat's way to say none; as a number it would mean 0 competitors

    @model_validator(mode="after")
    def _possible(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise complaint("best_of", "supported only when equal to 'n'", unsupported=True)
        if self.max_tokens == 0 and not self.echo:
            raise complaint("max_tokens", "'max_tokens' 0 needs 'echo': true")
        if self.logprob_token_ids and self.logprobs is None:
            raise complaint("logprob_token_ids", "'logprob_token_ids' needs 'logprobs'")
        check_whole(self, self.logprobs, "logprobs")
        return self


class ContentPart(HistoryModel):
    """A part that is text."""

    type: Literal["text"]
    text: str


class CalledFunction(HistoryModel):
    """Name and arguments of a call."""

    name: str
    arguments: str


class ToolCall(HistoryModel):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True, description="of a streamed call; not used")

    @model_validator(mode="before")
    @classmethod
    def _of_custom_tool(cls, data: Any) -> Any:
        """The call of a function that a call of a custom tool comes to."""
        custom = data.get("custom") if isinstance(data, dict) and data.get("type") == "custom" else None
        if not isinstance(custom, dict):
            return data
        called = {"name": custom.get("name"), "arguments": arguments_of(str(custom.get("input") or ""))}
        return {**data, "type": "function", "function": called}


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
    content: str | list[MessagePart] | None = None
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
            if isinstance(kind, str) and kind not in ("text", "image_url", "file"):
                reason = f"parts of type '{kind}' are not supported, only 'text', 'image_url' and 'file'"
                raise complaint(f"content[{i}]", reason, unsupported=True)
        return {**data, "reasoning_content": reasoning_of(data)}

    @model_validator(mode="after")
    def _complete(self) -> "ChatMessage":
        said_otherwise = self.role == "assistant" and (self.tool_calls or self.reasoning_content)
        if self.content is None and not said_otherwise:
            if self.role not in ("assistant", "tool"):
                raise complaint("content", f"a message of role '{self.role}' needs 'content'")
            self.content = ""  # an answer that was stopped before its first word, a tool that brought nothing
        if self.tool_calls and self.role != "assistant":
            raise complaint("tool_calls", "only a message of role 'assistant' has tool calls")
        if self.role not in ("user", "tool") and self.has_images:
            raise complaint("content", "only a message of role 'user' or 'tool' has images")
        self.tool_calls = self.tool_calls or None  # some templates ask whether there are any by asking for the field
        return self

    @property
    def has_images(self) -> bool:
        """True if one of the message's parts is an image."""
        return isinstance(self.content, list) and any(part.type != "text" for part in self.content)


class ChatFields(RequestModel):
    """A chat, and how the model's template shows it."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = Field(
        default=False, description="the answer goes on with the last message, which is left open (vLLM's)"
    )
    add_special_tokens: bool | None = Field(default=None, description="default: true for text, false for a chat")

    @model_validator(mode="after")
    def _continued(self) -> "ChatFields":
        """Refuse what contradicts `continue_final_message`: an answer that begins anew, or nothing to go on with."""
        if not self.continue_final_message:
            return self
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise complaint("continue_final_message", "it does not go with 'add_generation_prompt': true")
        last = self.messages[-1] if self.messages else None
        if last is None or not last.content or last.tool_calls or last.has_images:
            raise complaint("continue_final_message", "the last message must be text")
        return self


class Prediction(RequestModel):
    """Text that the client expects of the answer. The answer may come sooner by it, and is the same without."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        """Whole text of the expected answer."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(SamplingFields, ChatFields):
    """Request body of POST /v1/chat/completions."""

    off: ClassVar[Off] = {
        **SAMPLING_OFF,
        "echo": (False,),
        "best_of": (1,),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "moderation": (),
        "chat_template": (),
        "documents": ([],),
        "media_io_kwargs": (),
        "mm_processor_kwargs": (),
    }

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="OpenAI's newer name of max_tokens")
    logprobs: bool | None = False
    top_logprobs: TopLogprobs | None = Field(default=None, description="-1: the whole vocabulary")
    prediction: Prediction | None = Field(
        default=None, description="text that is likely in the answer, which then comes sooner (--spec-decode)"
    )
    response_format: ResponseFormat | None = None
    tools: ChatTools | None = None
    tool_choice: ToolChoice | None = Field(default=None, description="default: auto, if there are tools")
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call")
    functions: list[FunctionDefinition] | None = Field(
        default=None,
        max_length=MAX_TOOLS,
        description="OpenAI's older form of tools; the call comes as `function_call`",
    )
    function_call: Literal["none", "auto"] | FunctionName | None = Field(
        default=None, description="the older form of `tool_choice`"
    )
    reasoning_effort: str | None = Field(default=None, description="for templates that know it")
    max_reasoning_tokens: int | None = Field(
        default=None, ge=0, le=MAX_REASONING, description="reasoning that is not over by then is ended"
    )
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, le=MAX_REASONING, description="vLLM's name of max_reasoning_tokens; -1: no bound"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="for templates that know it")
    include_reasoning: bool | None = Field(default=True, description="false: reasoning is left out (vLLM's)")
    safety_identifier: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_key: str | None = Field(
        default=None, description="of the form of a UUID it names a session; else it is not used"
    )
    prompt_cache_retention: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="accepted, not used")

    @property
    def opening(self) -> str:
        return first_words(self.messages)

    @model_validator(mode="after")
    def _possible(self) -> "ChatCompletionRequest":
        self._take_functions()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise complaint("max_tokens", "'max_tokens' and 'max_completion_tokens' differ")
        budgets = {self.max_reasoning_tokens, self.thinking_token_budget} - {None}
        if len(budgets) > 1:
            raise complaint("thinking_token_budget", "'max_reasoning_tokens' and 'thinking_token_budget' differ")
        self.max_reasoning_tokens = next((budget for budget in budgets if budget != -1), None)
        if self.top_logprobs and not self.logprobs:
            raise complaint("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        if self.logprob_token_ids and not self.logprobs:
            raise complaint("logprob_token_ids", "'logprob_token_ids' needs 'logprobs': true")
        check_whole(self, self.top_logprobs, "top_logprobs")
        if self.structured_outputs is not None and self.response_format is not None:
            raise complaint("structured_outputs", "'structured_outputs' and 'response_format' say the same twice")
        return self

    def _take_functions(self) -> None:
        """Functions of the older form are tools, of which one is called at a time."""
        if not self.functions:
            if isinstance(self.function_call, FunctionName):
                raise complaint("function_call", "'function_call' needs 'functions'")
            return
        if self.tools or self.tool_choice:
            raise complaint("functions", "'functions' is the older form of 'tools': give one of them")
        self.tools = [*(Tool(type="function", function=each) for each in self.functions)]
        asked = self.function_call
        self.tool_choice = NamedChoice(type="function", function=asked) if isinstance(asked, FunctionName) else asked
        self.parallel_tool_calls = False
