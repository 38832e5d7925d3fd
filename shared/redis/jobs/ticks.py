"""Ticks of jobs on arq, which only this module uses: enqueueing needs nothing else of arq.

A tick advances one job for about two seconds and names the next (worker/jobs/tick.py). It is named after the job and
a counter in the job's hash, which starting the tick increments. So at most one tick of a job waits, however often it is
enqueued; a tick that was started never starts again; and a tick lost with its runner is enqueued again under the next
number as soon as the job's lease has run out.

Messages are msgpack, never pickle: what arrives from Redis is data, not code.
"""

from typing import Any

import msgspec
from arq.connections import ArqRedis
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from shared.redis.connection.cluster import ClusterRedis

TICK = "tick"  # arq's name of the one function
WAKE_CHANNEL = "arq:parallm:wake"
_TAG = "{parallm}"  # of arq's keys in a cluster, where each of its transactions needs them in one slot
ATTEMPTS = 3
EXPIRES_MS = 86_400_000  # of an enqueued tick that no runner takes; the sweeper enqueues it again


def serialize(message: dict[str, Any]) -> bytes:
    """msgpack bytes of arq's own record of a job; what msgpack does not know becomes its repr."""
    return msgspec.msgpack.encode(message, enc_hook=repr)


def deserialize(data: bytes) -> dict[str, Any]:
    """Read arq's own record of a job."""
    return msgspec.msgpack.decode(data, type=dict[str, Any])


class _Arq(ArqRedis):  # type: ignore[misc]  # arq has no types
    """arq's client over ours, which finds the server and hides its error texts."""

    def __init__(self, redis: Redis) -> None:
        self._ours = redis
        super().__init__(
            pool_or_conn=redis.connection_pool,
            job_serializer=serialize,
            job_deserializer=deserialize,
            default_queue_name=queue_name(redis),
            expires_extra_ms=EXPIRES_MS,
        )

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await self._ours.execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return self._ours.pipeline(transaction, shard_hint)


def arq_redis(redis: Redis) -> ArqRedis:
    """arq's client, which uses the connections of `redis`."""
    return _Arq(redis)


def queue_name(redis: Redis) -> str:
    """The key of arq's queue."""
    return f"arq:{_TAG}" if isinstance(redis, ClusterRedis) else "arq:parallm"


def tick_name(redis: Redis, job_id: str, number: int) -> str:
    """Id of a tick in arq, which becomes part of its key names."""
    return f"{_TAG if isinstance(redis, ClusterRedis) else ''}{job_id}:{number}"


async def enqueue_tick(redis: Redis, job_id: str, number: int, *, delay_s: float = 0) -> bool:
    """Enqueue a tick of a job; False when this tick is in the queue already.

    Runners sleep until they are woken, so a tick without a delay starts at once.
    """
    name = tick_name(redis, job_id, number)
    for left in reversed(range(ATTEMPTS)):
        try:
            queued = await arq_redis(redis).enqueue_job(TICK, job_id, number, _job_id=name, _defer_by=delay_s or None)
            break
        except WatchError:  # its connection broke, or its slot moved, before anything was enqueued
            if not left:
                raise
    if queued is None:
        return False
    if not delay_s:
        await redis.publish(WAKE_CHANNEL, b"1")
    return True
