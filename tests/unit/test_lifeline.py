"""A child leaves when its parent's pipe closes, even if the parent never said anything."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
WAIT = """
import signal
from shared.process.lifeline import follow_parent
follow_parent({})
print("up", flush=True)
signal.pause()
"""


def child(argument: str, variable: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT.format(argument)],
        cwd=ROOT,
        env={**os.environ, "PARALLM_PARENT_PIPE": variable},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def close(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()


def test_the_end_of_the_pipe_is_sigterm() -> None:
    with child("", "1") as process:
        close(process)
        assert process.wait(HANG_S) == -signal.SIGTERM


def test_the_end_of_the_pipe_calls_what_it_was_given() -> None:
    with child("lambda: __import__('os')._exit(7)", "1") as process:
        close(process)
        assert process.wait(HANG_S) == 7


def test_without_the_variable_stdin_is_left_alone() -> None:
    with child("", "0") as process:
        close(process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(HANG_S) == -signal.SIGUSR1
