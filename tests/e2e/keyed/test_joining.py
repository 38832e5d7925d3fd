"""Processes that join a ring knowing an api of it alone: a server, a worker, and what they say when it is wrong."""

from pathlib import Path

import httpx
import pytest
import redis as sync_redis

from api.serve.embedded_redis import EmbeddedRedis
from tests.e2e.keyed import KEY
from tests.e2e.rings import MODEL, Process, Ring
from tests.waiting import HANG_S


def test_a_server_and_a_worker_join_through_an_api_with_a_key(keyed: Ring, tmp_path: Path) -> None:
    given = {"PARALLM_CONNECT_KEY": KEY}
    joined = Process.start(
        "api.serve.main", "--mode", "inference", "--connect-to", keyed.url, "--model", f"models/{MODEL}", "--port", "0",
        "--data-dir", str(tmp_path / "second"), "--log-json", "true", environment=given,
    )  # fmt: skip
    worker = Process.start(
        "worker", "--connect-to", f"{keyed.url}/v1", "--model", f"models/{MODEL}", "--log-json", "true",
        environment=given,
    )  # fmt: skip
    try:
        url = joined.wait_for_line(r"ready: (http://\S+)/v1").group(1)
        for process in (worker, joined):
            process.wait_for_line("worker.ready")
        assert len(keyed.workers()) == 3
        assert not joined.printed("redis.started")
        body = {"model": MODEL, "prompt": "1+2=", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        seen = httpx.get(f"{url}/health", timeout=HANG_S).json()["workers"]
        assert [each["id"] for each in seen] == [each["id"] for each in keyed.health()["workers"]]
    finally:
        assert (worker.stop(), joined.stop()) == (0, 0)
    assert keyed.server.popen.poll() is None


@pytest.mark.parametrize("module", ["worker", "api.serve.main"])
def test_what_keeps_a_process_from_joining_is_said(module: str, keyed: Ring) -> None:
    process = Process.start(module, "--connect-to", keyed.url, "--model", f"models/{MODEL}")
    code = process.wait()
    process.stop()
    assert code == 2 and "PARALLM_CONNECT_KEY" in process.output
    process = Process.start(module, "--connect-to", "127.0.0.1:9", "--model", f"models/{MODEL}")
    code = process.wait()
    process.stop()
    assert code in (1, 2) and "no api answers at http://127.0.0.1:9" in process.output


@pytest.mark.parametrize(
    ("refuse", "accept", "code", "flags"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "OOM", ()),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "READONLY", ("--num-local-ranks", "2")),
    ],
    ids=["worker", "group"],
)
def test_a_worker_that_starts_while_redis_refuses_writes_says_so_and_waits(
    refuse: str, accept: str, code: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with EmbeddedRedis(tmp_path) as server, sync_redis.Redis.from_url(server.url) as client:
        client.execute_command(refuse)
        command = ("worker", "--redis", server.url, "--model", f"models/{MODEL}", *flags)
        waiting, leaving = Process.start(*command), Process.start(*command)
        try:
            for process in (waiting, leaving):
                process.wait_for_line(f"{code}.*waits_for_redis")
            assert leaving.stop() == 0, "SIGTERM ends it while it waits"
            client.execute_command(accept)
            waiting.wait_for_line("worker.ready")
        finally:
            codes = [process.stop() for process in (waiting, leaving)]
    assert codes == [0, 0]
    assert "Traceback" not in waiting.output + leaving.output


def test_learners_that_start_before_any_worker_wait_for_one(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        command = ("--redis", server.url, "--model", f"models/{MODEL}")
        waiting, leaving = (Process.start("trainer.service", *command) for _ in range(2))
        try:
            for process in (waiting, leaving):
                process.wait_for_line("learners.waits_for_worker")
            assert leaving.stop() == 0, "SIGTERM ends it while it waits"
            worker = Process.start("worker", *command)
            try:
                waiting.wait_for_line("learners.ready")
            finally:
                assert worker.stop() == 0
        finally:
            codes = [process.stop() for process in (waiting, leaving)]
    assert codes == [0, 0]
