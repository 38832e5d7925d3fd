"""What `mlx_parallm acl > users.acl` writes is a file that a server starts with."""

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from api.cli.acl import ROLES
from shared.redis import keys
from shared.redis.server_binary import find_binary
from tests.waiting import HANG_S


@contextlib.contextmanager
def server_with(aclfile: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = aclfile.with_suffix(".log")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(aclfile.parent)]
    with log.open("wb") as out:
        process = subprocess.Popen([find_binary(), "--aclfile", aclfile, *options], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + HANG_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait()


def test_a_server_starts_with_the_printed_file_and_knows_the_printed_passwords(tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    command = [sys.executable, "-m", "api.cli.main", "acl", "--host", "redis.example:6379"]
    with file.open("wb") as out:
        told = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=True, text=True).stderr
    urls = dict(re.findall(r"^(\w+): rediss://(parallm-\w+:[^@\s]+)@redis\.example:6379/0$", told, re.MULTILINE))
    assert set(urls) == set(ROLES)
    assert not any(credentials.split(":")[1] in file.read_text() for credentials in urls.values()), "hashes alone"
    with server_with(file) as port:
        for role, credentials in urls.items():
            with contextlib.closing(redis.Redis.from_url(f"redis://{credentials}@127.0.0.1:{port}/0")) as client:
                assert client.ping(), role
                if role == "worker":  # it reads the images of prompts
                    assert client.hget(keys.kept("a", "b"), "bytes") is client.hget(keys.job_images("j"), "b") is None
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command("CONFIG", "GET", "*")
