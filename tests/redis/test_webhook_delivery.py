"""Webhooks as they arrive: at the end of a job, a batch and a response, once it is taken, whoever dies meanwhile."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of
from api.webhooks.work import AT_ONE_RECEIVER, OF_ONE_TENANT
from shared.redis import keys
from shared.redis.jobs.ledger import JobLedger
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker
from tests.redis.sequences import end_leases
from tests.redis.tenants import KEYS
from tests.waiting import wait_until

SECRET = "a-secret-of-the-receiver-alone"
JOB = {"kind": "generate", "model": MODEL, "prompts": ["a"]}


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello")


@dataclass
class Receiver:
    """A real HTTP server that answers with `status`, and keeps what came."""

    port: int = 0
    status: int = 204
    silent: bool = False
    came: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def webhook(self) -> dict[str, str]:
        return {"url": f"http://localhost:{self.port}/secret-path?token=t0ken", "secret": SECRET}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.came.append((first, headers, body))
            if self.silent:
                await reader.read()
            else:
                other = f"location: http://localhost:{self.port}/elsewhere\r\n"
                writer.write(f"HTTP/1.1 {self.status} X\r\n{other}content-length: 0\r\n\r\n".encode())
                await writer.drain()
        writer.close()

    def events(self) -> list[dict[str, Any]]:
        """What came, checked by the openai package."""
        client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
        return [client.webhooks.unwrap(body, headers).model_dump() for _, headers, body in self.came]


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    monkeypatch.setattr("api.webhooks.work.LOOK_S", 0.05)
    monkeypatch.setattr("api.webhooks.work.FIRST_S", 0.05)
    made = Receiver()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker, receiver: Receiver) -> AsyncIterator[Api]:
    async with api(redis_url, webhook_hosts=[f"localhost:{receiver.port}"], webhook_private=True) as serving:
        yield serving


async def end(server: Api, job_id: str) -> None:
    assert await JobLedger(server.ring.redis).finish(job_id, "failed", "as the test wants")


async def submit(server: Api, receiver: Receiver) -> str:
    response = await server.post("/v1/jobs", {**JOB, "webhook": receiver.webhook})
    assert response.status_code == 202, response.text
    job_id: str = response.json()["id"]
    return job_id


async def is_over(redis: Redis) -> bool:
    return await redis.zcard(keys.due("webhooks")) == 0


async def test_the_end_of_a_job_a_batch_and_a_response_is_told_once(
    server: Api, receiver: Receiver, redis: Redis, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.batches.work.LOOK_S", 0.05)
    job_id = await submit(server, receiver)
    file = await server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}\n")})
    batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = (await server.post("/v1/batches", {**batch, "webhook": receiver.webhook})).json()["id"]
    asked = {"input": "hi", "background": True, "webhook": receiver.webhook}
    response_id = (await server.post("/v1/responses", asked)).json()["id"]
    await wait_until(lambda: len(receiver.came) == 2)
    await end(server, job_id)
    await wait_until(lambda: is_over(redis))
    told = {(event["type"], event["data"]["id"]) for event in receiver.events()}
    assert told == {("job.failed", job_id), ("batch.failed", batch_id), ("response.completed", response_id)}
    assert len(receiver.came) == 3
    first, headers, body = receiver.came[0]
    assert first == "POST /secret-path?token=t0ken HTTP/1.1" and headers["host"] == f"localhost:{receiver.port}"
    assert headers["webhook-id"] == json.loads(body)["id"]
    shown = capsys.readouterr()
    for secret in (SECRET, "secret-path", "t0ken"):
        assert secret not in shown.out + shown.err
        for path in (f"/v1/jobs/{job_id}", f"/v1/batches/{batch_id}", f"/v1/responses/{response_id}"):
            assert secret not in (await server.http.get(path)).text
    assert "webhook.sent" in shown.out + shown.err


async def test_one_that_fails_is_tried_again_under_the_same_id(server: Api, receiver: Receiver, redis: Redis) -> None:
    receiver.status = 307
    await end(server, await submit(server, receiver))
    await wait_until(lambda: len(receiver.came) >= 3)
    receiver.status = 204
    await wait_until(lambda: is_over(redis))
    assert len({headers["webhook-id"] for _, headers, _ in receiver.came}) == 1
    assert {first.split()[1].partition("?")[0] for first, *_ in receiver.came} == {"/secret-path"}, "no redirect"


async def test_one_that_nobody_takes_is_given_up(
    redis_url: str, worker: ScriptedWorker, receiver: Receiver, redis: Redis
) -> None:
    receiver.status = 500
    allowed = {"webhook_hosts": [f"localhost:{receiver.port}"], "webhook_private": True}
    async with api(redis_url, **allowed, webhook_hours=1e-4) as server:
        await end(server, await submit(server, receiver))
        await wait_until(lambda: is_over(redis))
    assert receiver.came


async def test_a_process_that_dies_in_a_try_leaves_it_to_another_one(
    redis_url: str, worker: ScriptedWorker, receiver: Receiver, redis: Redis
) -> None:
    allowed = {"webhook_hosts": [f"localhost:{receiver.port}"], "webhook_private": True}
    receiver.silent = True
    async with api(redis_url, **allowed) as first:
        await end(first, await submit(first, receiver))
        await wait_until(lambda: len(receiver.came) == 1)
    assert not await is_over(redis)
    await end_leases(redis, "webhooks")
    receiver.silent = False
    async with api(redis_url, **allowed):
        await wait_until(lambda: is_over(redis))
    assert len(receiver.came) == 2 and len({headers["webhook-id"] for _, headers, _ in receiver.came}) == 1


async def test_slow_receivers_of_one_tenant_keep_no_other_one_s_message(
    redis_url: str, worker: ScriptedWorker, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("work", "sending"):
        monkeypatch.setattr(f"api.webhooks.{room}.TRY_S", 600.0)  # alice's tries never end
    key_file = tmp_path / "keys"
    key_file.write_text("\n".join(line_of(KEYS[who], name=who, tenant=who) for who in ("alice", "bob")))
    async with contextlib.AsyncExitStack() as open_servers:
        silent = [Receiver(silent=True) for _ in range(8)]
        for made in silent:
            server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
            open_servers.callback(server.close)
            made.port = server.sockets[0].getsockname()[1]
        hosts = [f"localhost:{each.port}" for each in (*silent, receiver)]
        ring = api(redis_url, webhook_hosts=hosts, webhook_private=True, api_key_file=key_file)
        served = await open_servers.enter_async_context(ring)

        async def end_one(who: str, told: Receiver) -> None:
            headers = {"authorization": f"Bearer {KEYS[who]}"}
            created = await served.http.post("/v1/jobs", json={**JOB, "webhook": told.webhook}, headers=headers)
            assert created.status_code == 202, created.text
            await end(served, created.json()["id"])

        for _ in range(6):
            for made in silent:
                await end_one("alice", made)
        await wait_until(lambda: sum(len(made.came) for made in silent) == OF_ONE_TENANT)
        assert max(len(made.came) for made in silent) <= AT_ONE_RECEIVER
        await end_one("bob", receiver)
        await wait_until(lambda: len(receiver.came) == 1)
        assert sum(len(made.came) for made in silent) == OF_ONE_TENANT, "hers were held all the time"


async def test_a_process_that_sends_none_leaves_them_to_others(
    redis_url: str, worker: ScriptedWorker, receiver: Receiver, redis: Redis
) -> None:
    elsewhere = {"webhook_hosts": ["other.example"], "webhook_private": True}
    async with (
        api(redis_url) as without,
        api(redis_url, **elsewhere),
        api(redis_url, webhook_hosts=[f"localhost:{receiver.port}"], webhook_private=True) as server,
    ):
        jobs = [await submit(server, receiver) for _ in range(4)]
        for job_id in jobs:
            await end(without, job_id)
        await wait_until(lambda: is_over(redis))  # chance says who looks, and one that may not send puts off
    assert {event["data"]["id"] for event in receiver.events()} == set(jobs) and len(receiver.came) == 4


async def test_an_end_that_nobody_could_tell_of_is_found(
    server: Api, receiver: Receiver, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.due.webhooks.LOOK_MS", 50)
    job_id = await submit(server, receiver)
    await redis.hset(keys.job(job_id), mapping={"state": "failed", "finished_ms": 1})  # type: ignore[misc]
    await wait_until(lambda: is_over(redis))
    assert len(receiver.came) == 1


async def test_what_is_private_is_not_called_without_leave(
    redis_url: str, worker: ScriptedWorker, receiver: Receiver, redis: Redis
) -> None:
    webhook = {"url": f"https://localhost:{receiver.port}/", "secret": SECRET}
    allowed = {"webhook_hosts": [f"localhost:{receiver.port}"], "webhook_hours": 1e-9}
    async with api(redis_url, **allowed) as server:
        job = (await server.post("/v1/jobs", {**JOB, "webhook": webhook})).json()["id"]
        await end(server, job)
        await wait_until(lambda: is_over(redis))
        plain = await server.post("/v1/jobs", {**JOB, "webhook": receiver.webhook})
        assert plain.status_code == 400 and plain.json()["error"]["param"] == "webhook.url"
    assert not receiver.came


async def test_a_webhook_that_may_not_be_is_refused_by_name(redis_url: str, worker: ScriptedWorker) -> None:
    webhook = {"url": "https://example.com/", "secret": SECRET}
    async with api(redis_url) as server:
        for path, body in (("/v1/jobs", JOB), ("/v1/responses", {"input": "hi", "background": True})):
            refused = (await server.post(path, {**body, "webhook": webhook})).json()["error"]
            assert (refused["code"], refused["param"]) == ("unsupported_parameter", "webhook")
        refused = (await server.post("/v1/responses", {"input": "hi", "webhook": webhook})).json()["error"]
        assert refused["param"] == "webhook"
    async with api(redis_url, webhook_hosts=["other.example"]) as server:
        for wrong, param in (
            (webhook, "webhook.url"),
            ({"url": "https://other.example/"}, "webhook.secret"),
            ({"url": "https://other.example/", "secret": "short"}, "webhook.secret"),
        ):
            refused = (await server.post("/v1/jobs", {**JOB, "webhook": wrong})).json()["error"]
            assert refused["param"] == param and SECRET not in refused["message"], refused
