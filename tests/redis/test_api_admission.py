"""Load at the door: what is refused, with which status, and what never reaches a worker."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of
from api.ring import first_tokens
from shared.redis import keys
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.waiting import HANG_S, wait_until

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 5}
HELD = Answer(hold_at=1)


def refusal(response: object) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]  # type: ignore[attr-defined]


async def say(redis: Redis, worker: ScriptedWorker, **changes: object) -> None:
    """The worker's next heartbeat."""
    status = WorkerStatus(worker.id, MODEL, "host", 1, "ready", 0, 8, 0, 0, 100, 0.0, 0, 1, 2**40)
    await WorkerRegistry(redis).heartbeat(msgspec.structs.replace(status, **changes))


@contextlib.asynccontextmanager
async def idling(redis_url: str, redis: Redis, **changes: object) -> AsyncIterator[ScriptedWorker]:
    """A worker that lives and asks for nothing, so that what is enqueued waits."""
    async with working(redis_url, lambda spec: Answer()) as worker:
        pass  # it has registered

    async def live_on() -> None:
        while True:
            await asyncio.sleep(1)
            await say(redis, worker, **changes)

    await say(redis, worker, **changes)
    living = asyncio.create_task(live_on())
    try:
        yield worker
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)


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
    bounds = {"max_queue_size": 2, "max_batch_queue_size": 1, "api_key_file": file}
    async with idling(redis_url, redis), api(redis_url, **bounds) as server:
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


@pytest.mark.cluster
async def test_rates_are_counted_for_a_key_over_all_api_processes(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.admission.RATE_ANSWER_S", HANG_S)  # else what a busy Redis counts late passes
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
        await answered(server, 503)
        refused = await server.post("/v1/completions", BODY)
        assert refusal(refused) == (503, "service_unavailable")
        assert "memory" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "overloaded")
        await say(redis, worker, kv_bytes=70)
        await answered(server, 200)
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded"), "0.7 of 0.9 is more than 72%"
        await say(redis, worker, kv_bytes=10)
        await wait_until(lambda: _health(server, "ok"))


async def answered(server: Api, status: int, **fields: object) -> None:
    """Ask until a request is answered so. One that is let in waits, and is taken back: later each time, since a busy
    machine takes long to refuse, too."""
    patience_s, statuses = 1.0, set[int]()
    while status not in statuses:
        assert patience_s < HANG_S, f"no answer {status}, only {statuses}"
        asked = asyncio.create_task(server.post("/v1/completions", {**BODY, **fields}))
        done, _ = await asyncio.wait({asked}, timeout=patience_s)
        asked.cancel()
        statuses |= {each.result().status_code for each in done}
        patience_s *= 1.2


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
    timed = {"first_token_timeout_s": HANG_S}
    async with idling(redis_url, redis), api(redis_url, **timed) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", BODY))
        await wait_until(lambda: _length(redis, "interactive", 1))
        hash_ = keys.sequence(MODEL, (await redis.xrange(keys.queue(MODEL, "interactive")))[0][1][b"id"].decode())
        assert int(await redis.hget(hash_, "first")) > time.time() * 1000
        await redis.hset(hash_, "first", 1)
        async with working(redis_url, lambda spec: Answer()) as other:
            response = await waiting
        assert refusal(response) == (504, "deadline_exceeded")
        assert other.specs == [], "expired work reached a worker"


# Of seconds so long that those of a busy machine are none.
PACE = {"claims_per_s:interactive": 0.04, "first_token_s": 5.0, "prompt_tokens": 2.0, "prompt_tokens_per_s": 2.0}


async def test_what_would_miss_its_first_token_s_deadline_is_refused_and_when_to_come_again_is_said(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_tokens, "IDLE_SHARE", 1.0)
    timed = {"first_token_timeout_s": 200, "admit_by_time": True}
    async with idling(redis_url, redis, extra=PACE), api(redis_url, **timed) as server:
        with monkeypatch.context() as at_once:
            at_once.setattr(first_tokens, "IDLE_S", HANG_S)  # a busy machine takes its time over eight requests
            waiting = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(8)]
            await wait_until(lambda: _length(redis, "interactive", 8))  # more than may wait, but all came at once
        await answered(server, 429)
        refused = await server.post("/v1/completions", BODY)
        assert refusal(refused) == (429, "first_token_too_late")
        message = refused.json()["error"]["message"]
        assert "The deadline is " in message and "37% of it is reserved" in message, "30%, more after a refusal"
        assert 1 <= int(refused.headers["retry-after"]) <= 250
        metrics = await _metrics(server)
        assert 'outcome="refused"' in metrics and "mlx_parallm_queue_predicted_seconds{" in metrics
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_later_deadline_is_let_in_where_an_early_one_is_refused(redis_url: str, redis: Redis) -> None:
    pace = {**PACE, "claims_per_s:interactive": 2.0, "first_token_s": 0.1, "prompt_tokens_per_s": 100.0}
    async with idling(redis_url, redis, extra=pace), api(redis_url, admit_by_time=True) as server:
        waiting = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(8)]
        await wait_until(lambda: _length(redis, "interactive", 8))
        await answered(server, 429, deadline_s=2)
        later = asyncio.create_task(server.post("/v1/completions", BODY))
        await wait_until(lambda: _length(redis, "interactive", 9))
        for each in (*waiting, later):
            each.cancel()
        await asyncio.gather(*waiting, later, return_exceptions=True)


@pytest.mark.parametrize(("pace", "settings"), [({}, {"admit_by_time": True}), (PACE, {})])
async def test_nothing_is_refused_by_time_without_a_measured_pace_or_unless_asked_for(
    redis_url: str, redis: Redis, pace: dict[str, float], settings: dict[str, object]
) -> None:
    timed = {"first_token_timeout_s": 200, **settings}
    async with idling(redis_url, redis, extra=pace), api(redis_url, **timed) as server:
        waiting = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(20)]
        await wait_until(lambda: _length(redis, "interactive", 20))
        await _has_waited(redis)
        waiting.append(asyncio.create_task(server.post("/v1/completions", BODY)))
        await wait_until(lambda: _length(redis, "interactive", 21))
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_workers_with_free_rows_take_more_at_once_than_their_pace_allows(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_tokens, "IDLE_S", 60.0)  # a busy machine takes long for a claim
    monkeypatch.setattr(first_tokens, "IDLE_SHARE", 1.0)
    timed = {"first_token_timeout_s": 300, "admit_by_time": True}
    async with working(redis_url, lambda spec: Answer()) as worker, api(redis_url, **timed) as server:
        await say(redis, worker, extra={**PACE, "claims_per_s:interactive": 0.01})
        await server.post("/v1/completions", BODY)
        answers = await asyncio.gather(*(server.post("/v1/completions", BODY) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}, "one in a hundred seconds, but nobody has to wait"
        assert 'outcome="kept"} 21.0' in await _metrics(server)


async def _has_waited(redis: Redis) -> None:
    """Until the oldest has waited for longer than a worker with a free row takes to come."""
    first = (await redis.xrange(keys.queue(MODEL, "interactive"), count=1))[0][0]
    await wait_until(lambda: 1000 * time.time() - int(first.split(b"-")[0]) > 1000)


async def _metrics(server: Api) -> str:
    return (await server.http.get("/metrics")).text


async def test_a_request_may_bring_a_deadline_shorter_than_the_server_s(redis_url: str) -> None:
    async with working(redis_url, lambda spec: HELD) as worker, api(redis_url) as server:
        began_ms = int(1000 * time.time())
        request = asyncio.create_task(server.post("/v1/completions", {**BODY, "deadline_s": 300}))
        await wait_until(lambda: bool(worker.specs))
        assert 0 <= worker.specs[0].deadline_ms - 300_000 - began_ms <= 1000 * time.time() - began_ms
        request.cancel()
        late = await server.post("/v1/completions", {**BODY, "deadline_s": 0.5})
        assert refusal(late) == (504, "deadline_exceeded")
        wrong = await server.post("/v1/completions", {**BODY, "deadline_s": 0})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "deadline_s"
