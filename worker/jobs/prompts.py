"""Input lines become prompts in token ids, checked against what the model can take.

A prompt that is impossible carries its error: it becomes a failed sample, not a failed job.
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
    TokenOutOfRangeError,
)
from shared.jobs import JobInput, JobSpec, Prompt
from shared.sequences import ModelCard
from shared.text import TextCodec

_input_decoder = msgspec.json.Decoder(JobInput)


@dataclass(frozen=True)
class PreparedPrompt:
    """One line of a job's input, ready for the queue; `error` says why it never will be."""

    index: int
    source: JobInput
    prompt_ids: tuple[int, ...] = ()
    score_ids: tuple[int, ...] = ()  # kind "score": the completion
    error: ParallmError | None = None


def prepare(index: int, line: bytes, spec: JobSpec, card: ModelCard, codec: TextCodec) -> PreparedPrompt:
    """Tokenise and check one input line."""
    read = read_prompt(index, line)
    if read.error is not None:
        return read
    source = read.source
    if spec.kind == "batch":  # tokenised and checked by the api
        refused = None if source.request is not None else InvalidRequestError(source.refused)
        prompt_ids = tuple(item for item in source.prompt if isinstance(item, int))
        bare = msgspec.structs.replace(source, prompt=(), reply={})  # the cache keeps it
        return PreparedPrompt(index, bare, prompt_ids, error=refused)
    try:
        prompt_ids = _prompt_ids(source.prompt, codec)
        score_ids = completion_ids(source.completion, codec) if spec.kind == "score" else ()
        _check(prompt_ids, score_ids, spec, card)
    except ParallmError as error:
        return PreparedPrompt(index, source, error=error)
    return PreparedPrompt(index, source, prompt_ids, score_ids)


def read_input(line: bytes) -> JobInput:
    """One input line, checked at submission."""
    return _input_decoder.decode(line)


def read_prompt(index: int, line: bytes) -> PreparedPrompt:
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


def _prompt_ids(prompt: Prompt, codec: TextCodec) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(codec.encode(prompt))
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return tuple(ids)
    if ids:
        raise InvalidRequestError("a prompt is token ids or messages, not both", param="prompt")
    return tuple(codec.encode_chat([item for item in prompt if not isinstance(item, int)]))


def _check(prompt_ids: Sequence[int], score_ids: Sequence[int], spec: JobSpec, card: ModelCard) -> None:
    if not prompt_ids:
        raise EmptyPromptError("the prompt has no tokens", param="prompt")
    if spec.kind == "score" and not score_ids:
        raise EmptyPromptError("the completion has no tokens", param="completion")
    for token in (*prompt_ids, *score_ids):
        if not 0 <= token < card.vocab_size:
            raise TokenOutOfRangeError(f"token {token} is not in the vocabulary of {card.vocab_size}", param="prompt")
    wanted = len(score_ids) if spec.kind == "score" else spec.sampling.max_tokens
    if len(prompt_ids) + wanted > card.context_length:
        raise ContextLengthExceededError(
            f"{len(prompt_ids)} prompt tokens + {wanted} do not fit the context of {card.context_length}",
            param="prompt",
        )


class PromptCache:
    """Prompts that are under way, so that gathering need not tokenise again what expanding has; bounded in both."""

    def __init__(self, max_tokens: int = 4_000_000, max_prompts: int = 16_384) -> None:
        self._max_tokens = max_tokens
        self._max_prompts = max_prompts
        self._tokens = 0
        self._prompts: OrderedDict[tuple[str, int], PreparedPrompt] = OrderedDict()

    def get(self, job_id: str, index: int) -> PreparedPrompt | None:
        """The prompt, if we still have it."""
        return self._prompts.get((job_id, index))

    def put(self, job_id: str, prompt: PreparedPrompt) -> None:
        """Keep a prompt; the oldest make room."""
        if (job_id, prompt.index) in self._prompts:
            return
        self._prompts[job_id, prompt.index] = prompt
        self._tokens += _tokens(prompt)
        while len(self._prompts) > self._max_prompts or (self._tokens > self._max_tokens and len(self._prompts) > 1):
            self._tokens -= _tokens(self._prompts.popitem(last=False)[1])


def _tokens(prompt: PreparedPrompt) -> int:
    return len(prompt.prompt_ids) + len(prompt.score_ids)
