"""A Redis that is there and refuses: nobody learns what was asked of it, and everybody learns why it was refused."""

import asyncio
import contextlib
import logging
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import structlog
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from api.serve.embedded_redis import EmbeddedRedis
from shared.errors import ServiceUnavailableError
from shared.jobs import TERMINAL, JobInput
from shared.redis import keys
from shared.redis.connection.client import require
from shared.redis.connection.faults import code_of, is_refusal, reason
from shared.redis.jobs.store import JobStore
from shared.redis.jobs.ticks import arq_redis
from shared.redis.tokens.reader import FrameReader
from tests.redis.api_servers import Api, api
from tests.redis.job_fakes import FakeWorker, lines, register, spec
from tests.redis.job_fakes import working as job_working
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
SECRET = "xyzzy-plugh-7531"
Refusing = Callable[[Redis], AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def full(redis: Redis) -> AsyncIterator[None]:
    """maxmemory, noeviction."""
    await redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await redis.config_set("maxmemory", 0)


@contextlib.asynccontextmanager
async def without_replicas(redis: Redis) -> AsyncIterator[None]:
    await redis.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        await redis.config_set("min-replicas-to-write", 0)


@contextlib.asynccontextmanager
async def without_a_disk(redis: Redis) -> AsyncIterator[None]:
    """A snapshot has failed: a folder stands in its place."""
    place = Path((await redis.config_get("dir"))["dir"]) / "dump.rdb"
    place.unlink(missing_ok=True)
    place.mkdir()
    await redis.config_set("save", "3600 1000000")
    await redis.bgsave()

    async def saved(status: str) -> bool:
        return (await redis.info("persistence"))["rdb_last_bgsave_status"] == status

    await wait_until(lambda: saved("err"))
    try:
        yield
    finally:
        place.rmdir()
        await redis.config_set("save", "")
        await redis.bgsave()
        await wait_until(lambda: saved("ok"))


REFUSALS: list[tuple[Refusing, str]] = [(full, "OOM"), (without_replicas, "NOREPLICAS"), (without_a_disk, "MISCONF")]
kinds = pytest.mark.parametrize(("refusing", "code"), REFUSALS, ids=[code for _, code in REFUSALS])


def everything_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + str(error)


async def in_a_pipeline(redis: Redis, transaction: bool) -> None:
    async with redis.pipeline(transaction=transaction) as pipe:
        pipe.get("parallm:x")
        pipe.hset("parallm:x", mapping={"prompt": SECRET})
        await pipe.execute()


@kinds
async def test_no_error_of_redis_holds_the_arguments_of_its_command(
    redis: Redis, refusing: Refusing, code: str
) -> None:
    ways: list[Callable[[], Awaitable[object]]] = [
        lambda: redis.set("parallm:x", SECRET),
        lambda: in_a_pipeline(redis, True),
        lambda: in_a_pipeline(redis, False),
        lambda: in_a_pipeline(arq_redis(redis), False),
    ]
    async with refusing(redis):
        for way in ways:
            with pytest.raises(ResponseError) as raised:
                await way()
            assert SECRET not in everything_of(raised.value)
            assert code_of(raised.value) == code and is_refusal(raised.value)
            assert reason(raised.value).startswith(f"{code}: ")


async def test_what_the_server_repeats_is_left_out(redis: Redis) -> None:
    asked = (("NOSUCH", SECRET), ("XADD", SECRET), ("EVAL", f"return redis.call('GET', {SECRET!r}, 'b')", 0))
    for command in asked:
        with pytest.raises(ResponseError) as raised:
            await redis.execute_command(*command)
        assert SECRET not in everything_of(raised.value) and not is_refusal(raised.value)
    with pytest.raises(ResponseError) as unknown:
        await redis.execute_command("NOSUCH", SECRET)
    assert "unknown command" in reason(unknown.value), "what helps is kept"


def test_codes_of_errors_that_did_not_come_through_our_clients() -> None:
    said = ResponseError(f"Command # 1 (HSET x {SECRET} OOM MISCONF) of pipeline caused error: ('NOREPLICAS no',)")
    assert SECRET not in reason(said)
    assert code_of(OutOfMemoryError("command not allowed")) == "OOM"
    assert code_of(NoScriptError("No matching script.")) == "NOSCRIPT"
    assert code_of(OSError(28, "full")) == ""
    old = ResponseError("Error running script (call to f_a): @user_script:3: @user_script: 3: -OOM not allowed")
    assert code_of(old) == "OOM"


@contextlib.asynccontextmanager
async def serving(redis: Redis, url: str) -> AsyncIterator[tuple[Api, ScriptedWorker]]:
    async with working(url, lambda spec: Answer("hello there", hold_at=HELD_AT)) as worker, api(url) as server:
        yield server, worker


HELD_AT = 4
BODY = {"model": MODEL, "prompt": SECRET, "max_tokens": 50}


RESUMABLE = {"stream": True, "stream_options": {"include_event_ids": True}}


@kinds
async def test_a_refused_request_is_a_503_with_the_reason_and_the_log_has_no_prompt(
    redis: Redis, redis_url: str, refusing: Refusing, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    job = {"kind": "generate", "model": MODEL, "prompts": [SECRET]}
    upload = {"file": ("in.jsonl", f'{{"custom_id": "{SECRET}"}}\n'.encode())}
    with structlog.testing.capture_logs(processors=[structlog.processors.format_exc_info]) as events:
        async with serving(redis, redis_url) as (server, _):
            await server.http.get("/v1/models")
            async with refusing(redis):
                answers = [
                    await server.post("/v1/completions", BODY),
                    await server.post("/v1/completions", {**BODY, "stream": True}),
                    await server.post("/v1/completions", BODY | RESUMABLE),
                    await server.post("/v1/jobs", job),
                    await server.http.post("/v1/files", files=upload, data={"purpose": "batch"}),
                ]  # fmt: skip
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert code in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
        assert SECRET not in answer.text
    assert any(event["event"] == "api.request" for event in events)
    assert SECRET not in repr(events) + caplog.text


@kinds
async def test_a_request_that_is_under_way_is_told_why_nothing_comes(
    redis: Redis, redis_url: str, refusing: Refusing, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.tokens.reader.REFUSED_S", 0.2)
    async with serving(redis, redis_url) as (server, worker), asyncio.timeout(HANG_S):

        async def all_held() -> bool:
            logs = [keys.sequence_log(MODEL, spec.id) for spec in worker.specs]
            return [await redis.xlen(name) for name in logs] == [HELD_AT, HELD_AT]

        whole = asyncio.create_task(server.post("/v1/completions", BODY))
        async with server.stream("/v1/completions", BODY) as events:
            await wait_until(all_held)
            async with refusing(redis):
                rest = await events.all()
                health = (await server.http.get("/health")).json()
                answer = await whole
        worker.go.set()
    assert code in rest[-1]["error"]["message"] and events.done
    assert any(f"Redis refuses writes: {code}" in reason for reason in health["reasons"])
    assert answer.status_code == 503 and code in answer.json()["error"]["message"]


async def test_a_request_that_came_in_during_a_refusal_is_told_too(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that writes something harmless first passes, so a sequence may be enqueued, and its tokens may not."""
    monkeypatch.setattr("shared.redis.tokens.reader.REFUSED_S", 0.2)
    reader = FrameReader(redis_url, "a")
    await reader.start()
    async with without_replicas(redis):
        for _ in range(2):
            feed = reader.open(MODEL, ["s"])
            with pytest.raises(ServiceUnavailableError, match="NOREPLICAS"):
                async with asyncio.timeout(HANG_S):
                    await feed.next()
            feed.close()
    await reader.stop()


async def test_a_job_outlives_refusals_and_its_runner_logs_no_prompt(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    await register(redis)
    jobs, log = JobStore(redis), tmp_path / "runner.log"
    command = [sys.executable, "-m", "worker.jobs", "--redis", redis_url, "--reward-processes", "1"]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=out, stderr=out)
    try:
        job, _ = await jobs.create(spec(), lines(JobInput(f"{SECRET} {i}") for i in range(20)))
        for refusing, code in REFUSALS:
            async with refusing(redis):
                await wait_until(lambda code=code: code in log.read_text())  # type: ignore[misc]
        async with job_working(FakeWorker(redis)):

            async def done() -> bool:
                return (await jobs.status(job)).status in TERMINAL

            await wait_until(done)
        status = await jobs.status(job)
    finally:
        process.terminate()
        await process.wait()
    assert (status.status, status.counts.succeeded) == ("succeeded", 20)
    assert SECRET not in log.read_text()


async def test_a_server_that_refuses_the_password_is_told_without_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, pytest.raises(ServiceUnavailableError) as raised:
        await require(server.url.replace("redis://", f"redis://nobody:{SECRET}@"), within_s=HANG_S)
    assert SECRET not in str(raised.value) and "WRONGPASS" in str(raised.value)
