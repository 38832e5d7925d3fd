"""What is due has one owner at a time, and is lost with none."""

import asyncio

import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.due.due_list import DueList
from tests.waiting import wait_until

LEASE_MS = 60_000


@pytest.fixture
def lists(redis: Redis) -> list[DueList]:
    return [DueList(redis, "webhooks") for _ in range(3)]


async def test_an_entry_is_taken_by_one_of_many(lists: list[DueList]) -> None:
    for at in range(40):
        await lists[0].add(f"job {at}")
    taken = await asyncio.gather(*(each.take(5, LEASE_MS) for _ in range(4) for each in lists))
    names = [name for some in taken for name in some]
    assert len(names) == len(set(names)) == 40
    assert await lists[0].take(5, LEASE_MS) == []


async def test_a_dead_owner_s_entry_goes_on_and_what_it_says_later_does_not_count(lists: list[DueList]) -> None:
    first, second, _ = lists
    await first.add("job 1")
    assert await first.take(1, 1) == ["job 1"]
    taken: list[str] = []

    async def is_taken() -> bool:
        taken.extend(await second.take(1, LEASE_MS))
        return bool(taken)

    await wait_until(is_taken)
    await first.done("job 1")
    await first.again(["job 1"], 0)
    await first.renew(["job 1"], 0)
    assert await lists[2].take(1, LEASE_MS) == [], "it is the second one's"
    await second.again(["job 1"], 0)
    assert await lists[2].take(1, LEASE_MS) == ["job 1"]
    await lists[2].done("job 1")
    assert await first.take(1, LEASE_MS) == []


async def test_who_hastens_takes_nothing_from_an_owner(lists: list[DueList], redis: Redis) -> None:
    first, second, third = lists
    await first.add("job 1", LEASE_MS)
    assert await second.take(1, LEASE_MS) == []
    await third.hasten("job 1")
    assert await second.take(1, LEASE_MS) == ["job 1"]
    await third.hasten("job 1")
    await third.hasten("job 1")
    assert await first.take(1, LEASE_MS) == [], "it has an owner"
    await second.again(["job 1"], LEASE_MS)
    assert await first.take(1, LEASE_MS) == ["job 1"], "at once, for it was hastened meanwhile"
    await third.drop("job 1")
    await first.again(["job 1"], 0)
    await third.hasten("job 1")
    assert not await redis.exists(keys.due("webhooks"), keys.due_owners("webhooks"))
