"""What happens when workers die, freeze, leave; and how sequences end, once."""

import asyncio

import pytest
from redis.asyncio import Redis

from shared.frames import TokenEvent
from shared.redis import keys
from shared.redis.connection.client import server_time_ms
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.writer import FrameWriter
from shared.sequences import SequenceClass
from tests.redis.sequences import (
    LEASE_MS,
    MODEL,
    commit,
    die,
    ending,
    gathered,
    ids,
    make_old,
    plan,
    queue,
    spec,
    specs,
    state,
    stop,
    tokens,
)
from tests.waiting import HANG_S, wait_until


async def test_a_dead_workers_sequence_is_taken_over_after_its_lease(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 2))
    claims = await q.claim("w1", plan(2))
    assert await q.reap("w2", 8) == []
    await die(redis, claims)
    taken = await q.reap("w2", 8)
    assert [(claim.spec.id, claim.attempt) for claim in taken] == [("s0", 2), ("s1", 2)]
    assert await q.renew("w1", claims) == claims
    assert await q.renew("w2", taken) == []


async def test_beyond_the_reapers_rows_the_handed_back_wait_in_front(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 3))
    claims = await q.claim("w1", plan(3))
    await q.enqueue(specs("t", 1))
    await die(redis, claims)
    assert ids(await q.reap("w2", 1)) == ["s0"]
    assert ids(await q.claim("w3", plan(8))) == ["s1", "s2", "t0"]


async def test_a_renewed_lease_is_not_reaped(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    claims = await q.claim("w1", plan(1))
    await die(redis, claims)
    assert await q.renew("w1", claims) == []
    assert await queue(redis).reap("w2", 8) == []


async def test_a_late_worker_does_not_reap_itself(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    claims = await q.claim("w1", plan(1))
    await die(redis, claims)
    assert await q.reap("w1", 8) == []
    assert await commit(redis, "w1", claims[0])


async def test_claims_whose_answer_was_lost_are_reaped_by_anyone(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    lost = await queue(redis).claim("w1", plan(1))
    await die(redis, lost)
    assert ids(await q.reap("w1", 8)) == ["s0"]


@pytest.mark.cluster
async def test_stale_worker_cannot_finish_a_reclaimed_sequence(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j")])
    (zombies,) = await q.claim("w1", plan(1))
    await die(redis, [zombies])
    (claim,) = await q.reap("w2", 1)
    assert not await commit(redis, "w1", zombies)
    assert await gathered(redis, "j") == []
    assert await commit(redis, "w2", claim)
    assert not await commit(redis, "w1", zombies)
    (result,) = await gathered(redis, "j")
    assert (result.worker, result.attempt) == ("w2", 2)


async def test_stale_attempt_of_the_same_worker_is_refused(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    (old,) = await q.claim("w1", plan(1))
    await q.release("w1", [old])
    (new,) = await q.claim("w1", plan(1))
    assert new.attempt == 2
    assert not await commit(redis, "w1", old)
    assert await q.renew("w1", [old]) == [old]
    assert await commit(redis, "w1", new)


async def test_stale_worker_cannot_write_into_the_log_of_a_reclaimed_sequence(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    (zombies,) = await q.claim("w1", plan(1))
    writer = FrameWriter(redis, MODEL, "w1")
    await writer.write({}, {"s0": [tokens("s0", 0, 4)]}, [])
    await die(redis, [zombies])
    await q.reap("w2", 1)
    await writer.write({}, {"s0": [tokens("s0", 4, 4)]}, [])
    (event,) = await read_tokens(redis, MODEL, "s0", 0)
    assert event.end == 4


async def test_a_commit_said_again_is_accepted_and_counts_once(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j")])
    (claim,) = await q.claim("w1", plan(1))
    assert await commit(redis, "w1", claim)
    assert await commit(redis, "w1", claim)
    assert len(await gathered(redis, "j")) == 1
    assert (await q.depth())["interactive"].leased == 0


async def test_release_hands_back_at_once_and_is_no_death(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    for attempt in range(1, 7):
        claims = await q.claim(f"w{attempt}", plan(1))
        assert [claim.attempt for claim in claims] == [attempt]
        assert not claims[0].suspect
        await q.release(f"w{attempt}", claims)
    await q.release("w1", claims)
    assert (await q.depth())["interactive"].waiting == 1


async def test_what_an_engine_failed_over_takes_a_death_along_and_is_given_up_in_the_end(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j")])
    for attempt in (1, 2):
        claims = await q.claim(f"w{attempt}", plan(1, empty=True))
        assert [(claim.attempt, claim.suspect) for claim in claims] == [(attempt, False)]
        await q.release(f"w{attempt}", claims, failed=True)
    suspect = await q.claim("w3", plan(1, empty=True))
    assert [claim.suspect for claim in suspect] == [True]
    await q.release("w3", suspect, failed=True)
    assert await q.claim("w4", plan(1, empty=True)) == []
    await die(redis, suspect)
    assert await q.reap("w4", 1) == []
    (result,) = await gathered(redis, "j")
    assert "died 3 times" in result.finish.error_message


async def test_handed_back_sequences_come_before_new_ones(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("old", 2))
    claims = await q.claim("w1", plan(2))
    await q.enqueue(specs("new", 2))
    await q.release("w1", claims)
    assert ids(await q.claim("w2", plan(3))) == ["old0", "old1", "new0"]


async def test_cancelled_while_queued_ends_once_and_reaches_its_job(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j", api="a"), spec("t")])
    assert await q.cancel(["s", "unknown"]) == {"s": "queued", "unknown": ""}
    assert await q.cancel(["s"]) == {"s": ""}
    assert ids(await q.claim("w1", plan(2))) == ["t"]
    (result,) = await gathered(redis, "j")
    assert (result.id, result.finish.reason, result.prompt_tokens) == ("s", "cancelled", 2)
    assert await state(redis, "s") == "cancelled"
    (event,) = await read_tokens(redis, MODEL, "s", 0)
    assert event.finish is not None and event.finish.reason == "cancelled"
    assert await redis.xlen(keys.frames("a")) == 1, "a reader learns of it at once"


async def test_cancelled_after_it_was_handed_back_keeps_what_it_has_said(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j", api="a")])
    claims = await q.claim("w1", plan(1))
    writer = FrameWriter(redis, MODEL, "w1")
    await writer.write({"a": [tokens("s", 0, 2)]}, {"s": [tokens("s", 0, 2)]}, [])
    await writer.write({"a": [tokens("s", 2, 1)]}, {}, [])
    await q.release("w1", claims)
    assert await q.cancel(["s"]) == {"s": "queued"}
    (result,) = await gathered(redis, "j")
    assert result.completion_ids == (1000, 1001, 1002)
    events = await read_tokens(redis, MODEL, "s", 0)
    assert [event.end for event in events] == [2, 3, 3]
    assert events[-1].finish is not None


async def test_cancelling_a_running_sequence_tells_its_worker(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s")])
    await q.claim("w1", plan(1))
    async with redis.pubsub() as channel:
        await channel.subscribe(keys.control_channel("w1"))
        assert (await channel.get_message(timeout=HANG_S))["type"] == "subscribe"
        assert await q.cancel(["s"]) == {"s": "w1"}
        message = await channel.get_message(timeout=HANG_S)
    assert message["data"] == b"\x92\xa6cancel\xa1s"


async def test_cancelled_on_a_worker_that_dies_ends_at_the_next_claim(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j")])
    claims = await q.claim("w1", plan(1))
    await q.cancel(["s"])
    await die(redis, claims)
    assert await q.reap("w2", 8) == []
    (result,) = await gathered(redis, "j")
    assert result.finish.reason == "cancelled"


async def test_a_past_deadline_ends_a_sequence_before_it_takes_a_row(redis: Redis) -> None:
    q = queue(redis)
    now = await server_time_ms(redis)
    late, soon = spec("late", job="j", deadline_ms=now - 1), spec("soon", job="j", deadline_ms=now + 60_000)
    await q.enqueue([late, soon])
    assert ids(await q.claim("w1", plan(1))) == ["soon"], "the row is for the other"
    (result,) = await gathered(redis, "j")
    assert (result.id, result.finish.reason) == ("late", "deadline")


async def test_a_hundred_expired_sequences_do_not_hide_the_one_behind(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([*(spec(f"s{i}", deadline_ms=1) for i in range(100)), spec("good")])
    found: list[str] = []

    async def claimed() -> bool:
        found.extend(ids(await q.claim("w1", plan(4))))
        return bool(found)

    await wait_until(claimed)
    assert found == ["good"]
    assert (await q.depth())["interactive"].leased == 1


async def kill_twice(redis: Redis, q: SequenceQueue, count: int) -> None:
    for worker in ("w1", "w2"):
        claims = await q.claim(worker, plan(8))
        assert len(claims) == count
        await die(redis, claims)
        assert await q.reap("w0", 0) == []


async def test_suspects_run_apart_in_halves(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("innocent"), spec("poison")])
    await kill_twice(redis, q, 2)
    await q.enqueue([spec("other")])
    (first,) = await q.claim("w3", plan(8, empty=True))
    assert (first.spec.id, first.suspect, first.attempt) == ("innocent", True, 3)
    assert await q.claim("w3", plan(7)) == [], "nothing may run beside it"
    assert ids(await q.claim("w4", plan(8))) == [], "a busy worker runs empty for the other half"
    assert ids(await q.claim("w5", plan(8))) == ["other"], "the others go on"
    assert await commit(redis, "w3", first)
    (second,) = await q.claim("w3", plan(8, empty=True))
    assert (second.spec.id, second.suspect) == ("poison", True)


class Workers:
    """Workers of which each dies over a party that has a guilty sequence, and else ends all that it has."""

    def __init__(self, redis: Redis, q: SequenceQueue, guilty: set[str], rows: int = 64) -> None:
        self.redis, self.q, self.guilty, self.rows = redis, q, guilty, rows
        self.deaths = 0
        self.rounds = 0
        self.ended_in: dict[str, int] = {}  # by sequence
        self.parties: list[list[str]] = []

    async def live_one_life(self) -> bool:
        """One worker's life with what it is given; false when nothing waits."""
        self.rounds += 1
        me = f"w{self.rounds}"
        claims = await self.q.claim(me, plan(self.rows, empty=True))
        if not claims:
            return False
        self.parties.append(ids(claims))
        if not self.guilty.isdisjoint(ids(claims)):
            self.deaths += 1
            await die(self.redis, claims)
            assert await self.q.reap("reaper", 0) == []
            return True
        for claim in claims:
            self.ended_in[claim.spec.id] = self.rounds
            assert await commit(self.redis, me, claim)
        return True


@pytest.mark.parametrize("at", [0, 13, 31])
@pytest.mark.parametrize("kind", ["interactive", "batch"])
@pytest.mark.cluster
async def test_the_guilty_one_of_n_suspects_is_found_after_log_n_deaths(
    redis: Redis, at: int, kind: SequenceClass
) -> None:
    n, q = 32, queue(redis)
    names = [f"s{i}" for i in range(n)]
    await q.enqueue([spec(name, job="j", kind=kind, group="g") for name in names])
    workers = Workers(redis, q, {names[at]})
    while await workers.live_one_life():
        pass
    assert workers.deaths == 2 + 5, "two with all of them, then parties of 16, 8, 4, 2 and 1"
    assert max(workers.ended_in.values()) <= 2 + 2 * 5, "the last innocent one: two parties for each halving"
    assert sum(rounds <= 4 for rounds in workers.ended_in.values()) >= n // 2, "a half of them at the first"
    results = {result.id: result.finish.reason for result in await gathered(redis, "j")}
    assert results == {name: "error" if name == names[at] else "stop" for name in names}
    assert (await q.depth())[kind].leased == (await q.depth())[kind].waiting == 0
    ((_, letter),) = await redis.xrange(keys.dead_letters(MODEL))
    assert letter[b"id"] == names[at].encode()


async def test_of_two_guilty_ones_both_are_found_and_no_other(redis: Redis) -> None:
    n, q = 24, queue(redis)
    await q.enqueue([spec(f"s{i}", job="j") for i in range(n)])
    guilty = {"s3", "s20"}
    workers = Workers(redis, q, guilty)
    while await workers.live_one_life():
        pass
    results = {result.id: result.finish.reason for result in await gathered(redis, "j")}
    assert {name for name, reason in results.items() if reason == "error"} == guilty and len(results) == n


async def test_what_only_fails_together_is_no_poison(redis: Redis) -> None:
    """Say, rows for which there is not the memory."""
    q = queue(redis)
    await q.enqueue([spec(f"s{i}", job="j") for i in range(6)])
    while claims := await q.claim("w", plan(8, empty=True)):
        if len(claims) > 3:
            await q.release("w", claims, failed=True)
            continue
        for claim in claims:
            assert await commit(redis, "w", claim)
    assert [result.finish.reason for result in await gathered(redis, "j")] == ["stop"] * 6


async def test_a_cancelled_suspect_brings_none_of_another_party_in(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec(f"s{i}", job="j") for i in range(8)])
    await kill_twice(redis, q, 8)
    await q.cancel(["s1"])
    assert ids(await q.claim("w3", plan(8, empty=True))) == ["s0", "s2", "s3"]
    assert ids(await q.claim("w4", plan(2, empty=True))) == ["s4", "s5"], "it has no more rows"
    assert ids(await q.claim("w5", plan(8, empty=True))) == ["s6", "s7"]


async def test_nothing_comes_in_until_the_last_of_a_party_has_ended(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 4))
    await kill_twice(redis, q, 4)
    await q.enqueue([spec("other")])
    first, second = await q.claim("w3", plan(8, empty=True))
    assert await commit(redis, "w3", first)
    assert await q.claim("w3", plan(7)) == []
    assert await commit(redis, "w3", second)
    assert ids(await q.claim("w3", plan(8, empty=True))) == ["s2", "s3"]


@pytest.mark.cluster
async def test_poison_ends_as_an_error_and_leaves_a_dead_letter(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("poison", job="j")])
    await kill_twice(redis, q, 1)
    (claim,) = await q.claim("w3", plan(8, empty=True))
    await die(redis, [claim])
    assert await q.reap("w4", 8) == []
    (result,) = await gathered(redis, "j")
    assert (result.finish.reason, result.finish.error_code) == ("error", "engine_error")
    assert "died 3 times" in result.finish.error_message
    ((_, letter),) = await redis.xrange(keys.dead_letters(MODEL))
    assert letter[b"id"] == b"poison" and b"died 3 times" in letter[b"reason"]
    assert await q.claim("w4", plan(8, empty=True)) == []


async def test_a_released_suspect_stays_a_suspect(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s")])
    await kill_twice(redis, q, 1)
    claims = await q.claim("w3", plan(8, empty=True))
    await q.release("w3", claims)
    assert [claim.suspect for claim in await q.claim("w4", plan(8, empty=True))] == [True]


async def test_an_unreadable_spec_becomes_a_dead_letter_and_an_error(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("newer", job="j"), spec("fine")])
    await redis.hset(keys.sequence(MODEL, "newer"), "spec", b"\xc1 not msgpack")
    assert ids(await q.claim("w1", plan(4))) == ["fine"]
    (result,) = await gathered(redis, "j")
    assert result.finish.reason == "error" and "unreadable" in result.finish.error_message
    ((_, letter),) = await redis.xrange(keys.dead_letters(MODEL))
    assert letter[b"id"] == b"newer"


async def test_an_entry_without_a_sequence_becomes_a_dead_letter(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s")])
    await redis.xadd(keys.queue(MODEL, "interactive"), {"nonsense": "1"})
    assert ids(await q.claim("w1", plan(4))) == ["s"]
    assert (await q.depth())["interactive"].waiting == 0
    assert await redis.xlen(keys.dead_letters(MODEL)) == 1


async def test_a_result_nobody_streams_leaves_only_a_marker(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue([spec("s", job="j")])
    (claim,) = await q.claim("w1", plan(1))
    writer = FrameWriter(redis, MODEL, "w1")
    await writer.write({}, {"s": [tokens("s", 0, 3)]}, [])
    events: list[TokenEvent] = [tokens("s", 0, 3), stop("s", 3)]
    assert await writer.write({}, {}, [ending(claim, events)]) == [True]
    assert await redis.exists(keys.sequence_log(MODEL, "s")) == 0
    assert await redis.hget(keys.sequence(MODEL, "s"), "spec") is None
    assert await q.enqueue([spec("s", job="j")]) == 0
    assert [result.completion_ids for result in await gathered(redis, "j")] == [(1000, 1001, 1002)]


@pytest.mark.parametrize("workers", [3])
async def test_every_sequence_ends_exactly_once_among_dying_workers(redis: Redis, workers: int) -> None:
    """Workers claim, finish some, and abandon the rest; whatever happens, each ends once."""
    lease_ms, total = 50, 60
    q = SequenceQueue(redis, MODEL, lease_ms=lease_ms, max_deaths=1000)
    await q.enqueue([spec(f"s{i}", job="j", group=f"g{i // 4}") for i in range(total)])

    async def work(name: str) -> None:
        life = 0
        while len(await gathered(redis, "j")) < total:
            life += 1
            mine = SequenceQueue(redis, MODEL, lease_ms=lease_ms, max_deaths=1000)
            me = f"{name}-{life}"
            claims = await mine.claim(me, plan(6, empty=True)) + await mine.reap(me, 2)
            for i, claim in enumerate(claims):
                if (i + life) % 3:  # the rest is abandoned with this life
                    await commit(redis, me, claim)  # refused when its lease ran out first: then another ends it
            await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(*(work(f"w{i}") for i in range(workers))), HANG_S)
    results = await gathered(redis, "j")
    assert sorted(result.id for result in results) == sorted(f"s{i}" for i in range(total))
    assert (await q.depth())["interactive"].leased == 0


async def test_of_many_workers_one_at_a_time_looks_for_the_dead(redis: Redis) -> None:
    q = queue(redis, lease_ms=60_000)
    assert [await q.may_reap(f"w{i}") for i in range(5)] == [True, False, False, False, False]
    short = queue(redis, lease_ms=12)
    await redis.delete(keys.reap_turn(MODEL))
    assert await short.may_reap("w1")

    async def next_turn() -> bool:
        return await short.may_reap("w2")

    await wait_until(next_turn)


async def test_a_look_for_the_dead_renews_only_what_is_late(redis: Redis) -> None:
    q = queue(redis)
    await q.enqueue(specs("s", 1))
    (claim,) = await q.claim("w1", plan(1))
    await q.renew("w1", [claim])

    async def idle_ms() -> int:
        return (await redis.xpending_range(claim.stream, keys.GROUP, "-", "+", 1))[0]["time_since_delivered"]

    await make_old(redis, claim.stream, LEASE_MS // 2)
    assert await q.reap("w1", 1) == []
    assert await idle_ms() >= LEASE_MS // 2, "it was not renewed"
    q.askers["w1"].renewed_at -= LEASE_MS / 2000
    assert await q.reap("w1", 1) == []
    assert await idle_ms() < LEASE_MS // 2, "it was"
