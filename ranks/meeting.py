"""How the ranks of a group find one another: each writes in Redis who it is, rank 0 where it waits for whom.

A process has a nonce, so that a rank that has begun anew is another one. Rank 0 publishes the nonces that it waits for,
and its address; who finds its own among them connects. What is in Redis is refreshed while a rank waits, and gone
soon after.
"""

import asyncio
import contextlib
import hashlib
import socket
import time
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ranks.placement import Placement
from shared.errors import SetupError
from shared.process.loops import until_taken
from shared.process.settings import version
from shared.redis import keys
from shared.redis.connection.client import ask_all
from shared.redis.connection.faults import reason
from shared.redis.processes.ring_secret import ring_secret

log = structlog.get_logger()
T = TypeVar("T")

LOOK_S = 0.25
REFRESH_S = 2.0
TELL_S = 15.0  # between two lines in the log while ranks are missing
PATIENCE_S = 60.0  # of a rank that has connected, until all have

_SECRET = {"worker": keys.peer_secret, "trainer": keys.trainer_secret}
_MEMBER = {"worker": keys.group_member, "trainer": keys.trainer_member}
_MEETING = {"worker": keys.group_meeting, "trainer": keys.trainer_meeting}


class GroupMember(msgspec.Struct, frozen=True):
    """A rank that looks for its group."""

    nonce: str
    host: str  # for people
    places: list[str]  # where it listens for the other ranks' sums
    backend: str
    told: dict[str, str]  # what must be the same on all ranks, by its name


class Meeting(msgspec.Struct, frozen=True):
    """Where rank 0 waits, and for whom."""

    address: str
    nonces: list[str]  # by rank


async def secret_of(redis: Redis, placed: Placement) -> bytes:
    """The secret by which the ranks of a group know one another, once Redis takes it; b"": not to be had."""
    return await until_taken("group", lambda: ring_secret(redis, of=_SECRET[placed.kind]))


def own_member(placed: Placement, backend: str, places: list[str], folder: Path) -> GroupMember:
    """Describe this process; `folder` is the model's."""
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest()[:12] if config.is_file() else "none"
    told = {"mlx-parallm": version(), "mlx": metadata.version("mlx"), "the model's config.json": digest}
    told |= {"--distributed-mode": backend, "ranks": str(placed.size), "kind of process": placed.kind}
    return GroupMember(uuid.uuid4().hex, socket.gethostname(), places, backend, told)


def check_alike(members: list[GroupMember]) -> None:
    """SetupError that names what a rank has otherwise than rank 0."""
    first = members[0]
    for rank, member in enumerate(members):
        for name, value in first.told.items():
            if member.told.get(name) != value:
                raise SetupError(
                    f"rank {rank} ({member.host}) has {name} {member.told.get(name)!r}, and rank 0 ({first.host}) "
                    f"{value!r}: ranks of one group need the same"
                )


async def gather(
    redis: Redis, placed: Placement, ours: GroupMember, address: str, connected: Callable[[], frozenset[str]]
) -> list[GroupMember]:
    """Rank 0: wait until every other rank is here and has connected; all members, by rank.

    `connected`: nonces of those that have. SetupError when one has something else than we have.
    """
    refreshed, told_at = 0.0, time.monotonic()
    published: Meeting | None = None
    while True:
        try:
            members = await _members(redis, placed, ours)
        except (RedisError, OSError) as error:
            log.warning("group.redis_trouble", error=reason(error))
            await asyncio.sleep(LOOK_S)
            continue
        missing = [rank for rank, member in enumerate(members) if member is None]
        now = time.monotonic()
        if not missing:
            all_here = [member for member in members if member is not None]
            check_alike(all_here)
            meeting = Meeting(address, [member.nonce for member in all_here])
            if meeting != published or now - refreshed > REFRESH_S:
                await _set(redis, _MEETING[placed.kind](placed.group), msgspec.msgpack.encode(meeting))
                published, refreshed = meeting, now
            if connected().issuperset(meeting.nonces[1:]):
                with contextlib.suppress(RedisError, OSError):
                    await redis.delete(_MEETING[placed.kind](placed.group))
                return all_here
        if now - told_at > TELL_S:
            log.info("group.waiting", missing=missing or "none has connected", of=placed.size)
            told_at = now
        await asyncio.sleep(LOOK_S)


async def look_for(redis: Redis, placed: Placement, ours: GroupMember) -> Meeting:
    """A follower: publish who we are until rank 0 waits for us."""
    told_at = time.monotonic()
    while True:
        key = _MEMBER[placed.kind](placed.group, placed.rank)
        set_ours = ("SET", key, msgspec.msgpack.encode(ours), "EX", keys.GROUP_TTL_S)
        try:
            _, found = await ask_all(redis, [set_ours, ("GET", _MEETING[placed.kind](placed.group))])
        except (RedisError, OSError) as error:
            log.warning("group.redis_trouble", error=reason(error))
            found = None
        if found is not None:
            meeting = _decoded(found, Meeting)
            if meeting is not None and placed.rank < len(meeting.nonces) and meeting.nonces[placed.rank] == ours.nonce:
                return meeting
        if time.monotonic() - told_at > TELL_S:
            hint = "rank 0 waits for all ranks; if its process has ended, its last line says why"
            log.info("group.looking", rank=placed.rank, of=placed.size, group=placed.group, hint=hint)
            told_at = time.monotonic()
        await asyncio.sleep(LOOK_S)


async def leave(redis: Redis, placed: Placement) -> None:
    """A follower has met its group."""
    with contextlib.suppress(RedisError, OSError):  # it goes by itself
        await redis.delete(_MEMBER[placed.kind](placed.group, placed.rank))


async def _members(redis: Redis, placed: Placement, ours: GroupMember) -> list[GroupMember | None]:
    others = [("GET", _MEMBER[placed.kind](placed.group, rank)) for rank in range(1, placed.size)]
    found = await ask_all(redis, others)
    return [ours, *(None if each is None else _decoded(each, GroupMember) for each in found)]


async def _set(redis: Redis, key: str, value: bytes) -> None:
    with contextlib.suppress(RedisError, OSError):  # the next look says it again
        await redis.set(key, value, ex=keys.GROUP_TTL_S)


def _decoded(data: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError):
        return None  # of another version of ours, say
