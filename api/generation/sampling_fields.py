"""The fields that completions and chats share, with vLLM's extras. Every field is known by name; others are refused."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from api.generation.structured import StructuredOutputs
from api.http.fields import LogitBias, Priority, RequestModel, Stop, Truncation, TruncationSide, complaint
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
