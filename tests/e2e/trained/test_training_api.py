"""Training from outside on one real ring: live traffic, posted trajectories, sabotage, and what is served meanwhile.

Each trainer is a process with a policy of its own.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.rings import MODEL, Process, Ring
from tests.waiting import HANG_S, wait_until

ASK = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 5}
SCORED = {"collect_trajectory": True, "scoring_function": "exact", "metadata": {"reference": "42"}}


@contextlib.contextmanager
def trainer(served: Ring, folder: Path, policy: str, *flags: str) -> Iterator[Process]:
    process = Process.start(
        "trainer", "--redis", served.redis_url, "--model", f"models/{MODEL}", "--adapter", policy,
        "--run-dir", str(folder), "--learning-rate", "0.001", "--log-json", "true", *flags,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture
def http(served: Ring) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=HANG_S, trust_env=False) as client:
        yield client


def status(http: httpx.Client, policy: str) -> dict[str, Any]:
    answer = http.get("/v1/training/status", params={"policy": policy})
    return answer.json() if answer.status_code == 200 else {"training_enabled": False, "trainer": None}


def ready(http: httpx.Client, policy: str) -> None:
    """The trainer has published its first version and waits for work."""

    def held() -> bool:
        return (status(http, policy)["trainer"] or {}).get("version", 0) >= 1 and _serves(http, policy)

    asyncio.run(wait_until(held))


def _serves(http: httpx.Client, policy: str) -> bool:
    return http.post("/v1/chat/completions", json={**ASK, "model": policy}).status_code == 200


def collected(http: httpx.Client, policy: str, **changes: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={**ASK, **SCORED, "model": policy, "n": 8, **changes})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def ids(http: httpx.Client, text: str) -> list[int]:
    answer = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    found: list[int] = answer.json()["tokens"]
    return found


def pair(http: httpx.Client, version: str, logprob: float = -1.0) -> list[dict[str, Any]]:
    """A right and a wrong answer to one question."""
    prompt, answers = ids(http, "What is 12 + 30?"), [ids(http, "42"), ids(http, "17")]
    return [
        {
            "prompt_ids": prompt,
            "completion_ids": answer,
            "logprobs": [logprob] * len(answer),
            "weight_versions": [{"version": version, "start": 0, "end": len(answer)}],
            "reward": float(i == 0),
        }
        for i, answer in enumerate(answers)
    ]


def test_live_traffic_trains_the_policy_that_it_talks_to(served: Ring, http: httpx.Client, tmp_path: Path) -> None:
    flags = ("--source", "live", "--live-trajectories", "16", "--steps", "2", "--parity-every", "0")
    with trainer(served, tmp_path, "live", *flags) as process:
        ready(http, "live")
        with ThreadPoolExecutor(4) as pool:
            while process.popen.poll() is None:
                list(pool.map(lambda i: collected(http, "live", stream=False), range(2)))
                single = collected(http, "live", n=1)  # alone: compared with the others of its pool
                assert single["choices"][0]["finish_reason"] in ("stop", "length")
        assert process.wait() == 0, process.output
    told = status(http, "live")
    assert told["training_enabled"] is False and told["trainer"]["state"] == "ended"
    assert told["trainer"]["train_step"] == 2
    stats = told["trajectories"]
    assert stats["collected"] == stats["consumed"] + stats["waiting"] and stats["dropped"] == 0
    assert stats["consumed"] >= told["trainer"]["trajectories"] >= 32
    points = http.get("/debug/training", params={"policy": "live"}).json()["points"]
    assert [point["source"] for point in points] == ["live", "live"]


def test_a_killed_trainer_learns_from_every_live_trajectory_exactly_once(
    served: Ring, http: httpx.Client, tmp_path: Path
) -> None:
    # Pinned: what a version of the killed life has sampled is dropped as stale, since no weights of ours made it.
    flags = (
        "--source", "live", "--live-trajectories", "16", "--steps", "4", "--checkpoint-every", "2",
        "--parity-every", "0",
    )  # fmt: skip
    with trainer(served, tmp_path, "killed-live", *flags) as process:
        ready(http, "killed-live")
        for _ in range(6):
            collected(http, "killed-live", model="killed-live@1")
        process.wait_for_line(r'"step": "3/4"')  # trained on 48, a checkpoint knows 32
        process.popen.kill()
        process.popen.wait()
    for _ in range(2):
        collected(http, "killed-live", model="killed-live@1")
    with trainer(served, tmp_path, "killed-live", *flags) as process:
        assert process.wait() == 0, process.output
    assert process.printed("run.resumed")
    told = status(http, "killed-live")
    assert told["trajectories"] == {"collected": 64, "dropped": 0, "consumed": 64, "waiting": 0, "bytes": 0}
    assert (told["trainer"]["train_step"], told["trainer"]["trajectories"]) == (4, 64)


def test_posted_trajectories_checkpoints_and_sabotage(served: Ring, http: httpx.Client, tmp_path: Path) -> None:
    def post(policy: str, trajectories: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        answer = http.post("/v1/training/update", json={"trajectories": trajectories, "policy": policy, **more})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    made_up = ("--source", "posted", "--max-logprob-gap", "1e38", "--dual-clip", "0")  # no version has -1 everywhere
    wild = trainer(served, tmp_path, "wild", *made_up, "--learning-rate", "1.0", "--parity-every", "0")
    with trainer(served, tmp_path, "posted", *made_up) as process, wild:
        ready(http, "posted")
        first = post("posted", pair(http, "posted@1"), checkpoint_name="mine")
        assert (first["status"], first["lora"], first["checkpoint"]) == ("updated", "posted@2", "mine")
        quiet = post("posted", pair(http, "posted@2"), update_inference=False)
        assert (quiet["status"], quiet["served"], quiet["lora"]) == ("updated", False, "posted@2")
        poisoned = post("posted", pair(http, "posted@2", logprob=-1e30))
        assert poisoned["status"] == "rejected" and "finite_gradients" in poisoned["gate"]
        assert poisoned["lora"] == "posted@2" and _serves(http, "posted")
        saved = http.post("/training/checkpoint", json={"policy": "posted", "name": "later"}).json()
        assert (saved["checkpoint"], saved["train_step"]) == ("later", 3)
        told = status(http, "posted")
        assert told["training_enabled"] and told["current_lora"] == "posted@2"
        assert {"mine", "later"} <= set(told["available_checkpoints"])
        assert told["alerts"]["gate_failed"] == 1

        ready(http, "wild")
        refused = post("wild", pair(http, "wild@1"))
        assert refused["status"] == "rejected" and "update_norm" in refused["gate"] and "probe_kl" in refused["gate"]
        assert _serves(http, "wild") and http.get("/v1/adapters/wild").json()["latest"] == 1
        rejected = http.get("/v1/adapters/wild/versions/2").json()
        assert rejected["status"] == "rejected"
        assert {check["name"] for check in rejected["gate"] if not check["passed"]} >= {"update_norm", "probe_kl"}
        on_it = http.post("/v1/chat/completions", json={**ASK, "model": "wild@2"})
        assert on_it.status_code == 409, "inspected, never served"
        assert process.stop() == 0, process.output
    gone = http.post("/v1/training/update", json={"trajectories": pair(http, "posted@1"), "policy": "posted"})
    assert gone.status_code == 503 and "no trainer of policy 'posted' is alive" in gone.json()["error"]["message"]


def test_a_reward_that_inverts_brings_the_good_version_back(served: Ring, http: httpx.Client, tmp_path: Path) -> None:
    flags = (
        "--task", "tests.training.sabotage:Inverting", "--task-options", '{"after": 96}', "--prompts-per-step", "4",
        "--group-size", "8", "--max-tokens", "5", "--min-groups", "4", "--reward-margin", "0.6", "--max-lag", "0",
        "--steps", "5", "--parity-every", "0",
    )  # fmt: skip
    with trainer(served, tmp_path, "turning", *flags) as process:
        assert process.wait() == 2, "rewards that stay turned end the run: nothing is learned from them"
    debug = http.get("/debug/training", params={"policy": "turning"}).json()
    assert debug["trainer"]["rollbacks"] == 3 and debug["trainer"]["state"] == "failed"
    assert "no better version in between" in debug["trainer"]["problem"]
    assert [alert["kind"] for alert in debug["alerts"]] == ["gave_up", *["reward_collapse"] * 3]
    back = [move for move in debug["history"] if "earned less than version" in move["reason"]][-1]
    assert back["version"] < back["previous"]
    adapter = debug["adapter"]
    assert adapter["latest"] == debug["trainer"]["version"]
    assert adapter["best"] == debug["trainer"]["best_version"] and adapter["best_value"] > 0
    assert _serves(http, "turning")
