"""Measurements of a model on this machine, in a process that loads MLX; and what an earlier run has measured."""

import json
import subprocess
import sys
from typing import Any

from api.doctor.finding import Finding, ok, wrong


def tune(model: str, out: str) -> tuple[Finding, dict[str, Any]]:
    """Measure, with progress on stderr; the finding, and all figures."""
    command = [sys.executable, "-m", "worker.tune", "--model", model, *(["--out", out] if out else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return wrong("tune", f"it ended with {done.returncode}", "its last line above says why"), {}
    figures: dict[str, Any] = json.loads(done.stdout)
    found = f"a piece of prompts may have {figures['tuning']['chunk']} tokens; all figures are in {figures['file']}"
    return ok("tune", found), figures
