"""Who gets which sequence: order, shares, groups, KV budget, affinity."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.errors import QueueFullError
from shared.redis import keys
from shared.redis.connection.client import server_time_ms
from shared.redis.queue import sequence_queue
from shared.redis.queue.sequence_queue import SequenceQueue
from tests.redis.sequences import MODEL, beat, commit, ids, plan, queue, spec, specs, state
from tests.waiting import HANG_S, NEVER_S, wait_until


async def test_two_workers_share_without_overlap(redis: Redis) -> None:
    q = queue(redis)
    assert await q.enqueue(specs("s", 8)) == 8
    first, second = await asyncio.gather(q.claim("w1", plan(4)), q.claim("w2", plan(4)))
    assert sorted(ids(first) + ids(second)) == [f"s{i}" for i in range(8)]
    assert {claim.attempt for claim in first + second} == {1}
    assert await q.claim("w1", plan(4)) == []


async def test_a_claim_brings_the_whole_spec(redis: Redis) -> None:
    q = queue(redis)
    sent = spec("s", api="a", job="j", deadline_ms=await server_time_ms(redis) + 60_000)
    await q.enqueue([sent])
    (claim,) = await q.claim("w1", plan(1))
    assert claim.spec == sent
    assert await state(redis, "s") == "running"


async def test_a_sequence_routed_meanwhile_goes_to_the_new_api(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", api="a")])
    await q.route(["s", "unknown"], "b")
    (claim,) = await q.claim("w1", plan(1))
    assert claim.spec.api == "b"
    assert await redis.exists(keys.sequence(MODEL, "unknown")) == 0


async def test_routing_a_running_sequence_tells_its_worker(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", api="a")])
    await q.claim("w1", plan(1))
    async with redis.pubsub() as channel:
        await channel.subscribe(keys.control_channel("w1"))
        assert (await channel.get_message(timeout=HANG_S))["type"] == "subscribe"
        await q.route(["s"], "b")
        message = await channel.get_message(timeout=HANG_S)
    assert message["data"] == b"\x93\xa5route\xa1s\xa1b"


async def test_enqueueing_again_changes_nothing(redis: Redis) -> None:
    q = queue(redis)
    assert await q.enqueue(specs("s", 3)) == 3
    assert await q.enqueue(specs("s", 4)) == 1
    claims = await q.claim("w1", plan(10))
    assert ids(claims) == ["s0", "s1", "s2", "s3"]
    assert await commit(redis, "w1", claims[0])
    assert await q.enqueue(specs("s", 4)) == 0
    assert await q.claim("w2", plan(10)) == []


async def test_twenty_at_once_with_one_id_enqueue_it_once(redis: Redis) -> None:
    q = queue(redis)
    assert sum(await asyncio.gather(*(q.enqueue([spec("same")]) for _ in range(20)))) == 1
    assert (await q.depth())["interactive"].waiting == 1


async def test_a_full_queue_refuses_all_or_nothing(redis: Redis) -> None:
    q = queue(redis, bound=5)
    await q.enqueue(specs("a", 4))
    with pytest.raises(QueueFullError, match=r"4 interactive sequences .* 5 is the limit"):
        await q.enqueue(specs("b", 2))
    assert (await q.depth())["interactive"].waiting == 4
    assert await q.enqueue(specs("a", 4)) == 0, "what is known already is no new work"
    await q.claim("w1", plan(2))
    assert await q.enqueue(specs("b", 3)) == 3, "leased sequences do not count"


async def test_interactive_comes_before_batch_within_its_quota(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("b", 10, kind="batch"))
    await q.enqueue(specs("i", 10))
    claims = await q.claim("w1", plan(10, interactive_first=7, batch_first=3, batch_max=8))
    assert ids(claims) == [f"i{i}" for i in range(7)] + ["b0", "b1", "b2"]


async def test_an_idle_class_lends_its_rows(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("b", 10, kind="batch"))
    shares = plan(10, interactive_first=7, batch_first=3, batch_max=8)
    assert len(await q.claim("w1", shares)) == 8, "batch never takes the reserved rows"
    await q.enqueue(specs("i", 12))
    claims = await q.claim("w2", shares)
    assert [claim.spec.sequence_class for claim in claims].count("interactive") == 8
    assert len(claims) == 10


async def test_interactive_may_take_every_row(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("i", 12))
    assert len(await q.claim("w1", plan(10, interactive_first=7, batch_first=3, batch_max=8))) == 10


async def test_a_group_is_taken_whole_when_the_rows_allow_it(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("b", 8, kind="batch"))
    await q.enqueue([*specs("x", 1), *specs("g", 4, group="g")])
    claims = await q.claim("w1", plan(6, interactive_first=2, batch_first=4))
    assert ids(claims)[:5] == ["x0", "g0", "g1", "g2", "g3"], "the quota lets a group in whole"
    assert ids(claims)[5:] == ["b0"]


async def test_a_group_is_not_begun_behind_others_when_it_does_not_fit(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([*specs("x", 3), *specs("g", 4, group="g")])
    assert ids(await q.claim("w1", plan(5))) == ["x0", "x1", "x2"]
    assert ids(await q.claim("w2", plan(4))) == ["g0", "g1", "g2", "g3"]


async def test_a_group_larger_than_the_worker_is_taken_in_parts(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("g", 6, group="g"))
    assert len(await q.claim("w1", plan(4, empty=True))) == 4
    assert len(await q.claim("w1", plan(4))) == 2


async def test_what_does_not_fit_the_kv_budget_waits_with_all_behind_it(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("small", kv=10), spec("large", kv=100), spec("next", kv=10)])
    await q.enqueue([spec("batch", kind="batch", kv=10)])
    assert ids(await q.claim("w1", plan(8, batch_first=4, kv=50))) == ["small"], "else the large one would starve"
    assert ids(await q.claim("w1", plan(8, batch_first=4, kv=120))) == ["large", "next", "batch"]


async def test_a_sequence_takes_no_more_of_the_kv_budget_than_a_row_can_hold(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("small", kv=10), spec("large", kv=100), spec("next", kv=100), spec("last", kv=10)])
    bounded = replace(plan(8, kv=70), kv_window=30)
    assert ids(await q.claim("w1", bounded)) == ["small", "large", "next"]
    await q.enqueue([spec("one", kv=10), spec("two", kv=10)])
    assert ids(await q.claim("w1", replace(plan(8, kv=70), kv_state=25))) == ["last", "one"], "35 each"


async def test_an_empty_worker_takes_one_sequence_beyond_its_kv_budget(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("large", kv=100), spec("next", kv=10)])
    assert await q.claim("w1", plan(8, kv=50)) == []
    assert ids(await q.claim("w1", plan(8, kv=50, empty=True))) == ["large"]


async def test_affinity_is_served_first_and_stolen_when_it_has_waited(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_queue, "STEAL_AFTER_MS", 60_000)
    q = queue(redis)
    await beat(redis, "w1")
    await q.enqueue(specs("shared", 1))
    await q.enqueue(specs("own", 2), prefer=["w1"])
    assert ids(await q.claim("w1", plan(2, interactive_first=2))) == ["own0", "own1"]
    await q.enqueue(specs("later", 1), prefer=["w1"])
    assert ids(await q.claim("w2", plan(4), others=["w1"])) == ["shared0"], "too young to be stolen"
    monkeypatch.setattr(sequence_queue, "STEAL_AFTER_MS", 1)

    async def stolen() -> bool:
        return ids(await q.claim("w2", plan(4), others=["w1"])) == ["later0"]

    await wait_until(stolen)


async def test_what_waited_for_a_dead_worker_goes_to_the_living(redis: Redis) -> None:
    q = queue(redis)
    await beat(redis, "dead")
    await q.enqueue(specs("s", 3), prefer=["dead"])
    await redis.delete(keys.worker(MODEL, "dead"))
    assert ids(await q.reap("w1", 2)) == ["s0", "s1"]
    assert ids(await q.claim("w1", plan(8))) == ["s2"]
    assert await redis.exists(keys.queue(MODEL, "interactive", "dead")) == 0


async def test_a_leaving_worker_leaves_its_affinity_streams_to_all(redis: Redis) -> None:
    q = queue(redis)
    await beat(redis, "w1")
    await q.enqueue(specs("s", 3), prefer=["w1"])
    (running,) = await q.claim("w1", plan(1))
    await q.delete_worker_streams("w1")
    assert ids(await q.claim("w2", plan(8))) == ["s1", "s2"]
    assert await commit(redis, "w1", running), "what it runs it may end"
    await q.delete_worker_streams("w1")
    assert await redis.exists(keys.queue(MODEL, "interactive", "w1")) == 0


async def test_wait_wakes_for_new_work_and_not_for_what_a_claim_left(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 3))
    assert len(await q.claim("w1", plan(1))) == 1
    assert not await q.wait("w1", 0.05)
    waiting = asyncio.create_task(q.wait("w1", HANG_S))
    await q.enqueue([spec("t", kind="batch")])
    assert await asyncio.wait_for(waiting, HANG_S)


async def test_wait_wakes_when_another_worker_hands_back(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    claims = await q.claim("w1", plan(1))
    assert await q.claim("w2", plan(1)) == []
    waiting = asyncio.create_task(q.wait("w2", HANG_S))
    await q.release("w1", claims)
    assert await asyncio.wait_for(waiting, HANG_S)
    assert ids(await q.claim("w2", plan(1))) == ["s0"]


async def test_depth_tells_waiting_from_leased(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 5))
    await q.claim("w1", plan(2))
    depth = await q.depth()
    assert (depth["interactive"].waiting, depth["interactive"].leased) == (3, 2)
    assert (depth["batch"].waiting, depth["batch"].leased, depth["batch"].oldest_ms) == (0, 0, 0)
    assert 0 <= depth["interactive"].oldest_ms < 60_000


async def test_groups_that_are_missing_are_made_again(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 2))
    await redis.xgroup_destroy(keys.queue(MODEL, "interactive"), keys.GROUP)
    assert ids(await q.claim("w1", plan(2))) == ["s0", "s1"]


async def test_scripts_that_are_missing_are_loaded_again(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 2))
    await redis.script_flush()
    (claim, *_) = await q.claim("w1", plan(2))
    await redis.script_flush()
    assert await commit(redis, "w1", claim)


class _Late(SequenceQueue):
    """The queue of worker "late", which waits: three sequences wake it, and it looks at them when `looks` is set."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, MODEL)
        self.looks = asyncio.Event()
        self.looked = 0

    async def woken(self) -> "asyncio.Task[bool]":
        assert await self.claim("late", plan(4), others=["quick"]) == []
        waiting = asyncio.create_task(self.wait("late", HANG_S))
        await wait_until(lambda: _waits(self._redis))
        await self.enqueue(specs("a", 3))
        return waiting

    async def _delivered(self, streams: Sequence[str]) -> dict[Any, Any]:
        await self.looks.wait()
        found = await super()._delivered(streams)
        self.looked += 1
        return found


async def test_who_wakes_too_late_goes_on_waiting(redis: Redis) -> None:
    q = _Late(redis)
    waiting = await q.woken()
    assert ids(await q.claim("quick", plan(4), others=["late"])) == ["a0", "a1", "a2"]
    q.looks.set()
    await wait_until(lambda: q.looked == 1)
    await wait_until(lambda: _waits(redis))
    assert not waiting.done(), "what woke it has been taken"
    await q.enqueue(specs("b", 2))
    assert await asyncio.wait_for(waiting, HANG_S)
    assert ids(await q.claim("late", plan(4), others=["quick"])) == ["b0", "b1"]


async def test_it_wakes_for_what_others_leave(redis: Redis) -> None:
    q = _Late(redis)
    waiting = await q.woken()
    assert ids(await q.claim("quick", plan(1), others=["late"])) == ["a0"]
    q.looks.set()
    assert await asyncio.wait_for(waiting, HANG_S)
    assert ids(await q.claim("late", plan(4), others=["quick"])) == ["a1", "a2"]


MANY = [f"other{at}" for at in range(300)]


async def test_a_claim_in_a_large_ring_looks_at_a_few_others_and_finds_by_and_by_what_waits_at_any(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_queue, "STEAL_AFTER_MS", 0)
    q, busiest = queue(redis), MANY[7]
    await beat(redis, busiest)
    await q.enqueue(specs("s", 1), prefer=[busiest])
    looks = 0
    while not (claims := await q.claim("w1", plan(1), MANY)):
        looks += 1
        assert len(q.askers["w1"].tips) == 8 + 2 * sequence_queue.OTHERS
    assert ids(claims) == ["s0"] and looks < 1000


async def test_of_many_free_workers_a_few_wait_for_what_is_for_any_and_the_others_for_their_own(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {f"w{at}": queue(redis) for at in range(12)}
    for worker, q in free.items():
        assert await q.claim(worker, plan(1), MANY) == []
    draws = iter([0.0, 0.0, 0.0, *[0.99] * 50])
    monkeypatch.setattr("random.random", lambda: next(draws))
    waiting = {worker: asyncio.create_task(q.wait(worker, NEVER_S)) for worker, q in free.items()}
    await wait_until(lambda: _waiting(redis, len(free)))
    await free["w0"].enqueue(specs("s", 1))
    await wait_until(lambda: _waiting(redis, len(free) - 3))
    assert await asyncio.gather(*[waiting[worker] for worker in ("w0", "w1", "w2")]) == [True] * 3
    await beat(redis, "w7")
    await free["w0"].enqueue(specs("own", 1), prefer=["w7"])
    assert await asyncio.wait_for(waiting["w7"], HANG_S)
    assert ids(await free["w7"].claim("w7", plan(1), MANY)) == ["own0"]
    for task in waiting.values():
        task.cancel()
    await asyncio.gather(*waiting.values(), return_exceptions=True)


async def test_who_finds_what_nobody_waited_for_waits_for_it_more_often_and_who_wakes_for_nothing_less(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = queue(redis)
    asker = q.askers["w1"]
    assert await q.claim("w1", plan(1), MANY) == []
    monkeypatch.setattr("random.random", lambda: 0.99)
    for found in range(4):
        least = asker.chance
        assert not await q.wait("w1", 0.01)
        await q.enqueue([spec(f"s{found}")])
        assert ids(await q.claim("w1", plan(1), MANY)) == [f"s{found}"]
        assert asker.chance == min(1.0, 2 * least)
    assert asker.chance == 1.0
    waiting = asyncio.create_task(q.wait("w1", HANG_S))
    await wait_until(lambda: _waits(redis))
    async with redis.pipeline() as pipe:  # it comes and is taken at once
        pipe.xadd(keys.queue(MODEL, "interactive"), {"id": "taken"})
        pipe.xreadgroup(keys.GROUP, "w2", {keys.queue(MODEL, "interactive"): ">"})
        await pipe.execute()
    await wait_until(lambda: asker.chance < 1.0)
    waiting.cancel()


async def test_leases_of_the_dead_are_found_in_a_ring_of_many(redis: Redis) -> None:
    q = queue(redis, lease_ms=1)
    for worker in MANY[:150]:
        await beat(redis, worker)
    for at in (0, 70, 149):
        await q.enqueue(specs(f"{at}-", 1))
        assert len(await q.claim(MANY[at], plan(1))) == 1
    await asyncio.sleep(0.01)
    found = ids(await q.reap("w1", 8))
    assert sorted(found) == ["0-0", "149-0", "70-0"] and q.reclaimed == 3


async def _waiting(redis: Redis, number: int) -> bool:
    return (await redis.info("clients"))["blocked_clients"] == number


async def _waits(redis: Redis) -> bool:
    return bool((await redis.info("clients"))["blocked_clients"])
