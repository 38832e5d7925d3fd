"""Webhooks that wait: one entry for each job, batch or response with a webhook for its end.

The entry is written with the thing itself, before its end, and api processes look now and then whether the thing has
ended. Whoever ends it hastens the entry. So the death of any process costs a webhook some seconds and never loses it.
"""

import contextlib

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.redis.due.due_list import DueList

LIST = "webhooks"
LOOK_MS = 10_000  # between two looks at a thing that runs


def entry_of(kind: str, *name: str) -> str:
    """The entry of a thing: its kind, and by what it is found."""
    return " ".join((kind, *name))


async def wait_for(redis: Redis, tenant: str, kind: str, *name: str) -> None:
    """Write the entry of a thing that has been made for a tenant; may be repeated."""
    await DueList(redis, LIST).add(entry_of(kind, *name), LOOK_MS, tenant)


async def hasten(redis: Redis, kind: str, *name: str) -> None:
    """Make the entry of a thing that has ended due now; should this fail, the next look finds it."""
    with contextlib.suppress(RedisError, OSError):
        await DueList(redis, LIST).hasten(entry_of(kind, *name))
