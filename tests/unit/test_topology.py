"""Whom a topology believes when several ask at once whether a server still has its slots."""

import asyncio
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from shared.redis.connection.routing import SLOTS
from shared.redis.connection.topology import Place, Topology, UnknownSlotsError

FIRST, SECOND = ("a", 1), ("b", 2)


async def test_a_server_is_not_asked_about_itself_and_what_failed_answers_nobody() -> None:
    asked: list[Place] = []
    away: set[Place] = set()

    async def ask(place: Place) -> list[list[Any]]:
        asked.append(place)
        await asyncio.sleep(0)
        if place in away:
            raise RedisConnectionError
        return [[0, SLOTS - 1, [place[0].encode(), place[1]]]]  # each takes itself for the primary of all

    topology = Topology((FIRST, SECOND), ask)
    await topology.place(0)
    asked.clear()
    both = [topology.is_current(0, place) for place in (FIRST, SECOND, FIRST, SECOND, FIRST, SECOND)]
    assert not any(await asyncio.gather(*both))
    assert sorted(asked) == [FIRST, SECOND, SECOND], "those who wait for a question share the next one"
    away.update((FIRST, SECOND))
    failed = await asyncio.gather(*(topology.is_current(0, FIRST) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in failed] == [UnknownSlotsError] * 3
