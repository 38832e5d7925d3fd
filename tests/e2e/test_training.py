"""The trainer as a process of its own, on a real ring that goes on serving."""

import asyncio
import json
from pathlib import Path

import httpx

from tests.e2e.rings import MODEL, ROOT, Process, Ring, ring

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def test_the_policy_learns_while_chats_on_it_go_on(tmp_path: Path) -> None:
    with ring(tmp_path / "ring") as served:
        trainer = Process.start(
            "trainer", "--redis", served.redis_url, "--model", f"models/{MODEL}",
            "--config", str(ROOT / "trainer/recipes/tiny-fixed.yaml"),
            "--run-dir", str(tmp_path / "run"), "--steps", "20", "--log-json", "true",
        )  # fmt: skip
        try:
            answers = asyncio.run(chat_until_trained(served, trainer))
            assert trainer.popen.wait(10) == 0, trainer.output
        finally:
            trainer.stop()
        versions = httpx.get(f"{served.url}/v1/adapters/policy", timeout=10).json()
    steps = [json.loads(line) for line in trainer.lines if '"train.step"' in line]
    assert len(steps) == 20
    assert steps[-1]["held_out"] >= 0.6, "greedy exact on the sixteen tasks, 0.3 to 0.5 before training"
    assert answers > 5
    assert versions["latest"] == steps[-1]["version"]


async def chat_until_trained(served: Ring, trainer: Process) -> int:
    """Chat on the policy, once it is there, until the trainer ends; every answer must be whole."""
    answers = 0
    async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:
        await asyncio.to_thread(trainer.wait_for_line, r"train\.step")
        while trainer.popen.poll() is None:
            answer = await http.post("/v1/chat/completions", json={**ASK, "model": "policy"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
            answers += 1
    return answers
