"""The bodies of POST /v1/completions and /v1/chat/completions."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from api.generation.sampling_fields import _SAMPLING_OFF, Off, SamplingFields, TopLogprobs, check_whole
from api.generation.structured import ResponseFormat
from api.http.fields import Prompts, complaint
from api.openai.messages import ChatMessage, ContinueFinalMessage, check_continued
from api.openai.tools import MAX_TOOLS, FunctionDefinition, FunctionName, NamedChoice, Tool, ToolChoice, Tools

_COMPLETION_OFF: Off = {
    **_SAMPLING_OFF,
    "suffix": ("",),
    "store": (False,),
}
_CHAT_OFF: Off = {
    **_SAMPLING_OFF,
    "echo": (False,),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "service_tier": (
        "auto",
        "default",
    ),
    "store": (False,),
    "moderation": (),
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "thinking_token_budget": (),
}


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    off: ClassVar[Off] = _COMPLETION_OFF

    prompt: Prompts
    max_tokens: int | None = Field(
        default=None, ge=0, description="default 16; 0 goes with `echo` and scores the prompt"
    )
    logprobs: TopLogprobs | None = Field(
        default=None, description="log-probabilities, with the k most likely tokens; -1: with the whole vocabulary"
    )
    echo: bool | None = Field(default=False, description="the prompt comes before the completion")
    best_of: int | None = Field(default=None, ge=1, description="accepted when equal to n")

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


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    off: ClassVar[Off] = _CHAT_OFF

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="OpenAI's newer name of max_tokens")
    logprobs: bool | None = False
    top_logprobs: TopLogprobs | None = Field(default=None, description="-1: the whole vocabulary")
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")
    add_generation_prompt: bool | None = True
    continue_final_message: ContinueFinalMessage = False
    tools: Tools | None = None
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
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="for templates that know it")
    include_reasoning: bool | None = Field(default=True, description="false: reasoning is left out (vLLM's)")
    safety_identifier: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_key: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_retention: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="accepted, not used")

    @model_validator(mode="after")
    def _possible(self) -> "ChatCompletionRequest":
        check_continued(self)
        self._take_functions()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise complaint("max_tokens", "'max_tokens' and 'max_completion_tokens' differ")
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
        self.tools = [Tool(type="function", function=each) for each in self.functions]
        asked = self.function_call
        self.tool_choice = NamedChoice(type="function", function=asked) if isinstance(asked, FunctionName) else asked
        self.parallel_tool_calls = False
