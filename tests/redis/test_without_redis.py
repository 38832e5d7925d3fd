"""What processes do where no Redis answers: end with a reason, not hang."""

import subprocess
import sys

import pytest

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("module", ["api", "worker.jobs", "worker"])
def test_a_process_started_without_its_redis_says_so_and_ends(module: str) -> None:
    port = ["--port", "0"] if module == "api" else []
    ended = subprocess.run(
        [sys.executable, "-m", module, "--redis", NOWHERE, *port], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1, ended.stderr
    assert f"no Redis answers at {NOWHERE}" in ended.stderr
    assert "Traceback" not in ended.stderr
