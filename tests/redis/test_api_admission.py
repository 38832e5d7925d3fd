"""Load at the door: what is refused, with which status, and what never reaches a worker."""

import asyncio
import time

import msgspec
import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of
from shared.redis import keys
from shared.redis.ring.worker_registry import WorkerRegistry, WorkerStatus
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.waiting import wait_until

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 5}
HELD = Answer(hold_at=1)


def refusal(response: object) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]  # type: ignore[attr-defined]


async def say(redis: Redis, worker: ScriptedWorker, **changes: object) -> None:
    """The worker's next heartbeat."""
    status = WorkerStatus(worker.id, MODEL, "host", 1, "ready", 0, 8, 0, 0, 100, 0.0, 0, 1, 2**40)
    await WorkerRegistry(redis).heartbeat(msgspec.structs.replace(status, **changes))


async def test_beyond_the_requests_under_way_comes_429_at_once_and_room_comes_back(redis_url: str) -> None:
    async with working(redis_url, lambda spec: HELD) as worker, api(redis_url, max_concurrent_requests=2) as server:
        held = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(2)]
        await wait_until(lambda: len(worker.specs) == 2)
        refused = await server.post("/v1/completions", BODY)
        assert refusal(refused) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await server.http.get("/v1/models")).status_code == 200, "what begins no work is not refused"
        worker.go.set()
        assert {(await each).status_code for each in held} == {200}
        assert (await server.post("/v1/completions", BODY)).status_code == 200


async def test_beyond_the_queue_comes_429_by_class(redis_url: str, redis: Redis, tmp_path) -> None:
    file = tmp_path / "keys"
    alice, bob = "alice-has-a-long-key", "bob-has-a-long-key"
    file.write_text(f"{line_of(alice, name='alice')}\n{line_of(bob, name='bob', **{'class': 'batch'})}\n")
    async with working(redis_url, lambda spec: Answer()) as worker:
        pass  # it has registered, and leaves: nobody empties the queue
    await say(redis, worker)
    async with api(redis_url, max_queue_size=2, max_batch_queue_size=1, api_key_file=file) as server:
        waiting = []
        for key, room in ((alice, 2), (bob, 1)):
            bearer = {"headers": {"authorization": f"Bearer {key}"}}
            waiting += [asyncio.create_task(server.post("/v1/completions", BODY, **bearer)) for _ in range(room)]
            kind = "batch" if key == bob else "interactive"
            await wait_until(lambda kind=kind, room=room: _length(redis, kind, room))
            refused = await server.post("/v1/completions", BODY, **bearer)
            assert refusal(refused) == (429, "queue_full")
            assert f"{kind} sequences" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _length(redis: Redis, kind: str, length: int) -> bool:
    return bool(await redis.xlen(keys.queue(MODEL, kind)) == length)


async def test_rates_are_counted_for_a_key_over_all_api_processes(redis_url: str, tmp_path) -> None:
    file = tmp_path / "keys"
    slow, quick = "the-slow-key-is-long", "the-quick-key-is-long"
    file.write_text(f"{line_of(slow, name='slow', rate='3/hour')}\n{line_of(quick, name='quick')}\n")
    settings = {"api_key_file": file, "rate_limit": "1000/hour"}
    async with (
        working(redis_url, lambda spec: Answer()),
        api(redis_url, **settings) as one,
        api(redis_url, **settings) as two,
    ):
        statuses = [await _status(server, slow) for server in (one, two, one, two)]
        assert statuses == [200, 200, 200, 429]
        refused = await one.post("/v1/completions", BODY, headers={"authorization": f"Bearer {slow}"})
        assert refusal(refused) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 3600
        assert await _status(two, quick) == 200, "another key has its own count"


async def _status(server: Api, key: str) -> int:
    response = await server.post("/v1/completions", BODY, headers={"authorization": f"Bearer {key}"})
    return response.status_code


async def test_the_class_of_a_key_is_the_class_of_its_sequences(redis_url: str, tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text(line_of("a-batch-key-that-is-long", **{"class": "batch"}))
    async with working(redis_url, lambda spec: Answer()) as worker, api(redis_url, api_key_file=file) as server:
        request = asyncio.create_task(_status(server, "a-batch-key-that-is-long"))
        await wait_until(lambda: bool(worker.specs) or request.done())
        assert await request == 200
    assert [spec.sequence_class for spec in worker.specs] == ["batch"]


async def test_memory_pressure_is_503_until_a_worker_has_room(redis_url: str, redis: Redis) -> None:
    async with working(redis_url, lambda spec: Answer()) as worker, api(redis_url) as server:
        await say(redis, worker, kv_bytes=95)
        await wait_until(lambda: _is(server, 503))
        refused = await server.post("/v1/completions", BODY)
        assert refusal(refused) == (503, "service_unavailable")
        assert "memory" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "overloaded")
        await say(redis, worker, kv_bytes=70)
        await wait_until(lambda: _is(server, 200))
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded"), "0.7 of 0.9 is more than 72%"
        await say(redis, worker, kv_bytes=10)
        await wait_until(lambda: _health(server, "ok"))


async def _is(server: Api, status: int) -> bool:
    return (await server.post("/v1/completions", BODY)).status_code == status


async def _health(server: Api, status: str) -> bool:
    return bool((await server.http.get("/health")).json()["status"] == status)


@pytest.mark.parametrize("state", ["stuck", "draining", "starting"])
async def test_a_model_whose_workers_take_nothing_is_503_and_not_healthy(
    redis_url: str, redis: Redis, state: str
) -> None:
    async with working(redis_url, lambda spec: Answer()) as worker, api(redis_url) as server:
        await say(redis, worker, state=state, engine_silent_s=70.0)
        refused = await server.post("/v1/completions", BODY)
        assert refusal(refused) == (503, "service_unavailable")
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "overloaded")
        assert [each["state"] for each in health.json()["workers"]] == [state]
        assert (await server.http.get("/readyz")).status_code == 503
        assert (await server.http.get("/livez")).status_code == 200


async def test_one_stuck_worker_among_others_is_degraded_and_named(redis_url: str, redis: Redis) -> None:
    async with working(redis_url, lambda spec: Answer()) as worker, api(redis_url) as server:
        worker.id = "w2"
        await say(redis, worker, state="stuck", engine_silent_s=70.0)
        health = await server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert any("w2" in reason for reason in health.json()["reasons"])


async def test_a_sequence_that_waits_beyond_its_first_token_s_deadline_never_reaches_a_row(
    redis_url: str, redis: Redis
) -> None:
    async with working(redis_url, lambda spec: Answer()) as worker:
        pass  # nobody claims for the time being
    await say(redis, worker)
    async with api(redis_url, first_token_timeout_s=60) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", BODY))
        await wait_until(lambda: _length(redis, "interactive", 1))
        hash_ = keys.sequence(MODEL, (await redis.xrange(keys.queue(MODEL, "interactive")))[0][1][b"id"].decode())
        assert int(await redis.hget(hash_, "first")) > time.time() * 1000
        await redis.hset(hash_, "first", 1)
        async with working(redis_url, lambda spec: Answer()) as other:
            response = await waiting
        assert refusal(response) == (504, "deadline_exceeded")
        assert other.specs == [], "expired work reached a worker"


async def test_a_request_may_bring_a_deadline_shorter_than_the_server_s(redis_url: str) -> None:
    async with working(redis_url, lambda spec: HELD) as worker, api(redis_url) as server:
        began = time.time()
        request = asyncio.create_task(server.post("/v1/completions", {**BODY, "deadline_s": 1.5}))
        await wait_until(lambda: bool(worker.specs))
        assert 0 < worker.specs[0].deadline_ms / 1000 - began < 60
        assert refusal(await request) == (504, "deadline_exceeded")
        wrong = await server.post("/v1/completions", {**BODY, "deadline_s": 0})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "deadline_s"
