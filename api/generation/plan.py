"""The one step from a checked request to the plan of its reply and the work for the workers: `plan`.

An endpoint says in `Asked` what it alone knows; everything else is the same for all. What has no such reply (scores,
embeddings) becomes work by `plain_work`.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.generation.choice import Endpoint, ReplyPlan
from api.generation.collection import collection_for_feedback, collection_of
from api.generation.languages.pieces import SplitPlan
from api.generation.sampling import (
    MAX_TOP_LOGPROBS,
    WHOLE_VOCABULARY,
    PromptFields,
    SamplingFields,
    for_a_trainer,
    sampling_of,
)
from api.generation.target import Target
from api.generation.work import Work
from api.ring.ring import Ring
from api.ring.room import LARGE_CHARS, aside
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidGrammarError,
    InvalidRequestError,
    UnsupportedParameterError,
)
from shared.images.refs import ImageRef
from shared.process.settings import ApiSettings
from shared.sequences import ModelCard, SamplingParams, vocabulary_error
from shared.text.codec import TextCodec

MAX_CHOICES = 1024
MAX_WHOLE_LOGPROBS = 1 << 18  # of an answer that has them of the whole vocabulary: numbers
CHARS_OF_A_CALL = 64  # that are tokenized in the time that it takes to begin
UNSAMPLED = SamplingParams(max_tokens=0, seed=0)  # of work that generates nothing

_ID_PREFIX: dict[Endpoint, str] = {"chat": "chatcmpl", "completions": "cmpl"}


@dataclass(frozen=True)
class Asked:
    """What one endpoint alone knows of a request, beside the fields that all share."""

    endpoint: Endpoint
    prompts: list[list[int]]
    max_tokens: int | None  # 0: the prompts are scored, and nothing is generated
    default_tokens: int  # where the request does not say how many
    prompt_param: str = "prompt"  # the fields to blame
    max_tokens_param: str = "max_tokens"
    grammar_param: str = "structured_outputs"
    clamp: bool = False  # more tokens than the context leaves come to what it leaves, whatever the setting
    logprobs: int | None = None  # None: none; k: with the k most likely tokens
    echo: Sequence[str | list[int]] = ()  # the prompts as they were given, to come before their completions
    grammar: str = ""
    split: SplitPlan | None = None
    prediction: tuple[int, ...] = ()  # what the client expects of the completion
    images: tuple[ImageRef, ...] = ()  # of the one prompt
    image_token: int = 0  # that stands for each vector of them


async def plan(ring: Ring, body: SamplingFields, target: Target, asked: Asked) -> tuple[Work, ReplyPlan]:
    """What to ask of the workers, and what to make of their tokens. InvalidRequestError names the field to blame."""
    work, reply = unchecked_plan(body, target, asked, ring.settings)
    if body.collect_trajectory or body.scoring_function is not None:
        collect = await collection_of(ring, body, target, len(work.prompts))
        if collect is not None and work.kind == "score":
            raise InvalidRequestError(
                "a trajectory needs generated tokens: 'max_tokens' 0 has none", param="max_tokens"
            )
        work = msgspec.structs.replace(work, collect=collect)
    elif body.collect_trajectory is None and work.kind == "generate" and not work.images:
        collect = await collection_for_feedback(ring, target, reply.name or reply.id.partition("-")[2], work.n)
        if collect is not None:
            work = msgspec.structs.replace(work, collect=collect, sampling=for_a_trainer(body, work.sampling))
    if work.sampling.grammar:
        try:
            grammar = await ring.grammars.checked(work.sampling.grammar, target.served.card, target.served.codec)
        except InvalidGrammarError as error:
            error.param = asked.grammar_param
            raise
        work = msgspec.structs.replace(work, sampling=msgspec.structs.replace(work.sampling, grammar=grammar))
    return work, reply


def unchecked_plan(body: SamplingFields, target: Target, asked: Asked, settings: ApiSettings) -> tuple[Work, ReplyPlan]:
    """The plan, but for what takes time: its grammar has not been compiled, and nobody was asked about a reward."""
    served, n = target.served, body.n or 1
    card, codec = served.card, served.codec
    if asked.images:
        _check_beside_images(body)
    if len(asked.prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(f"at most {MAX_CHOICES} choices a request; use /v1/jobs for more", param="prompt")
    unsaid = min(asked.default_tokens, settings.default_max_tokens)
    prompts = truncated(asked.prompts, body, card, settings, asked.max_tokens, unsaid)
    check_prompts(prompts, card, settings, asked.prompt_param)
    scores_only = asked.max_tokens == 0
    if scores_only and n > 1:
        raise InvalidRequestError("'max_tokens' 0 goes with 'n' 1", param="n")
    split = asked.split
    echoed = _top(asked.logprobs, card) if asked.echo else None
    scored = [k for k in (_top(body.prompt_logprobs, card), echoed, 0 if scores_only else None) if k is not None]
    sampling = sampling_of(
        body,
        card,
        room_for(
            prompts,
            card,
            asked.max_tokens,
            asked.default_tokens,
            param=asked.max_tokens_param,
            clamp=asked.clamp or settings.clamp_max_tokens,
        ),
        top_logprobs=_top(asked.logprobs, card) or None,
        prompt_logprobs=max(scored, default=None),
        logprobs_mode=settings.logprobs_mode,
        grammar=asked.grammar,
        shown_tokens=() if split is None else tuple(filter(codec.is_special, split.marks)),
        codec=codec,
    )
    _check_whole_logprobs(sampling, prompts, n, card)
    streamed, named = body.stream_options, body.logprob_token_ids
    reply = ReplyPlan(
        id=f"{_ID_PREFIX[asked.endpoint]}-{uuid.uuid4().hex}",
        endpoint=asked.endpoint,
        created=int(time.time()),
        served=card.name,
        model=body.model or card.name,
        fingerprint=served.fingerprint if target.admitted is None else f"{served.fingerprint}-{target.admitted.id}",
        prompts=tuple(map(tuple, prompts)),
        n=n,
        echo=_echoed(asked, prompts, codec, body.skip_special_tokens is not False),
        logprobs=len(named) if named and asked.logprobs is not None else _top(asked.logprobs, card),
        prompt_logprobs=_top(body.prompt_logprobs, card),
        names_tokens=bool(named),
        include_usage=bool(streamed and streamed.include_usage),
        usage_so_far=bool(streamed and streamed.include_usage and streamed.continuous_usage_stats),
        event_ids=bool(streamed and streamed.include_event_ids),
        token_ids=bool(body.return_token_ids),
        weight_versions=bool(body.return_weight_versions),
        name_tokens_by_id=bool(body.return_tokens_as_token_ids),
        eos_token_ids=card.eos_token_ids,
        show_stop_token=bool(body.include_stop_str_in_output),
        scores_only=scores_only,
        deadline_ms=deadline(settings, body.deadline_s),
        split=split,
        show_special=body.skip_special_tokens is False,
        name=body.request_id or "",
        predicted=bool(asked.prediction),
    )
    work = Work(
        id=reply.id,
        model=card.name,
        prompts=reply.prompts,
        sampling=sampling,
        n=n,
        kind="score" if scores_only else "generate",
        chat=asked.endpoint == "chat",
        adapter=target.adapter,
        adapter_policy=target.policy,
        deadline_ms=reply.deadline_ms,
        name=reply.name,
        split_to=target.choice.kind if target.choice else None,
        prediction_ids=asked.prediction,
        images=asked.images,
        image_token=asked.image_token,
    )
    return work, reply


def plain_work(
    name: str,
    target: Target,
    settings: ApiSettings,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    **more: Any,
) -> Work:
    """Work without a reply plan, under a fresh id that begins with `name`; `more`: further fields of `Work`."""
    return Work(
        id=f"{name}-{uuid.uuid4().hex}",
        model=target.served.card.name,
        prompts=tuple(map(tuple, prompts)),
        sampling=sampling,
        adapter=target.adapter,
        adapter_policy=target.policy,
        deadline_ms=deadline(settings),
        **more,
    )


async def encoded(
    codec: TextCodec, prompts: Sequence[str | list[int]], add_special_tokens: bool = True
) -> list[list[int]]:
    """Ids of prompts; beside the event loop when they are long together, or many."""

    def encode() -> list[list[int]]:
        return [codec.encode(each, add_special_tokens) if isinstance(each, str) else each for each in prompts]

    long = sum(CHARS_OF_A_CALL + len(each) for each in prompts if isinstance(each, str)) > LARGE_CHARS
    return await aside(encode) if long else encode()


def truncated(
    prompts: list[list[int]],
    body: PromptFields,
    card: ModelCard,
    settings: ApiSettings,
    max_tokens: int | None,
    unsaid: int = 0,
) -> list[list[int]]:
    """The prompts as the request wants them cut; with -1 `max_tokens`, or `unsaid` of them, fit behind each."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompts
    if most < 0:
        behind = min(unsaid, card.context_length // 2) if max_tokens is None else max_tokens
        most = min(settings.max_prompt_tokens or card.context_length, max(1, card.context_length - behind))
    cut = slice(most) if body.truncation_side == "right" else slice(-most, None)
    return [prompt[cut] for prompt in prompts]


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
        if error := vocabulary_error(prompt, card.vocab_size, param):
            raise error


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


def _check_beside_images(body: SamplingFields) -> None:
    """UnsupportedParameterError for what does not go with images."""
    wanted = {
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "collect_trajectory": bool(body.collect_trajectory),
        "scoring_function": body.scoring_function is not None,
    }
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        raise UnsupportedParameterError("it does not go with images", param=name)


def _top(asked: int | None, card: ModelCard) -> int | None:
    return card.vocab_size if asked == WHOLE_VOCABULARY else asked


def _echoed(asked: Asked, prompts: list[list[int]], codec: TextCodec, hide_special: bool) -> tuple[str, ...]:
    """What the client wrote; of ids, and of a prompt that was cut, the text that they stand for."""
    return tuple(
        given if isinstance(given, str) and len(prompt) == len(whole) else codec.decode(prompt, hide_special)
        for given, whole, prompt in zip(asked.echo, asked.prompts, prompts, strict=bool(asked.echo))
    )


def _check_whole_logprobs(sampling: SamplingParams, prompts: Sequence[Sequence[int]], n: int, card: ModelCard) -> None:
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
