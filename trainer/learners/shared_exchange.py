"""Gradients and weights as bytes, and the leader's side of the exchange: who is alive, has answered, or is lost."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
from redis.exceptions import RedisError

from shared.errors import ConflictError, NotFoundError
from shared.images.refs import Picture
from shared.redis.connection.faults import reason
from shared.redis.training.parcels import StoredParcel
from shared.redis.training.shared_runs import SharedRun
from trainer.learn.advantages import ValueSums
from trainer.learn.packing import pack, unpack
from trainer.learn.steps import StepPlan, Sums
from trainer.sharing import ExchangeDtype
from trainer.state import Arrays

log = structlog.get_logger()


LOOK = -1  # in the place of an update


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A run that others may join."""

    model: str  # served name of the base
    base_sha256: str
    options: bytes  # PolicyOptions (trainer/learners/kinds.py), msgpack
    settings: dict[str, object]  # those that a member may not have of its own
    exchange: ExchangeDtype = "float32"  # of gradients
    version: str = ""  # of the leader's package


class StepPart(msgspec.Struct, frozen=True):
    """One process's part of a train step."""

    plan: StepPlan
    policy_step: int


@dataclass(frozen=True)
class Computed:
    """A part of one update's gradient; of the whole step's loss, so that parts add up."""

    gradient: Arrays  # none: no token is in the loss, or it was only looked at
    sums: Sums
    positions: int = 0
    seconds: float = 0.0
    known: ValueSums | None = None  # of a look

    @property
    def finite(self) -> bool:
        """True if every number is finite."""
        return (self.known is None or self.known.finite) and all(
            np.isfinite(value).all() for value in self.gradient.values()
        )


class BeginStep(msgspec.Struct, frozen=True, tag="begin"):
    """A train step begins, with its look or first update: its first weights, a `StepPart` for each member that takes
    part, and the images of their samples.
    """

    epoch: str
    step: int
    weights: StoredParcel
    parts: dict[str, StoredParcel]
    origin: StoredParcel | None = None  # what the run began with, where the loss needs it
    pictures: dict[str, StoredParcel] = {}  # by their keys in hex: `Picture`, msgpack


class NextUpdate(msgspec.Struct, frozen=True, tag="go"):
    """The next update of the step, and its weights."""

    epoch: str
    step: int
    update: int
    weights: StoredParcel
    known: ValueSums | None = None  # of all parts, with a value head


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The weights that the next step will most likely have."""

    epoch: str
    weights: StoredParcel


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Order to a member to leave, because its results are wrong."""

    epoch: str
    member: str
    reason: str


Word = BeginStep | NextUpdate | Ready | Leave


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A member's gradient for one update, or its look."""

    epoch: str
    member: str
    step: int
    update: int
    gradient: StoredParcel | None  # None: its part has no token in the loss
    sums: Sums
    positions: int
    known: ValueSums | None = None


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """A member could not compute its part."""

    epoch: str
    member: str
    step: int
    message: str


Answer = Done | Trouble

BEAT_S = 1.5
LOOK_S = 1.0  # how long one look for an answer takes, before it is asked who lives
PATIENCE = 10.0  # a living member that takes so many times as long as it should is given up
LEAST_PATIENCE_S = 30.0
_FRESH_S = 300.0  # half of a parcel's time to live
_PICTURE_BYTES = 256 << 20  # of images that stay in Redis between two steps, for new members and later steps
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def gradient_bytes(gradient: Arrays, dtype: ExchangeDtype) -> bytes:
    """A gradient on its way; bfloat16 rounds to the nearest, ties to even."""
    if dtype == "float32":
        return pack({"gradient": gradient})
    return pack({"rounded": {name: _rounded(value) for name, value in gradient.items()}})


def gradient_of(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Inverse of `gradient_bytes`; ValueError when the shapes are those of another adapter."""
    groups = unpack(data)
    if "rounded" in groups:
        found: Arrays = {name: _widened(value) for name, value in groups["rounded"].items()}
    else:
        found = groups.get("gradient", {})
    if {name: tuple(value.shape) for name, value in found.items()} != dict(shapes):
        raise ValueError("the gradient is of another adapter")
    return found


def _rounded(value: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # A NaN may not round to infinity, nor infinity to NaN.
    return np.where(np.isfinite(value), rounded, (bits >> 16) | np.isnan(value) * np.uint32(64)).astype(np.uint16)


def _widened(value: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (value.astype(np.uint32) << 16).view(np.float32)


class CachedParcel:
    """Bytes that are put again only when they change, or grow old."""

    def __init__(self, run: SharedRun) -> None:
        self._run = run
        self._data = b""
        self._put: tuple[StoredParcel, float] | None = None
        self._one = asyncio.Lock()

    async def of(self, arrays: Arrays) -> StoredParcel:
        """Store the arrays unless they are stored already, and return where."""
        async with self._one:
            data = await asyncio.to_thread(pack, {"weights": arrays})
            if self._put is not None:
                parcel, at = self._put
                if data == self._data and time.monotonic() - at < _FRESH_S:
                    return parcel
                await self._run.parcels.drop(parcel)
            self._data, parcel = data, await self._run.parcels.put(data)
            self._put = parcel, time.monotonic()
            return parcel


class RunLead:
    """A run's lead, from `begin` on. Belongs to the event loop; ConflictError when another process has taken it."""

    def __init__(self, run: SharedRun) -> None:
        self._run = run
        self.epoch = secrets.token_hex(6)
        self.exchange: ExchangeDtype = "float32"
        self._weights, self._origin = CachedParcel(run), CachedParcel(run)
        self._step = 0
        self._after = "0-0"
        self._beating: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._lost = self._done = False
        self._parts: list[StoredParcel] = []
        self._pictures: dict[bytes, tuple[StoredParcel, float]] = {}  # images that were put, by key, and when
        self._within_s, self._since = float("inf"), 0.0  # seconds, and from when on time.monotonic's clock: `expect`

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beating is None:
            return
        for task in (self._beating, self._closing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._run.leave(self.epoch, done=self._done)

    async def begin(self, spec: RunSpec) -> None:
        """Others may join from now on."""
        body = msgspec.msgpack.encode(spec)
        self.exchange = spec.exchange
        self._after = await self._run.answers_end()
        await self._run.lead(self.epoch, body, begin=True)
        self._beating = asyncio.create_task(self._beat(body))

    async def _beat(self, body: bytes) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                if not await self._run.lead(self.epoch, body, begin=False):
                    self._lost = True
                    log.error("shared.lead_lost", run=self._run.name)
                    return
            except (RedisError, OSError) as error:
                log.warning("shared.redis_away", error=reason(error))

    def end(self) -> None:
        """Mark the run as done: at the exit its members are notified that they may go."""
        self._done = True

    async def members(self) -> list[str]:
        """Members that can take part in a step; [] while Redis is away."""
        if self._lost:
            raise ConflictError(f"another process leads the run {self._run.name!r}")
        try:
            return await self._run.members.alive()
        except (RedisError, OSError) as error:
            log.warning("shared.redis_away", error=reason(error))
            return []

    # -- one train step

    async def open(
        self,
        weights: Arrays,
        origin: Arrays | None,
        parts: Mapping[str, StepPart],
        pictures: Sequence[Picture] = (),
    ) -> None:
        """Announce a step to the members; `pictures` are the images of its samples."""
        if self._closing is not None:
            await self._closing
        self._step += 1
        told = {}
        for member, part in parts.items():
            told[member] = await self._run.parcels.put(await asyncio.to_thread(msgspec.msgpack.encode, part))
        self._parts = list(told.values())
        first = None if origin is None else await self._origin.of(origin)
        shown = await self._shown(pictures)
        await self._send(BeginStep(self.epoch, self._step, await self._weights.of(weights), told, first, shown))

    async def _shown(self, pictures: Sequence[Picture]) -> dict[str, StoredParcel]:
        """Parcels of the images, by key; members cache them, too."""
        now = time.monotonic()
        self._pictures = {key: put for key, put in self._pictures.items() if now - put[1] < _FRESH_S}
        for picture in pictures:
            if picture.key not in self._pictures:
                data = await asyncio.to_thread(msgspec.msgpack.encode, picture)
                self._pictures[picture.key] = await self._run.parcels.put(data), now
        return {picture.key.hex(): self._pictures[picture.key][0] for picture in pictures}

    def expect(self, within_s: float) -> None:
        """Give up members that have not answered this long after now, or after the announcement."""
        self._within_s, self._since = within_s, time.monotonic()

    async def go(self, update: int, weights: Arrays, known: ValueSums | None = None) -> None:
        """Announce the next update to the members."""
        await self._send(NextUpdate(self.epoch, self._step, update, await self._weights.of(weights), known))

    def close(self, weights: Arrays) -> None:
        """The step is over, and these are most likely the next one's weights: members get them in the meantime."""
        self._closing = asyncio.create_task(self._close(weights))

    async def _close(self, weights: Arrays) -> None:
        try:
            for parcel in self._parts:
                await self._run.parcels.drop(parcel)
            self._parts = []
            kept = sum(parcel.size for parcel, _ in self._pictures.values())
            while kept > _PICTURE_BYTES:
                oldest, _ = self._pictures.pop(next(iter(self._pictures)))
                kept -= oldest.size
                await self._run.parcels.drop(oldest)
            await self._send(Ready(self.epoch, await self._weights.of(weights)))
        except (RedisError, OSError) as error:
            log.warning("shared.redis_away", error=reason(error))

    async def send_off(self, member: str, why: str) -> None:
        """Order a member to leave the run."""
        log.error("shared.member_wrong", member=member, reason=why)
        await self._send(Leave(self.epoch, member, why))

    async def _send(self, word: Word) -> None:
        await self._run.send(msgspec.msgpack.encode(word))

    async def collect(
        self, update: int, wanted: Collection[str], shapes: Mapping[str, tuple[int, ...]], began: float
    ) -> tuple[dict[str, Computed], set[str]]:
        """Gradients by member, for answers in time, and the late members; all others are dead, or have failed.

        How long one took is counted from `began`, on perf_counter's clock: the way of its bytes is a part of it.
        """
        found: dict[str, Computed] = {}
        waited, told = set(wanted), time.monotonic()
        while waited:
            for place, body in await self._run.answers(self._after, LOOK_S):
                self._after = place
                try:
                    answer = _answer.decode(body)
                except msgspec.DecodeError as error:
                    log.warning("shared.unreadable", error=str(error))
                    continue
                if isinstance(answer, Done) and self._at(update) != (answer.epoch, answer.step, answer.update):
                    await self._drop(answer)
                elif answer.member in waited and (answer.epoch, answer.step) == (self.epoch, self._step):
                    waited.discard(answer.member)
                    computed = await self._computed(answer, shapes, began)
                    if computed is not None:
                        found[answer.member] = computed
            for member in waited - set(await self._run.members.alive()):
                log.warning("shared.member_lost", member=member, reason="it is dead, or was stopped")
                waited.discard(member)
            if waited and time.monotonic() > max(told, self._since) + self._within_s:
                log.warning("shared.member_lost", members=sorted(waited), reason="it takes too long")
                break
        return found, waited

    def _at(self, update: int) -> tuple[str, int, int]:
        return self.epoch, self._step, update

    async def _computed(self, answer: Answer, shapes: Mapping[str, tuple[int, ...]], began: float) -> Computed | None:
        if isinstance(answer, Trouble):
            log.warning("shared.member_lost", member=answer.member, reason=answer.message)
            return None
        gradient: Arrays = {}
        if answer.gradient is not None:
            try:
                data = await self._run.parcels.get(answer.gradient)
                gradient = await asyncio.to_thread(gradient_of, data, shapes)
            except (NotFoundError, ValueError) as error:
                log.warning("shared.member_lost", member=answer.member, reason=str(error))
                return None
            await self._drop(answer)
        return Computed(gradient, answer.sums, answer.positions, time.perf_counter() - began, answer.known)

    async def _drop(self, answer: Done) -> None:
        if answer.gradient is not None:
            await self._run.parcels.drop(answer.gradient)
