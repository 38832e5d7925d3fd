"""The body of POST /v1/jobs, and the lines of its uploads."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from api.callers.caller import may_cache
from api.callers.fair_pool import aside
from api.generation.sampling import MAX_REASONING, MAX_TOP_LOGPROBS, StrictId
from api.http.fields import LogitBias, RequestModel, Stop, complaint
from api.http.limits import MAX_JSON_DEPTH, is_deep
from api.jobs.images import Taking, has_parts
from api.webhooks.body import WebhookBody
from shared.errors import InvalidRequestError
from shared.jobs import InputLine, JobInput, JobKind, JobSpec, Prompt, RewardSpec, SamplingOverrides, input_line
from shared.sequences import AdapterPolicy, LogprobsMode, ModelCard, vocabulary_error

MAX_LINE_BYTES = 16 << 20
LARGE_LINE_BYTES = 64 << 10
_BLOCK = 64 << 10  # read at once; a larger one would hold up other requests' tokens

Message = dict[str, Any]


class RewardBody(RequestModel):
    """`{"name": "gsm8k", "strict": true}`, or with the options under `options`."""

    model_config = ConfigDict(extra="allow")

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    def spec(self) -> RewardSpec:
        """As the runner takes it."""
        return RewardSpec(self.name, {**self.options, **(self.model_extra or {})})


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class JobBody(RequestModel):
    """A job. With a multipart upload, this is the `spec` field and the prompts are in `file`."""

    kind: Literal["generate", "rollout", "score"]
    model: str | None = Field(
        default=None,
        description="a model, an adapter, a version of it, or a split; may be left out when only one model is served",
    )
    prompts: Annotated[
        list[str | list[StrictId] | list[Message]] | None,
        Field(description="each a string, token ids, or chat messages"),
    ] = None
    completions: list[str | list[StrictId]] | None = Field(default=None, description="kind score: one for each prompt")
    references: list[Any] | None = Field(default=None, description="one for each prompt; what its reward compares with")
    metadata: dict[str, Any] | list[dict[str, Any]] | None = Field(
        default=None, description="of the job, or a list with one object for each prompt"
    )
    n: int = Field(default=1, ge=1, le=4096, description="samples for each prompt")
    reward: Annotated[RewardBody | None, BeforeValidator(_named)] = Field(
        default=None, description="a reward's name, or an object with its options"
    )
    score_logprobs: bool = Field(default=True, description="kind score: log-probabilities, or the reward alone")
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    logit_bias: LogitBias
    stop: Stop
    stop_token_ids: list[StrictId] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    max_reasoning_tokens: int | None = Field(
        default=None, ge=0, le=MAX_REASONING, description="reasoning that is not over by then is ended"
    )
    logprobs: bool | int | None = Field(
        default=None, description="the drawn tokens' are always stored; a number is the same as top_logprobs"
    )
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    logprobs_mode: LogprobsMode | None = Field(
        default=None,
        description="raw: the model's own; processed: those of what was drawn from; default: the server's setting",
    )
    return_routed_experts: bool = Field(
        default=False, description="each sample comes with the experts that its tokens were computed with (`routes`)"
    )
    adapter: str = Field(default="", description="an adapter, a version of it (`name@k`), or a split by weight")
    lora_adapter: str = Field(default="", description="the same as `adapter`")
    adapter_policy: AdapterPolicy = "follow"
    has_next_turn: bool = Field(
        default=False,
        description="prompts of later jobs will begin with these and their completions: the KV of both is stored",
    )
    cache: bool = Field(default=True, description="false: none of its KV is stored for later requests")
    deadline_s: float | None = Field(default=None, gt=0, description="what has not finished by then expires")
    webhook: WebhookBody | None = Field(default=None, description="the URL that is notified of its end")
    idempotency_key: str = Field(default="", max_length=256, description="submitting again gives the same job")

    @model_validator(mode="after")
    def _lengths_match(self) -> "JobBody":
        if self.min_tokens > self.max_tokens:
            raise complaint("min_tokens", f"more than 'max_tokens' ({self.max_tokens})")
        if self.has_next_turn and self.kind == "score":
            raise complaint("has_next_turn", "a job of kind score writes nothing that could go on")
        if self.return_routed_experts and self.kind == "score":
            raise complaint("return_routed_experts", "a job of kind score writes nothing that it could be of")
        if self.max_reasoning_tokens is not None and self.kind == "score":
            raise complaint("max_reasoning_tokens", "a job of kind score writes nothing, and does not reason")
        if self.adapter and self.lora_adapter and self.adapter != self.lora_adapter:
            raise complaint("adapter", "'adapter' and 'lora_adapter' name different adapters")
        if self.has_next_turn and not self.cache:
            raise complaint("has_next_turn", "it asks to keep KV, and 'cache': false to keep none")
        for name in ("references", "completions", "metadata"):
            given = getattr(self, name)
            if not isinstance(given, list):
                continue
            if self.prompts is None:
                raise complaint(name, "with an upload this goes into the lines of the file")
            if len(given) != len(self.prompts):
                raise complaint(name, f"has {len(given)} entries for {len(self.prompts)} prompts")
        return self

    def spec(self, card: ModelCard, adapter: str = "", logprobs_mode: LogprobsMode = "raw_logprobs") -> JobSpec:
        """The job without its inputs; `logprobs_mode`: the server's."""
        now = int(1000 * time.time())
        return JobSpec(
            id="",
            kind=self.kind,
            model=card.name,
            total_prompts=0,
            n=self.n,
            sampling=self._sampling(self.logprobs_mode or logprobs_mode),
            reward=self.reward.spec() if self.reward is not None else None,
            score_logprobs=self.score_logprobs,
            adapter=adapter,
            adapter_policy=self.adapter_policy,
            metadata=self.metadata if isinstance(self.metadata, dict) else {},
            deadline_ms=now + int(1000 * self.deadline_s) if self.deadline_s else 0,
            created_ms=now,
            has_next_turn=self.has_next_turn,
            cache=self.cache and may_cache(),
            max_reasoning_tokens=self.max_reasoning_tokens,
        )

    def _sampling(self, logprobs_mode: LogprobsMode) -> SamplingOverrides:
        counted = self.logprobs if isinstance(self.logprobs, int) and not isinstance(self.logprobs, bool) else None
        return SamplingOverrides(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs_mode=logprobs_mode,
            return_routed_experts=self.return_routed_experts,
            top_logprobs=(self.top_logprobs if self.top_logprobs is not None else counted) or None,
        )

    async def inputs(self, card: ModelCard, taking: Taking) -> AsyncIterator[InputLine]:
        """The prompts of a JSON body, as the job store takes them."""
        each = self.metadata if isinstance(self.metadata, list) else None
        for i, prompt in enumerate(self.prompts or ()):
            given = JobInput(
                prompt=prompt,
                reference=self.references[i] if self.references else None,
                completion=self.completions[i] if self.completions else None,
                metadata=each[i] if each else {},
            )
            where = f"prompts[{i}]"
            given = _checked(given, card, where)
            yield input_line(await taking(given, where, "prompts") if has_parts(given) else given, self.kind, i + 1)


class UploadLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of an upload that is not a bare string; exactly one of the three prompts is there."""

    prompt: Prompt | None = None
    messages: list[Message] | None = None
    prompt_ids: list[int] | None = None
    reference: Any = None
    completion: str | list[int] | None = None
    metadata: dict[str, Any] = {}


class Upload(Protocol):
    """A file that has arrived."""

    async def read(self, size: int = -1) -> bytes: ...


async def upload_inputs(file: Upload, card: ModelCard, kind: JobKind, taking: Taking) -> AsyncIterator[InputLine]:
    """The lines of a JSONL upload, as the job store takes them; blank ones count in line numbers and are no prompts."""
    number = 0
    async for line in _lines(file):
        number += 1
        large = len(line) > LARGE_LINE_BYTES
        stored = await aside(_stored, line, number, card, kind) if large else _stored(line, number, card, kind)
        if isinstance(stored, JobInput):
            yield input_line(await taking(stored, f"line {number}", "file"), kind, number)
        elif stored is not None:
            yield stored


def _stored(line: bytes, number: int, card: ModelCard, kind: JobKind) -> InputLine | JobInput | None:
    """A line as the job store takes it; as it is, where it has images that are to be read; None for a blank one."""
    if not line.strip():
        return None
    given = _checked(_input_of(line, number), card, f"line {number}")
    return given if has_parts(given) else input_line(given, kind, number)


async def _lines(file: Upload) -> AsyncIterator[bytes]:
    pending = b""
    while block := await file.read(_BLOCK):
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            yield line
        if len(pending) > MAX_LINE_BYTES:
            raise InvalidRequestError(f"a line is longer than {MAX_LINE_BYTES} bytes", param="file")
    if pending:
        yield pending


_line_decoder = msgspec.json.Decoder(str | UploadLine)


def _input_of(line: bytes, number: int) -> JobInput:
    if is_deep(line):
        raise InvalidRequestError(f"line {number} is nested deeper than {MAX_JSON_DEPTH} levels", param="file")
    try:
        given: str | UploadLine = _line_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"line {number}: {error}", param="file") from error
    if isinstance(given, str):
        return JobInput(prompt=given)
    prompts = [p for p in (given.prompt, given.messages, given.prompt_ids) if p is not None]
    if len(prompts) != 1:
        raise InvalidRequestError(
            f"line {number}: give exactly one of 'prompt', 'messages' and 'prompt_ids'", param="file"
        )
    return JobInput(prompts[0], given.reference, given.completion, given.metadata)


def _checked(given: JobInput, card: ModelCard, where: str) -> JobInput:
    prompt = given.prompt
    if not prompt:
        raise InvalidRequestError(f"{where}: the prompt is empty", param="prompts")
    if not isinstance(prompt, str):
        if isinstance(prompt[0], dict):
            if not all(isinstance(message, dict) and "role" in message for message in prompt):
                raise InvalidRequestError(f"{where}: every message needs a 'role'", param="prompts")
        else:
            _check_ids(prompt, card, where)
    if isinstance(given.completion, list):
        _check_ids(given.completion, card, where)
    return given


def _check_ids(ids: Sequence[Any], card: ModelCard, where: str) -> None:
    if any(type(token) is not int for token in ids):
        raise InvalidRequestError(f"{where}: token ids and messages cannot be mixed", param="prompts")
    if error := vocabulary_error(ids, card.vocab_size, "prompts", where):
        raise error
