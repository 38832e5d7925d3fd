"""From a job and its prompts to sequences: pure arithmetic, the same in every process.

A sequence's id and seed follow from the job, the prompt and the sample, so expanding a prompt again after a crash
yields the same sequences, which the queue already knows.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidRequestError,
    ParallmError,
    UnsupportedModelError,
    UnsupportedParameterError,
)
from shared.images.chat import ChatImages
from shared.images.refs import ImageRef
from shared.jobs import InputLine, JobInput, JobSpec, Prompt, read_input
from shared.seeds import seed_in_job
from shared.sequences import ModelCard, SamplingParams, SequenceKind, SequenceSpec, vocabulary_error
from shared.text.codec import TextCodec
from shared.text.languages.grammars import after_reasoning
from shared.text.languages.language import language_of

_PROMPT_END = 64  # tokens that show whether a completion begins inside reasoning


@dataclass(frozen=True)
class PreparedPrompt:
    """One line of a job's input, ready for the queue; `error` says why it never will be."""

    index: int
    source: JobInput
    prompt_ids: tuple[int, ...] = ()
    score_ids: tuple[int, ...] = ()  # kind "score": the completion
    error: ParallmError | None = None
    images: tuple[ImageRef, ...] = ()  # of the prompt
    image_token: int = 0  # that stands for each vector of them
    grammar: str = ""  # of the completion; "": anything


def prepare(index: int, line: InputLine, spec: JobSpec, card: ModelCard, codec: TextCodec) -> PreparedPrompt:
    """Tokenise and check one input line."""
    read = read_prompt(index, line)
    if read.error is not None:
        return read
    source = read.source
    if spec.kind == "batch":  # tokenised and checked by the api
        refused = None if source.request is not None else InvalidRequestError(source.refused)
        prompt_ids = tuple(item for item in source.prompt if isinstance(item, int))
        bare = msgspec.structs.replace(source, prompt=(), reply={})  # the cache keeps it
        own = source.request
        shown = ((), 0) if own is None else (own.images, own.image_token)
        return PreparedPrompt(index, bare, prompt_ids, (), refused, *shown)
    try:
        images = _images(source, card)
        prompt_ids = _prompt_ids(source.prompt, codec, images)
        score_ids = completion_ids(source.completion, codec) if spec.kind == "score" else ()
        _check(prompt_ids, score_ids, spec, card)
        grammar = _bounded_reasoning(prompt_ids, spec.max_reasoning_tokens, codec)
    except ParallmError as error:
        return PreparedPrompt(index, source, error=error)
    shown = ((), 0) if images is None else (images.refs, images.vision.image_token_id)
    return PreparedPrompt(index, source, prompt_ids, score_ids, None, *shown, grammar)


def read_prompt(index: int, line: InputLine) -> PreparedPrompt:
    """One input line, not tokenised; with an error when it is nested deeper than this process can read."""
    try:
        return PreparedPrompt(index, read_input(line))
    except RecursionError:
        return PreparedPrompt(index, JobInput(""), error=InvalidRequestError("the line is nested too deep to be read"))


def completion_ids(completion: str | list[int] | None, codec: TextCodec) -> tuple[int, ...]:
    """Token ids of the completion that a score job is about."""
    if isinstance(completion, str):
        return tuple(codec.encode(completion, add_special_tokens=False))
    return tuple(completion or ())


def _images(source: JobInput, card: ModelCard) -> ChatImages | None:
    if not source.images:
        return None
    if card.vision is None:  # any more: the job was taken in while it did
        raise UnsupportedModelError(f"model '{card.name}' takes no images", param="prompt")
    return ChatImages.of(card.vision, source.images)


def _prompt_ids(prompt: Prompt, codec: TextCodec, images: ChatImages | None) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(codec.encode(prompt))
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return tuple(ids)
    if ids:
        raise InvalidRequestError("a prompt is token ids or messages, not both", param="prompt")
    messages = [item for item in prompt if not isinstance(item, int)]
    if images is None:
        return tuple(codec.encode_chat(messages))
    ids = codec.encode(images.expanded(codec.render_chat(messages)), add_special_tokens=False)
    images.check(ids)
    return tuple(ids)


def _check(prompt_ids: Sequence[int], score_ids: Sequence[int], spec: JobSpec, card: ModelCard) -> None:
    if not prompt_ids:
        raise EmptyPromptError("the prompt has no tokens", param="prompt")
    if spec.kind == "score" and not score_ids:
        raise EmptyPromptError("the completion has no tokens", param="completion")
    for ids in (prompt_ids, score_ids):
        if error := vocabulary_error(ids, card.vocab_size, "prompt"):
            raise error
    wanted = len(score_ids) if spec.kind == "score" else spec.sampling.max_tokens
    if len(prompt_ids) + wanted > card.context_length:
        raise ContextLengthExceededError(
            f"{len(prompt_ids)} prompt tokens + {wanted} do not fit the context of {card.context_length}",
            param="prompt",
        )


def _bounded_reasoning(prompt_ids: Sequence[int], most: int | None, codec: TextCodec) -> str:
    """The grammar of a completion whose reasoning is ended after `most` tokens; "" without a bound."""
    if most is None:
        return ""
    if (reasoning := language_of(codec).reasoning) is None:
        raise UnsupportedParameterError(
            "this model writes no reasoning that could be bounded", param="max_reasoning_tokens"
        )
    end = codec.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)
    return after_reasoning("", reasoning.thinking_after(end), reasoning, codec, most)


class PromptCache:
    """Prompts under way, so that a result's prompt is not tokenised again; bounded in prompts and tokens."""

    def __init__(self, max_tokens: int = 4_000_000, max_prompts: int = 16_384) -> None:
        self._max_tokens = max_tokens
        self._max_prompts = max_prompts
        self._tokens = 0
        self._prompts: OrderedDict[tuple[str, int], PreparedPrompt] = OrderedDict()
        self._indices: dict[str, set[int]] = {}  # of each job

    def get(self, job_id: str, index: int) -> PreparedPrompt | None:
        """The prompt, if we still have it."""
        return self._prompts.get((job_id, index))

    def put(self, job_id: str, prompt: PreparedPrompt) -> None:
        """Keep a prompt; the oldest make room."""
        if (job_id, prompt.index) in self._prompts:
            return
        self._prompts[job_id, prompt.index] = prompt
        self._indices.setdefault(job_id, set()).add(prompt.index)
        self._tokens += _tokens(prompt)
        while len(self._prompts) > self._max_prompts or (self._tokens > self._max_tokens and len(self._prompts) > 1):
            (job, index), oldest = self._prompts.popitem(last=False)
            self._tokens -= _tokens(oldest)
            self._indices[job].remove(index)
            if not self._indices[job]:
                del self._indices[job]

    def forget(self, job_id: str) -> None:
        """Drop the prompts of a job that has ended, or that another runner has."""
        for index in self._indices.pop(job_id, ()):
            self._tokens -= _tokens(self._prompts.pop((job_id, index)))


def _tokens(prompt: PreparedPrompt) -> int:
    return len(prompt.prompt_ids) + len(prompt.score_ids)


def sequence_id(job_id: str, ordinal: int) -> str:
    """Id of the sequence of one sample."""
    return f"{job_id}-{ordinal}"


def ordinal_of(sequence: str) -> int:
    """The ordinal of the sample that a sequence's id names."""
    return int(sequence.rpartition("-")[2])


def sequences(spec: JobSpec, prompt: PreparedPrompt, now_ms: int, trace: str = "") -> list[SequenceSpec]:
    """The group of one prompt; `trace`: a traceparent."""
    first = prompt.index * spec.n
    own = prompt.source.request  # a batch's line
    kind: SequenceKind = "score" if spec.kind == "score" else "generate"
    return [
        SequenceSpec(
            id=sequence_id(spec.id, first + sample),
            model=spec.model,
            prompt_ids=prompt.prompt_ids,
            sampling=sampling(spec, prompt, sample) if own is None else own.sampling,
            sequence_class="batch",
            kind=kind if own is None else own.kind,
            pooling="mean" if own is None else own.pooling,
            prediction_ids=() if own is None else own.prediction_ids,
            group=f"{spec.id}-p{prompt.index}" if spec.n > 1 else "",
            score_ids=prompt.score_ids,
            job=spec.id,
            adapter=spec.adapter,
            adapter_policy=spec.adapter_policy,
            deadline_ms=spec.deadline_ms,
            enqueued_ms=now_ms,
            trace=trace,
            tenant=spec.tenant,
            has_next_turn=spec.has_next_turn,
            record_s=spec.record_s,
            images=prompt.images,
            image_token=prompt.image_token,
            cache=spec.cache and (own is None or own.cache),
        )
        for sample in range(spec.n)
    ]


def is_sample(spec: JobSpec, seq: str) -> bool:
    """True if `seq` is the id of a sample of this job."""
    job, dash, ordinal = seq.rpartition("-")
    known = bool(dash) and job == spec.id and ordinal.isascii() and ordinal.isdigit() and len(ordinal) < 16
    return known and int(ordinal) < spec.total_prompts * spec.n and sequence_id(spec.id, int(ordinal)) == seq


def sampling(spec: JobSpec, prompt: PreparedPrompt, sample_index: int) -> SamplingParams:
    """The job's sampling with this sample's own seed."""
    fields = {name: getattr(spec.sampling, name) for name in spec.sampling.__struct_fields__}
    fields["seed"] = seed_in_job(spec.sampling.seed or 0, prompt.index, sample_index)
    return SamplingParams(**fields, grammar=prompt.grammar)


def prompts_to_expand(spec: JobSpec, window: int, expanded: int, recorded: int, most: int) -> int:
    """How many more prompts to enqueue now: whole groups within the window, at least one when nothing is in flight.

    `most` bounds the sequences of one call, except that a group is never cut.
    """
    in_flight = expanded * spec.n - recorded
    room = min((window - in_flight) // spec.n, max(1, most // spec.n))
    if in_flight <= 0:
        room = max(room, 1)
    return max(0, min(room, spec.total_prompts - expanded))
