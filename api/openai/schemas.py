"""The bodies of the OpenAI endpoints, with vLLM's extras. Every field is known by name; unknown ones are refused."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from api.openai.fields import LogitBias, Priority, Prompts, RequestModel, Stop, Truncation, TruncationSide, complaint
from api.openai.messages import ChatMessage, ContinueFinalMessage, check_continued
from api.openai.structured import ResponseFormat, StructuredOutputs
from api.openai.tools import MAX_TOOLS, FunctionDefinition, FunctionName, NamedChoice, Tool, ToolChoice, Tools
from shared.sequences import AdapterPolicy, LogprobsMode

MAX_N = 256
MAX_TOP_LOGPROBS = 20
WHOLE_VOCABULARY = -1  # as a number of log-probabilities
MAX_ALLOWED = 16_384  # tokens; each sequence carries them
MAX_BAD_WORDS = 128
MAX_NAMED_LOGPROBS = 128

StrictId = Annotated[int, Field(strict=True, ge=0)]
TopLogprobs = Annotated[int, Field(ge=WHOLE_VOCABULARY, le=MAX_TOP_LOGPROBS)]

Off = dict[str, tuple[Any, ...]]  # parameters that we do not support -> the values that ask for nothing
_STREAM_OFF: Off = {
    "include_obfuscation": (False,),
}
_SAMPLING_OFF: Off = {
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    # vLLM's older names of what is in `structured_outputs` now
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    # vLLM's further ones: clients that send every field send null
    "cache_salt": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "repetition_detection": (),
    "vllm_xargs": (),
}
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


class StreamOptions(RequestModel):
    """What a stream carries besides tokens."""

    off: ClassVar[Off] = _STREAM_OFF

    include_usage: bool | None = Field(default=None, description="a last chunk with the token counts")
    continuous_usage_stats: bool | None = Field(
        default=None, description="vLLM's: with include_usage, every chunk has the counts of its choice so far"
    )
    include_event_ids: bool | None = Field(
        default=None,
        description="`id:` lines, with which GET /v1/streams/{id} resumes the stream on any api process",
    )


class SamplingFields(RequestModel):
    """What both endpoints share."""

    model: str | None = Field(
        default=None,
        description="a served model, an adapter, a version of it (`name@k`), or a split (`a@1:0.9,b@2:0.1`); "
        "may be left out when only one model is served",
    )
    n: int | None = Field(default=1, ge=1, le=MAX_N, description="completions for each prompt, from one prefill")
    temperature: float | None = Field(default=1.0, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    logit_bias: LogitBias
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens, whatever the batch"
    )
    stop: Stop
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="a session: it stays with its choice of an adapter split")
    metadata: dict[str, Any] | None = Field(
        default=None, description="kept with a collected trajectory; its `reference` is what scoring compares with"
    )
    # vLLM's
    top_k: int | None = Field(default=0, ge=-1, description="0 or -1: off")
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0, le=10)
    stop_token_ids: list[StrictId] | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(default=0, ge=0, description="nothing stops the completion before this many tokens")
    include_stop_str_in_output: bool | None = False
    prompt_logprobs: TopLogprobs | None = Field(default=None, description="-1: of the whole vocabulary")
    logprob_token_ids: list[StrictId] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAMED_LOGPROBS,
        description="log-probabilities of these tokens at each position, in the place of the most likely ones",
    )
    allowed_token_ids: list[StrictId] | None = Field(
        default=None, min_length=1, max_length=MAX_ALLOWED, description="no other token is drawn"
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = Field(
        default=None, max_length=MAX_BAD_WORDS, description="texts that the completion must not contain"
    )
    skip_special_tokens: bool | None = Field(default=True, description="false: the text shows them")
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    priority: Priority = None
    request_id: str | None = Field(
        default=None,
        pattern=r"^[\x21-\x7e]{1,128}$",
        description="the answer's id ends with it, and POST /abort_requests takes it",
    )
    logprobs_mode: LogprobsMode | None = Field(
        default=None,
        description="of the completion's tokens: the model's own (raw), or those of what was drawn from (processed), "
        "after penalties, temperature and filters; default: the setting of that name",
    )
    structured_outputs: StructuredOutputs | None = Field(default=None, description="what the completion must look like")
    return_token_ids: bool | None = Field(default=False, description="adds `prompt_token_ids` and `token_ids`")
    return_tokens_as_token_ids: bool | None = Field(default=False, description="logprobs name tokens `token_id:<id>`")
    add_special_tokens: bool | None = None
    # ours
    adapter: str | None = Field(default=None, description="an adapter, a version of it or a split, as in `model`")
    lora_adapter: str | None = Field(default=None, description="the same as `adapter`")
    adapter_policy: AdapterPolicy | None = Field(
        default=None, description="follow: newest version at each decode step; pin: the version at the start"
    )
    collect_trajectory: bool | None = Field(
        default=False, description="each completion becomes a trajectory of the policy, for its trainer"
    )
    scoring_function: str | dict[str, Any] | None = Field(
        default=None, description="what scores the trajectory: a reward's name, or an object with `name` and options"
    )
    deadline_s: float | None = Field(
        default=None, gt=0, le=86_400, description="given up (504) after so long; at most the server's own timeout"
    )
    return_weight_versions: bool | None = Field(
        default=False, description="adds `weight_versions`: the adapter version of each range of tokens"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise complaint("stream_options", "'stream_options' needs 'stream': true")
        if self.adapter and self.lora_adapter and self.adapter != self.lora_adapter:
            raise complaint("adapter", "'adapter' and 'lora_adapter' name different adapters")
        if self.stream and self.prompt_logprobs is not None:
            raise complaint("prompt_logprobs", "'prompt_logprobs' does not go with 'stream'")
        if self.allowed_token_ids and self.bad_words:
            raise complaint(
                "bad_words", "'bad_words' does not go with 'allowed_token_ids': together they may leave none"
            )
        if self.request_id and self.stream_options is not None and self.stream_options.include_event_ids:
            raise complaint("request_id", "a stream that can be resumed ('include_event_ids') has an id of ours")
        return self


def check_whole(body: SamplingFields, top: int | None, param: str) -> None:
    """Refuse what a stream cannot have: log-probabilities of the whole vocabulary."""
    if top == WHOLE_VOCABULARY and body.stream:
        raise complaint(param, "log-probabilities of the whole vocabulary do not go with 'stream'")


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
