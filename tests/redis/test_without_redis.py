"""What processes do where no Redis answers: end with a reason, not hang."""

import subprocess
import sys

from tests.waiting import HANG_S

NOWHERE = "redis://127.0.0.1:1/0"
COMMANDS = (["api", "--port", "0"], ["worker.jobs"], ["worker"], ["trainer", "--model", "models/tiny"])


def test_a_process_started_without_its_redis_says_so_and_ends() -> None:
    processes = [  # side by side, for each waits five seconds for a Redis
        subprocess.Popen(
            [sys.executable, "-m", *command, "--redis", NOWHERE],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for command in COMMANDS
    ]  # fmt: skip
    for command, process in zip(COMMANDS, processes, strict=True):
        try:
            _, said = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        assert process.returncode == 1, (command, said)
        assert f"no Redis answers at {NOWHERE}" in said
        assert "Traceback" not in said
