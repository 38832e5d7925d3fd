import subprocess
import sys

from tests.e2e.rings import ROOT
from tests.waiting import HANG_S


def test_the_reference_pages_say_what_the_code_says() -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, f"out of date, run `make docs`: {done.stdout}{done.stderr}"
