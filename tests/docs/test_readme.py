"""The README's commands run as they stand (with free ports in place of 8000 and 36379)."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.rings import ROOT
from tests.waiting import HANG_S

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
BIN = Path(sys.executable).parent


def block(word: str) -> str:
    found = [text for text in BLOCKS if word in text]
    assert len(found) == 1, f"{len(found)} README blocks with {word!r}"
    return found[0]


class Shell:
    """Runs README text with our ports, our virtual environment and a data folder of the test."""

    def __init__(self, folder: Path) -> None:
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ports.append(str(listener.getsockname()[1]))
        self.http, self.redis = ports
        self.folder = folder
        self.environment = {**os.environ, "PARALLM_URL": f"http://127.0.0.1:{self.http}"}

    def text(self, command: str) -> str:
        command = command.replace(".venv/bin/", f"{BIN}/").replace("make setup\n", "")
        command = command.replace("8000", self.http).replace("36379", self.redis)
        return command.replace(".parallm", str(self.folder / "data")).replace(
            "sums.jsonl", str(self.folder / "s.jsonl")
        )

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", self.text(command)],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-euc", "exec " + self.text(command).strip()],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def stop(process: "subprocess.Popen[str]") -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(HANG_S)
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("readme"))
    server = made.start(block("mlx_parallm_serve --model"))
    code = -1
    try:
        assert server.stdout is not None
        printed = ""
        for line in server.stdout:
            printed += line
            if "join with another worker" in line:
                break
        assert f"ParaLLM is ready: http://127.0.0.1:{made.http}/v1" in printed, printed
        yield made
    finally:
        code = stop(server)
    assert code == 0


def test_curl_streams_an_answer(shell: Shell) -> None:
    lines = shell.run(block("curl -N")).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_a_job_is_submitted_and_waited_for(shell: Shell) -> None:
    told = shell.run(block("mlx_parallm submit"))
    assert "succeeded: 24 of 24 samples" in told
    reward = re.search(r"mean reward ([\d.]+)", told)
    assert reward and float(reward[1]) > 0, "what a newcomer sees first is a reward"


def test_a_second_worker_joins(shell: Shell) -> None:
    worker = shell.start(block("mlx_parallm_worker --redis"))
    assert worker.stdout is not None
    try:
        joined = next((line for line in worker.stdout if "worker.ready" in line), "")
        assert joined
        health = json.loads(shell.run("curl -s http://127.0.0.1:8000/health"))
        assert len(health["workers"]) == 2
    finally:
        assert stop(worker) == 0


def test_a_trainer_learns_from_the_ring(shell: Shell) -> None:
    shell.run(
        block("mlx_parallm_train --connect-to").replace("--steps 20", f"--steps 2 --run-dir {shell.folder}/train")
    )
    models = json.loads(shell.run("curl -s http://127.0.0.1:8000/v1/models"))
    assert "policy" in [model["id"] for model in models["data"]]


def test_make_has_the_targets_that_the_readme_names() -> None:
    for target in re.findall(r"make (\w+)", README):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
