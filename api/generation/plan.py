"""The one step from a checked request to its plan: the sequences that compute it, and the shape of its reply.

An endpoint says in `PreparedRequest` what it alone knows; everything else is the same for all. What has no such reply
(scores, embeddings) becomes sequences by `plain_sequences`.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.callers.caller import may_cache, may_record
from api.callers.fair_pool import LARGE_CHARS, aside
from api.generation.choice import RequestPlan
from api.generation.collection import collection_for_feedback, collection_of
from api.generation.sampling import (
    MAX_TOP_LOGPROBS,
    WHOLE_VOCABULARY,
    PromptFields,
    SamplingFields,
    for_a_trainer,
    sampling_of,
)
from api.generation.sequences import UNSAMPLED, Sequences
from api.generation.target import Target
from api.ring.ring import Ring
from shared.episodes import PlainMessage
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidGrammarError,
    InvalidRequestError,
    UnsupportedParameterError,
)
from shared.images.refs import ImageRef
from shared.process.api_settings import ApiSettings
from shared.sequences import ModelCard, SamplingParams, SequenceSpec, vocabulary_error
from shared.text.codec import TextCodec
from shared.text.languages.pieces import SplitPlan

MAX_CHOICES = 1024
MAX_WHOLE_LOGPROBS = 1 << 18  # of an answer that has them of the whole vocabulary: numbers
CHARS_OF_A_CALL = 64  # that are tokenized in the time that it takes to begin


@dataclass(frozen=True)
class PreparedRequest:
    """The part of a request that only its endpoint knows, besides the fields of the body that all share."""

    prompts: list[list[int]]
    max_tokens: int | None  # 0: the prompts are scored, and nothing is generated
    default_tokens: int  # where the request does not say how many
    chat: bool = False
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
    messages: Sequence[PlainMessage] = ()  # that the prompt was made of


async def plan(ring: Ring, body: SamplingFields, target: Target, prepared: PreparedRequest) -> RequestPlan:
    """The plan of a request. InvalidRequestError names the field to blame."""
    planned = unchecked_plan(body, target, prepared, ring.settings)
    sequences = planned.sequences
    spec = sequences.template
    collect, sampling = None, spec.sampling
    if body.collect_trajectory or body.scoring_function is not None:
        collect = await collection_of(ring, body, target, len(sequences.prompts))
        if collect is not None and spec.kind == "score":
            raise InvalidRequestError(
                "a trajectory needs generated tokens: 'max_tokens' 0 has none", param="max_tokens"
            )
    elif body.collect_trajectory is None and spec.kind == "generate" and not spec.images:
        answer = sequences.name or spec.id.partition("-")[2]
        collect = await collection_for_feedback(ring, body, target, answer, prepared.messages)
        sampling = sampling if collect is None else for_a_trainer(body, sampling)
    if sampling.grammar:
        try:
            grammar = await ring.grammars.checked(sampling.grammar, target.served.card, target.served.codec)
        except InvalidGrammarError as error:
            error.param = prepared.grammar_param
            raise
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    if collect is None and sampling is spec.sampling and body.collect_trajectory is not False:
        return planned
    record_s = spec.record_s if body.collect_trajectory is not False else 0
    template = msgspec.structs.replace(spec, collect=collect, sampling=sampling, record_s=record_s)
    return msgspec.structs.replace(planned, sequences=msgspec.structs.replace(sequences, template=template))


def unchecked_plan(
    body: SamplingFields, target: Target, prepared: PreparedRequest, settings: ApiSettings
) -> RequestPlan:
    """The plan before what takes time: its grammar is not compiled, its reward and its policy are not looked up."""
    served = target.served
    card, codec = served.card, served.codec
    prompts = _checked_prompts(body, card, settings, prepared)
    sequences = Sequences(
        template=_template(
            "chatcmpl" if prepared.chat else "cmpl",
            target,
            settings,
            _sampling(body, target, settings, prepared, prompts),
            kind="score" if prepared.max_tokens == 0 else "generate",
            prediction_ids=prepared.prediction,
            images=prepared.images,
            image_token=card.vision.image_token_id if prepared.images and card.vision else 0,
            deadline_s=body.deadline_s,
            cache=body.cache is not False,
        ),
        prompts=tuple(map(tuple, prompts)),
        n=body.n or 1,
        chat=prepared.chat,
        name=body.request_id or "",
        split_to=target.choice.kind if target.choice else None,
    )
    _check_whole_logprobs(sequences, card)
    streamed, named = body.stream_options, body.logprob_token_ids
    return RequestPlan(
        sequences=sequences,
        created=int(time.time()),
        model=body.model or card.name,
        fingerprint=served.fingerprint if target.admitted is None else f"{served.fingerprint}-{target.admitted.id}",
        echo=_echoed(prepared, prompts, codec, body.skip_special_tokens is not False),
        logprobs=len(named) if named and prepared.logprobs is not None else _top(prepared.logprobs, card),
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
        split=prepared.split,
        show_special=body.skip_special_tokens is False,
        predicted=bool(prepared.prediction),
    )


def plain_sequences(
    name: str,
    target: Target,
    settings: ApiSettings,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams = UNSAMPLED,
    **more: Any,
) -> Sequences:
    """Sequences without a plan of a reply; `more`: further fields of `SequenceSpec` that all of them have."""
    return Sequences(_template(name, target, settings, sampling, **more), tuple(map(tuple, prompts)))


def _template(
    name: str,
    target: Target,
    settings: ApiSettings,
    sampling: SamplingParams,
    *,
    deadline_s: float | None = None,
    cache: bool = True,
    **more: Any,
) -> SequenceSpec:
    """The part that all sequences of a request share, under a fresh id that begins with `name`."""
    return SequenceSpec(
        id=f"{name}-{uuid.uuid4().hex}",
        model=target.served.card.name,
        prompt_ids=(),
        sampling=sampling,
        adapter=target.adapter,
        adapter_policy=target.policy,
        deadline_ms=deadline(settings, deadline_s),
        record_s=settings.record_ttl_s if may_record() else 0,
        cache=cache and target.cache and may_cache(),
        **more,
    )


def _checked_prompts(
    body: SamplingFields, card: ModelCard, settings: ApiSettings, prepared: PreparedRequest
) -> list[list[int]]:
    n = body.n or 1
    if prepared.images:
        _check_with_images(body)
    if len(prepared.prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(f"at most {MAX_CHOICES} choices a request; use /v1/jobs for more", param="prompt")
    unsaid = min(prepared.default_tokens, settings.default_max_tokens)
    prompts = truncated(prepared.prompts, body, card, settings, prepared.max_tokens, unsaid)
    check_prompts(prompts, card, settings, prepared.prompt_param)
    if prepared.max_tokens == 0 and n > 1:
        raise InvalidRequestError("'max_tokens' 0 goes with 'n' 1", param="n")
    return prompts


def _sampling(
    body: SamplingFields, target: Target, settings: ApiSettings, prepared: PreparedRequest, prompts: list[list[int]]
) -> SamplingParams:
    card, codec = target.served.card, target.served.codec
    top = _top(prepared.logprobs, card)
    scored = (_top(body.prompt_logprobs, card), top if prepared.echo else None, 0 if prepared.max_tokens == 0 else None)
    return sampling_of(
        body,
        card,
        room_for(
            prompts,
            card,
            prepared.max_tokens,
            prepared.default_tokens,
            param=prepared.max_tokens_param,
            clamp=prepared.clamp or settings.clamp_max_tokens,
        ),
        top_logprobs=top or None,
        prompt_logprobs=max((k for k in scored if k is not None), default=None),
        logprobs_mode=settings.logprobs_mode,
        grammar=prepared.grammar,
        shown_tokens=() if prepared.split is None else tuple(filter(codec.is_special, prepared.split.marks)),
        codec=codec,
    )


async def encoded(
    codec: TextCodec, prompts: Sequence[str | list[int]], add_special_tokens: bool = True
) -> list[list[int]]:
    """Ids of prompts; encoded off the event loop when they are long together, or many."""

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
    """The prompts as the request wants them cut; with -1 `max_tokens`, or `unsaid` of them, fit after each."""
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
    """`asked` if it fits the model's context after the longest prompt, else an error, or what fits with `clamp`;
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


def _check_with_images(body: SamplingFields) -> None:
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


def _echoed(
    prepared: PreparedRequest, prompts: list[list[int]], codec: TextCodec, hide_special: bool
) -> tuple[str, ...]:
    """The prompts as the client wrote them; the decoded text of ids and of a prompt that was cut."""
    return tuple(
        given if isinstance(given, str) and len(prompt) == len(whole) else codec.decode(prompt, hide_special)
        for given, whole, prompt in zip(prepared.echo, prepared.prompts, prompts, strict=bool(prepared.echo))
    )


def _check_whole_logprobs(sequences: Sequences, card: ModelCard) -> None:
    """InvalidRequestError for an answer with too many log-probabilities of the whole vocabulary."""
    sampling = sequences.template.sampling
    completions = sequences.n * len(sequences.prompts) * sampling.max_tokens
    scored = sequences.n * sum(map(len, sequences.prompts))
    asked = ((sampling.top_logprobs, completions, "logprobs"), (sampling.prompt_logprobs, scored, "prompt_logprobs"))
    for count, positions, param in asked:
        if (count or 0) > MAX_TOP_LOGPROBS and positions * (count or 0) > MAX_WHOLE_LOGPROBS:
            raise InvalidRequestError(
                f"{positions} positions of the whole vocabulary ({card.vocab_size}) are more than "
                f"{MAX_WHOLE_LOGPROBS} log-probabilities; ask for fewer tokens, or for 'logprob_token_ids'",
                param=param,
            )
