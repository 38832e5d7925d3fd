"""A process that computes parts of another one's train steps: `mlx_parallm_train --join-run RUN`.

It has the base and, for one step, what the leader has told it. It tells that it lives, fetches weights and samples,
computes, answers, and forgets. When the leader is away it waits for the next one, `--learner-wait-s` long.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import msgspec
import structlog
from redis.exceptions import RedisError

from mlx_model.loader import LoadedModel
from shared.errors import NotFoundError, ServiceUnavailableError, SetupError
from shared.images.refs import Picture
from shared.process.settings import version
from shared.redis.connection.client import connect, require
from shared.redis.connection.faults import reason
from shared.redis.training.parcels import StoredParcel
from shared.redis.training.shared_runs import RunNow, SharedRun
from trainer.learn.advantages import ValueSums
from trainer.learn.compute import ComputeHost, Work, at_once
from trainer.learn.packing import unpack
from trainer.learn.steps import StepPlan
from trainer.learners.kinds import PolicyOptions, policy_learner
from trainer.learners.policy import PolicyLearner
from trainer.learners.shared_exchange import (
    BEAT_S,
    LOOK,
    LOOK_S,
    Answer,
    BeginStep,
    Computed,
    Done,
    Leave,
    NextUpdate,
    Ready,
    RunSpec,
    StepPart,
    Trouble,
    Word,
    gradient_bytes,
)
from trainer.learners.shared_step import PartComputation
from trainer.rollouts.sight import sight_of
from trainer.settings import TrainSettings
from trainer.sharing import ExchangeDtype
from trainer.state import Arrays

log = structlog.get_logger()

_word: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)
_part: msgspec.msgpack.Decoder[StepPart] = msgspec.msgpack.Decoder(StepPart)
_picture: msgspec.msgpack.Decoder[Picture] = msgspec.msgpack.Decoder(Picture)


class RunMember:
    """One process of a run that another one leads."""

    def __init__(self, settings: TrainSettings, run: SharedRun, host: ComputeHost, loaded: LoadedModel) -> None:
        self._settings, self.shared_run, self._host, self._loaded = settings, run, host, loaded
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.stopping = False
        self._now: RunNow | None = None
        self.spec: RunSpec | None = None
        self._learner: PolicyLearner | None = None
        self.sight = sight_of(loaded)
        self.after = "0-0"
        self._words: list[Word] = []
        self._part: PartComputation | None = None
        self._step = 0
        self._known: tuple[StoredParcel, Arrays] | None = None

    def stop(self) -> None:
        """End after the part that is computed now."""
        self.stopping = True

    async def take_part(self) -> None:
        """Until the run is done or `stop` was called; ServiceUnavailableError when no process leads it for too long."""
        self.after = await self.shared_run.words_end()
        await self._join(await self._leader())
        beating = asyncio.create_task(self._beat())
        log.info("member.ready", run=self.shared_run.name, member=self.name)
        try:
            while not self.stopping:
                if not self._words:
                    await self._hear(LOOK_S)
                if not self._words:
                    now = await self._leader()
                    if now.ended:
                        return
                    await self._join(now)
                for word in self._newest():
                    await self._obey(word)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            with contextlib.suppress(RedisError, OSError):
                await self.shared_run.members.gone(self.name)

    async def _beat(self) -> None:
        while True:
            try:
                await self.shared_run.members.beat(self.name)
            except (RedisError, OSError) as error:
                log.warning("member.redis_away", error=reason(error))
            await asyncio.sleep(BEAT_S)

    async def _leader(self) -> RunNow:
        until = time.monotonic() + self._settings.learner_wait_s
        while True:
            if (now := await self.shared_run.now()) is not None or self.stopping:
                return now or RunNow("", b"", ended=True)
            why = f"no process leads the run {self.shared_run.name!r}: start it with --learner shared"
            if time.monotonic() > until:
                raise ServiceUnavailableError(why)
            log.warning("member.no_leader", reason=why)
            await asyncio.sleep(LOOK_S)

    async def _join(self, now: RunNow) -> None:
        """A new leader may have another adapter; SetupError when this process cannot train it."""
        if self._now is not None and now.epoch == self._now.epoch:
            return
        spec = msgspec.msgpack.decode(now.spec, type=RunSpec)
        if spec != self.spec:
            options = options_of(spec, self._settings, self._loaded.card.base_sha256)
            try:
                model = self._loaded.model
                self._learner = await self._host.run(at_once(lambda: policy_learner(model, options, self.sight)))
            except ValueError as error:
                raise SetupError(f"the run {self.shared_run.name!r} has another model: {error}") from error
        self._now, self.spec, self._part = now, spec, None

    async def _hear(self, within_s: float) -> None:
        for place, body in await self.shared_run.words(self.after, within_s):
            self.after = place
            try:
                self._words.append(_word.decode(body))
            except msgspec.DecodeError as error:
                log.warning("member.unreadable", error=str(error))

    def _newest(self) -> list[Word]:
        """Messages that have arrived since the last call, without those of steps that are over."""
        words, self._words = self._words, []
        last = max((at for at, word in enumerate(words) if isinstance(word, BeginStep)), default=0)
        return words[last:]

    # -- what is said

    async def _obey(self, word: Word) -> None:
        if self._now is None or word.epoch != self._now.epoch:
            await self._join(await self._leader())
            if self._now is None or word.epoch != self._now.epoch:
                return
        try:
            match word:
                case BeginStep():
                    await self._begin(word)
                case NextUpdate() if self._part is not None and word.step == self._step:
                    await self.compute(word.update, word.weights, word.known)
                case Ready():
                    await self._weights(word.weights)
                case Leave() if word.member == self.name:
                    raise ServiceUnavailableError(f"the leader has sent this process off: {word.reason}")
        except NotFoundError:  # the step is over
            self._part = None

    async def _begin(self, word: BeginStep) -> None:
        self._part, self._step = None, word.step
        if self.name not in word.parts:
            return
        learner = self._learner
        assert learner is not None, "it has joined"
        body = await self.shared_run.parcels.get(word.parts[self.name])
        part = await asyncio.to_thread(_part.decode, body)
        origin = None if word.origin is None else unpack(await self.shared_run.parcels.get(word.origin))["weights"]
        learner.optimizer.policy.origin = origin
        await self._look_at(part.plan, word.pictures)
        self._part = PartComputation(learner.optimizer, part.plan, part.policy_step)
        await self.compute(0 if learner.optimizer.options.value is None else LOOK, word.weights)

    async def _look_at(self, plan: StepPlan, pictures: Mapping[str, StoredParcel]) -> None:
        """Fetch what is not known of the part's images."""
        keys = {image.key for mini in plan.minis for group in mini for image in group.images}
        for key in keys:
            assert self.sight is not None, "a run whose base is ours sees what we see"
            if not self.sight.knows(key) and key.hex() in pictures:
                data = await self.shared_run.parcels.get(pictures[key.hex()])
                self.sight.show(await asyncio.to_thread(_picture.decode, data))

    async def compute(self, update: int, parcel: StoredParcel, known: ValueSums | None = None) -> None:
        assert self._now is not None and self._part is not None
        weights, part = await self._weights(parcel), self._part
        try:
            computed = await self._host.run(lambda: self.gradient(part, update, weights, known))
        except Exception as error:
            log.exception("member.failed")
            message = f"{type(error).__name__}: {error}"
            await self._send(Trouble(self._now.epoch, self.name, self._step, message))
            raise ServiceUnavailableError(f"this part of a train step could not be computed: {message}") from error
        await self._hear(0.001)
        if any(isinstance(word, BeginStep) for word in self._words):  # it took too long: nobody wants it any more
            self._part = None
            return
        parcelled = None
        if computed.gradient:
            data = await asyncio.to_thread(gradient_bytes, computed.gradient, self._exchange)
            parcelled = await self.shared_run.parcels.put(data)
        await self._send(
            Done(
                self._now.epoch,
                self.name,
                self._step,
                update,
                parcelled,
                computed.sums,
                computed.positions,
                computed.known,
            )
        )

    @property
    def _exchange(self) -> ExchangeDtype:
        assert self.spec is not None
        return self.spec.exchange

    def gradient(self, part: PartComputation, update: int, weights: Arrays, known: ValueSums | None) -> Work[Computed]:
        assert self._learner is not None
        self._learner.optimizer.policy.load(weights)
        return (yield from part.look() if update == LOOK else part.gradient(update, known))

    async def _weights(self, parcel: StoredParcel) -> Arrays:
        if self._known is None or self._known[0] != parcel:
            data = await self.shared_run.parcels.get(parcel)
            self._known = parcel, (await asyncio.to_thread(unpack, data, "weights"))["weights"]
        return self._known[1]

    async def _send(self, answer: Answer) -> None:
        await self.shared_run.answer(msgspec.msgpack.encode(answer))


async def take_part(
    settings: TrainSettings,
    host: ComputeHost,
    load: Callable[[], Awaitable[LoadedModel]],
    begun: Callable[[RunMember], None],
) -> None:
    """Compute with a run until it is done; `begun` gets the member before its first part."""
    url = await settings.ring_url()
    if not url:
        raise SetupError("a trainer joins a run over the ring: give its Redis (--redis) or an api (--connect-to)")
    await require(url)
    async with contextlib.aclosing(connect(url)) as redis, contextlib.aclosing(connect(url, blocking=True)) as blocking:
        run = SharedRun(redis, settings.join_run, blocking=blocking)
        member = RunMember(settings, run, host, await load())
        begun(member)
        await member.take_part()
    log.info("member.ended", run=settings.join_run)


SAME = (
    "lora_kind", "lora_rank", "lora_scale", "lora_targets", "seed", "loss", "clip_low", "clip_high", "kl_coefficient",
    "entropy_bonus", "importance_truncation", "importance_level", "dual_clip", "ratio", "minibatches", "update_epochs",
    "head_hidden", "head_only", "head_learning_rate", "discount", "gae_lambda", "value_coefficient", "value_clip",
    "advantage_scale",
)  # fmt: skip
_OWN = ("microbatch_tokens", "microbatch_s", "microbatch_gb", "gradient_checkpointing")  # as this machine can


def run_spec(settings: TrainSettings, options: PolicyOptions, model: str, base_sha256: str) -> RunSpec:
    """Specification of a run for the processes that may join it."""
    return RunSpec(
        model=model,
        base_sha256=base_sha256,
        options=msgspec.msgpack.encode(options),
        settings=settings.model_dump(mode="json", include=set(SAME)),
        exchange=settings.exchange,
        version=version(),
    )


def options_of(spec: RunSpec, mine: TrainSettings, base_sha256: str) -> PolicyOptions:
    """Options of a member's learner; SetupError when its base, version or a setting of its own differs from the
    run's.
    """
    if spec.version != version():
        raise SetupError(f"the run {mine.join_run!r} is one of version {spec.version}, this is {version()}")
    if base_sha256 != spec.base_sha256:
        raise SetupError(
            f"the run {mine.join_run!r} trains another base than {mine.model}: it is {spec.model} "
            f"({spec.base_sha256[:12]}), this one {base_sha256[:12]}; weights and dtype must be the same"
        )
    given = mine.model_dump(mode="json", include=set(SAME) & mine.model_fields_set)
    for name, value in given.items():
        if value != spec.settings.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise SetupError(f"{flag} {value}, but the run {mine.join_run!r} has {spec.settings.get(name)}")
    options = msgspec.msgpack.decode(spec.options, type=PolicyOptions)
    sizes = {name for name in _OWN if name in mine.model_fields_set}
    optimize = options.optimize
    if "microbatch_tokens" in sizes:
        optimize = replace(optimize, microbatch_tokens=mine.microbatch_tokens)
    if "microbatch_s" in sizes:
        optimize = replace(optimize, microbatch_s=mine.microbatch_s)
    if "microbatch_gb" in sizes:
        optimize = replace(optimize, microbatch_bytes=int(mine.microbatch_gb * 1e9))
    layers = mine.gradient_checkpointing if "gradient_checkpointing" in sizes else options.checkpoint_layers
    return replace(options, optimize=optimize, checkpoint_layers=layers)
