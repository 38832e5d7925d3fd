"""One learner in a service's memory: its requests in order, their answers, its state.

Invariants.
- A request is carried out after the one before it, and answered once. What its service could not answer before it died
  is carried out again by the next one, from the last state that is stored (shared/redis/training/learner_store.py).
- A request's error is its answer. It ends neither the learner nor the service.
- A state is stored between two requests only: in the midst of one it may hold a part of it.
- What was answered before its service died has the same effect when it is carried out again: what had failed changes
  nothing, and what had not must not fail now.
- A request that ends its service (for want of memory) does so MOST_TRIES times at most, and is then refused.
- A `LoadRequest` stores the new state together with its answer, because the save that it read may have expired later.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import structlog
from safetensors import SafetensorError
from safetensors.numpy import save_file

from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE, prepared
from shared.errors import ConflictError, EngineError, NotFoundError, ParallmError
from shared.images.refs import Picture
from shared.learners import (
    Answer,
    BeginDone,
    BeginRequest,
    CallDone,
    CallRequest,
    LoadDone,
    LoadRequest,
    PassRequest,
    PublishRequest,
    RefusedRequest,
    Request,
    RequestFailed,
    SaveDone,
    SaveInfo,
    SaveRequest,
    StepRequest,
    checked,
)
from shared.owners import working_for
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.chunks import CHUNK_BYTES
from shared.redis.training.learner_store import MOST_BYTES, HeldLearner, LearnerStore
from shared.sequences import ModelCard
from trainer.learn.compute import Work, at_once
from trainer.rollouts.pictures import ChatPictures
from trainer.service.learner import ServiceLearner
from trainer.service.run_learner import RunLearner, read_call
from trainer.service.turns import Turns

log = structlog.get_logger()

T = TypeVar("T")
_LOOK_S = (0.005, 0.25)  # pauses between looks for a request, first and longest
DAMAGED = (
    ValueError,
    KeyError,
    TypeError,
    SafetensorError,
    ConflictError,
    NotFoundError,
)  # of a state: no way to read it
_SAID = "said"  # a save: the last long answer to a run
MOST_TRIES = 3  # of a request that ends its service


class LostError(Exception):
    """Another service has the learner now."""


class Seat:
    """A learner that this service owns."""

    def __init__(
        self,
        held: HeldLearner,
        store: LearnerStore,
        adapters: AdapterStore,
        turns: Turns,
        card: ModelCard,
        *,
        state_every: int,
        state_after_s: float,
        max_saves: int,
        pictures: ChatPictures | None = None,
    ) -> None:
        """`pictures`: reads the images of passes; None: this service learns from none."""
        self._held, self._store, self._adapters, self._turns, self._card = held, store, adapters, turns, card
        self._state_every, self._state_after_s = state_every, state_after_s
        self._max_saves = max_saves
        self._pictures = pictures
        self._learner: ServiceLearner | RunLearner | None = None
        self._number = held.applied  # of the last request that the learner has carried out
        self._applied, self._state = held.applied, held.state  # of the stored state
        self._bytes = 0  # of the requests since then
        self._last = time.monotonic()
        self._whole = False  # the learner is between two requests
        self._leaving = False
        self._broken: RequestFailed | None = None  # what it answers where there is no learner

    @property
    def idle_s(self) -> float:
        """Since the last request was done; 0 in the midst of one."""
        return time.monotonic() - self._last if self._whole else 0.0

    def leave(self) -> None:
        """End after the present request."""
        self._leaving = True

    async def run(self, build: Callable[[], ServiceLearner | RunLearner]) -> None:
        """Carry out requests until the learner is to leave; LostError when another service has taken it."""
        try:
            self._learner = await self._compute(at_once(build))
            if self._held.state:
                state = await self._store.state(self._held)
                learner = self._learner
                await self._compute(at_once(lambda: learner.restore(state)))
        except DAMAGED as error:
            kind = type(error).__name__
            self._learner, self._broken = None, RequestFailed(f"this learner cannot be trained: {kind}: {error}")
        self._last, self._whole, pause = time.monotonic(), True, _LOOK_S[0]
        while not self._leaving:
            found = await self._store.request(self._held.id, self._number + 1)
            if found is not None:
                self._whole, pause = False, _LOOK_S[0]
                await self._carry_out(self._number + 1, *found)
                self._last, self._whole = time.monotonic(), True
            elif self._broken is None and self._number > self._applied and self.idle_s > self._state_after_s:
                await self.store_state()
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LOOK_S[1])

    async def store_state(self) -> None:
        """Make the present state count, and let its requests go; nothing in the midst of a request. LostError."""
        if self._number > self._applied and self._whole and self._learner is not None:
            self._whole = False  # cut off in the midst, it is not known whether it counts
            await self._store_answer(self._number, None, stores=True)
            self._whole = True

    @property
    def _mine(self) -> ServiceLearner:
        if not isinstance(self._learner, ServiceLearner):
            raise ConflictError("this learner is that of a run of mlx_parallm_train, which alone asks it")
        return self._learner

    async def _compute(self, start: Callable[[], Work[T]]) -> T:
        return await self._turns.run(self._held.id, start, self._held.spec.owner)

    async def _carry_out(self, number: int, request: Request, size: int) -> None:
        again = number <= self._held.done  # it was answered before its service died
        save: SaveInfo | None = None
        answer: Answer | None = None
        if self._broken is not None:
            answer = self._broken
        elif not (again and _changes_nothing(request)):
            answer, save = await self._outcome(number, request, again)
            learner = self._learner
            passed = (isinstance(request, PassRequest) and request.backward) or _refused(request, "pass")
            spoils = passed or isinstance(request, StepRequest) or _refused(request, "step")
            if spoils and isinstance(answer, RequestFailed) and isinstance(learner, ServiceLearner):
                reason = answer.message if passed else ""
                await self._compute(at_once(lambda: learner.spoil(reason)))
        self._number = number
        self._bytes += size
        full = number - self._applied >= self._state_every or self._bytes > MOST_BYTES // 4
        loaded = isinstance(request, LoadRequest) and not isinstance(answer, RequestFailed)
        uploaded = request.upload if isinstance(request, CallRequest) else ""
        loaded = loaded or bool(uploaded)
        stores = (full or loaded) and self._learner is not None
        former = await self._published(save) if save is not None and not again else None
        await self._store_answer(number, None if again else answer, stores=stores, save=None if again else save)
        if former is not None:
            await self._adapters.unpin(self._held.spec.adapter, former.version, f"save-{former.name}")
        if uploaded:
            await self._store.drop_asked(self._held.id, uploaded)

    async def _outcome(self, number: int, request: Request, again: bool) -> tuple[Answer, SaveInfo | None]:
        """Result of a request; EngineError for one that fails now although it was answered before."""
        if number > self._held.done + 1:
            return await self._attempt(number, request)
        former: Answer | None = None
        if again:
            with contextlib.suppress(NotFoundError):  # long ago
                former = await self._store.answer(self._held.id, number)
        if isinstance(former, RequestFailed) and not isinstance(request, CallRequest):
            return former, None
        suspect = await self._store.tries(self._held.id, number) > 0
        # Of those alone, the learner that is noted when the service dies has ended it.
        async with self._turns.alone if suspect else contextlib.nullcontext():
            tries = await self._store.begun(self._held, number)
            if not tries:
                raise LostError
            if tries > MOST_TRIES:
                return self._given_up(number, again), None
            failed = False
            try:
                answer, save = await self._attempt(number, request)
                failed = (
                    isinstance(answer, RequestFailed) and former is not None and not isinstance(former, RequestFailed)
                )
            finally:
                if not failed:
                    await self._store.ended(self._held)
        if failed:
            log.error("learner.not_again", learner=self._held.id, request=number, tries=tries)
            raise EngineError(f"request {number} was answered, and cannot be carried out again")
        return answer, save

    def _given_up(self, number: int, again: bool) -> RequestFailed:
        log.error("learner.given_up", learner=self._held.id, request=number)
        failed = RequestFailed(f"request {number} has ended the service {MOST_TRIES} times (out of memory?)", "server")
        if again:  # what it has changed is lost, so that nothing that came after it can be true
            self._learner, self._broken = None, failed
        return failed

    async def _attempt(self, number: int, request: Request) -> tuple[Answer, SaveInfo | None]:
        try:
            return await self._answer(request)
        except ParallmError as error:
            return RequestFailed(str(error), "server" if error.status >= 500 else "user"), None
        except (ValueError, RuntimeError, MemoryError) as error:
            # MLX raises these, for want of memory, too. Its text may hold nothing of the data.
            log.exception("learner.failed", learner=self._held.id, request=number)
            return RequestFailed(f"the service could not compute this: {type(error).__name__}", "server"), None

    async def _answer(self, request: Request) -> tuple[Answer, SaveInfo | None]:
        if isinstance(request, BeginRequest):
            return BeginDone(), None
        if isinstance(request, CallRequest):
            return await self._called(request)
        if isinstance(request, RefusedRequest):
            return RequestFailed(request.message), None
        learner = self._mine
        match request:
            case PassRequest():
                await asyncio.to_thread(checked, request, self._card.vocab_size, self._card.context_length)
                pictures = await self._seen(request)
                return await self._compute(lambda: learner.run(request, pictures)), None
            case StepRequest():
                return await self._compute(at_once(lambda: learner.step(request))), None
            case LoadRequest():
                state = await self._store.saved(request.learner, request.name)
                await self._compute(at_once(lambda: learner.load(state, optimizer=request.optimizer)))
                return LoadDone(learner.steps), None
            case SaveRequest():
                await self._check_room(request)
                made = learner.state if request.kind == "state" else learner.weights_alone
                state = await self._compute(at_once(made))
                bytes_id = await self._store.put_saved(self._held.id, state)
                info = self._info(request, size=len(state), bytes_id=bytes_id)
                return SaveDone(request.name, request.kind), info
            case PublishRequest():
                if request.ttl_s:
                    await self._check_room(request)
                version, size = await self._publish()
                done = SaveDone(request.name, "sampler", version)
                if not request.ttl_s:
                    return done, None
                await self._adapters.pin(self._held.spec.adapter, version, f"save-{request.name}", request.ttl_s)
                return done, self._info(request, size=size, version=version)

    async def _seen(self, request: PassRequest) -> dict[bytes, Picture]:
        """The tiles of a pass's images, by key."""
        images = [image for datum in request.data for image in datum.images]
        if not images or self._pictures is None:
            return {}
        return await self._pictures.of_refs(images, request.files, self._held.spec.owner)

    async def _called(self, request: CallRequest) -> tuple[Answer, SaveInfo | None]:
        """Result of a call of a run's learner; a large one is stored as a save, which the next one replaces."""
        learner, id = self._learner, self._held.id
        if not isinstance(learner, RunLearner):
            raise ConflictError("this learner is not that of a run of mlx_parallm_train")
        body = await self._store.asked(id, request.upload) if request.upload else request.body
        method, arguments = await asyncio.to_thread(read_call, body)
        said = await self._compute(lambda: learner.answer(method, arguments))
        if len(said) <= CHUNK_BYTES:
            return CallDone(said), None
        now = time.time_ns() // 1_000_000
        expires_ms = now + 1000 * keys.LEARNER_ANSWER_TTL_S
        bytes_id = await self._store.put_saved(id, said)
        info = SaveInfo(
            name=_SAID, kind="state", created_ms=now, expires_ms=expires_ms, size=len(said), bytes_id=bytes_id
        )
        return CallDone(name=_SAID), info

    async def _published(self, save: SaveInfo) -> SaveInfo | None:
        """The version that has the name of a new one, and is no save any more once that counts."""
        saves = await self._store.saves(self._held.id) if save.version else []
        return next((each for each in saves if each.kind == save.kind and each.name == save.name), None)

    async def _check_room(self, request: SaveRequest | PublishRequest) -> None:
        """ConflictError when there is no room for one more save; one of the same name makes room for itself."""
        for info in await self._store.saves(self._held.id, expired=True):
            await self._store.drop_save(self._held.id, info)
        saves = await self._store.saves(self._held.id)
        if len(saves) >= self._max_saves and all(save.name != request.name for save in saves):
            raise ConflictError(f"this learner has {len(saves)} saves, the most that it may have: delete some")

    def _info(
        self, request: SaveRequest | PublishRequest, *, size: int, bytes_id: str = "", version: int = 0
    ) -> SaveInfo:
        now = time.time_ns() // 1_000_000
        lives_s = min(request.ttl_s or keys.LEARNER_SAVE_TTL_S, keys.LEARNER_SAVE_TTL_S)
        return SaveInfo(
            name=request.name,
            kind=request.kind if isinstance(request, SaveRequest) else "sampler",
            created_ms=now,
            expires_ms=now + 1000 * lives_s,
            size=size,
            bytes_id=bytes_id,
            version=version,
            step=self._mine.steps,
            metadata=request.metadata,
        )

    async def _publish(self) -> tuple[int, int]:
        """The present weights as the next version of the learner's adapter: its number and its size."""
        weights = await self._compute(at_once(self._mine.weights))
        spec = self._held.spec

        def write(folder: Path) -> None:
            save_file(weights, folder / MLX_FILE)
            (folder / CONFIG_FILE).write_bytes(self._mine.config())

        with contextlib.ExitStack() as open_files, working_for(spec.owner):
            try:
                folder = Path(open_files.enter_context(TemporaryDirectory(prefix="parallm-learner-")))
                await asyncio.to_thread(write, folder)
                shapes, hidden, dtype = self._card.modules, self._card.head_inputs, self._card.dtype
                made = prepared(folder, shapes=shapes, hidden_size=hidden, dtype=dtype)
                adapter = open_files.enter_context(made)
            except (OSError, SafetensorError) as error:
                raise EngineError(f"the service could not write the version to its disk: {error}") from error
            manifest = await self._adapters.publish(
                spec.adapter, adapter, base_sha256=self._card.base_sha256, source="learner"
            )
        return manifest.version, manifest.size

    async def _store_answer(
        self, number: int, answer: Answer | None, *, stores: bool, save: SaveInfo | None = None
    ) -> None:
        state = ""
        if stores:
            assert self._learner is not None
            data = await self._compute(at_once(self._learner.state))
            state = await self._store.put_state(self._held.id, data)
        elif answer is None:
            return
        if not await self._store.put_answer(self._held, number, answer, state=state, before=self._state, save=save):
            raise LostError
        if stores:
            self._applied, self._state, self._bytes = number, state, 0


def _changes_nothing(request: Request) -> bool:
    return isinstance(request, SaveRequest | PublishRequest) or (
        isinstance(request, PassRequest) and not request.backward
    )


def _refused(request: Request, of: str) -> bool:
    return isinstance(request, RefusedRequest) and request.of == of


def gone(error: BaseException) -> bool:
    """True if a seat ended because its learner no longer exists."""
    return isinstance(error, NotFoundError)
