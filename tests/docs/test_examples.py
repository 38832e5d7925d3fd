"""Each of examples/ runs against one real ring, by the command in its docstring (with our ports, and fewer steps)."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.rings import ROOT, Process, Ring, ring
from tests.waiting import HANG_S
from trainer.runs.metrics import StepMetrics, read

EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent


def command(example: str, program: str) -> list[str]:
    """The arguments that the example's docstring gives a program."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{example}.py").read_text())) or ""
    lines = re.sub(r"\\\n *", " ", text).splitlines()
    found = [shlex.split(line) for line in lines if line.strip().startswith(f"{program} ")]
    assert len(found) == 1, f"{example}: {len(found)} commands with {program}"
    return found[0][1:]


def without(arguments: list[str], *flags: str) -> list[str]:
    """The arguments less these flags and their values."""
    drop = {place + i for place, argument in enumerate(arguments) if argument in flags for i in (0, 1)}
    return [argument for place, argument in enumerate(arguments) if place not in drop]


def run(*words: str | Path, typed: str = "", folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, input=typed, capture_output=True, text=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """One ring, whose worker hosts the trainer that learns from what is posted."""
    arguments = without(command("grpo_by_hand", "mlx_parallm_serve"), "--model", "--port")
    arguments += ["--feedback-ttl-days", "1"]
    with ring(tmp_path_factory.mktemp("ring"), *arguments) as started:
        yield started


def trained(served: Ring, folder: Path, example: str, *flags: str) -> list[StepMetrics]:
    """Two steps of the trainer that the example's docstring starts."""
    arguments = command(example, "mlx_parallm_train")
    adapter = arguments[arguments.index("--adapter") + 1]
    arguments = without(arguments, "--connect-to", "--steps")
    here = ("--connect-to", served.url.removeprefix("http://"), "--run-dir", str(folder), "--steps", "2")
    run(BIN / "mlx_parallm_train", *arguments, *here, *flags)
    lines = read(folder / adapter / "metrics.jsonl")
    assert [line.train_step for line in lines] == [0, 1]
    assert all(line.failed == 0 for line in lines)
    return lines


def test_grpo_by_hand_makes_the_reward_rise(served: Ring) -> None:
    program = EXAMPLES / "grpo_by_hand.py"
    assert len(program.read_text().splitlines()) <= 150, "all of it is read in one go"
    printed = run(sys.executable, program, "--url", served.url, "--steps", "4", "--questions", "8")
    rewards = [float(value) for value in re.findall(r"mean reward ([\d.]+)", printed)]
    assert len(rewards) == 4 and rewards[0] > 0, printed
    assert max(rewards[-2:]) > rewards[0] + 0.1, printed
    assert httpx.get(f"{served.url}/v1/adapters/policy", timeout=HANG_S).json()["latest"] == 5, (
        "four steps, each served"
    )


def test_a_run_on_an_own_task_makes_the_reward_rise(served: Ring, tmp_path: Path) -> None:
    program = EXAMPLES / "own_task.py"
    printed = run(sys.executable, program, "--url", served.url, "--steps", "4", "--folder", tmp_path)
    rewards = [float(value) for value in re.findall(r"step +\d+ +([\d.]+)  #", printed)]
    assert len(rewards) == 4 and max(rewards[-2:]) > rewards[0] + 0.04, printed
    assert len(re.findall(r"likeliest answers: mean reward [\d.]+", printed)) == 2


def test_the_notebook_s_cells_run(served: Ring, tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "own_task.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "cells.py").write_text(code.replace("STEPS = 20", "STEPS = 1"))
    here = {**os.environ, "PARALLM_URL": served.url, "MPLBACKEND": "agg"}
    printed = run(sys.executable, "cells.py", folder=tmp_path, environment=here)
    assert printed.count("after: ") == 12


def test_an_agent_calls_its_tool_and_learns_from_the_episode(served: Ring) -> None:
    arguments = without(command("tool_episode", "python")[1:], "--url", "--steps")
    few = ("--url", served.url, "--steps", "2", "--group-size", "12")
    printed = run(sys.executable, EXAMPLES / "tool_episode.py", *arguments, *few)
    assert len(re.findall(r"tool: .+, answer: '.+'\nstep \d: mean reward 0\.\d+, now policy", printed)) == 2, printed
    # Three quarters of the tiny model's calls are the same one, so all rewards of a step may be equal.
    assert re.search(r"now policy@\d+$", printed, re.MULTILINE), printed


def test_an_app_s_feedback_makes_versions_of_its_model(served: Ring, tmp_path: Path) -> None:
    arguments = without(command("feedback_app", "mlx_parallm_train"), "--redis", "--steps", "--live-trajectories")
    here = ("--redis", served.redis_url, "--run-dir", str(tmp_path), "--steps", "1", "--live-trajectories", "24")
    trainer = Process.start("trainer", *arguments, *here)
    try:
        program = EXAMPLES / "feedback_app.py"
        printed = run(sys.executable, program, "--url", served.url, "--rounds", "1", "--users", "2")
        assert trainer.wait() == 0, trainer.output
    finally:
        trainer.stop()
    [share] = re.findall(r"round \d: (\d+)% of 24 answers were liked", printed)
    [step] = read(tmp_path / "app" / "metrics.jsonl")
    assert step.source == "live" and round(100 * step.reward) == int(share), "each verdict was learned from"
    assert httpx.get(f"{served.url}/v1/adapters/app", timeout=HANG_S).json()["latest"] == 2


def test_a_chat_is_streamed_and_remembers(served: Ring) -> None:
    printed = run(sys.executable, EXAMPLES / "streaming_chat.py", "--url", served.url, typed="hello\nthank you\n\n")
    first, second = re.findall(r"> (.+)\n\[\d+ tokens\]", printed)
    assert "tiny model" in first and second != first


def test_an_own_reward_teaches(served: Ring, tmp_path: Path) -> None:
    lines = trained(served, tmp_path, "own_reward")
    assert all(0 < line.reward < 1 and line.taught for line in lines)


def test_two_turns_of_an_own_environment_are_trained_over_the_ring(served: Ring, tmp_path: Path) -> None:
    lines = trained(served, tmp_path, "own_environment", "--distances-every", "1")
    assert any(line.taught for line in lines)
    assert all(line.completion_tokens > 12 for line in lines), "two replies and the tool's words between them"
    measured = [line.mismatch for line in lines if line.mismatch is not None]
    assert measured and max(measured) < 1e-3, "the second turn saw the very ids of the first"


def test_two_agents_learn_over_one_base_and_ask_each_other(served: Ring, tmp_path: Path) -> None:
    arguments = without(command("two_agents", "mlx_parallm_train"), "--connect-to")
    here = ("--connect-to", served.url.removeprefix("http://"), "--run-dir", str(tmp_path), "--steps", "2")
    run(BIN / "mlx_parallm_train", *arguments, *here)
    agents = ("black", "white")
    dashboard = httpx.get(f"{served.url}/dashboard", timeout=HANG_S).text
    for agent in agents:
        lines = read(tmp_path / agent / "metrics.jsonl")
        assert [line.train_step for line in lines] == [0, 1] and all(line.failed == 0 for line in lines)
        assert any(line.taught for line in lines)
        assert httpx.get(f"{served.url}/v1/adapters/{agent}", timeout=HANG_S).json()["latest"] == 3
        assert agent in dashboard
    weights = [(tmp_path / agent / "checkpoints/step-000002/adapters.safetensors").read_bytes() for agent in agents]
    assert weights[0] != weights[1]


def test_the_readme_names_the_examples_and_each_is_run() -> None:
    assert "[examples/](examples/)" in (ROOT / "README.md").read_text()
    pages = ROOT.glob("docs/how-to/*.md")  # whose first commands tests/docs/served/test_how_to.py runs
    tested = (
        Path(__file__).read_text() + (ROOT / "tests/bench/learning.py").read_text()
    )  # which tests/e2e/test_benches.py runs
    tested += "".join(page.read_text().split("\n## ")[0] for page in pages)
    for path in EXAMPLES.glob("[a-z]*.[pi][yp]*"):
        assert (path.name if path.suffix == ".ipynb" else path.stem) in tested, f"{path.name} is run by no test"
