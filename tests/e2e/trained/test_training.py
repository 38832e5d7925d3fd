"""The trainer as a process of its own, on a real ring that goes on serving."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.e2e.rings import MODEL, ROOT, Process, Ring
from tests.waiting import HANG_S
from trainer.runs.metrics import read

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def test_the_policy_learns_while_chats_on_it_go_on(served: Ring, tmp_path: Path) -> None:
    recipe = str(ROOT / "trainer/recipes/tiny-fixed.yaml")
    sizes = ("--steps", "8", "--group-size", "8", "--learning-rate", "0.003", "--evaluate-every", "4")
    with training(served, tmp_path, "--config", recipe, *sizes) as trainer:
        answers = asyncio.run(chat_until_trained(served, trainer))
        assert trainer.wait() == 0, trainer.output
    versions = httpx.get(f"{served.url}/v1/adapters/policy", timeout=HANG_S).json()
    steps = [json.loads(line) for line in trainer.lines if '"train.step"' in line]
    assert len(steps) == 8
    assert steps[-1]["held_out"] >= 0.6, "greedy exact on the sixteen tasks, 0.3 to 0.5 before training"
    assert answers > 5
    assert versions["latest"] == steps[-1]["version"]


def test_gsm8k_is_trained_with_its_reward_and_drawn_in_tensorboard(served: Ring, tmp_path: Path) -> None:
    task = ("--task", "gsm8k", "--dataset", "data/gsm8k/test-64.jsonl", "--reward-options", '{"format_score": 0.5}')
    sizes = ("--steps", "2", "--prompts-per-step", "8", "--max-tokens", "24", "--adapter", "gsm")
    board = tmp_path / "board"
    with training(served, tmp_path, *task, *sizes, "--tensorboard", str(board)) as trainer:
        assert trainer.wait() == 0, trainer.output
    lines = read(tmp_path / "gsm" / "metrics.jsonl")
    assert len(lines) == 2 and all(line.failed == 0 for line in lines)
    assert any(0 < line.reward < 1 for line in lines), "a number earns half a point, most replies hold one"
    assert next(board.glob("events.*")).stat().st_size > 1000


def test_a_run_that_waits_for_workers_ends_when_it_is_told_twice(served: Ring, tmp_path: Path) -> None:
    httpx.post(f"{served.url}/pause", timeout=HANG_S).raise_for_status()
    try:
        with training(served, tmp_path, "--adapter", "told-twice", "--evaluate-every", "1") as trainer:
            trainer.wait_for_line("train.evaluating")
            trainer.popen.send_signal(signal.SIGINT)
            trainer.wait_for_line("train.stopping")
            trainer.popen.send_signal(signal.SIGINT)
            assert trainer.popen.wait(HANG_S) == 130, trainer.output
            assert "Traceback" not in trainer.output
    finally:
        httpx.post(f"{served.url}/resume", timeout=HANG_S).raise_for_status()


@contextlib.contextmanager
def training(served: Ring, run_dir: Path, *arguments: str) -> Iterator[Process]:
    """A trainer on the ring, as a process of its own."""
    trainer = Process.start(
        "trainer", "--connect-to", served.url, "--model", f"models/{MODEL}",
        "--run-dir", str(run_dir), "--log-json", "true", *arguments,
    )  # fmt: skip
    try:
        yield trainer
    finally:
        trainer.stop()


async def chat_until_trained(served: Ring, trainer: Process) -> int:
    """Chat on the policy, once it is there, until the trainer ends; every answer must be whole."""
    answers = 0
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        await asyncio.to_thread(trainer.wait_for_line, r"train\.step")
        while trainer.popen.poll() is None:
            answer = await http.post("/v1/chat/completions", json={**ASK, "model": "policy"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
            answers += 1
    return answers
