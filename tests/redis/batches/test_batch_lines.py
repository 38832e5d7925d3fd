"""Lines of a batch: how they are read, which are refused, and what is said of each."""

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from api.batches.work import MAX_LINES
from shared.redis import keys
from shared.redis.jobs.ledger import JobLedger
from tests.redis.api_servers import Api
from tests.redis.batches.batch_requests import created, in_state, join_worker, line, text
from tests.redis.scripted_worker import MODEL


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
