"""A run's learner that the training service has: `mlx_parallm_train --learner service`.

Invariants.
- Each start of a run has a learner of its own, which begins where the run's checkpoint was taken. So nothing that a
  former start has asked, or still asks, counts; its learner is dropped.
- What is asked is numbered, and is placed again where it is not known whether it was placed: the service carries it out
  once (shared/redis/training/learner_store.py). A service that dies leaves the learner to the next one.
- One thing is asked at a time.
"""

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog
from redis.exceptions import RedisError

from shared.errors import ConflictError, EngineError, NotFoundError, ServiceUnavailableError, SetupError
from shared.learners import (
    Answer,
    BeginDone,
    BeginRequest,
    CallDone,
    CallRequest,
    LearnerSpec,
    Request,
    RequestFailed,
    ServiceCard,
)
from shared.redis.chunks import CHUNK_BYTES
from shared.redis.connection.faults import reason
from shared.redis.training.learner_store import LearnerStore
from trainer.learn.options import AdapterShape
from trainer.learners.calls import call_of, signature_of
from trainer.learners.handle import Handle
from trainer.learners.kinds import PolicyOptions
from trainer.learners.policy import PolicyLearner

log = structlog.get_logger()

_LOOK_S = 2.0  # how long one look for an answer takes, before it is asked whether there is a service at all
_FILE = "learner"  # of the run's folder: the id of its last learner


class ServiceLearners:
    """Learners of one model that a service trains; a run has one at a time."""

    def __init__(self, store: LearnerStore, model: str, wait_s: float) -> None:
        self._store, self._model, self._wait_s = store, model, wait_s
        self._open: ServiceHandle | None = None

    async def open(self, options: PolicyOptions, run: str, folder: Path) -> "ServiceHandle":
        """A new learner; what the run's former start has had is dropped.

        SetupError when the service does not take its rank, ServiceUnavailableError when there is none in time.
        """
        service = await self._service()
        shape = options.shape or AdapterShape(rank=0)  # a head learns alone
        if shape.rank > service.max_rank:
            raise SetupError(f"--lora-rank {shape.rank} is above the service's --max-rank {service.max_rank}")
        spec = LearnerSpec(
            id=f"run-{run}-{secrets.token_hex(6)}",
            model=self._model,
            rank=shape.rank,
            scale=shape.scale,
            seed=options.seed,
            run=msgspec.msgpack.encode(options),
            keeper="run",  # no client's, whatever its key
            created_ms=time.time_ns() // 1_000_000,
        )
        file = folder / _FILE
        if former := await asyncio.to_thread(_noted, file):
            await self._store.drop(self._model, former)
        await asyncio.to_thread(_note, file, spec.id)
        await self._store.create(spec)
        self._open = ServiceHandle(self._store, spec, self._wait_s)
        await self._open.begin()
        return self._open

    async def _service(self) -> ServiceCard:
        until = time.monotonic() + self._wait_s
        while (service := await self._store.service(self._model)) is None:
            why = f"no training service of {self._model} runs: start mlx_parallm_learners, or give --learner own"
            if time.monotonic() > until:
                raise ServiceUnavailableError(why)
            log.warning("learner.no_service", reason=why)
            await asyncio.sleep(_LOOK_S)
        return service

    async def close(self) -> None:
        """Give the service's place back."""
        if self._open is not None:
            try:
                await self._store.drop(self._model, self._open.id)
            except (RedisError, OSError) as error:
                log.warning("learner.not_dropped", reason=reason(error))


class ServiceHandle(Handle[PolicyLearner]):
    """Card of a service. ServiceUnavailableError when there is none for `wait_s`."""

    def __init__(self, store: LearnerStore, spec: LearnerSpec, wait_s: float) -> None:
        self._store, self._spec, self._wait_s = store, spec, wait_s
        self._number = 0
        self._one = asyncio.Lock()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.config = b""

    @property
    def id(self) -> str:
        """Id of the learner in the service."""
        return self._spec.id

    async def begin(self) -> None:
        """Have it built, and learn of what shape it is; ConflictError when the model has no layers for it."""
        async with self._one:
            answer = await self._answered(BeginRequest())
        if not isinstance(answer, BeginDone):
            _refused(answer)
        self.config = await self.call(PolicyLearner.config)
        weights = await self.weights()
        self.shapes = {name: tuple(value.shape) for name, value in weights.items()}

    async def _called(self, method: str, args: tuple[Any, ...]) -> Any:
        """Send a call and wait for its result; ValueError when what is given is another adapter's."""
        async with self._one:
            body = await asyncio.to_thread(lambda: msgspec.msgpack.encode(call_of(method, args)))
            request = CallRequest(body)
            if len(body) > CHUNK_BYTES:
                request = CallRequest(upload=await self._store.put_asked(self.id, body))
            answer = await self._answered(request)
            if not isinstance(answer, CallDone):
                try:
                    _refused(answer)
                except ConflictError as error:
                    raise ValueError(str(error)) from error
            data = await self._store.saved(self.id, answer.name) if answer.name else answer.body
            try:
                return await asyncio.to_thread(signature_of(PolicyLearner, method).result.decode, data)
            except (msgspec.DecodeError, ValueError) as error:
                raise EngineError(f"the service's answer to {method} cannot be read: {error}") from error

    async def _answered(self, request: Request) -> Answer:
        """Placed once, however often it takes to place it; looked for until it is there."""
        self._number += 1
        seen = time.monotonic()  # when there was a service
        placed = False
        while True:
            why = "no service trains learners of this model"
            try:
                if not placed:
                    await self._store.place(self._spec, self._number, request)
                    placed = True
                answer = await self._store.answer(self.id, self._number, _LOOK_S)
                if answer is not None:
                    return answer
                if await self._store.service(self._spec.model) is not None:
                    seen = time.monotonic()
            except NotFoundError as error:  # Redis has lost it, or another start of the run has dropped it
                raise ServiceUnavailableError(f"the service's learner is gone: {error}; start the run again") from error
            except (RedisError, OSError) as error:
                why = f"Redis does not answer: {reason(error)}"
                await asyncio.sleep(1)
            if time.monotonic() - seen > self._wait_s:
                raise ServiceUnavailableError(f"{why}, for {self._wait_s:.0f} s: the run goes on from its checkpoint")


def _noted(file: Path) -> str:
    """Id of the learner that the run has had; "" for none."""
    return file.read_text() if file.exists() else ""


def _note(file: Path, learner: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(learner)


def _refused(answer: Answer) -> NoReturn:
    message = (
        answer.message if isinstance(answer, RequestFailed) else f"the service has answered {type(answer).__name__}"
    )
    if isinstance(answer, RequestFailed) and answer.fault == "user":
        raise ConflictError(message)
    raise EngineError(message)
