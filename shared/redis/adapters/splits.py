"""Splits of adapters in Redis: their terms, what their versions have earned, and their verdicts.

Invariants.
- A split holds while the latest version is the one that it began with: who moves `latest`, by hand or by training, ends
  it in the same step and for good, also when `latest` comes back.
- An answer's reward is counted once, and not behind the last one that the verdict takes: so every process comes to the
  same verdict. It is written, and `latest` moves, in one step of the store's own promote or rollback; or neither.
- A version that a split names is gone or rejected: the split is over.
"""

import math
import time
import uuid
from collections.abc import Collection, Mapping

import msgspec
import structlog
from redis.asyncio import Redis

from shared.adapters import AdapterStatus, GateCheck
from shared.errors import ConflictError, UnknownAdapterError
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore, SplitEnd
from shared.redis.connection.client import Argument, Script, ask, ask_all
from shared.splits import MOST_REWARD, Outcome, RewardSums, Split, SplitVerdict, shares, winner
from shared.trajectories import LiveTrajectory

log = structlog.get_logger()

GATE = "split"  # the check that a version has passed which a split has promoted

_set = Script("split_set")
_reward = Script("split_reward")
_end = Script("split_end")


class _Manifest(msgspec.Struct, frozen=True):
    """The part of a version's manifest that a split reads; the rest may name thousands of modules and labels."""

    version: int
    status: AdapterStatus


_manifest = msgspec.json.Decoder(_Manifest)


class SplitState(msgspec.Struct, frozen=True):
    """A split as it is now."""

    id: str
    split: Split
    earned: dict[int, RewardSums]
    latest: int
    served: frozenset[int]  # its versions that are there and not rejected
    started_ms: int
    moved: int = 0  # version to which `latest` was moved while it ran
    verdict: SplitVerdict | None = None

    @property
    def over(self) -> str:
        """Why it chooses no versions any more; "": it does."""
        if self.verdict is not None:
            return f"the verdict is version {self.verdict.winner}"
        if self.moved:
            return f"the latest version was moved to {self.moved} from {self.split.latest}, which it was from the start"
        if self.latest != self.split.latest:
            return f"the latest version is {self.latest or 'gone'}, and was {self.split.latest} when the split began"
        if lost := [version for version in self.split.versions if version not in self.served]:
            return f"version {lost[0]} is deleted or rejected"
        return ""

    @property
    def shares(self) -> dict[int, float]:
        """Share of the requests by version; once the split is over, the latest version gets all of them."""
        if self.over:
            return {version: float(version == self.latest) for version in self.split.versions}
        return dict(zip(self.split.versions, shares(self.split, self.earned), strict=True))

    @property
    def counted(self) -> int:
        """Rewards of all its versions."""
        return sum(each.count for each in self.earned.values())

    @property
    def full(self) -> bool:
        """True if enough rewards have been counted for a verdict."""
        return self.counted >= self.split.verdict_after


class Splits:
    """The splits of a ring's adapters, one an adapter at most."""

    def __init__(self, redis: Redis, adapters: AdapterStore) -> None:
        self._redis = redis
        self._adapters = adapters

    async def begin(self, name: str, split: Split) -> str:
        """Begin a split, or give the one that runs over these versions other terms; its id.

        ConflictError when its `latest` is not the latest version any more, UnknownAdapterError.
        """
        await self._adapters.check_change(name)
        status, said = await _set(
            self._redis,
            [*_keys(name), keys.adapter(name)],
            [
                uuid.uuid4().hex[:16],
                msgspec.json.encode(split),
                ",".join(map(str, split.versions)),
                split.latest,
                split.verdict_after,
                time.time_ns() // 1_000_000,
                keys.ADAPTER_TTL_S,
            ],
        )
        if status == b"unknown":
            raise UnknownAdapterError(f"there is no adapter {name!r}")
        if status == b"moved":
            raise ConflictError(f"the latest version of {name!r} is {said.decode()}, not {split.latest}")
        return str(said.decode())

    async def remove(self, name: str) -> bool:
        """End a split without a verdict; False when there is none."""
        await self._adapters.check_change(name)
        return bool(await ask(self._redis, "UNLINK", *_keys(name)))

    async def find(self, name: str) -> SplitState | None:
        """The split of an adapter, over or not; that of an earlier adapter of this name does not count."""
        raw, (latest, tenant) = await ask_all(
            self._redis, [("HGETALL", keys.split(name)), ("HMGET", keys.adapter(name), "latest", "tenant")]
        )
        if b"terms" not in raw:
            return None
        split = msgspec.json.decode(raw[b"terms"], type=Split)
        if split.tenant != (tenant or b"").decode():
            return None
        packed = await ask(self._redis, "MGET", *(keys.adapter_manifest(name, version) for version in split.versions))
        manifests = [_manifest.decode(each) for each in packed if each is not None]
        return SplitState(
            id=raw[b"id"].decode(),
            split=split,
            earned={version: _earned(raw, version) for version in split.versions},
            latest=int(latest or 0),
            served=frozenset(each.version for each in manifests if each.status == "published"),
            started_ms=int(raw[b"started_ms"]),
            moved=int(raw.get(b"moved", 0)),
            verdict=msgspec.json.decode(raw[b"verdict"], type=SplitVerdict) if b"verdict" in raw else None,
        )

    async def among(self, names: Collection[str]) -> list[str]:
        """Those of the adapters that have a split, over or not."""
        there = await ask_all(self._redis, [("EXISTS", keys.split(name)) for name in names]) if names else []
        return [name for name, exists in zip(names, there, strict=True) if exists]

    async def settle(self, name: str, state: SplitState) -> None:
        """Give the verdict of a split that has all its rewards; repeating it changes nothing."""
        if state.over:
            return
        best, why = winner(state.split, state.earned)
        latest = state.split.latest
        outcome: Outcome = "kept" if best == latest else "promoted" if best > latest else "rolled_back"
        verdict = msgspec.json.encode(SplitVerdict(best, outcome, why, time.time_ns() // 1_000_000))
        if best == latest:
            if not await _end(self._redis, _keys(name), [state.id, verdict]):
                return
        else:
            try:
                await self._move(name, best, latest, why, SplitEnd(state.id, verdict))
            except (
                ConflictError,
                UnknownAdapterError,
            ) as error:  # another process was faster, or it was ended by request
                log.info("split.not_moved", adapter=name, winner=best, detail=error.message)
                return
        log.info("split.verdict", adapter=name, winner=best, outcome=outcome, detail=why)

    async def _move(self, name: str, version: int, latest: int, why: str, ends: SplitEnd) -> None:
        if version > latest:
            manifest = await self._adapters.manifest(name, version)
            gate = [*(check for check in manifest.gate if check.name != GATE), GateCheck(GATE, True, why)]
            try:
                await self._adapters.promote(name, version, gate=gate, if_latest=latest, ends=ends)
                return
            except ConflictError:  # a newer one has been the latest before
                if await self._adapters.latest(name) != latest:
                    raise
        await self._adapters.rollback(name, version, reason=f"split: {why}", if_latest=latest, ends=ends)


async def count_for_split(redis: Redis, live: LiveTrajectory) -> bool:
    """Count what an answer has earned for the version that a split has chosen for it.

    False when no split has, when it is counted already, or when the split takes no more.
    """
    reward = live.trajectory.reward
    if live.arm is None or reward is None or reward.value is None:
        return False
    if not math.isfinite(reward.value) or abs(reward.value) > MOST_REWARD:
        log.warning("split.reward_too_large", adapter=live.policy, answer=live.id)
        return False
    arguments: list[Argument] = [
        live.arm.split,
        live.arm.version,
        live.id,
        repr(float(reward.value)),
        keys.ADAPTER_TTL_S,
    ]
    return bool(await _reward(redis, _keys(live.policy), arguments))


def _keys(name: str) -> list[str]:
    return [keys.split(name), keys.split_answers(name)]


def _earned(raw: Mapping[bytes, bytes], version: int) -> RewardSums:
    count, mean, squares = (raw.get(f"{what}:{version}".encode(), b"0") for what in ("count", "mean", "squares"))
    return RewardSums(int(count), float(mean), float(squares))
