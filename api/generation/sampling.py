"""The fields that all endpoints share, with vLLM's extras, and the sampling parameters that they come to.

Every field is known by name; others are refused.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, model_validator

from api.generation.structured import StructuredOutputs
from api.generation.target import TargetFields
from api.http.fields import LogitBias, Off, Priority, RequestModel, Stop, Truncation, TruncationSide, complaint
from shared.errors import InvalidRequestError
from shared.sequences import LogprobsMode, ModelCard, SamplingParams, vocabulary_error
from shared.text.codec import TextCodec
from shared.trajectories import drawing_of, needs_processed

MAX_N = 256
MAX_REASONING = 1 << 20  # tokens of reasoning that a bound may name
MAX_TOP_LOGPROBS = 20
WHOLE_VOCABULARY = -1  # as a number of log-probabilities
MAX_ALLOWED = 16_384  # tokens; each sequence carries them
MAX_BAD_WORDS = 128
MAX_NAMED_LOGPROBS = 128

StrictId = Annotated[int, Field(strict=True, ge=0)]
TopLogprobs = Annotated[int, Field(ge=WHOLE_VOCABULARY, le=MAX_TOP_LOGPROBS)]

SAMPLING_OFF: Off = {
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
    """Parts of a stream besides its tokens."""

    off: ClassVar[Off] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(default=None, description="a last chunk with the token counts")
    continuous_usage_stats: bool | None = Field(
        default=None, description="vLLM's: with include_usage, every chunk has the counts of its choice so far"
    )
    include_event_ids: bool | None = Field(
        default=None,
        description="`id:` lines, with which GET /v1/streams/{id} resumes the stream on any api process",
    )


class PromptFields(TargetFields):
    """Which model gets which part of a prompt."""

    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    priority: Priority = None


class DrawFields(PromptFields):
    """How a completion is drawn, of which prompt, and where it stops."""

    temperature: float | None = Field(default=1.0, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    logit_bias: LogitBias
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens, whatever the batch"
    )
    stop: Stop
    # vLLM's
    top_k: int | None = Field(default=0, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0, le=10)
    stop_token_ids: list[StrictId] | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(default=0, ge=0, description="nothing stops the completion before this many tokens")
    include_stop_str_in_output: bool | None = False
    allowed_token_ids: list[StrictId] | None = Field(
        default=None, min_length=1, max_length=MAX_ALLOWED, description="no other token is drawn"
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = Field(
        default=None, max_length=MAX_BAD_WORDS, description="texts that the completion must not contain"
    )
    skip_special_tokens: bool | None = Field(default=True, description="false: the text shows them")
    request_id: str | None = Field(
        default=None,
        pattern=r"^[\x21-\x7e]{1,128}$",
        description="the answer's id ends with it, and POST /abort_requests takes it",
    )
    structured_outputs: StructuredOutputs | None = Field(default=None, description="what the completion must look like")


class SamplingFields(DrawFields):
    """Fields that all endpoints share which generate text or tokens."""

    n: int | None = Field(default=1, ge=1, le=MAX_N, description="completions for each prompt, from one prefill")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = Field(
        default=None, description="stored with a collected trajectory; its `reference` is what scoring compares with"
    )
    # vLLM's
    prompt_logprobs: TopLogprobs | None = Field(default=None, description="-1: of the whole vocabulary")
    logprob_token_ids: list[StrictId] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAMED_LOGPROBS,
        description="log-probabilities of these tokens at each position, in the place of the most likely ones",
    )
    logprobs_mode: LogprobsMode | None = Field(
        default=None,
        description="of the completion's tokens: the model's own (raw), or those of what was drawn from (processed), "
        "after penalties, temperature and filters; default: the setting of that name",
    )
    return_token_ids: bool | None = Field(default=False, description="adds `prompt_token_ids` and `token_ids`")
    return_tokens_as_token_ids: bool | None = Field(default=False, description="logprobs name tokens `token_id:<id>`")
    add_special_tokens: bool | None = None
    # ours
    collect_trajectory: bool | None = Field(
        default=None,
        description="each completion becomes a trajectory of the policy, for its trainer; false: it is not stored "
        "for feedback either",
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


def sampling_of(
    body: SamplingFields,
    card: ModelCard,
    max_tokens: int,
    *,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    grammar: str = "",
    shown_tokens: tuple[str, ...] = (),
    codec: TextCodec | None = None,
) -> SamplingParams:
    """The sampling parameters; a field that is null means its default.

    `logprobs_mode`: that of the server. `codec`: for what is said in text.
    """
    _check_masks(body, card, grammar)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        if error := vocabulary_error(getattr(body, name) or (), card.vocab_size, name):
            raise error
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequestError(f"'min_tokens' is more than 'max_tokens' ({max_tokens})", param="min_tokens")
    if body.logprob_token_ids:
        top_logprobs = 0
    if body.skip_special_tokens is False and codec is not None:
        shown_tokens = tuple(sorted(codec.special_tokens))
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**63,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=body.logit_bias,
        stop=body.stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        include_stop_str=bool(body.include_stop_str_in_output),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        shown_tokens=shown_tokens if body.stop else (),  # else the api decodes
        logprobs_mode=body.logprobs_mode or logprobs_mode,
        grammar=grammar,
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=bad_words_of(body.bad_words, codec) if body.bad_words else (),
        logprob_token_ids=tuple(body.logprob_token_ids or ()),
    )
    return for_a_trainer(body, params) if body.collect_trajectory else params


def for_a_trainer(body: SamplingFields, params: SamplingParams) -> SamplingParams:
    """With the log-probabilities that a trainer needs, where the client does not read them."""
    asked = getattr(body, "logprobs", None)
    shown = asked is not None and asked is not False  # 0 asks for the drawn token's
    if body.logprobs_mode is None and not shown and needs_processed(drawing_of(params)):
        return msgspec.structs.replace(params, logprobs_mode="processed_logprobs")
    return params


def bad_words_of(words: Sequence[str], codec: TextCodec | None) -> tuple[tuple[int, ...], ...]:
    """The ids of words that must not come, as a text would begin with them and as they follow a space."""
    assert codec is not None, "words without a tokenizer"
    spelled = [codec.encode(text, False) for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))


def _check_masks(body: SamplingFields, card: ModelCard, grammar: str) -> None:
    """Refuse what would continue after the end of a grammar, and masks that may leave a row without any token."""
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
        if grammar and getattr(body, name):
            raise InvalidRequestError(f"'{name}' does not go with a constrained completion", param=name)
    stops = {*(body.stop_token_ids or ()), *(() if body.ignore_eos else card.eos_token_ids)}
    if body.min_tokens and body.allowed_token_ids and stops.issuperset(body.allowed_token_ids):
        raise InvalidRequestError(
            "'allowed_token_ids' has stop tokens alone: 'min_tokens' cannot be", param="min_tokens"
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
