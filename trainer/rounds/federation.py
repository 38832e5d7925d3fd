"""A run's side of a federation: it lives, tells what it has changed, and gets the average, which one of them makes.

Who is alive is waited for, until `--sync-wait-s` after the first change of a round; who has died is not. A run that was
away finds that the round is over, and goes on from its average: what it had changed meanwhile is in none.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec
import structlog
from redis.exceptions import RedisError

from shared.errors import NotFoundError, ServiceUnavailableError, SetupError
from shared.redis import keys
from shared.redis.connection.client import connect, require
from shared.redis.training.parcels import Parcel
from shared.redis.training.rounds import Change, RoundStore, Standing
from trainer.learn.packing import pack, unpack
from trainer.rounds.average import Average, Learned, averaged, usable
from trainer.settings import TrainSettings
from trainer.state import Arrays, GradientMeans

log = structlog.get_logger()

BEAT_S = 1.5
LOOK_S = 0.2
_SAME = (
    *("lora_kind", "lora_rank", "lora_scale", "lora_targets"),
    *("sync_every", "sync_moments", "outer_rate", "outer_momentum"),
)


class Federation:
    """One run's place in it. Enter it to take part."""

    def __init__(self, store: RoundStore, member: str, spec: dict[str, object], settings: TrainSettings) -> None:
        self._store, self._member, self._spec, self._settings = store, member, spec, settings
        self._standing: Standing | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if (now := await self._store.now()) is not None:
            self._check(now.spec)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            with contextlib.suppress(RedisError, OSError):
                await self._store.members.gone(self._member)

    def _check(self, spec: bytes) -> None:
        theirs: dict[str, object] = msgspec.json.decode(spec)
        mine = msgspec.json.decode(msgspec.json.encode(self._spec))
        for name, value in mine.items():
            usual = "own" if name == "sync_moments" else None  # of a federation from before there was a choice
            if theirs.get(name, usual) != value:
                named = "another base" if name == "base" else f"--{name.replace('_', '-')} {value}"
                has = f"the federation {self._store.name!r} has {theirs.get(name)}"
                raise SetupError(f"{named}: {has}")

    @property
    def averages_moments(self) -> bool:
        """Whether runs tell their moments, and go on with those of all."""
        return self._settings.sync_moments == "average"

    @property
    def round(self) -> int:
        """The last one that this run knows; -1: it has not joined."""
        return -1 if self._standing is None else self._standing.round

    async def join(self, weights: Arrays) -> Arrays:
        """Where to begin: the last average, or these weights where there is none yet."""
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        if await self._store.now() is None:
            state = await self._store.parcels.put(pack({"weights": weights, "momentum": {}}), keys.ROUNDS_TTL_S)
            await self._store.begin(msgspec.json.encode(self._spec), state)
        now = await self._store.now()
        if now is None:
            raise ServiceUnavailableError("the federation's Redis does not keep what is written to it")
        self._check(now.spec)
        return (await self._read(now)).weights

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):
                await self._store.members.beat(self._member)
            await asyncio.sleep(BEAT_S)

    async def exchange(self, learned: Learned) -> Average:
        """Tell what was changed since the last average; the next one."""
        assert self._standing is not None, "it has joined"
        number, began = self._standing.round + 1, time.monotonic()
        now = await self._now()
        if now.round < number:
            await self._tell(number, learned)
        while (now := await self._now()).round < number:
            told, waited_s = await self._store.told(number)
            missing = set(await self._store.members.alive()) - told.keys()
            if (not missing or waited_s > self._settings.sync_wait_s) and await self._store.turn(self._member):
                try:
                    await self._close_once(number)
                finally:
                    await self._store.turn_over()
            else:
                await asyncio.sleep(LOOK_S)
        average = await self._read(now)
        counted = self._member in now.taken and self.round == now.round == number
        log.info(
            "round.over",
            round=now.round,
            runs=len(now.taken),
            counted=counted,
            seconds=round(time.monotonic() - began, 1),
        )
        return average

    async def _tell(self, number: int, learned: Learned) -> None:
        data = await asyncio.to_thread(pack, {"delta": learned.delta} | _packed(learned.means))
        lives_s = int(self._settings.sync_wait_s) + keys.ADAPTER_UPLOAD_TTL_S
        await self._store.tell(number, self._member, await self._store.parcels.put(data, lives_s), learned.samples)

    async def _close_once(self, number: int) -> None:
        """What has come since it was looked at counts; and another may have had the turn just before."""
        now = await self._now()
        if now.round < number:
            told, _ = await self._store.told(number)
            await self._close(now, told)

    async def _close(self, before: Standing, told: dict[str, Change]) -> None:
        last = await self._average(before)
        runs: dict[str, Learned] = {}
        for member in sorted(told):
            try:
                data = await self._store.parcels.get(told[member].delta)
                groups = await asyncio.to_thread(unpack, data, "delta")
            except (NotFoundError, ValueError) as error:
                log.warning("round.left_out", member=member, reason=str(error))
                continue
            learned = Learned(groups["delta"], told[member].samples, _unpacked(groups))
            if usable(learned, last.weights):
                runs[member] = learned
            else:
                log.warning("round.left_out", member=member, reason="it is of another adapter, or not finite")
        settings, changes = self._settings, list(runs.values())
        if not changes:  # nobody's: the average stays, and the round is over
            changes = [Learned({name: 0 * value for name, value in last.weights.items()}, 1)]
        average = await asyncio.to_thread(averaged, last, changes, settings.outer_rate, settings.outer_momentum)
        kept = {"weights": average.weights, "momentum": average.momentum} | _packed(average.means)
        data = await asyncio.to_thread(pack, kept)
        state = await self._store.parcels.put(data)
        if not await self._store.close(before, state, frozenset(runs)):
            await self._store.parcels.drop(state)
            return
        for change in told.values():
            await self._store.parcels.drop(change.delta)

    async def _now(self) -> Standing:
        now = await self._store.now()
        if now is None:
            raise ServiceUnavailableError("the federation's Redis has lost it: start the run again")
        return now

    async def _read(self, now: Standing) -> Average:
        """The average; of a later round where that has taken its place meanwhile."""
        while True:
            try:
                average = await self._average(now)
            except NotFoundError as error:
                later = await self._now()
                if later.round == now.round:
                    raise ServiceUnavailableError(f"the average of round {now.round} is gone: {error}") from error
                now = later
            else:
                self._standing = now
                return average

    async def _average(self, now: Standing) -> Average:
        parcel: Parcel = now.state
        groups = unpack(await self._store.parcels.get(parcel), "weights")
        return Average(groups["weights"], groups.get("momentum", {}), _unpacked(groups))


def _packed(means: GradientMeans) -> dict[str, Arrays]:
    return {"first": means.first, "second": means.second} if means.first else {}


def _unpacked(groups: dict[str, Arrays]) -> GradientMeans:
    return GradientMeans(groups.get("first", {}), groups.get("second", {}))


@asynccontextmanager
async def federation(settings: TrainSettings, url: str, base_sha256: str, ring: str) -> AsyncIterator[Federation]:
    """The run's place in its federation; SetupError when it trains another base, or has another adapter."""
    if settings.sync_redis:
        await require(settings.sync_redis)
    same = settings.model_dump(mode="json", include=set(_SAME))
    async with contextlib.aclosing(connect(settings.sync_redis or url)) as redis:
        store = RoundStore(redis, settings.federation)
        async with Federation(store, f"{ring}/{settings.run_name}", {"base": base_sha256, **same}, settings) as place:
            yield place
