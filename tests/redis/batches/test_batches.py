"""Batches over HTTP: what is refused, which batch is the same, and what becomes of one that has no job yet."""

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from api.batches.work import BatchWork
from shared.errors import ServiceUnavailableError
from shared.redis import keys
from shared.redis.files.batch_store import BatchSpec, BatchStore, new_batch_id
from tests.redis.api_servers import Api, api
from tests.redis.batches.batch_requests import (
    DAY,
    URL,
    batch_of,
    content,
    created,
    in_state,
    join_worker,
    line,
    text,
    uploaded,
)
from tests.redis.scripted_worker import MODEL
from tests.waiting import wait_until


async def test_creating_under_the_same_idempotency_key_gives_the_same_batch(server: Api, redis: Redis) -> None:
    file_id = (await uploaded(server, text(line("a")))).json()["id"]
    body = {**DAY, "input_file_id": file_id}
    tries = [server.http.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"}) for _ in range(5)]
    answers = await asyncio.gather(*tries)
    assert len({answer.json()["id"] for answer in answers}) == 1
    await server.http.delete(f"/v1/files/{file_id}")  # a repetition is no second batch: it needs no file
    again = await server.http.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"})
    assert again.json()["id"] == answers[0].json()["id"]
    other = {**body, "completion_window": "1h"}
    refused = await server.http.post("/v1/batches", json=other, headers={"Idempotency-Key": "k"})
    assert (refused.status_code, "completion_window" in refused.json()["error"]["message"]) == (409, True)
    long = await server.http.post("/v1/batches", json=body, headers={"Idempotency-Key": "k" * 300})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "idempotency-key")
    assert len((await server.http.get("/v1/batches")).json()["data"]) == 1
    assert await redis.zcard(keys.batches()) == 1


SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"completion_window": "8d"}, "completion_window"),
    ({"completion_window": "0h"}, "completion_window"),
    ({"completion_window": 24}, "completion_window"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
    ({"endpoint": "/v1/images/generations"}, "endpoint"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after"),
    ({"priority": "high"}, "priority"),
]


async def test_a_batch_that_makes_no_sense_is_refused_by_the_field(server: Api) -> None:
    file_id = (await uploaded(server, text(line("a")))).json()["id"]
    for change, param in SENSELESS:
        refused = await server.post("/v1/batches", {**DAY, "input_file_id": file_id, **change})
        assert (refused.status_code, refused.json()["error"]["param"].split(".")[0]) == (400, param), refused.text
    assert (await server.http.get("/v1/batches")).json()["data"] == []


async def test_a_batch_cancelled_or_expired_before_its_job_has_every_line_in_the_error_file(
    server: Api, redis: Redis
) -> None:
    data = text(*(line(f"line {at}") for at in range(300)))
    cancelled, expired = await created(server, data), await created(server, data)
    await server.post(f"/v1/batches/{cancelled}/cancel", {})
    spec = json.loads(await redis.hget(keys.batch(expired), "spec"))
    await redis.hset(keys.batch(expired), "spec", json.dumps({**spec, "expires_at": 1}))
    for batch_id, state in ((cancelled, "cancelled"), (expired, "expired")):
        ended = await in_state(server, batch_id, state)
        assert (ended["output_file_id"], ended["request_counts"]["total"]) == (None, 300)
        lines = await content(server, ended["error_file_id"])
        assert [each["custom_id"] for each in lines] == [f"line {at}" for at in range(300)]
        assert {each["error"]["code"] for each in lines} == {f"batch_{state}"}
        assert len({each["id"] for each in lines}) == 300
        assert (await server.post(f"/v1/batches/{batch_id}/cancel", {})).status_code == 409


async def test_a_cancel_in_the_moment_of_a_death_reaches_the_job_that_the_dead_process_made(
    server: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, take = server.ring.batches, server.ring.batches.take

    async def leave_it(batch_id: str, owner: str) -> bool:
        return False

    monkeypatch.setattr(batches, "take", leave_it)  # the server's own work, until the end of this
    batch_id = await created(server, text(line("a"), line("b")))
    record = await batches.find(batch_id)
    assert await take(batch_id, "dying")
    await join_worker(redis)
    dying = BatchWork(server.ring)

    async def dies(*_: object) -> None:
        raise RedisConnectionError("killed here")

    monkeypatch.setattr(dying, "begin", dies)
    with pytest.raises(RedisConnectionError):
        await dying.validate(record)
    (job,) = (await server.http.get("/v1/jobs")).json()["data"]
    assert (job["status"], (await batch_of(server, batch_id))["status"]) == ("queued", "validating")
    await server.post(f"/v1/batches/{batch_id}/cancel", {})
    monkeypatch.setattr(batches, "take", take)
    await batches.release(batch_id, "dying")
    ended = await in_state(server, batch_id, "cancelled")
    assert (await server.http.get(f"/v1/jobs/{job['id']}")).json()["status"] == "cancelled"
    assert {each["custom_id"] for each in await content(server, ended["error_file_id"])} == {"a", "b"}
    assert ended["model"] == MODEL


async def test_a_batch_whose_job_s_end_redis_has_lost_waits_for_it_again(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    batch_id = await created(server, text(line("a")))
    await in_state(server, batch_id, "in_progress")
    with pytest.raises(ServiceUnavailableError, match="goes on"):
        await BatchWork(server.ring).finalize(await server.ring.batches.find(batch_id))
    found = await batch_of(server, batch_id)
    assert (found["status"], found["finalizing_at"], found["errors"]) == ("in_progress", None, None)


async def test_cancels_at_once_are_one_cancel(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    batch_id = await created(server, text(line("a")))
    await in_state(server, batch_id, "in_progress")
    answers = await asyncio.gather(*(server.post(f"/v1/batches/{batch_id}/cancel", {}) for _ in range(8)))
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert {answer.json()["status"] for answer in answers if answer.status_code == 200} <= {"cancelling", "cancelled"}
    ended = await in_state(server, batch_id, "cancelled")
    assert [each["error"]["code"] for each in await content(server, ended["error_file_id"])] == ["batch_cancelled"]


async def test_an_input_deleted_before_it_was_read_fails_its_batch(server: Api, redis: Redis) -> None:
    batch_id = await created(server, text(line("a")))
    file_id = (await batch_of(server, batch_id))["input_file_id"]
    assert (await server.http.delete(f"/v1/files/{file_id}")).status_code == 200
    await join_worker(redis)
    failed = await in_state(server, batch_id, "failed")
    assert failed["errors"]["data"][0]["code"] == "file_not_found"


async def test_pages_come_newest_first_and_go_on_after_an_id(server: Api) -> None:
    made = [await created(server, text(line("a"))) for _ in range(5)]
    for path, newest in (("batches", made[::-1]), ("files", None)):
        whole = (await server.http.get(f"/v1/{path}")).json()
        ids = [each["id"] for each in whole["data"]]
        assert len(ids) == 5 and ids == (newest or ids)
        assert (whole["first_id"], whole["last_id"], whole["has_more"]) == (ids[0], ids[-1], False)
        first = (await server.http.get(f"/v1/{path}?limit=2")).json()
        rest = (await server.http.get(f"/v1/{path}?limit=3&after={first['last_id']}")).json()
        assert [each["id"] for each in first["data"] + rest["data"]] == ids
        assert (first["has_more"], rest["has_more"]) == (True, False)
        beyond = (await server.http.get(f"/v1/{path}?after={ids[-1]}")).json()
        assert (beyond["data"], beyond["first_id"], beyond["has_more"]) == ([], None, False)
        for wrong, status in (("limit=0", 400), ("limit=x", 400), ("limit=100001", 400), ("after=nobody", 404)):
            answer = await server.http.get(f"/v1/{path}?{wrong}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, wrong.partition("=")[0])
    oldest = (await server.http.get("/v1/files?order=asc")).json()["data"]
    assert [each["id"] for each in oldest] == ids[::-1]


async def test_one_key_s_batches_leave_a_hand_for_others(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    async def hold(self: BatchWork, batch_id: str) -> None:
        taken.append(batch_id)
        await asyncio.Event().wait()

    monkeypatch.setattr(BatchWork, "work", hold)
    specs = [
        BatchSpec(new_batch_id(), URL, "file-1", "24h", 1, 2**40, f"file-{at}2", f"file-{at}3", 3600, key=key)
        for at, key in enumerate(["alice"] * 5 + ["bob"])
    ]
    for spec in specs:
        await BatchStore(redis).create(spec)
    async with api(redis_url):
        await wait_until(lambda: len(taken) == 4)
    assert sorted(spec.key for spec in specs if spec.id in taken) == ["alice"] * 3 + ["bob"]
