"""The README's commands run as they stand (with free ports in place of 8000 and 36379)."""

import json
import re
import subprocess

import pytest

from tests.docs.shell import READY, START, Shell, blocks
from tests.e2e.rings import ROOT
from tests.waiting import HANG_S

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(README)


def block(word: str) -> str:
    found = [text for text in BLOCKS if word in text]
    assert len(found) == 1, f"{len(found)} README blocks with {word!r}"
    return found[0]


def test_it_starts_the_quickstart_s_server() -> None:
    assert block("mlx_parallm_serve --model") == START


def test_curl_streams_an_answer(served: Shell) -> None:
    lines = served.run(block("curl -N")).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_a_job_is_submitted_and_waited_for(served: Shell) -> None:
    told = served.run(block("mlx_parallm submit"))
    assert "succeeded: 24 of 24 samples" in told
    reward = re.search(r"mean reward ([\d.]+)", told)
    assert reward and float(reward[1]) > 0, "what a newcomer sees first is a reward"


def test_a_second_worker_joins(served: Shell) -> None:
    worker = served.start(block("mlx_parallm_worker --redis"))
    try:
        worker.wait_for_line(READY["worker"])
        health = json.loads(served.run("curl -s http://127.0.0.1:8000/health"))
        assert len(health["workers"]) == 2
    finally:
        assert worker.stop() == 0


def test_a_trainer_learns_from_the_ring(served: Shell) -> None:
    served.run(block("mlx_parallm_train --connect-to"))
    models = json.loads(served.run("curl -s http://127.0.0.1:8000/v1/models"))
    assert "policy" in [model["id"] for model in models["data"]]


def test_make_has_the_targets_that_the_readme_names() -> None:
    for target in re.findall(r"make (\w+)", README):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks/index.md"])
def test_a_page_that_everybody_reads_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= 150


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
