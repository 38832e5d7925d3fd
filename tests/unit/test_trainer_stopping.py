"""Signals to a trainer, in a process of its own that hangs in its own way."""

import signal
import subprocess
import sys

import pytest

from tests.waiting import HANG_S

SCRIPT = """
import asyncio, signal, sys, time
from trainer.runs import stopping
stopping.LEAVE_S = 0.5

async def main(hang):
    running, asked, raised = asyncio.current_task(), [], []

    def is_stopping():
        if hang == "within" and not raised:  # the second signal, while the first one is handled
            raised.append(1)
            signal.raise_signal(signal.SIGINT)
        return bool(asked)

    stopping.obey(lambda: asked.append(1), is_stopping, running.cancel)
    print("ready", flush=True)
    if hang == "loop":
        while True:
            time.sleep(0.05)
    if hang == "thread":
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    while not asked:
        await asyncio.sleep(0.01)
    print("stopped", flush=True)
    if hang == "after":
        await asyncio.sleep(3600)

try:
    asyncio.run(main(sys.argv[1]))
except asyncio.CancelledError:
    print("cancelled", flush=True)
    sys.exit(130)
finally:
    stopping.ended()
"""


@pytest.mark.parametrize(
    ("hang", "signals", "code", "printed"),
    [
        ("nothing", 1, 0, "stopped"),
        ("after", 2, 130, "cancelled"),
        ("within", 1, 130, "cancelled"),
        ("loop", 2, 1, "most recent call first"),
        ("thread", 2, 1, "most recent call first"),
    ],
)
def test_a_second_signal_ends_the_run_whatever_hangs(hang: str, signals: int, code: int, printed: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, hang], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        if hang == "after":
            assert process.stdout.readline() == "stopped\n"
        for _ in range(1, signals):
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == code and printed in output
