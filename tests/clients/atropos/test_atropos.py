"""The real run-api and a real Atropos environment of the PyPI package atroposlib, with our server and our trainer.

    pip install 'mlx-parallm[atropos]'    and then    pytest tests/clients/atropos

Skipped when atroposlib is not there; PARALLM_ATROPOS_PYTHON names the interpreter of another virtual environment that
has it. It proves: the environment's ManagedServer generates on our `/generate`, run-api takes its groups, our trainer
registers, fetches batches, finds log-probabilities that it can reproduce (mismatch near 0), publishes, and the
environment goes on with the new version.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import httpx
import pytest

from api.serve.embedded_redis import free_port
from tests.e2e.rings import MODEL, ROOT, Process, ring
from trainer.runs.metrics import read

PYTHON = os.environ.get("PARALLM_ATROPOS_PYTHON", sys.executable)
ENVIRONMENT = Path(__file__).parent / "sums_env.py"


def _installed() -> bool:
    return subprocess.run([PYTHON, "-c", "import atroposlib"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.skipif(not _installed(), reason="atroposlib is not installed"),
    pytest.mark.timeout(400),
]


@contextmanager
def atropos(*arguments: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of Atropos' Python."""
    quiet = {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with log.open("wb") as file:
        process = subprocess.Popen([PYTHON, *arguments], stdout=file, stderr=subprocess.STDOUT, env=quiet, cwd=ROOT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_up(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            Event().wait(0.2)
    raise AssertionError("run-api did not start")


def test_an_atropos_environment_teaches_the_policy_that_it_samples_from(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = ("-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port))
    serve = ("-c", f"import sys; sys.argv[1:] = {list(serve[2:])!r}; from atroposlib.cli.run_api import main; main()")
    with ring(tmp_path / "ring") as served, atropos(*serve, log=tmp_path / "run-api.log") as run_api:
        wait_until_up(url, run_api)
        trainer = Process.start(
            "trainer", "--connect-to", served.redis_url, "--model", f"models/{MODEL}",
            "--run-dir", str(tmp_path / "run"),
            "--atropos-url", url, "--steps", "4", "--prompts-per-step", "8", "--group-size", "8",
            "--learning-rate", "1e-3", "--distances-every", "1", "--parity-every", "0", "--log-json", "true",
        )  # fmt: skip
        try:
            trainer.wait_for_line("atropos.registered")
            arguments = (str(ENVIRONMENT), url, f"{served.url}/v1", str(ROOT / "models" / MODEL))
            with atropos(*arguments, log=tmp_path / "env.log"):
                assert trainer.wait() == 0, trainer.output + (tmp_path / "env.log").read_text()[-4000:]
        finally:
            trainer.stop()
        versions = httpx.get(f"{served.url}/v1/adapters/policy", timeout=10).json()
    lines = read(tmp_path / "run" / "policy" / "metrics.jsonl")
    assert len(lines) == 4
    assert all(line.groups == 8 and line.failed == 0 and line.dropped == 0 for line in lines)
    assert sum(line.taught for line in lines) > 8, "about two thirds of the groups have variance"
    assert lines[0].mismatch is not None and lines[0].mismatch < 1e-3, "the very tokens, and the sampler's own figures"
    assert versions["latest"] == lines[-1].version >= 4
