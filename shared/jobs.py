"""A job: a durable unit that a user submits and polls.

State machine: queued -> running -> one of succeeded, failed, cancelled, expired (terminal, exactly one, never left).
`failed` means that the job as a whole could not be done; a sample that went wrong is a result line with an error.
"""

from collections.abc import Sequence
from typing import Any, Literal, NewType

import msgspec

from shared.errors import InvalidRequestError
from shared.images.chat import SizedImage
from shared.images.refs import ImageRef
from shared.sequences import AdapterPolicy, LogprobsMode, Pooling, SamplingParams, SequenceKind
from shared.webhooks import Webhook

JobKind = Literal["generate", "rollout", "score", "batch"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled", "expired"})


Message = dict[str, Any]  # an OpenAI chat message, as the chat template takes it
Prompt = str | Sequence[Message | int]  # text, messages or token ids; a mixture is refused


class RewardSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which reward scores the completions; `options` go to it as keyword arguments, checked at submission."""

    name: str
    options: dict[str, Any] = {}


class SamplingOverrides(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling fields of a job, with the job's defaults (RL's: temperature 1, no filters)."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # sample s of prompt p draws with a seed derived from (seed, p, s)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    return_routed_experts: bool = False  # of a mixture of experts, for each completion token


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A submitted job without its inputs, which are stored apart, one JSON line a prompt."""

    id: str
    kind: JobKind
    model: str
    total_prompts: int
    n: int = 1
    sampling: SamplingOverrides = SamplingOverrides()
    reward: RewardSpec | None = None
    score_logprobs: bool = True  # kind "score": ask the model; False scores texts by the reward alone, without a model
    adapter: str = ""
    adapter_policy: AdapterPolicy = "follow"
    metadata: dict[str, Any] = {}
    deadline_ms: int = 0  # Unix time; 0: none
    created_ms: int = 0
    trace: str = ""  # W3C traceparent of the request that submitted it; "": it was not traced
    tenant: str = ""  # who owns it, and its sequences (shared/owners.py)
    key: str = ""  # name of the API key that submitted it; its jobs share the reward processes' time
    webhook: Webhook | None = None  # notified of its end
    has_next_turn: bool = False  # prompts of a later job may begin with these and their samples
    record_s: int = 0  # for so long its samples are stored to be replayed
    cache: bool = True  # of its sequences
    max_reasoning_tokens: int | None = None  # reasoning of a sample that is not over by then is ended

    @property
    def total(self) -> int:
        """Samples in all; sample s of prompt p has ordinal p * n + s."""
        return self.total_prompts * self.n


class LineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Kind "batch": what one line asks of a worker; the api has checked it against the model."""

    sampling: SamplingParams
    kind: SequenceKind = "generate"
    pooling: Pooling = "mean"
    prediction_ids: tuple[int, ...] = ()
    images: tuple[ImageRef, ...] = ()  # of the prompt; their bytes are the job's
    image_token: int = 0  # that stands for each vector of them
    cache: bool = True  # of its sequence


class JobInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of input: a prompt, and what its reward needs.

    kind "score" scores `completion` (text or token ids) after `prompt`.
    """

    prompt: Prompt
    reference: Any = None
    completion: str | list[int] | None = None
    metadata: dict[str, Any] = {}
    request: LineRequest | None = None  # kind "batch"; None: the api has refused the line
    refused: str = ""  # why
    images: tuple[SizedImage, ...] = ()  # of the messages, whose parts `{"type": "image"}` they are, in order
    reply: dict[str, Any] = {}  # kind "batch": what the api needs to write the answer; runners do not look at it


InputLine = NewType("InputLine", bytes)  # a `JobInput` as it is stored, JSON; `input_line` has checked it

_input_encoder = msgspec.json.Encoder()
_input_decoder = msgspec.json.Decoder(JobInput)


def input_line(given: JobInput, kind: JobKind, number: int) -> InputLine:
    """An input as it is stored; InvalidRequestError for line `number` when a job of this kind needs more."""
    if kind == "score" and given.completion is None:
        raise InvalidRequestError(f"input line {number}: a score job needs `completion`", param="prompts")
    if kind == "batch" and given.request is None and not given.refused:
        raise InvalidRequestError(f"input line {number}: a batch needs `request`", param="prompts")
    return InputLine(_input_encoder.encode(given))


def read_input(line: InputLine) -> JobInput:
    """An input that is stored."""
    return _input_decoder.decode(line)


class JobCounts(msgspec.Struct, frozen=True):
    """Samples by state; they add up to `total`."""

    total: int
    queued: int  # not yet enqueued as sequences
    running: int  # enqueued or decoding
    succeeded: int
    failed: int  # finish_reason "error"
    cancelled: int
    expired: int


class JobUsage(msgspec.Struct, frozen=True):
    """Tokens of the finished samples."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class JobStatus(msgspec.Struct, frozen=True):
    """Body of the answer to `GET /v1/jobs/{id}`."""

    id: str
    kind: JobKind
    model: str
    status: JobState
    counts: JobCounts
    progress: float  # finished / total, 0..1
    usage: JobUsage
    mean_reward: float | None
    reward_errors: int
    created_ms: int
    started_ms: int
    finished_ms: int
    complete_through: int  # every sample with ordinal below this is finished
    error: str
    metadata: dict[str, Any]
    n: int = 1  # samples a prompt
    tenant: str = ""  # who owns it; "" without tenants
