"""The board of a policy's training: a hash with totals, a bounded series of train steps, alerts, and who owns it.

The trainer writes; metrics, dashboard and /v1/training/status read. Everything outlives the trainer by TRAIN_TTL_S;
whether it lives, the `alive` key alone says, which also keeps a second trainer away from the policy.
"""

import secrets
import time
from typing import Any, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis

from shared.adapters import not_yours
from shared.night import NightReport
from shared.owners import ANYBODY, Asker
from shared.redis import keys
from shared.redis.connection.client import Script, ask_all
from shared.training import ALERT_KINDS, Alert, AlertKind, TrainerStatus, TrainingPoint, TrajectoryStats

log = structlog.get_logger()

POINTS_KEPT = 4096
ALERTS_KEPT = 256

_NESTED = frozenset({"checkpoints", "ranks", "samples", "machine"})  # fields of a status that are JSON

T = TypeVar("T", TrainerStatus, TrainingPoint)

_alive = Script("trainer_alive")


class TrainingBoard:
    """Training status and curve of one policy."""

    def __init__(self, redis: Redis, policy: str) -> None:
        self._redis = redis
        self.policy = policy

    # -- the trainer's side

    async def hold(self, owner: str, instead_of: str = "", asker: Asker = ANYBODY) -> str:
        """Own the policy for TRAINER_TTL_S; the owner from now on: `owner`, or who has it already.

        `instead_of`: an owner that is known to be dead. A new policy belongs to the asker's tenant;
        UnknownAdapterError when the policy is not the asker's to change.
        """
        holder = await self._alive(owner, keys.TRAINER_TTL_S, instead_of, asker)
        if holder is None:
            raise not_yours(self.policy)
        return str(holder.decode())

    async def let_go(self, owner: str) -> None:
        """Give the policy up, if it is `owner`'s."""
        await self._alive(owner, 0, "", ANYBODY)

    async def _alive(self, owner: str, ttl_s: int, instead_of: str, asker: Asker) -> bytes | None:
        names = [keys.trainer_alive(self.policy), keys.adapter(self.policy), keys.training(self.policy)]
        strict = "1" if asker.limited else "0"
        args = [owner, str(ttl_s), instead_of, asker.publishes_for, strict, str(keys.TRAIN_TTL_S)]
        holder: bytes | None = await _alive(self._redis, names, args)
        return holder

    async def write(self, status: TrainerStatus) -> None:
        """Replace the status; counts of alerts stay."""
        fields, absent = _flat(status)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.training(self.policy), mapping=fields)
            if absent:
                pipe.hdel(keys.training(self.policy), *absent)
            pipe.expire(keys.training(self.policy), keys.TRAIN_TTL_S)
            pipe.expire(keys.training_steps(self.policy), keys.TRAIN_TTL_S)
            pipe.expire(keys.training_alerts(self.policy), keys.TRAIN_TTL_S)
            pipe.zadd(keys.trainings(), {self.policy: status.heartbeat_ms})
            pipe.expire(keys.trainings(), keys.TRAIN_TTL_S)
            await pipe.execute()

    async def add(self, point: TrainingPoint) -> None:
        """One more train step on the curves. After a resume a step may come twice; the last one counts."""
        fields, _ = _flat(point)
        key = keys.training_steps(self.policy)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(key, fields, maxlen=POINTS_KEPT, approximate=True)  # type: ignore[arg-type]
            pipe.expire(key, keys.TRAIN_TTL_S)
            await pipe.execute()

    async def alert(self, kind: AlertKind, message: str) -> None:
        """Store an alert, count it, and publish it on the channel."""
        alert = Alert(self.policy, kind, message[:2000], time.time_ns() // 1_000_000)
        key = keys.training_alerts(self.policy)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(key, {"d": msgspec.json.encode(alert)}, maxlen=ALERTS_KEPT, approximate=True)
            pipe.expire(key, keys.TRAIN_TTL_S)
            pipe.hincrby(keys.training(self.policy), f"alerts:{kind}", 1)
            pipe.expire(keys.training(self.policy), keys.TRAIN_TTL_S)
            pipe.publish(keys.alert_channel(), msgspec.json.encode(alert))
            await pipe.execute()

    async def put_night(self, report: NightReport) -> None:
        """Replace the report of the last night."""
        await self._redis.set(keys.night_report(self.policy), msgspec.json.encode(report), ex=keys.TRAIN_TTL_S)

    # -- the readers' side

    async def night(self) -> NightReport | None:
        """The report of the last night; None when there is none, or none that can be read."""
        raw = await self._redis.get(keys.night_report(self.policy))
        try:
            return None if raw is None else msgspec.json.decode(raw, type=NightReport)
        except msgspec.DecodeError as error:
            log.warning("training.unreadable_report", policy=self.policy, error=str(error))
            return None

    async def alive(self) -> str:
        """The owner of the policy; "" when no trainer lives."""
        return bytes(await self._redis.get(keys.trainer_alive(self.policy)) or b"").decode()

    async def status(self) -> TrainerStatus | None:
        """The trainer's last word; None when there never was one, or none that can be read."""
        return _status(self.policy, await self._hash(keys.training(self.policy)))

    async def alert_counts(self) -> dict[AlertKind, int]:
        """Alerts so far, by kind."""
        fields = await self._hash(keys.training(self.policy))
        return {kind: int(fields.get(f"alerts:{kind}".encode(), 0)) for kind in ALERT_KINDS}

    async def points(self, limit: int = POINTS_KEPT) -> list[TrainingPoint]:
        """The newest train steps, in order, each once."""
        entries = await self._redis.xrevrange(keys.training_steps(self.policy), count=limit)
        steps: dict[int, TrainingPoint] = {}
        for _, fields in entries:  # the newest first: what a resumed run did again replaces what it had done
            point = _read(fields, TrainingPoint)
            if not steps or point.train_step < min(steps):
                steps[point.train_step] = point
        return [steps[step] for step in sorted(steps)]

    async def alerts(self, limit: int = ALERTS_KEPT) -> list[Alert]:
        """The newest alerts, newest first."""
        entries = await self._redis.xrevrange(keys.training_alerts(self.policy), count=limit)
        return [msgspec.json.decode(fields[b"d"], type=Alert) for _, fields in entries]

    async def trajectories(self) -> TrajectoryStats:
        """Counts of the policy's live trajectories."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.trajectory_stats(self.policy))
            pipe.xlen(keys.trajectories(self.policy))
            fields, waiting = await pipe.execute()
        return TrajectoryStats(
            collected=int(fields.get(b"added", 0)),
            dropped=int(fields.get(b"dropped", 0)),
            consumed=int(fields.get(b"consumed", 0)),
            waiting=waiting,
            bytes=int(fields.get(b"bytes", 0)) if waiting else 0,
        )

    async def _hash(self, key: str) -> dict[bytes, bytes]:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(key)
            (fields,) = await pipe.execute()
        return dict(fields)


async def ring_id(redis: Redis) -> str:
    """The name of this ring's data: drawn at the first request, and lost only with the data."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(keys.ring_id(), secrets.token_hex(8), nx=True)
        pipe.getex(keys.ring_id(), ex=keys.RING_ID_TTL_S)
        _, name = await pipe.execute()
    return bytes(name).decode()


async def trained_policies(redis: Redis) -> list[str]:
    """Policies that have a board, the one with the newest heartbeat first."""
    return [name.decode() for name in await redis.zrevrange(keys.trainings(), 0, -1)]


async def live_trainers(redis: Redis, now_ms: int) -> list[TrainerStatus]:
    """The last words of trainers that live, the newest first."""
    since = now_ms - 1000 * keys.TRAINER_TTL_S
    policies = [name.decode() for name in await redis.zrevrangebyscore(keys.trainings(), "+inf", since)]
    boards = [("HGETALL", keys.training(policy)) for policy in policies]
    owners = [("GET", keys.trainer_alive(policy)) for policy in policies]
    answers = await ask_all(redis, [*boards, *owners])
    live = [_status(*each) for *each, owner in zip(policies, answers, answers[len(policies) :], strict=False) if owner]
    return [status for status in live if status is not None]


def _flat(message: TrainerStatus | TrainingPoint) -> tuple[dict[str, str], list[str]]:
    """The fields as Redis stores them, and the names of the None ones."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    absent = [name for name, value in plain.items() if value is None]
    fields = {
        name: msgspec.json.encode(value).decode() if isinstance(value, list | tuple | dict) else str(value)
        for name, value in plain.items()
        if value is not None
    }
    return fields, absent


def _status(policy: str, fields: dict[bytes, bytes]) -> TrainerStatus | None:
    """A status; None, and a line in our log, when it cannot be read, as a newer trainer's may."""
    try:
        return None if b"policy" not in fields else _read(fields, TrainerStatus)
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("training.unreadable_board", policy=policy, error=str(error))
        return None


def _read(fields: dict[bytes, bytes], kind: type[T]) -> T:
    plain: dict[str, Any] = {name.decode(): value.decode() for name, value in fields.items()}
    for name in _NESTED & plain.keys():
        plain[name] = msgspec.json.decode(plain[name])
    return msgspec.convert(plain, kind, strict=False)
