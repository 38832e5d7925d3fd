"""A run's side of a federation: it sends heartbeats, publishes its change, and gets the average that one run computes.

Who is alive is waited for, until `--sync-wait-s` after the first change of a round; who has died is not. A run that was
away finds that the round is over, and goes on from its average: what it had changed meanwhile is in none.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import structlog
from redis.exceptions import RedisError

from shared.errors import NotFoundError, ServiceUnavailableError, SetupError
from shared.redis import keys
from shared.redis.connection.client import connect, require
from shared.redis.connection.faults import reason
from shared.redis.training.parcels import StoredParcel
from shared.redis.training.rounds import Change, ClosedRound, RoundStore
from trainer.learn.batches import SampleGroup
from trainer.learn.packing import pack, unpack
from trainer.learners.handle import Handle, HostHandle
from trainer.learners.policy import PolicyLearner, Trained
from trainer.settings import TrainSettings
from trainer.state import Arrays, GradientMeans

log = structlog.get_logger()


@dataclass(frozen=True)
class Average:
    """State at the end of a round, and the start of the next one."""

    weights: Arrays
    momentum: Arrays
    means: GradientMeans = field(default_factory=GradientMeans)  # of the gradients; empty where runs keep their moments


@dataclass(frozen=True)
class RunChange:
    """Difference that one run has made to the weights since the last average, and the number of samples it learned
    from.
    """

    delta: Arrays
    samples: int
    means: GradientMeans = field(default_factory=GradientMeans)  # empty: the run does not publish them


def usable(learned: RunChange, like: Arrays) -> bool:
    """True if a change, and its moments if there are any, have the adapter's shapes and usable numbers."""
    first, second = learned.means.first, learned.means.second
    told = [learned.delta, first, second] if first or second else [learned.delta]
    return all(_fits(arrays, like) for arrays in told) and all((value >= 0).all() for value in second.values())


def _fits(arrays: Arrays, like: Arrays) -> bool:
    same = {name: value.shape for name, value in arrays.items()} == {name: value.shape for name, value in like.items()}
    return same and all(np.isfinite(value).all() for value in arrays.values())


def averaged(last: Average, runs: Sequence[RunChange], rate: float, momentum: float) -> Average:
    """The next average. In fp64, so that the order of runs matters little."""
    samples = [run.samples for run in runs]
    deltas = _mean([run.delta for run in runs], samples)
    weights: Arrays = {}
    moved: Arrays = {}
    for name, value in last.weights.items():
        pulled = -deltas[name]
        before = last.momentum[name].astype(np.float64) if name in last.momentum else np.zeros(value.shape)
        now = momentum * before + pulled
        moved[name] = now.astype(np.float32)
        weights[name] = (value.astype(np.float64) - rate * (pulled + momentum * now)).astype(np.float32)
    return Average(weights, moved if momentum else {}, _means(runs))


def _means(runs: Sequence[RunChange]) -> GradientMeans:
    """Average of the moments of the runs that publish theirs, weighted by samples."""
    told = [run for run in runs if run.means.first]
    if not told:
        return GradientMeans()
    samples = [run.samples for run in told]
    first, second = (
        {name: value.astype(np.float32) for name, value in _mean(arrays, samples).items()}
        for arrays in ([run.means.first for run in told], [run.means.second for run in told])
    )
    return GradientMeans(first, second)


def _mean(arrays: Sequence[Arrays], samples: Sequence[int]) -> dict[str, npt.NDArray[np.float64]]:
    """Mean weighted by samples; evenly if no run has any."""
    total = sum(samples)
    shares = [each / total if total else 1 / len(samples) for each in samples]
    weighted = list(zip(shares, arrays, strict=True))
    return {name: np.sum([share * each[name].astype(np.float64) for share, each in weighted], 0) for name in arrays[0]}


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
        self._standing: ClosedRound | None = None
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
        """True if runs publish their moments and continue with the average."""
        return self._settings.sync_moments == "average"

    @property
    def round(self) -> int:
        """The last one that this run knows; -1: it has not joined."""
        return -1 if self._standing is None else self._standing.round

    async def join(self, weights: Arrays) -> Arrays:
        """Starting weights: the last average, or these weights where there is none yet."""
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

    async def exchange(self, learned: RunChange) -> Average:
        """Publish the change since the last average, and return the next average."""
        assert self._standing is not None, "it has joined"
        number, began = self._standing.round + 1, time.monotonic()
        now = await self._now()
        if now.round < number:
            await self._publish(number, learned)
        while (now := await self._now()).round < number:
            told, waited_s = await self._store.changes(number)
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

    async def _publish(self, number: int, learned: RunChange) -> None:
        data = await asyncio.to_thread(pack, {"delta": learned.delta} | _packed(learned.means))
        lives_s = int(self._settings.sync_wait_s) + keys.ADAPTER_UPLOAD_TTL_S
        parcel = await self._store.parcels.put(data, lives_s)
        await self._store.put_change(number, self._member, parcel, learned.samples)

    async def _close_once(self, number: int) -> None:
        """Average the round, with changes that arrived meanwhile, unless another run has just done so."""
        now = await self._now()
        if now.round < number:
            told, _ = await self._store.changes(number)
            await self._close(now, told)

    async def _close(self, before: ClosedRound, told: dict[str, Change]) -> None:
        last = await self._average(before)
        runs: dict[str, RunChange] = {}
        for member in sorted(told):
            try:
                data = await self._store.parcels.get(told[member].delta)
                groups = await asyncio.to_thread(unpack, data, "delta")
            except (NotFoundError, ValueError) as error:
                log.warning("round.left_out", member=member, reason=str(error))
                continue
            learned = RunChange(groups["delta"], told[member].samples, _unpacked(groups))
            if usable(learned, last.weights):
                runs[member] = learned
            else:
                log.warning("round.left_out", member=member, reason="it is of another adapter, or not finite")
        settings, changes = self._settings, list(runs.values())
        if not changes:  # no change is usable: the average stays, and the round is over
            changes = [RunChange({name: 0 * value for name, value in last.weights.items()}, 1)]
        average = await asyncio.to_thread(averaged, last, changes, settings.outer_rate, settings.outer_momentum)
        kept = {"weights": average.weights, "momentum": average.momentum} | _packed(average.means)
        data = await asyncio.to_thread(pack, kept)
        state = await self._store.parcels.put(data)
        if not await self._store.close(before, state, frozenset(runs)):
            await self._store.parcels.drop(state)
            return
        for change in told.values():
            await self._store.parcels.drop(change.delta)

    async def _now(self) -> ClosedRound:
        now = await self._store.now()
        if now is None:
            raise ServiceUnavailableError("the federation's Redis has lost it: start the run again")
        return now

    async def _read(self, now: ClosedRound) -> Average:
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

    async def _average(self, now: ClosedRound) -> Average:
        parcel: StoredParcel = now.state
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


class RoundHandle(Handle[PolicyLearner]):
    """A learner in the thread of the run's host, `mine`, and its place in a federation."""

    def __init__(self, mine: HostHandle[PolicyLearner], place: Federation, every: int) -> None:
        self._mine, self._place, self._every = mine, place, every
        self.shapes, self.config = mine.shapes, mine.config
        self._anchor: Arrays = {}  # the last average
        self._steps = self._samples = 0  # since then

    async def _called(self, method: str, args: tuple[Any, ...]) -> Any:
        return await (
            self._train(*args) if method == PolicyLearner.train.__name__ else self._mine._called(method, args)
        )

    async def _train(
        self, groups: Sequence[SampleGroup], step: int, policy_step: int, probes: Sequence[tuple[int, ...]]
    ) -> Trained:
        """One train step, with the average where it is due, and the checks."""
        mine = self._mine
        if not self._anchor:
            self._anchor = await self._place.join(await mine.weights())
            await mine.call(PolicyLearner.go_on_from, self._anchor)
        report = await mine.call(PolicyLearner.step, groups, step, policy_step)
        self._steps += 1
        self._samples += report.sequences
        if self._steps >= self._every:
            present = await mine.weights()
            delta = {name: value - self._anchor[name] for name, value in present.items()}
            means = await mine.call(PolicyLearner.means) if self._place.averages_moments else GradientMeans()
            try:
                average = await self._place.exchange(RunChange(delta, self._samples, means))
            except (RedisError, OSError) as error:  # learned alone so far; asked again after the next step
                log.warning("round.redis_away", error=reason(error))
            else:
                self._steps = self._samples = 0
                self._anchor = average.weights
                await mine.call(PolicyLearner.put, average.weights, average.means)
                report = replace(report, updated=True)
        return await mine.call(PolicyLearner.checked, report, probes)
