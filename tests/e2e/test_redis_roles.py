"""Every process in Redis under its own minimal user: all works, and what is not its own is refused."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from safetensors.numpy import save

from api.cli.acl import ROLES, RoleName, rules
from api.cli.client import InferenceClient, JobRequest
from api.serve.embedded_redis import EmbeddedRedis
from shared.jobs import JobInput, RewardSpec
from shared.redis import keys
from tests.e2e.rings import MODEL, ROOT, Process
from tests.e2e.test_adapters import CONFIG, weights
from tests.redis.clusters import Cluster
from tests.unit.adapter_files import write
from tests.waiting import HANG_S

PASSWORD = "a-password-of-the-role"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as started:
        with_users([started.url])
        yield started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("shards"))
    with_users(urls_of(started))
    yield started
    started.stop()


def with_users(urls: list[str]) -> None:
    for url in urls:
        with redis.Redis.from_url(url) as admin:
            for role in ROLES:
                admin.execute_command("ACL", "SETUSER", f"parallm-{role}", "on", f">{PASSWORD}", *rules(role))
            admin.execute_command("ACL", "LOG", "RESET")


def urls_of(server: EmbeddedRedis | Cluster) -> list[str]:
    """Of each server."""
    if isinstance(server, EmbeddedRedis):
        return [server.url]
    return [f"redis://127.0.0.1:{each.port}/0" for each in server.servers]


def url_of(server: EmbeddedRedis | Cluster, role: RoleName) -> str:
    return server.url.replace("://", f"://parallm-{role}:{PASSWORD}@")


@contextlib.contextmanager
def started(
    module: str, server: EmbeddedRedis | Cluster, role: RoleName, ready: str, *arguments: str
) -> Iterator[Process]:
    environment = {"PARALLM_REDIS_URL": url_of(server, role)}
    process = Process.start(module, "--log-json", "true", *arguments, environment=environment)
    try:
        process.wait_for_line(ready)
        yield process
    finally:
        code = process.stop()
    assert code == 0, process.output
    assert PASSWORD not in process.output
    assert "NOPERM" not in process.output, process.output


def denied(server: EmbeddedRedis | Cluster) -> list[tuple[str, str, str]]:
    """What a user was refused: (user, why, what)."""
    refused = []
    for url in urls_of(server):
        with redis.Redis.from_url(url, decode_responses=True) as admin:
            lines = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in admin.execute_command("ACL", "LOG")]
        refused += [(line["username"], line["reason"], line["object"]) for line in lines]
    return refused


async def use(url: str, adapter: Path) -> None:
    """What clients do: stream, resume, cancel by leaving, jobs with rewards, adapters, probes, figures."""
    body = {"model": MODEL, "prompt": "12+35=", "max_tokens": 24, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
        streamed = {**body, "stream": True, "stream_options": {"include_event_ids": True}}
        async with http.stream("POST", "/v1/completions", json=streamed) as response:
            lines = [line async for line in response.aiter_lines()]
        assert lines[-2] == "data: [DONE]", lines
        stream_id = lines[1].split('"id":"')[1].split('"')[0]
        assert (await http.get(f"/v1/streams/{stream_id}")).status_code == 200
        async with http.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": 1500, "stream": True}
        ) as response:
            await anext(response.aiter_lines())
        files = {
            "adapter": ("adapters.safetensors", save(weights(3))),
            "config": ("adapter_config.json", (adapter / "adapter_config.json").read_bytes()),
        }
        assert (await http.post("/upload_adapter", files=files, data={"name": "lora"})).status_code == 200
        answer = await http.post("/v1/completions", json={**body, "model": "lora"})
        assert answer.status_code == 200, answer.text
        for path in (
            "/health",
            "/readyz",
            "/metrics",
            "/v1/models",
            "/v1/jobs",
            "/v1/adapters/lora",
            "/v1/deadletters",
        ):
            assert (await http.get(path)).status_code == 200, path
    async with InferenceClient(url) as client:
        request = JobRequest(kind="rollout", model="lora", n=2, max_tokens=8, reward=RewardSpec("exact"))
        job = await client.submit(request, [JobInput(f"{i}+1=", str(i + 1)) for i in range(10, 16)])
        assert (await client.wait(job.id)).status == "succeeded"
        assert len([line async for line in client.results(job.id)]) == 12


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_every_process_works_under_its_minimal_user(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    server: EmbeddedRedis | Cluster = request.getfixturevalue(kind)
    write(tmp_path / "lora", CONFIG, weights(3))
    worker = ("--model", f"models/{MODEL}", "--adapter-cache-dir", str(tmp_path / "cache"), "--kv-transfer")
    with (
        started("api", server, "api", r"api\.listening", "--port", "0") as api,
        started("worker.jobs", server, "runner", r"runner\.ready"),
        started("worker", server, "worker", r"worker\.ready", *worker),
    ):
        url = api.wait_for_line(r"(http://127\.0\.0\.1:\d+)").group(1)
        asyncio.run(use(url, tmp_path / "lora"))
        recipe = str(ROOT / "trainer/recipes/tiny-fixed.yaml")
        training = (
            "--config",
            recipe,
            "--steps",
            "1",
            "--run-dir",
            str(tmp_path / "run"),
            "--model",
            f"models/{MODEL}",
        )
        with started("trainer", server, "trainer", r"train\.ended", *training) as trainer:
            assert trainer.wait() == 0
        with started("worker", server, "worker", r"worker\.ready", *worker) as second:
            second.stop(signal.SIGTERM)
    assert denied(server) == []


MINE = keys.sequence(MODEL, "x")
JOB = keys.job("x")


@pytest.mark.parametrize(
    ("role", "command"),
    [
        *((role, command) for role in ROLES for command in ("FLUSHALL", "KEYS *", "CONFIG GET *", "EVAL return(1) 0")),
        *((role, "SET stranger 1") for role in ROLES),
        *((role, command) for role in ROLES if role != "viewer" for command in ("SCAN 0", "RANDOMKEY")),
        ("worker", f"HGETALL {JOB}"),
        ("worker", "XADD arq:parallm * a 1"),
        ("runner", "HSET parallm:adapter:{a} latest 9"),
        ("runner", "SET parallm:tokenizer:x 1"),
        ("trainer", f"HGETALL {JOB}"),
        ("trainer", "GET parallm:limit:x"),
        *((role, "GET parallm-peers:secret") for role in ROLES if role != "worker"),
        *((role, "GET parallm-ranks:secret") for role in ROLES if role != "trainer"),
        ("viewer", f"HSET {MINE} state done"),
        ("viewer", "SUBSCRIBE parallm:api:x:live"),
        ("viewer", "PUBLISH parallm:ctl:w cancel"),
    ],
)
def test_what_is_not_a_role_s_own_is_refused(server: EmbeddedRedis, role: RoleName, command: str) -> None:
    client = redis.Redis.from_url(url_of(server, role))
    try:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())
    finally:
        client.close()
