"""Hearing of adapter changes: events as hints, pointers as the truth.

`watch` subscribes first and reads second, so that nothing falls in between. Each confirmed subscription, which a
reconnect brings too, and each `reread_s` of silence makes it read the pointers again and report what it missed.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.adapters import AdapterEvent
from shared.redis import keys
from shared.redis.adapters.catalog import AdapterCatalog
from shared.redis.connection.faults import reason

log = structlog.get_logger()


async def watch(redis: Redis, *, reread_s: float = 5.0) -> AsyncIterator[AdapterEvent]:
    """Changes of all adapters, for ever; first one "seen" event for each adapter that has a latest version.

    A change missed while Redis was away comes as "seen" with the pointer that holds now, or as "deleted".
    """
    catalog, known = AdapterCatalog(redis), dict[str, int]()
    while True:
        try:
            async with redis.pubsub() as channel:
                await channel.subscribe(keys.adapter_channel())
                while True:
                    message = await channel.get_message(timeout=reread_s)
                    if message is not None and message["type"] == "message":
                        event = _decode(message["data"])
                        if event is not None:
                            known[event.name] = event.latest
                            yield event
                        continue
                    for event in _missed(known, await catalog.pointers()):
                        known[event.name] = event.latest
                        yield event
        except (RedisError, OSError) as error:
            log.warning("adapters.watch_interrupted", error=reason(error))
            await asyncio.sleep(0.2)


def _missed(known: dict[str, int], now: dict[str, int]) -> list[AdapterEvent]:
    """Events for the differences between the pointers that the reader knows and the present ones."""
    gone = [AdapterEvent(name, "deleted", 0, 0) for name, latest in known.items() if latest and name not in now]
    return gone + [
        AdapterEvent(name, "seen", latest, latest) for name, latest in now.items() if latest != known.get(name, 0)
    ]


def _decode(data: bytes) -> AdapterEvent | None:
    try:
        return msgspec.json.decode(data, type=AdapterEvent)
    except msgspec.DecodeError:
        log.warning("adapters.bad_event", data=data[:80])
        return None
