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


async def test_a_tenant_with_a_thousand_entries_has_one_turn_where_another_has_one(lists: list[DueList]) -> None:
    first, second, _ = lists
    for at in range(1000):
        await first.add(f"a {at:03}", who="alice")  # entries that are due in the same millisecond come by name
    await first.add("nobody's")
    await first.add("b 1", who="bob")
    await first.add("b 2", who="bob")
    assert [due.who for due in await first.take_in_turns(5, LEASE_MS)] == ["alice", "", "bob", "alice", "bob"]
    await first.add("b 3", who="bob")
    assert {*await second.take(1, LEASE_MS), *await second.take(1, LEASE_MS)} == {"a 002", "b 3"}
    assert await second.take(1, LEASE_MS) == ["a 003"]


async def test_what_was_given_back_again_and_again_takes_no_other_one_s_turn(lists: list[DueList]) -> None:
    """So it is where a tenant's entries wait for a place: each look gives them back."""
    first = lists[0]
    for at in range(40):
        await first.add(f"a {at}", who="alice")
    await first.add("b 1", who="bob")
    taken = []
    while "bob" not in taken:
        ((who, entry),) = await first.take_in_turns(1, LEASE_MS)
        taken.append(who)
        await first.again([entry], 0)
    assert taken == ["alice", "bob"]


async def test_who_is_passed_over_keeps_entries_and_turn(lists: list[DueList], redis: Redis) -> None:
    first = lists[0]
    for who in ("alice", "bob"):
        for at in range(3):
            await first.add(f"{who} {at}", who=who)
    assert [due.who for due in await first.take_in_turns(4, LEASE_MS, ["alice"])] == ["bob"] * 3
    assert [due.who for due in await first.take_in_turns(2, LEASE_MS)] == ["alice"] * 2
    for who in ("alice", "bob"):
        for at in range(3):
            await lists[1].drop(f"{who} {at}")
    assert [key async for key in redis.scan_iter("*due*")] == []


async def test_entries_of_a_version_that_knew_no_turns_are_taken(lists: list[DueList], redis: Redis) -> None:
    await redis.zadd(keys.due("webhooks"), {"job 1": 1})
    await lists[0].add("job 1", who="alice")
    assert await lists[0].take_in_turns(5, LEASE_MS) == [("", "job 1")]
    await redis.zadd(keys.due("webhooks"), {"job 1": 1})  # such a process gives it back
    assert await lists[1].take(5, LEASE_MS) == ["job 1"]
    await lists[1].done("job 1")
    assert await lists[0].take(5, LEASE_MS) == []
