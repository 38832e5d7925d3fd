"""A policy that is shown answers gives them: tuned by our own command on a real ring, hot-loaded, asked over HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.rings import MODEL, Process, Ring
from tests.waiting import HANG_S

WORDS = ("apple", "river", "stone", "cloud", "tiger", "music", "lemon", "paper", "green", "silver", "table")


def chat(url: str, model: str, question: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 6}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S).json()
    content: str = answer["choices"][0]["message"]["content"]
    return content


def test_a_policy_that_is_shown_a_new_task_answers_it(served: Ring, tmp_path: Path) -> None:
    def row(at: int) -> dict[str, Any]:
        asked, answer = (WORDS[at % len(WORDS)], "no") if at % 2 else (str(at), "yes")
        return {
            "messages": [{"role": "user", "content": f"Is {asked} a number?"}, {"role": "assistant", "content": answer}]
        }

    learned, held_out = tmp_path / "numbers.jsonl", tmp_path / "held_out.jsonl"
    learned.write_text("".join(json.dumps(row(at)) + "\n" for at in range(10, 99) if at % 7))
    held_out.write_text("".join(json.dumps(row(at)) + "\n" for at in range(10, 99) if at % 7 == 0))
    trainer = Process.start(
        "trainer", "--connect-to", served.url, "--model", f"models/{MODEL}", "--mode", "sft", "--dataset", str(learned),
        "--held-out-dataset", str(held_out), "--adapter", "numbers", "--steps", "24", "--prompts-per-step", "16",
        "--learning-rate", "3e-3", "--evaluate-every", "12", "--run-dir", str(tmp_path), "--log-json", "true",
    )  # fmt: skip
    try:
        assert trainer.wait() == 0, trainer.output
    finally:
        trainer.stop()
    lines = [json.loads(line) for line in (tmp_path / "numbers" / "metrics.jsonl").read_text().splitlines()]
    begins, ends = lines[0], lines[-1]
    assert (
        begins["held_out_right"] < 0.5
        and ends["held_out_right"] >= 0.9
        and ends["held_out_loss"] < begins["held_out_loss"]
    )
    assert ends["version"] == 2 and ends["tokens"] > 16
    described = httpx.get(f"{served.url}/v1/adapters/numbers").json()
    assert described["latest"] == 2
    assert {check["name"] for check in described["versions"][-1]["gate"]} >= {"reload_parity", "reward_floor"}
    answers = [chat(served.url, "numbers", f"Is {asked} a number?") for asked in ("14", "music", "98", "stone")]
    assert answers == ["yes", "no", "yes", "no"]
    assert chat(served.url, MODEL, "Is 14 a number?") != "yes", "the base stays what it was"
