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


def invariance_check(model: str) -> Finding:
    """Checks that this machine keeps `--batch-invariant` for a model, by computing sequences alone and together."""
    command = [sys.executable, "-m", "worker.invariance", "--model", model]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return wrong("invariance", f"it ended with {done.returncode}", "its last line above says why")
    result: dict[str, Any] = json.loads(done.stdout)
    if why := result.get("why"):
        return wrong("invariance", why, "start workers of this model without --batch-invariant")
    if different := result["different"]:
        found = f"{len(different)} sequences have other bits in a batch than alone"
        return wrong("invariance", found, "start workers without --batch-invariant, and report this with your hardware")
    return ok("invariance", f"{result['tokens']} tokens on {result['backend']}: the same bits alone and in a batch")
