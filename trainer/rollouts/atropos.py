"""Atropos as a source of batches: its run-api gathers scored groups from environments, and our trainer asks for them.

Atropos (https://github.com/NousResearch/atropos) is spoken by HTTP alone: `POST /register` once a start, `GET /batch`
until there is one, `GET /status` while waiting. What an environment sends is a `ScoredDataGroup` (`Scored` here).

Invariants.
- Masks are -100 or the token's own id; anything else (0/1 masks, say) is refused, because it means something else.
- The prompt of a group is what all its sequences begin with and mask; masked tokens after it stay in place, out of
  the loss, so that several turns are trained on exactly as they were sampled.
- run-api forgets a batch when it hands it out. Groups that a killed trainer had in hand are gone; a batch that was
  consumed is consumed once.
- It does not say which version sampled a token: the lag of its groups is not known and not bounded here.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import httpx
import msgspec
import structlog

from shared.errors import InvalidRequestError, ServiceUnavailableError
from shared.process.patience import Patience, patiently
from shared.trajectories import Reward, Trajectory
from trainer.rollouts.groups import IndexedSource, Lag, RolloutGroup

log = structlog.get_logger()

MASKED = -100
PATIENCE_S = 60.0  # for a run-api that is away
POLL_S = (0.2, 2.0)  # first and longest, between two questions for a batch
WARN_AGAIN_S = 30.0
_KNOWN_OVERRIDES = frozenset({"set_advantage_to_zero", "group_size"})


class Scored(msgspec.Struct, frozen=True):
    """A ScoredDataGroup; fields that are not needed here are left out."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    env_id: int | None = None
    images: Any = None


class _Batch(msgspec.Struct):
    batch: list[Scored] | None = None
    status: str = ""
    message: str = ""


class Registration(msgspec.Struct, frozen=True):
    """Registration at run-api: what it, and through it each environment, learns of the run."""

    wandb_group: str
    wandb_project: str
    batch_size: int  # sequences
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class AtroposApi:
    """run-api's side for trainers. `trouble` gets the reason why run-api cannot be asked, and "" once it can again."""

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        trouble: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self.url = url.rstrip("/")
        self._trouble = trouble
        self._away = False
        self._http = httpx.AsyncClient(base_url=self.url, timeout=30, transport=transport, trust_env=False)

    async def register(self, registration: Registration) -> None:
        """Register the run; environments may start from now on."""
        await self._ask("POST", "/register", content=msgspec.json.encode(registration))

    async def batch(self) -> list[Scored] | None:
        """The next batch, or None while there are not enough groups."""
        answer = await self._ask("GET", "/batch")
        try:
            reply = msgspec.json.decode(answer, type=_Batch)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(f"{self.url}/batch answered something else: {error}") from error
        if reply.status == "error":
            raise ServiceUnavailableError(f"{self.url}: {reply.message}")
        return reply.batch

    async def queue_size(self) -> int:
        """Groups that wait for a batch."""
        return int(msgspec.json.decode(await self._ask("GET", "/status"))["queue_size"])

    async def aclose(self) -> None:
        """Close the connections to run-api."""
        await self._http.aclose()

    async def _ask(self, method: str, path: str, **more: Any) -> bytes:
        def send() -> Awaitable[httpx.Response]:
            return self._http.request(method, path, headers=_JSON, **more)

        try:
            response = await patiently(send, Patience(PATIENCE_S), _FAULTS, lambda outcome: self._warn(path, outcome))
        except httpx.TransportError as error:
            raise ServiceUnavailableError(self._problem(path, error)) from error
        if not response.is_success:
            raise ServiceUnavailableError(self._problem(path, response))
        if self._away:
            self._away = False
            self._trouble("")
            log.info("atropos.back", url=self.url)
        return response.content

    def _warn(self, path: str, outcome: httpx.Response | httpx.TransportError) -> None:
        """Report that run-api is away, once until it is back."""
        if not self._away:
            self._away = True
            problem = self._problem(path, outcome)
            self._trouble(problem)
            log.warning("atropos.away", reason=problem, given_up_after_s=PATIENCE_S)

    def _problem(self, path: str, outcome: httpx.Response | httpx.TransportError) -> str:
        if isinstance(outcome, httpx.Response):
            return f"{self.url}{path} answered {outcome.status_code}: {outcome.text}"[:500]
        return f"cannot reach Atropos at {self.url}: {outcome or type(outcome).__name__}"


_FAULTS = frozenset(range(500, 600))  # that may pass
_JSON = {"content-type": "application/json"}


class AtroposCollector(IndexedSource):
    """Batches of run-api.

    `pending` are groups that an earlier start had in hand: nobody can bring them again, so they count as dropped.
    """

    def __init__(
        self,
        api: AtroposApi,
        registration: Registration,
        cursor: int = 0,
        consumed: int = 0,
        pending: Sequence[int] = (),
    ) -> None:
        super().__init__(cursor, consumed, pending)  # the cursor counts groups received, over all starts
        self._api = api
        self._registration = registration
        self._receiving: asyncio.Task[None] | None = None
        self._warned = 0.0

    async def __aenter__(self) -> Self:
        await self._api.register(self._registration)
        log.info("atropos.registered", url=self._api.url, batch_size=self._registration.batch_size)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop receiving, and disconnect from run-api."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        await self._api.aclose()

    async def next_batch(self, steps_done: int, lag: Lag) -> list[RolloutGroup]:
        """Wait for a batch; groups that cannot be learned from are dropped, with the reason in the log."""
        pause_s = POLL_S[0]
        while True:
            if not self.waiting:
                await self._receive()
            batch, self.waiting = self.waiting, []
            if batch:
                self.consumed += len(batch)
                return batch
            await self._warn_of_waiting()
            await asyncio.sleep(pause_s)
            pause_s = min(POLL_S[1], 1.5 * pause_s)

    async def _receive(self) -> None:
        """Ask once. A wait that is cancelled meanwhile loses nothing: what run-api has forgotten, we then have."""
        if self._receiving is None or self._receiving.done():
            self._receiving = asyncio.create_task(self._ask())
        await asyncio.shield(self._receiving)

    async def _ask(self) -> None:
        for scored in await self._api.batch() or []:
            index = self.cursor
            self.cursor += 1
            try:
                self.waiting.append(group_of(scored, index))
            except InvalidRequestError as error:
                log.warning("atropos.dropped", env=scored.env_id, reason=str(error))
                self.dropped.append(index)

    async def _warn_of_waiting(self) -> None:
        if time.monotonic() - self._warned > WARN_AGAIN_S:
            self._warned = time.monotonic()
            log.info("atropos.waiting", url=self._api.url, groups_queued=await self._api.queue_size())

    def pace_on(self, steps_done: int) -> None:
        """Nothing: environments pace themselves by run-api's queue."""


def group_of(scored: Scored, index: int) -> RolloutGroup:
    """A ScoredDataGroup as a group of trajectories; InvalidRequestError with the reason when it cannot be one."""
    _check(scored)
    shared = _shared_prompt(scored)
    zeroed = bool((scored.group_overrides or {}).get("set_advantage_to_zero"))
    given: list[float | None] = []
    trajectories: list[Trajectory] = []
    for sample in range(len(scored.tokens)):
        trajectories.append(_trajectory(scored, sample, shared))
        given.append(0.0 if zeroed or _overrides(scored, sample).get("set_advantage_to_zero") else None)
        if scored.advantages is not None and given[-1] is None:
            given[-1] = _one_advantage(scored, sample)
    name = f"atropos-{index}"
    if scored.advantages is None and any(advantage is not None for advantage in given):
        given = _beside_zeroed(scored.scores, given)
    advantages = tuple(given) if any(advantage is not None for advantage in given) else ()
    return RolloutGroup(name, index, tuple(trajectories), advantages=advantages)


def _check(scored: Scored) -> None:
    count = len(scored.tokens)
    if count == 0 or len(scored.masks) != count or len(scored.scores) != count:
        raise InvalidRequestError(
            f"{count} token lists, {len(scored.masks)} masks and {len(scored.scores)} scores are no group"
        )
    if scored.images is not None and any(scored.images):
        raise InvalidRequestError("images are not supported")
    if scored.inference_logprobs is None:
        raise InvalidRequestError(
            "no inference_logprobs: the loss needs what the sampler gave each token; use Atropos' ManagedServer"
        )
    if (scored.group_overrides or {}).get("sft"):
        raise InvalidRequestError("group_overrides asks for supervised training (sft), which this trainer has not")
    unknown = {*(scored.group_overrides or {}), *(key for overrides in scored.overrides or [] for key in overrides)}
    if unknown - _KNOWN_OVERRIDES:
        log.warning("atropos.overrides_unknown", names=sorted(unknown - _KNOWN_OVERRIDES))
    for name in ("masks", "inference_logprobs", "advantages"):
        lists = getattr(scored, name)
        if lists is not None and list(map(len, lists)) != list(map(len, scored.tokens)):
            raise InvalidRequestError(f"{name} and tokens differ in length")
    for tokens, mask in zip(scored.tokens, scored.masks, strict=True):
        if any(m not in (MASKED, token) for token, m in zip(tokens, mask, strict=True)):
            raise InvalidRequestError("a mask is -100 or the token's own id at each position, not 0 or 1")


def _shared_prompt(scored: Scored) -> int:
    """Number of masked tokens that all sequences begin with; at least one."""
    first = scored.tokens[0]
    length = min(_lead(mask) for mask in scored.masks)
    while any(tokens[:length] != first[:length] for tokens in scored.tokens):
        length -= 1
    if length < 1:
        raise InvalidRequestError("the sequences of a group share no masked first token: there is no prompt")
    return length


def _lead(mask: Sequence[int]) -> int:
    return next((at for at, m in enumerate(mask) if m != MASKED), len(mask))


def _trajectory(scored: Scored, sample: int, prompt: int) -> Trajectory:
    tokens, mask = scored.tokens[sample], scored.masks[sample]
    assert scored.inference_logprobs is not None
    own = [int(m != MASKED) for m in mask[prompt:]]
    logprobs = [x if mine else 0.0 for x, mine in zip(scored.inference_logprobs[sample][prompt:], own, strict=True)]
    if any(x > 1e-3 for x in logprobs):
        raise InvalidRequestError("inference_logprobs above 0 at tokens that are not masked")
    if not any(own):
        raise InvalidRequestError("a sequence in which everything is masked")
    return Trajectory(
        prompt_index=0,
        sample_index=sample,
        prompt_ids=tuple(tokens[:prompt]),
        completion_ids=tuple(tokens[prompt:]),
        text="",
        logprobs=tuple(min(x, 0.0) for x in logprobs),
        finish_reason="stop",
        reward=Reward("atropos", scored.scores[sample]),
        loss_mask=tuple(own),
        metadata={"env_id": scored.env_id},
    )


def _overrides(scored: Scored, sample: int) -> dict[str, Any]:
    overrides = scored.overrides or []
    return overrides[sample] if sample < len(overrides) else {}


def _one_advantage(scored: Scored, sample: int) -> float:
    assert scored.advantages is not None
    pairs = zip(scored.advantages[sample], scored.masks[sample], strict=True)
    values = {value for value, mask in pairs if mask != MASKED}
    if len(values) > 1:
        raise InvalidRequestError("advantages differ within a sequence; this trainer takes one a sequence")
    return values.pop() if values else 0.0


def _beside_zeroed(scores: Sequence[float], given: Sequence[float | None]) -> list[float | None]:
    """The others keep reward minus the whole group's mean: a sample that is left out still counts in the baseline."""
    mean = sum(scores) / len(scores)
    return [score - mean if each is None else each for score, each in zip(scores, given, strict=True)]
