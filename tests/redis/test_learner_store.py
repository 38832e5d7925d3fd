"""Learners in Redis: numbers, one owner at a time, states that count with the requests that they hold."""

import msgspec
import pytest
from redis.asyncio import Redis

from shared.errors import ConflictError, NotFoundError, QueueFullError
from shared.learners import LearnerSpec, RequestFailed, SaveInfo, StepDone, StepRequest
from shared.redis import chunks, keys
from shared.redis.training import learner_store
from shared.redis.training.learner_store import HeldLearner, LearnerStore, waiting_learners

SPEC = LearnerSpec(id="one", model="tiny", rank=4, scale=8.0, seed=3)
FAR_MS = 2**50


async def made(redis: Redis, count: int = 0) -> LearnerStore:
    store = LearnerStore(redis)
    await store.create(SPEC)
    for number in range(1, count + 1):
        await store.place(SPEC, number, StepRequest(learning_rate=number / 10))
    return store


async def taken(store: LearnerStore) -> HeldLearner:
    held = await store.take(SPEC.id)
    assert held is not None
    return held


async def test_a_learner_stays_what_it_was_made_as(redis: Redis) -> None:
    store = await made(redis)
    assert await store.create(msgspec.structs.replace(SPEC, seed=4)) == SPEC
    assert await store.spec("one") == SPEC
    with pytest.raises(NotFoundError):
        await store.spec("other")
    assert await store.take("other") is None


async def test_a_request_is_placed_once_under_its_number_in_any_order(redis: Redis) -> None:
    store = await made(redis)
    await store.place(SPEC, 2, StepRequest(learning_rate=0.2))
    await store.place(SPEC, 1, StepRequest(learning_rate=0.1))
    await store.place(SPEC, 2, StepRequest(learning_rate=0.9))
    found = [await store.request("one", number) for number in (1, 2, 3)]
    assert [each and each[0] for each in found] == [
        StepRequest(learning_rate=0.1),
        StepRequest(learning_rate=0.2),
        None,
    ]
    assert await waiting_learners(redis, "tiny").take(5, 1000) == ["one"]


async def test_too_much_is_refused_and_the_next_request_never_is(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_store, "MOST_WAITING", 2)
    store = await made(redis)
    for number in (2, 3):
        await store.place(SPEC, number, StepRequest())
    with pytest.raises(QueueFullError):
        await store.place(SPEC, 4, StepRequest())
    with pytest.raises(ConflictError):
        await store.place(SPEC, 99, StepRequest())
    await store.place(SPEC, 1, StepRequest())
    with pytest.raises(NotFoundError):
        await store.place(msgspec.structs.replace(SPEC, id="gone"), 1, StepRequest())


async def test_an_answer_counts_once_and_a_former_owner_is_refused(redis: Redis) -> None:
    store = await made(redis, 2)
    frozen = await taken(store)
    owner = await taken(store)
    assert not await store.put_answer(frozen, 1, RequestFailed("late"))
    assert await store.answer("one", 1) is None
    assert await store.put_answer(owner, 1, StepDone({"a": 1.0}))
    assert await store.put_answer(owner, 1, StepDone({"a": 2.0}))
    assert await store.answer("one", 1) == StepDone({"a": 1.0})
    assert (await taken(store)).done == 1
    await redis.delete(keys.learner_answer("one", 1))
    with pytest.raises(NotFoundError, match="not stored"):
        await store.answer("one", 1)


async def test_a_state_lets_the_requests_go_that_it_holds(redis: Redis) -> None:
    store = await made(redis, 3)
    held = await taken(store)
    state = bytes(300_000)
    first = await store.put_state("one", state)
    assert await store.put_answer(held, 1, StepDone({}))
    assert await store.put_answer(held, 2, StepDone({}), state=first)
    again = await taken(store)
    assert (again.done, again.applied, again.state) == (2, 2, first)
    assert await store.state(again) == state
    assert [await store.waits("one", number) for number in (1, 2, 3)] == [False, False, True]
    second = await store.put_state("one", b"more")
    assert await store.put_answer(again, 3, StepDone({}), state=second, before=first)
    assert not await redis.exists(keys.learner_state("one", first))
    assert await redis.hget(keys.learner("one"), "bytes") == b"0"


async def test_a_save_is_there_with_its_answer_and_until_it_expires(redis: Redis) -> None:
    store = await made(redis, 3)
    held = await taken(store)

    async def save(number: int, data: bytes, expires_ms: int) -> str:
        bytes_id = await store.put_saved("one", data)
        info = SaveInfo(name="a", kind="state", created_ms=1, expires_ms=expires_ms, bytes_id=bytes_id)
        assert await store.put_answer(held, number, StepDone({}), save=info)
        return bytes_id

    first = await save(1, b"first", FAR_MS)
    assert await store.saved("one", "a") == b"first"
    await save(2, b"second", FAR_MS)
    assert await store.saved("one", "a") == b"second"
    assert not await redis.exists(keys.learner_saved("one", first))
    await save(3, b"third", 1)
    assert await store.saves("one") == []
    assert [info.name for info in await store.saves("one", expired=True)] == ["a"]
    with pytest.raises(NotFoundError):
        await store.saved("one", "a")


async def test_what_is_asked_of_a_save_does_nothing_to_the_next_one_of_its_name(redis: Redis) -> None:
    store = await made(redis, 3)
    held = await taken(store)
    infos = []
    for number in (1, 2):
        bytes_id = await store.put_saved("one", b"data %d" % number)
        infos.append(SaveInfo(name="a", kind="state", created_ms=number, expires_ms=FAR_MS, bytes_id=bytes_id))
        assert await store.put_answer(held, number, StepDone({}), save=infos[-1])
    assert not await store.drop_save("one", infos[0]) and not await store.keep_save("one", infos[0], 60)
    assert await store.saved("one", "a") == b"data 2"
    assert await store.keep_save("one", infos[1], 60)
    (kept,) = await store.saves("one")
    assert kept.expires_ms < FAR_MS and await store.drop_save("one", kept)
    assert not await store.keep_save("one", kept, 60), "nor does it come back"
    assert await store.saves("one") == [] and not await redis.exists(keys.learner_saved("one", infos[1].bytes_id))


async def test_a_dropped_learner_leaves_only_answers_and_its_service_is_refused(redis: Redis) -> None:
    store = await made(redis, 2)
    held = await taken(store)
    state, upload = (
        await store.put_state("one", b"state"),
        await store.put_asked("one", b"much" * chunks.CHUNK_BYTES),
    )
    assert await store.asked("one", upload) == b"much" * chunks.CHUNK_BYTES
    await store.drop_asked("one", upload)
    info = SaveInfo(
        name="a", kind="state", created_ms=1, expires_ms=FAR_MS, bytes_id=await store.put_saved("one", b"s")
    )
    assert await store.put_answer(held, 1, StepDone({}), state=state, save=info)
    for _ in range(2):  # again, as somebody who was not told
        await store.drop("tiny", "one")
    left = [key async for key in redis.scan_iter("parallm:learner:*")]
    assert left == [keys.learner_answer("one", 1).encode()]
    assert await waiting_learners(redis, "tiny").take(5, 1000) == []
    assert not await store.put_answer(held, 2, StepDone({}))
    with pytest.raises(NotFoundError):
        await store.place(SPEC, 3, StepRequest())


async def test_what_a_service_still_writes_while_its_learner_is_dropped_does_not_stay(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await made(redis, 2)
    held = await taken(store)
    state = await store.put_state("one", b"state")
    look = LearnerStore.all_saves

    async def told_meanwhile(self: LearnerStore, learner: str) -> list[SaveInfo]:
        assert not await store.put_answer(held, 1, StepDone({}), state=state)
        return await look(self, learner)

    monkeypatch.setattr(LearnerStore, "all_saves", told_meanwhile)
    await store.drop("tiny", "one")
    left = [key async for key in redis.scan_iter("parallm:learner:*")]
    assert left == [keys.learner_state("one", state).encode()]
    assert 0 < await redis.ttl(left[0]) <= keys.ADAPTER_UPLOAD_TTL_S, "nothing points to it"


async def test_it_is_known_how_often_a_request_came_to_no_end(redis: Redis) -> None:
    store = await made(redis, 2)
    held = await taken(store)
    assert [await store.begun(held, 1), await store.begun(held, 1), await store.tries("one", 1)] == [1, 2, 2]
    assert [await store.tries("one", 2), await store.begun(held, 2), await store.tries("one", 1)] == [0, 1, 0]
    await store.ended(held)
    assert await store.tries("one", 2) == 0
    await taken(store)
    assert await store.begun(held, 2) == 0, "of a former owner"
