"""Message batches over HTTP: what is refused, which batch is the same, what becomes of one whose process dies."""

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from api.batches.work import MAX_LINE_BYTES, MAX_LINES, BatchWork
from shared.redis import keys
from tests.redis.api_servers import Api
from tests.redis.batches.batch_requests import DAY, MESSAGES, created, join_worker, line, text, uploaded
from tests.redis.scripted_worker import MODEL
from tests.waiting import wait_until


def asked(custom_id: str, **params: Any) -> dict[str, Any]:
    """A request of a Message Batch."""
    messages = [{"role": "user", "content": "hi"}]
    return {"custom_id": custom_id, "params": {"model": MODEL, "max_tokens": 4, "messages": messages, **params}}


async def message_batch(server: Api, requests: list[dict[str, Any]], key: str = "") -> Any:
    headers = {"idempotency-key": key} if key else {}
    answer = await server.post(MESSAGES, {"requests": requests}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ended_messages(server: Api, batch_id: str) -> tuple[Any, list[Any]]:
    """The Message Batch once it has ended, and its results."""

    async def ended() -> bool:
        return bool((await server.http.get(f"{MESSAGES}/{batch_id}")).json()["processing_status"] == "ended")

    await wait_until(ended)
    shown = (await server.http.get(f"{MESSAGES}/{batch_id}")).json()
    return shown, [json.loads(each) for each in (await server.http.get(shown["results_url"])).text.splitlines()]


NO_MESSAGES: list[tuple[Any, str]] = [
    (b"", "not valid JSON"),
    (b"[]", "object"),
    (b"{}", "requests"),
    (b'{"requests": ' + b"[" * 100_000, "requests"),
    ({"requests": []}, "requests"),
    ({"requests": [asked("a")], "colour": "red"}, "colour"),
    ({"requests": [{**asked("a"), "url": "/"}]}, "url"),
    ({"requests": [{"params": {}}]}, "custom_id"),
    ({"requests": [asked("a b")]}, "requests[0].custom_id"),
    ({"requests": [asked("a\n")]}, "requests[0].custom_id"),
    ({"requests": [asked("a" * 65)]}, "requests[0].custom_id"),
    ({"requests": [asked("a"), asked("a")]}, "requests[1].custom_id"),
    ({"requests": [{"custom_id": "a", "params": []}]}, "requests[0].params"),
    ({"requests": [asked("a"), asked("b", model="another")]}, "requests[1].params.model"),
    ({"requests": [asked("a", model=5)]}, "requests[0].params.model"),
    (b'{"requests": [{"custom_id": "a", "params": {"model": "\xff"}}]}', "requests[0].params"),
    (b'{"requests": [{"custom_id": "a", "params": {"model": "\\q"}}]}', "not valid JSON"),
    (
        b'{"requests": [{"custom_id": "a", "params": {"x": ' + b"[" * 500_000 + b"]" * 500_000 + b"}}]}",
        "not valid JSON",
    ),
    ({"requests": [asked(str(at)) for at in range(MAX_LINES + 1)]}, "requests"),
    (b'{"requests": [' + b'"custom_id",' * (11 * MAX_LINES) + b'""]}', "1 to 50000 requests"),  # counted unread
]


async def test_a_message_batch_that_makes_no_sense_is_refused_and_says_where(server: Api, redis: Redis) -> None:
    for given, where in NO_MESSAGES:
        content = given if isinstance(given, bytes) else json.dumps(given).encode()
        refused = await server.http.post(MESSAGES, content=content)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), refused.text
        assert where in refused.json()["error"]["message"], (where, refused.text)
    long = await server.post(MESSAGES, {"requests": [asked("a"), asked("b", metadata="x" * MAX_LINE_BYTES)]})
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")
    assert "requests[1].params" in long.json()["error"]["message"]
    unknown = await server.post(MESSAGES, {"requests": [asked("a", model="nobody")]})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    for path in ("msgbatch_no", "batch_no", "msgbatch_no/results"):
        assert (await server.http.get(f"{MESSAGES}/{path}")).json()["error"]["type"] == "not_found_error"
    for query in ("limit=0", "limit=1001", "after_id=a&before_id=b"):
        assert (await server.http.get(f"{MESSAGES}?{query}")).status_code == 400
    assert (await server.http.get(MESSAGES)).json() == {
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }
    assert [key async for key in redis.scan_iter("parallm:file:*")] == []


async def test_message_batches_are_paged_both_ways_and_apart_from_openai_s(server: Api) -> None:
    ids = [(await message_batch(server, [asked("a")]))["id"] for _ in range(4)][::-1]
    other = await created(server, text(line("a")))
    for query, shown, more in (
        ("", ids, False),
        ("limit=2", ids[:2], True),
        (f"limit=2&after_id={ids[1]}", ids[2:], False),
        (f"limit=2&before_id={ids[3]}", ids[1:3], True),
        (f"before_id={ids[1]}", ids[:1], False),
    ):
        page = (await server.http.get(f"{MESSAGES}?{query}")).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (shown, more), query
        assert (page["first_id"], page["last_id"]) == (shown[0], shown[-1])
    assert [each["id"] for each in (await server.http.get("/v1/batches")).json()["data"]] == [other]
    assert (await server.http.get(f"/v1/batches/{ids[0]}")).status_code == 404
    assert (await server.http.get(f"{MESSAGES}/{other}")).status_code == 404
    assert (await server.http.get(f"{MESSAGES}?after_id={other}")).status_code == 404
    assert [each["purpose"] for each in (await server.http.get("/v1/files")).json()["data"]] == ["batch"]


async def test_a_message_batch_under_one_idempotency_key_is_one_with_one_file(server: Api, redis: Redis) -> None:
    requests = [asked(str(at)) for at in range(3)]
    same = await asyncio.gather(*(message_batch(server, requests, "k") for _ in range(5)))
    assert len({each["id"] for each in same}) == 1
    assert len([key async for key in redis.scan_iter("parallm:file:*")]) == 2, "its description and its bytes"
    other = await server.post(MESSAGES, {"requests": requests[:1]}, headers={"idempotency-key": "k"})
    assert other.status_code == 409


async def test_a_batch_that_is_stored_and_not_listed_is_listed_by_its_repetition(server: Api, redis: Redis) -> None:
    bodies = {MESSAGES: {"requests": [asked("a")]}}
    bodies["/v1/batches"] = {**DAY, "input_file_id": (await uploaded(server, text(line("a")))).json()["id"]}
    ids = []
    for path, body in bodies.items():
        made = (await server.post(path, body, headers={"idempotency-key": "k"})).json()["id"]
        ids.append(made)
        for listed in (keys.pending_batches(), keys.batches()):
            assert await redis.zrem(listed, made), "as if the process had died before it wrote them"
        assert (await server.post(path, body, headers={"idempotency-key": "k"})).json()["id"] == made
        assert [each["id"] for each in (await server.http.get(path)).json()["data"]] == [made]
        await server.post(f"{path}/{made}/cancel", {})
    for made in ids:
        await wait_until(lambda each=made: ended_in(server, each))


async def ended_in(server: Api, batch_id: str) -> bool:
    return (await server.ring.batches.find(batch_id)).state == "cancelled"


async def test_lines_of_a_message_batch_that_could_not_be_stored_do_not_stay(
    server: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        raise RedisConnectionError("Redis is away")

    monkeypatch.setattr(server.ring.batches, "create", dies)
    assert (await server.post(MESSAGES, {"requests": [asked("a")]})).status_code == 529
    assert [key async for key in redis.scan_iter("parallm:file:*")] == []


@pytest.mark.parametrize("path", [MESSAGES, "/v1/batches"])
async def test_a_process_that_lost_its_lease_does_not_end_a_batch_whose_job_another_one_has_made(
    server: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    batches, take = server.ring.batches, server.ring.batches.take

    async def leave_it(*_: str) -> bool:
        return False

    monkeypatch.setattr(batches, "take", leave_it)  # the server's own work, until the end of this
    await join_worker(redis)
    made = (
        (await message_batch(server, [asked("a")]))["id"]
        if path == MESSAGES
        else await created(server, text(line("a")))
    )
    record = await batches.find(made)
    slow, fast = BatchWork(server.ring), BatchWork(server.ring)
    check = slow.check_shapes

    async def overtaken(*of: Any) -> Any:
        monkeypatch.setattr(slow, "check_shapes", check)
        await fast.validate(record)
        if path == "/v1/batches":
            await server.ring.files.delete(record.spec.input_file_id)  # as its client may, when it is in progress
        return await check(*of)

    monkeypatch.setattr(slow, "check_shapes", overtaken)
    await slow.validate(record)
    after = await batches.find(made)
    assert (after.state, after.errors, bool(after.job)) == ("in_progress", (), True)
    if path == MESSAGES:
        assert (await server.ring.files.find(record.spec.input_file_id)).bytes, "until the end"
    await server.post(f"{path}/{made}/cancel", {})
    monkeypatch.setattr(batches, "take", take)
    await wait_until(lambda: ended_in(server, made))
    await wait_until(lambda: lines_are_gone(server, made))


async def test_an_ended_message_batch_is_deleted_though_its_job_runs_on(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    made = (await message_batch(server, [asked("a")]))["id"]
    await wait_until(lambda: has_job(server, made))
    job = (await server.ring.batches.find(made)).job
    await server.ring.batches.end(made, "failed")
    assert (await server.http.delete(f"{MESSAGES}/{made}")).status_code == 200
    assert (await server.ring.jobs.status(job)).status == "cancelled"


async def lines_are_gone(server: Api, batch_id: str) -> bool:
    spec = (await server.ring.batches.find(batch_id)).spec
    return not await server.ring.redis.exists(keys.file(spec.input_file_id))


async def has_job(server: Api, batch_id: str) -> bool:
    return bool((await server.ring.batches.find(batch_id)).job)


async def test_requests_of_a_message_batch_that_never_ran_are_told_why(server: Api, redis: Redis) -> None:
    requests = [asked(str(at)) for at in range(300)]
    canceled, expired, failed = [await message_batch(server, requests) for _ in range(3)]
    processing = {"processing": 300, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    assert (canceled["processing_status"], canceled["request_counts"]) == ("in_progress", processing)
    assert (canceled["results_url"], canceled["ended_at"]) == (None, None)
    early = [await server.http.request(*each) for each in (
        ("GET", f"{MESSAGES}/{canceled['id']}/results"), ("DELETE", f"{MESSAGES}/{canceled['id']}")
    )]  # fmt: skip
    assert [answer.status_code for answer in early] == [400, 400]
    told = (await server.post(f"{MESSAGES}/{canceled['id']}/cancel", {})).json()
    assert told["processing_status"] in ("canceling", "ended") and told["cancel_initiated_at"]
    spec = json.loads(await redis.hget(keys.batch(expired["id"]), "spec"))
    await redis.hset(keys.batch(expired["id"]), "spec", json.dumps({**spec, "expires_at": 1}))
    await redis.delete(keys.model_card(MODEL))  # it was there when the batches were made
    for batch, state in ((canceled, "canceled"), (expired, "expired"), (failed, "errored")):
        shown, results = await ended_messages(server, batch["id"])
        assert shown["request_counts"] == {**processing, "processing": 0, state: 300}
        assert [each["custom_id"] for each in results] == [str(at) for at in range(300)]
        assert {each["result"]["type"] for each in results} == {state}
        if state == "errored":
            assert results[0]["result"]["error"]["error"]["type"] == "not_found_error"
        assert (await server.post(f"{MESSAGES}/{batch['id']}/cancel", {})).status_code == 400
        deleted = await server.http.delete(f"{MESSAGES}/{batch['id']}")
        assert deleted.json() == {"id": batch["id"], "type": "message_batch_deleted"}
        assert (await server.http.get(f"{MESSAGES}/{batch['id']}")).status_code == 404
    assert (await server.http.get(MESSAGES)).json()["data"] == []
    assert [key async for key in redis.scan_iter("parallm:file:*")] == []


async def test_results_that_are_gone_leave_an_archived_message_batch(server: Api, redis: Redis) -> None:
    made = await message_batch(server, [asked("a")])
    await server.post(f"{MESSAGES}/{made['id']}/cancel", {})
    shown, _ = await ended_messages(server, made["id"])
    assert shown["archived_at"] is None
    await wait_until(lambda: lines_are_gone(server, made["id"]))
    await redis.hincrby(keys.batch(made["id"]), "ended_at", -8 * keys.DAY_S)
    await redis.delete(keys.file((await server.ring.batches.find(made["id"])).spec.output_file_id))
    archived = (await server.http.get(f"{MESSAGES}/{made['id']}")).json()
    assert archived["archived_at"] and archived["results_url"] is None
    assert (await server.http.get(f"{MESSAGES}/{made['id']}/results")).json()["error"]["type"] == "not_found_error"
