"""Batches over HTTP: what is refused, what is the same batch, and what becomes of one that has no job yet."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from api.batches.work import MAX_LINE_BYTES, MAX_LINES, BatchWork
from shared.errors import ServiceUnavailableError
from shared.redis import keys
from shared.redis.files.batch_store import BatchSpec, BatchStore, new_batch_id
from shared.redis.jobs.ledger import JobLedger
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL
from tests.unit.api_texts import bundle
from tests.waiting import wait_until

URL = "/v1/completions"
MESSAGES = "/v1/messages/batches"
DAY = {"endpoint": URL, "completion_window": "24h"}


@pytest.fixture(autouse=True)
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every 0.1 s instead of every second, and leases of 1 s instead of 4."""
    monkeypatch.setattr("api.batches.work.LOOK_S", 0.1)
    monkeypatch.setattr("shared.redis.keys.BATCH_LEASE_MS", 1000)
    monkeypatch.setattr("api.batches.work.BATCH_LEASE_MS", 1000)


@pytest.fixture
async def server(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    """An api in a ring that knows a model and has no live worker: batches wait to be validated."""
    await WorkerRegistry(redis).register_model(CARD, bundle())
    async with api(redis_url) as serving:
        yield serving


async def join_worker(redis: Redis) -> None:
    status = WorkerStatus("w1", MODEL, "host", 1, "ready", 0, 8, 0, 0, 1, 0.0, 0, 1, 2**40)
    await WorkerRegistry(redis).heartbeat(status)


def line(custom_id: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body, **more}


def text(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


async def uploaded(server: Api, data: bytes, purpose: str = "batch") -> Any:
    files = {"file": ("requests.jsonl", data)}
    return await server.http.post("/v1/files", data={"purpose": purpose}, files=files)


async def created(server: Api, data: bytes) -> str:
    file_id = (await uploaded(server, data)).json()["id"]
    answer = await server.post("/v1/batches", {**DAY, "input_file_id": file_id})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def batch_of(server: Api, batch_id: str) -> Any:
    return (await server.http.get(f"/v1/batches/{batch_id}")).json()


async def in_state(server: Api, batch_id: str, *states: str) -> Any:
    found: dict[str, Any] = {}

    async def reached() -> bool:
        found.update(await batch_of(server, batch_id))
        return found["status"] in states

    await wait_until(reached)
    return found


async def content(server: Api, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(each) for each in (await server.http.get(f"/v1/files/{file_id}/content")).text.splitlines()]


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


async def test_only_a_file_that_was_uploaded_for_batches_is_an_input(server: Api) -> None:
    batch_id = await created(server, text(line("a")))
    await server.post(f"/v1/batches/{batch_id}/cancel", {})
    ended = await in_state(server, batch_id, "cancelled")
    others = [(await uploaded(server, b"{}\n", purpose)).json() for purpose in ("fine-tune", "user_data")]
    assert [each["purpose"] for each in others] == ["fine-tune", "user_data"]
    for file_id in (ended["error_file_id"], *(each["id"] for each in others)):
        refused = await server.post("/v1/batches", {**DAY, "input_file_id": file_id})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")
    unknown = await server.post("/v1/batches", {**DAY, "input_file_id": "file-no"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "file_not_found")


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

    monkeypatch.setattr(dying, "_begin", dies)
    with pytest.raises(RedisConnectionError):
        await dying._validate(record)
    (job,) = (await server.http.get("/v1/jobs")).json()["data"]
    assert (job["status"], (await batch_of(server, batch_id))["status"]) == ("queued", "validating")
    await server.post(f"/v1/batches/{batch_id}/cancel", {})
    monkeypatch.setattr(batches, "take", take)
    await batches.release(batch_id, "dying")
    ended = await in_state(server, batch_id, "cancelled")
    assert (await server.http.get(f"/v1/jobs/{job['id']}")).json()["status"] == "cancelled"
    assert {each["custom_id"] for each in await content(server, ended["error_file_id"])} == {"a", "b"}
    assert ended["model"] == MODEL


async def test_a_body_that_no_request_may_have_refuses_its_line_unread(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    long = {"model": MODEL, "prompt": "x" * (2 << 20), "max_tokens": 4}
    wide = {"model": MODEL, "prompt": [0] * 300_000, "max_tokens": 4}
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    bodies = {"long": long, "wide": wide, "deep": {"model": MODEL, "prompt": deep}}
    batch_id = await created(server, text(*(line(name, body=body) for name, body in bodies.items()), line("good")))
    job_id = (await in_state(server, batch_id, "in_progress"), (await server.ring.batches.find(batch_id)).job)[1]
    asked = [json.loads(each) for each in await JobLedger(redis).inputs(job_id, 0, 10)]
    replies = {each["reply"]["custom_id"]: each["reply"].get("status") for each in asked}
    assert replies == {"long": 413, "wide": 400, "deep": 400, "good": None}


async def test_a_batch_whose_job_s_end_redis_has_lost_waits_for_it_again(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    batch_id = await created(server, text(line("a")))
    await in_state(server, batch_id, "in_progress")
    with pytest.raises(ServiceUnavailableError, match="goes on"):
        await BatchWork(server.ring)._finalize(await server.ring.batches.find(batch_id))
    found = await batch_of(server, batch_id)
    assert (found["status"], found["finalizing_at"], found["errors"]) == ("in_progress", None, None)


async def test_a_file_is_read_however_its_lines_end(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    data = b"\xef\xbb\xbf" + text(line("a"), line("b")).replace(b"\n", b"\r\n") + b"\r\n  \r\n" + text(line("c"))[:-1]
    batch_id = await created(server, data)
    assert (await in_state(server, batch_id, "in_progress"))["request_counts"]["total"] == 3


BAD = {
    "empty_file": b" \n\r\n\n",
    "too_many_lines": text(*(line(str(at)) for at in range(MAX_LINES + 1))),
    "duplicate_custom_id": text(line("x"), line("x")),
    "mismatched_endpoint": text(line("x", url="/v1/embeddings")),
    "invalid_json_line": text(line("x")).decode().encode("utf-16"),
    "invalid_line": text(line("x", body=[])),
    "invalid_custom_id": text(line("")),
    "invalid_request_error": b"x" * (17 << 20),
    "model_not_found": text(line("x", body={"model": "nobody's", "prompt": "hi"})),
}


async def test_a_file_that_is_no_batch_fails_it_and_says_why(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    made = {code: await created(server, data) for code, data in BAD.items()}
    for code, batch_id in made.items():
        failed = await in_state(server, batch_id, "failed")
        assert failed["errors"]["data"][0]["code"] == code, failed["errors"]
        assert (failed["output_file_id"], failed["error_file_id"]) == (None, None)
        assert failed["failed_at"] is not None
        of_a_line = code not in ("empty_file", "invalid_request_error")
        assert all(bool(each["line"]) == of_a_line for each in failed["errors"]["data"]), failed["errors"]


async def test_every_fault_of_a_line_is_told_with_its_number(server: Api, redis: Redis) -> None:
    await join_worker(redis)
    broken = b'{"custom_id": 7, "method": "POST", "body": []}\n'
    odd = text(line("", url="/v1/embeddings"))
    failed = await in_state(server, await created(server, text(line("x")) + broken + odd), "failed")
    assert [(each["line"], each["code"], each["param"]) for each in failed["errors"]["data"]] == [
        (2, "invalid_line", "custom_id"),
        (2, "missing_required_parameter", "url"),
        (2, "invalid_line", "body"),
        (3, "invalid_custom_id", "custom_id"),
        (3, "mismatched_endpoint", "url"),
    ]


async def test_a_batch_cannot_fill_redis_with_choices(
    server: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await join_worker(redis)
    monkeypatch.setattr("api.batches.work.MAX_CHOICES", 600)
    many = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "n": 256}
    failed = await in_state(
        server, await created(server, text(*(line(str(at), body=many) for at in range(4)))), "failed"
    )
    (error,) = failed["errors"]["data"]
    assert (error["code"], error["param"], error["line"]) == ("too_many_choices", "n", 3)
    assert not [key async for key in redis.scan_iter(match=keys.job_inputs("*"))], "the job's inputs are left"


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


async def test_an_upload_that_makes_no_sense_is_refused_by_the_field(server: Api) -> None:
    post = server.http.post
    ok = ("x.jsonl", b"{}\n")
    wrong: list[tuple[dict[str, Any], str | None]] = [
        ({"data": {"purpose": "batch"}, "files": {"file": ("x.jsonl", b"")}}, "file"),
        ({"data": {"purpose": "batch_output"}, "files": {"file": ok}}, "purpose"),
        ({"files": {"file": ok}}, "purpose"),
        ({"data": {"purpose": "batch", "colour": "red"}, "files": {"file": ok}}, "colour"),
        ({"data": {"purpose": "batch"}, "files": {"other": ok}}, "other"),
        ({"data": {"purpose": "batch", "file": "text"}, "files": {"x": ("", b"")}}, "x"),
        ({"data": {"purpose": "batch"}, "files": [("file", ok), ("file", ok)]}, None),
        (
            {"data": {"purpose": "batch", "expires_after[seconds]": "60"}, "files": {"file": ok}},
            "expires_after[anchor]",
        ),
        ({"json": {"purpose": "batch"}}, "file"),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data"}}, None),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}}, None),
    ]
    for request, param in wrong:
        answer = await post("/v1/files", **request)
        assert answer.status_code == 400, (request, answer.text)
        assert param is None or answer.json()["error"]["param"] == param, (request, answer.text)
    assert (await server.http.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [("données ☃.jsonl", "données ☃.jsonl"), ("../../etc/passwd", "passwd"), ("a\u202eb.jsonl", "a?b.jsonl")],
)
async def test_a_file_keeps_its_name_for_people(server: Api, given: str, shown: str) -> None:
    answer = await server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": (given, b"{}\n")})
    assert answer.json()["filename"] == shown
    assert f"<code>{shown}</code>" in (await server.http.get(f"/dashboard/files/{answer.json()['id']}")).text


async def test_one_key_s_batches_leave_a_hand_for_others(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    async def hold(self: BatchWork, batch_id: str) -> None:
        taken.append(batch_id)
        await asyncio.Event().wait()

    monkeypatch.setattr(BatchWork, "_work", hold)
    specs = [
        BatchSpec(new_batch_id(), URL, "file-1", "24h", 1, 2**40, f"file-{at}2", f"file-{at}3", 3600, key=key)
        for at, key in enumerate(["alice"] * 5 + ["bob"])
    ]
    for spec in specs:
        await BatchStore(redis).create(spec)
    async with api(redis_url):
        await wait_until(lambda: len(taken) == 4)
    assert sorted(spec.key for spec in specs if spec.id in taken) == ["alice"] * 3 + ["bob"]


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
    check = slow._check_shapes

    async def overtaken(*of: Any) -> Any:
        monkeypatch.setattr(slow, "_check_shapes", check)
        await fast._validate(record)
        if path == "/v1/batches":
            await server.ring.files.delete(record.spec.input_file_id)  # as its client may, when it is in progress
        return await check(*of)

    monkeypatch.setattr(slow, "_check_shapes", overtaken)
    await slow._validate(record)
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


async def test_a_file_may_come_without_a_name(server: Api) -> None:
    parts = (b'name="purpose"\r\n\r\nbatch', b'name="file"\r\n\r\n\xff{}\n')
    body = b"".join(b"--b\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    stored = (await server.http.post("/v1/files", content=body, headers=headers)).json()
    assert (stored["filename"], stored["bytes"]) == ("file.jsonl", 4)
    assert (await server.http.get(f"/v1/files/{stored['id']}/content")).content == b"\xff{}\n"


async def test_files_have_anthropic_s_shape_for_its_clients(server: Api) -> None:
    ours, theirs = (await uploaded(server, b"{}\n")).json()["id"], {"anthropic-version": "2023-06-01"}

    async def ask(method: str, path: str, **request: Any) -> Any:
        return await server.http.request(method, f"/v1/files{path}", headers=theirs, **request)

    picture = {"file": ("a/b.png", b"data", "image/png")}
    stored = (await ask("POST", "", files=picture, data={"expires_in_seconds": "3600"})).json()
    assert (stored["type"], stored["filename"], stored["mime_type"], stored["size_bytes"]) == (
        "file", "b.png", "image/png", 4,
    )  # fmt: skip
    lived = [datetime.fromisoformat(stored[name]) for name in ("created_at", "expires_at")]
    assert lived[1] - lived[0] == timedelta(hours=1)
    assert (await ask("GET", f"/{stored['id']}")).json() == stored
    first = (await ask("GET", "?limit=1")).json()
    second = (await ask("GET", f"?limit=1&page={first['next_page']}")).json()
    assert [each["id"] for each in first["data"] + second["data"]] == [stored["id"], ours]
    assert second["next_page"] is None
    assert (await ask("GET", f"?ids[]={ours}&ids[]=file-no&ids[]={ours}")).json()["data"] == second["data"]
    for method, path, request, status in (
        ("GET", "?limit=0", {}, 400),
        ("GET", "?limit=x", {}, 400),
        ("GET", "?page=file-no", {}, 400),
        ("GET", "?page=page_file-no", {}, 404),
        ("GET", "?ids[]=" + ",".join(map(str, range(101))), {}, 400),
        ("GET", "/file-no", {}, 404),
        ("POST", "", {"files": picture, "data": {"expires_in_seconds": "1"}}, 400),
        ("POST", "", {"files": picture, "data": {"expires_in_seconds": "-1"}}, 400),
        ("POST", "", {"files": picture, "data": {"purpose": "batch"}}, 400),
        ("POST", "", {"data": {"expires_in_seconds": "3600"}, "files": {"other": b""}}, 400),
        ("POST", "", {"json": {}}, 400),
    ):
        kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
        refused = await ask(method, path, **request)
        assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind), (method, path, refused.text)
    assert (await ask("DELETE", f"/{ours}")).json() == {"id": ours, "type": "file_deleted"}
    purposes = [each["purpose"] for each in (await server.http.get("/v1/files")).json()["data"]]
    assert purposes == ["user_data"]
