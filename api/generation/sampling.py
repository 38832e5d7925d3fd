"""From the fields of a request to `SamplingParams`, checked against the model: lengths, vocabulary, context."""

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from api.generation.sampling_fields import MAX_TOP_LOGPROBS, WHOLE_VOCABULARY, SamplingFields
from api.generation.structured import check_alone
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidRequestError,
)
from shared.process.settings import ApiSettings
from shared.sequences import LogprobsMode, ModelCard, SamplingParams, vocabulary_error
from shared.text.codec import TextCodec
from shared.trajectories import drawing_of, needs_processed

MAX_WHOLE_LOGPROBS = 1 << 18  # of an answer that has them of the whole vocabulary: numbers


class TruncationFields(Protocol):
    """How a request wants a long prompt cut."""

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """To how many tokens; -1: to what the context leaves."""

    @property
    def truncation_side(self) -> str | None:
        """Where; None is left."""


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
    check_alone(grammar, bool(body.ignore_eos), body.min_tokens or 0)
    _check_masks(body, card, grammar)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        _check_tokens(getattr(body, name) or (), card, name)
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
    # A trajectory that nobody else reads the log-probabilities of has those that its trainer needs.
    asked = getattr(body, "logprobs", None)
    shown = asked is not None and asked is not False  # 0 asks for the drawn token's
    if body.collect_trajectory and body.logprobs_mode is None and not shown and needs_processed(drawing_of(params)):
        return msgspec.structs.replace(params, logprobs_mode="processed_logprobs")
    return params


def bad_words_of(words: Sequence[str], codec: TextCodec | None) -> tuple[tuple[int, ...], ...]:
    """The ids of words that must not come, as a text would begin with them and as they follow a space."""
    assert codec is not None, "words without a tokenizer"
    spelled = [codec.encode(text, False) for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))


def check_whole_logprobs(sampling: SamplingParams, prompts: Sequence[Sequence[int]], n: int, card: ModelCard) -> None:
    """InvalidRequestError for an answer with too many log-probabilities of the whole vocabulary."""
    completions = len(prompts) * n * sampling.max_tokens
    scored = n * sum(map(len, prompts))
    asked = ((sampling.top_logprobs, completions, "logprobs"), (sampling.prompt_logprobs, scored, "prompt_logprobs"))
    for count, positions, param in asked:
        if (count or 0) > MAX_TOP_LOGPROBS and positions * (count or 0) > MAX_WHOLE_LOGPROBS:
            raise InvalidRequestError(
                f"{positions} positions of the whole vocabulary ({card.vocab_size}) are more than "
                f"{MAX_WHOLE_LOGPROBS} log-probabilities; ask for fewer tokens, or for 'logprob_token_ids'",
                param=param,
            )


def top_of(asked: int | None, card: ModelCard, named: Sequence[int] | None = None) -> int | None:
    """How many log-probabilities a position of the answer has besides its own token's; None: none at all."""
    if asked is not None and named:
        return len(named)
    return card.vocab_size if asked == WHOLE_VOCABULARY else asked


def truncated(
    prompt: list[int], body: TruncationFields, card: ModelCard, settings: ApiSettings, max_tokens: int | None = None
) -> list[int]:
    """The prompt as the request wants it cut; with -1 `max_tokens`, or as many as by default, fit behind it."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most < 0:
        behind = min(settings.default_max_tokens, card.context_length // 2) if max_tokens is None else max_tokens
        most = min(settings.max_prompt_tokens or card.context_length, max(1, card.context_length - behind))
    return prompt[:most] if body.truncation_side == "right" else prompt[-most:]


def check_prompts(prompts: Sequence[Sequence[int]], card: ModelCard, settings: ApiSettings, param: str) -> None:
    """Refuse empty prompts, ids outside the vocabulary, and prompts that leave no room for a token."""
    longest = settings.max_prompt_tokens or card.context_length
    for i, prompt in enumerate(prompts):
        where = f"prompt {i}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise EmptyPromptError(f"{where} has no tokens", param=param)
        if len(prompt) > longest:
            raise ContextLengthExceededError(
                f"{where} has {len(prompt)} tokens; this server takes up to {longest}", param=param
            )
        _check_tokens(prompt, card, param)


def room_for(
    prompts: Sequence[Sequence[int]],
    card: ModelCard,
    asked: int | None,
    default: int,
    *,
    param: str = "max_tokens",
    clamp: bool = False,
) -> int:
    """`asked` if it fits the model's context behind the longest prompt, else an error, or what fits with `clamp`;
    unasked: what fits, at most `default`."""
    longest = max(map(len, prompts))
    room = card.context_length - longest
    if asked is not None and asked <= room:
        return asked
    if room > 0 and (asked is None or clamp):
        return min(default if asked is None else asked, room)
    wanted = "" if asked is None else f" and '{param}' {asked}"
    raise ContextLengthExceededError(
        f"the model's context is {card.context_length} tokens; the prompt's {longest} tokens{wanted} do not fit",
        param=param if asked is not None else "prompt",
    )


def deadline(settings: ApiSettings, asked_s: float | None = None) -> int:
    """Unix milliseconds at which a request that begins now is given up: when it asks, and by the setting at last."""
    longest = settings.request_timeout_s
    return int(1000 * (time.time() + (longest if asked_s is None else min(asked_s, longest))))


def _check_masks(body: SamplingFields, card: ModelCard, grammar: str) -> None:
    """Refuse masks that may leave a row without any token."""
    for name in ("allowed_token_ids", "bad_words"):
        if grammar and getattr(body, name):
            raise InvalidRequestError(f"'{name}' does not go with a constrained completion", param=name)
    stops = {*(body.stop_token_ids or ()), *(() if body.ignore_eos else card.eos_token_ids)}
    if body.min_tokens and body.allowed_token_ids and stops.issuperset(body.allowed_token_ids):
        raise InvalidRequestError(
            "'allowed_token_ids' has stop tokens alone: 'min_tokens' cannot be", param="min_tokens"
        )


def _check_tokens(tokens: "Sequence[int] | dict[int, float]", card: ModelCard, param: str) -> None:
    if error := vocabulary_error(tokens, card.vocab_size, param):
        raise error


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
