"""From the fields of a request to `SamplingParams`, checked against the model: lengths, vocabulary, context."""

import secrets
import time
from collections.abc import Sequence

import msgspec

from api.openai.schemas import SamplingFields
from api.openai.structured import check_alone
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidRequestError,
    TokenOutOfRangeError,
)
from shared.results import drawing_of, needs_processed
from shared.sequences import LogprobsMode, ModelCard, SamplingParams
from shared.settings import ApiSettings


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
) -> SamplingParams:
    """The sampling parameters; a field that is null means its default. `logprobs_mode`: that of the server."""
    check_alone(grammar, bool(body.ignore_eos), body.min_tokens or 0)
    _check_tokens(body.stop_token_ids or (), card, "stop_token_ids")
    _check_tokens(body.logit_bias, card, "logit_bias")
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequestError(f"'min_tokens' is more than 'max_tokens' ({max_tokens})", param="min_tokens")
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
    )
    # A trajectory that nobody else reads the log-probabilities of has those that its trainer needs.
    asked = getattr(body, "logprobs", None)
    shown = asked is not None and asked is not False  # 0 asks for the drawn token's
    if body.collect_trajectory and body.logprobs_mode is None and not shown and needs_processed(drawing_of(params)):
        return msgspec.structs.replace(params, logprobs_mode="processed_logprobs")
    return params


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
    prompts: Sequence[Sequence[int]], card: ModelCard, asked: int | None, default: int, *, param: str = "max_tokens"
) -> int:
    """`asked` if it fits the model's context behind the longest prompt, else an error; unasked: what fits, at most
    `default`."""
    longest = max(map(len, prompts))
    room = card.context_length - longest
    if asked is not None and asked <= room:
        return asked
    if asked is None and room > 0:
        return min(default, room)
    wanted = "" if asked is None else f" and '{param}' {asked}"
    raise ContextLengthExceededError(
        f"the model's context is {card.context_length} tokens; the prompt's {longest} tokens{wanted} do not fit",
        param=param if asked is not None else "prompt",
    )


def deadline(settings: ApiSettings, asked_s: float | None = None) -> int:
    """Unix milliseconds at which a request that begins now is given up: when it asks, and by the setting at last."""
    longest = settings.request_timeout_s
    return int(1000 * (time.time() + (longest if asked_s is None else min(asked_s, longest))))


def _check_tokens(tokens: "Sequence[int] | dict[int, float]", card: ModelCard, param: str) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < card.vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < card.vocab_size)
        raise TokenOutOfRangeError(f"token id {wrong} is not in the vocabulary of {card.vocab_size}", param=param)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
