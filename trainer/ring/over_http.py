"""A ring over HTTP alone: samples from /v1/jobs, versions to /v1/adapters, the rest at /v1/trainers.

A group of samples is a job under an idempotency key that follows from the request: asking again, after an answer was
lost or the api was restarted, finds the job that is there, so nothing is generated twice. A job that has been read is
deleted, one that is under way at the end is cancelled, and one that a killed trainer leaves behind ends at its
deadline; both are gone after a week.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec
import structlog

from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE
from shared.adapters import AdapterManifest, GateCheck
from shared.errors import (
    ConflictError,
    ParallmError,
    ServiceUnavailableError,
    SetupError,
    UnknownAdapterError,
    UnknownJobError,
)
from shared.jobs import TERMINAL, JobStatus
from shared.redis.training.orders import Received
from shared.rewards.kinds import CheckedReward
from shared.rewards.model_kinds import ModelOptions, lacks
from shared.scoring.pool import RewardSample
from shared.sequences import SequenceClass
from shared.training import (
    Alert,
    AlertKind,
    Answer,
    AnswerLetter,
    Beat,
    Holder,
    TakenOrder,
    TakeOrders,
    TrainerStatus,
    TrainingPoint,
)
from shared.trajectories import Reward, Trajectory
from trainer.ring.http_client import HttpApi
from trainer.ring.ring import Candidate, Stored
from trainer.rollouts.groups import RolloutRequest

log = structlog.get_logger()

POLL_S = (0.05, 1.0)  # first and longest pause between two looks at a job
LOST = 3  # times that a job may vanish (a Redis that lost its last second) before the group fails
ORDER_LOOK_S = 0.5
TEXTS_AT_ONCE = 64
SCORE_TIMEOUT_S = 660.0  # an api gives a judge its request_timeout_s, by default 600
_NEVER_MS = 2**62


class _Done(msgspec.Struct):
    """An answer of which nothing is needed."""


class _Served(msgspec.Struct):
    """The field of a policy's status that is needed here."""

    current_lora: str | None = None


class HttpSource:
    """Generates samples by submitting jobs."""

    def __init__(self, api: HttpApi, model: str, run: str, deadline_s: float) -> None:
        self._api = api
        self._model = model
        self._run = run
        self._deadline_s = deadline_s
        self._published: set[str] = set()  # adapters that have a version

    async def generate(self, request: RolloutRequest) -> list[Trajectory]:
        """All samples of one prompt, in order; cancelling it cancels the job."""
        if request.images:
            raise SetupError("a run over HTTP learns from text alone: prompts with images need the ring's Redis")
        body = await self._body(request)
        submitting: asyncio.Task[JobStatus] | None = None
        try:
            for _ in range(LOST):
                submitting = asyncio.create_task(self._api.call("POST", "/v1/jobs", JobStatus, body))
                try:
                    return await self._results(await asyncio.shield(submitting), request)
                except UnknownJobError:
                    log.warning("train.job_lost", request=request.id)
            raise ServiceUnavailableError(f"the job of {request.id} was lost {LOST} times")
        except asyncio.CancelledError:
            if submitting is not None:
                await asyncio.shield(self._cancel(submitting))
            raise

    async def _results(self, status: JobStatus, request: RolloutRequest) -> list[Trajectory]:
        pause_s, longest_s = POLL_S
        while status.status not in TERMINAL:
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 1.3 * pause_s)
            status = await self._api.call("GET", f"/v1/jobs/{status.id}", JobStatus)
        lines = await self._api.lines(f"/v1/jobs/{status.id}/results", Trajectory)
        with contextlib.suppress(ParallmError):
            await self._api.call("DELETE", f"/v1/jobs/{status.id}", _Done, patience_s=2)
        if len(lines) < request.n:
            raise ServiceUnavailableError(f"job {status.id} {status.status} with {len(lines)} samples: {status.error}")
        return [msgspec.structs.replace(line, metadata=request.metadata) for line in lines]

    async def _cancel(self, submitting: "asyncio.Task[JobStatus]") -> None:
        with contextlib.suppress(ParallmError):
            job = f"/v1/jobs/{(await submitting).id}"
            status = await self._api.call("POST", f"{job}/cancel", JobStatus, patience_s=2)
            if status.status in TERMINAL:
                await self._api.call("DELETE", job, _Done, patience_s=2)

    async def _body(self, request: RolloutRequest) -> dict[str, Any]:
        adapter = request.adapter
        if adapter and "@" not in adapter and adapter not in self._published:
            try:
                await self._api.call("GET", f"/v1/adapters/{quote(adapter)}", _Done)
                self._published.add(adapter)
            except UnknownAdapterError:
                adapter = ""  # nothing is published yet: the policy is the base
        sampling = {name: value for name, value in msgspec.to_builtins(request.sampling).items() if value is not None}
        goes_on = {"has_next_turn": True} if request.has_next_turn else {}
        return {
            "kind": "generate",
            "model": self._model,
            "prompts": [request.prompt_ids],
            "n": request.n,
            **sampling,
            **goes_on,
            "adapter": adapter,
            "adapter_policy": "pin" if "@" in adapter else "follow",
            "deadline_s": self._deadline_s,
            "metadata": {"run": self._run},
            "idempotency_key": f"train-{self._run}-{request.id}-{adapter}",
        }


class HttpSink:
    """Publishes by uploads; `model` is the base, "" for networks, which have none."""

    def __init__(self, api: HttpApi, name: str, model: str) -> None:
        self._api = api
        self._name = name
        self._model = model
        self._path = f"/v1/adapters/{quote(name)}"

    async def stage(self, candidate: Candidate) -> int:
        """Upload the candidate as the next version; the latest stays what it was."""
        fields = {
            **({"model": self._model} if self._model else {}),
            "set_latest": "false",
            "train_step": str(candidate.train_step),
            "metrics": _json({k: v for k, v in candidate.metrics.items() if math.isfinite(v)}),
            "parent": str(candidate.parent),
            "gate": _json(candidate.gate),
        }
        files = {
            name: (name, await asyncio.to_thread((candidate.directory / name).read_bytes))
            for name in (CONFIG_FILE, MLX_FILE)
        }
        return (await self._api.upload(f"{self._path}/versions", AdapterManifest, fields, files)).version

    async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
        """Write the checks down and flip `latest`."""
        body = {"version": version, "gate": gate}
        if if_latest is not None:
            body["if_latest"] = if_latest
        await self._api.call("POST", f"{self._path}/promote", _Done, body)

    async def latest_version(self) -> int:
        try:
            lora = (await self._api.call("GET", "/v1/training/status", _Served, policy=self._name)).current_lora
        except UnknownAdapterError:
            lora = None
        return int(lora.rpartition("@")[2]) if lora else 0

    async def fetch(self, version: int, name: str = "") -> Stored:
        raise ConflictError(
            f"the weights of {name or self._name}@{version} cannot be had over HTTP: only this run's own can be "
            "trained on, or a folder's (--start-from)"
        )

    async def served_base(self) -> str:
        """The api asks the same of each upload."""
        return ""

    async def reject(self, version: int, gate: Sequence[GateCheck]) -> None:
        """Write down which checks failed."""
        await self._api.call("POST", f"{self._path}/reject", _Done, {"version": version, "gate": gate})

    async def roll_back(self, version: int, reason: str) -> None:
        """Make an older version the latest again."""
        await self._api.call("POST", f"{self._path}/rollback", _Done, {"version": version, "reason": reason[:200]})

    async def set_best(self, version: int, value: float) -> None:
        """Point `best` at a version."""
        await self._api.call("POST", f"{self._path}/best", _Done, {"version": version, "value": value})

    async def alert(self, kind: AlertKind, message: str) -> None:
        """Log the event and publish it as an alert."""
        log.warning("train.alert", adapter=self._name, kind=kind, message=message)
        event = Alert(self._name, kind, message[:2000], time.time_ns() // 1_000_000)
        await self._api.call("POST", f"/v1/trainers/{quote(self._name)}/alerts", _Done, event)


class _QueueDepth(msgspec.Struct):
    model: str
    sequence_class: str
    waiting: int
    leased: int


class _Queues(msgspec.Struct):
    queues: list[_QueueDepth]


class HttpQueue:
    """The queue of a model, as far as a trainer looks at it."""

    def __init__(self, api: HttpApi, model: str) -> None:
        self._api, self._model = api, model

    async def is_asked(self) -> bool:
        """True if an interactive sequence waits or runs."""
        found = await self._api.call("GET", "/v1/ring/snapshot", _Queues, patience_s=2)
        mine = [each for each in found.queues if (each.model, each.sequence_class) == (self._model, "interactive")]
        return any(each.waiting or each.leased for each in mine)


class HttpBoard:
    """Implementation of RingBoard's store over HTTP; it waits briefly, since the next heartbeat repeats the same."""

    def __init__(self, api: HttpApi, policy: str) -> None:
        self._api = api
        self.policy = policy
        self._owner = ""

    async def hold(self, owner: str, instead_of: str = "") -> str:
        """Own the policy for a while; the owner from now on."""
        self._owner = owner
        return (await self._beat(Beat(owner=owner, instead_of=instead_of))).owner

    async def let_go(self, owner: str) -> None:
        """Release the policy, so that another trainer may own it."""
        await self._api.call("DELETE", f"/v1/trainers/{quote(self.policy)}", _Done, patience_s=2, owner=owner)

    async def write(self, status: TrainerStatus) -> None:
        """Replace the policy's status by this one."""
        await self._beat(Beat(owner=self._owner, status=status))

    async def add(self, point: TrainingPoint) -> None:
        """One more train step on the curves."""
        await self._beat(Beat(owner=self._owner, point=point))

    async def _beat(self, beat: Beat) -> Holder:
        return await self._api.call("PUT", f"/v1/trainers/{quote(self.policy)}", Holder, beat, patience_s=2)


class HttpOrders:
    """Orders for `trainer.ring.mailbox.RingMailbox` over HTTP; a policy that is no longer ours has none."""

    def __init__(self, api: HttpApi, policy: str, owner: str) -> None:
        self._api = api
        self._path = f"/v1/trainers/{quote(policy)}/orders"
        self._owner = owner
        self._after = "0-0"  # behind which an earlier life's unfinished orders are read; "": they all have been

    async def take(self, consumer: str, count: int = 1) -> list[Received[bytes]]:
        """The next orders: first what an earlier life of this trainer had and did not finish."""
        try:
            taken = await self._api.call("POST", self._path, list[TakenOrder], TakeOrders(self._owner, self._after))
        except ConflictError as error:
            log.warning("train.orders_refused", reason=str(error))
            return []
        if self._after:
            self._after = taken[-1].entry if taken else ""
        return [
            Received(order.entry, order.id, bytes(order.order), 0 if order.too_late else _NEVER_MS, order.again)
            for order in taken
        ]

    async def wait(self, timeout_s: float) -> None:
        """Sleep for at most ORDER_LOOK_S."""
        await asyncio.sleep(min(timeout_s, ORDER_LOOK_S))

    async def reply(self, order_id: str, answer: bytes) -> None:
        said = msgspec.json.decode(answer, type=Answer)
        await self._answer(AnswerLetter(self._owner, "0-0", order_id, said))

    async def finish(self, received: Received[Any]) -> None:
        await self._answer(AnswerLetter(self._owner, received.entry, received.id, done=True))

    async def _answer(self, letter: AnswerLetter) -> None:
        try:
            await self._api.call("POST", f"{self._path}/answers", _Done, letter)
        except ConflictError as error:
            log.warning("train.orders_refused", reason=str(error))


class HttpJudges:
    """Asks served models for rewards by /v1/rewards/score."""

    def __init__(self, api: HttpApi) -> None:
        self._api = api

    async def check(self, reward: CheckedReward) -> None:
        """UnknownModelError for a model or adapter that is not served."""
        for name in reward.served_models:
            await self._api.call("GET", f"/v1/models/{quote(name)}", _Done)

    async def score(
        self,
        name: str,
        options: ModelOptions,
        samples: Sequence[RewardSample],
        *,
        within_s: float = 0.0,
        sequence_class: SequenceClass = "batch",
    ) -> list[Reward]:
        """One reward a sample; time and class are the api's, by its settings and our key."""
        missing = [lacks(options, sample.prompt, sample.reference) for sample in samples]
        whole = [sample for sample, lack in zip(samples, missing, strict=True) if not lack]
        rewards: list[Reward] = []
        for at in range(0, len(whole), TEXTS_AT_ONCE):
            part = whole[at : at + TEXTS_AT_ONCE]
            body = {
                "completions": [sample.completion for sample in part],
                "prompts": [sample.prompt or "" for sample in part],
                "references": [sample.reference for sample in part],
                "reward": {"name": name, "options": options},
            }
            scores = await self._api.call("POST", "/v1/rewards/score", _Scores, body, timeout_s=SCORE_TIMEOUT_S)
            rewards += [Reward(name, score.score, score.components, score.error or "") for score in scores.data]
        scored = iter(rewards)
        return [Reward(name, None, error=lack) if lack else next(scored) for lack in missing]

    async def outputs(self, name: str, head: str, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Outputs by /v1/rl/act, which returns the distribution that an action is drawn from."""
        body = {"model": name, "head": head, "observations": texts, "deterministic": True}
        said = await self._api.call("POST", "/v1/rl/act", _Policies, body)
        if said.action_probs is not None:
            return [[math.log(max(each, 5e-324)) for each in probs] for probs in said.action_probs]
        return [[*means, *log_stds] for means, log_stds in zip(said.action_means, said.action_log_stds, strict=True)]


class _Policies(msgspec.Struct):
    action_probs: list[list[float]] | None = None
    action_means: list[list[float]] = []
    action_log_stds: list[list[float]] = []


class _Score(msgspec.Struct):
    score: float | None
    components: dict[str, float]
    error: str | None


class _Scores(msgspec.Struct):
    data: list[_Score]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
