"""Two ranks that are one worker: they answer as one process does, and what ends one of them ends nothing else."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.process.group_settings import LOST_EXIT_CODE
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.e2e.test_adapters import CONFIG, chat_body, upload, weights
from tests.unit.networks import LSTM, inputs_of, weights_of
from tests.waiting import HANG_S, wait_until

LONG = {"model": MODEL, "prompt": "Count from 1 to 60.", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SETTINGS = ("--max-batch-size", "8", "--lease-ms", "1000", "--spec-decode", "ngram")
RANKS = ("--num-local-ranks", "2", "--distributed-silence-s", "2")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("group"), *RANKS, *SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def whole(served: Ring) -> str:
    """What a single process says to LONG."""
    text: str = httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=HANG_S).json()["choices"][0]["text"]
    return text


def children(pid: int) -> list[int]:
    """Of a worker: its followers."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [each for each, parent in pairs if parent == pid]


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 32, **fields}


MIXED = [
    ("completions", body("Hello")),
    ("completions", body("What is 17 + 25? " * 30)),
    ("completions", body("Count from 1 to 9.", logprobs=3, max_tokens=12)),
    ("completions", body("Hello", max_tokens=90, ignore_eos=True)),
    ("completions", body("What is 3 + 4?", stop=["="], repetition_penalty=1.2)),
    ("chat/completions", chat_body(MODEL, response_format={"type": "json_object"})),
    ("chat/completions", chat_body("both")),
    ("chat/completions", chat_body("both@1", max_tokens=40)),
    ("embeddings", {"model": MODEL, "input": ["hello", "x" * 300]}),
    ("rl/act", {"model": "steers", "observations": inputs_of(LSTM, 3)["observation"].tolist()}),
]


async def answers(at: Ring) -> list[Any]:
    """What is answered to all, asked at the same time beside rows that are drawn and a stream that is dropped."""
    async with httpx.AsyncClient(base_url=at.openai_url, timeout=HANG_S) as http:

        async def dropped() -> None:
            async with http.stream("POST", "/completions", json={**LONG, "stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        return

        async def ask(path: str, asked: dict[str, Any]) -> Any:
            response = await http.post(f"/{path}", json=asked)
            assert response.status_code == 200, response.text
            told = response.json()
            if path == "rl/act":
                return [[round(number, 4) for number in each] for each in told["action_probs"]]
            if path == "embeddings":
                return [[round(number, 3) for number in each["embedding"]] for each in told["data"]]
            return [(each.get("text") or each["message"]["content"], each["finish_reason"]) for each in told["choices"]]

        drawn = body("Say something", temperature=1.0, n=3, seed=5)
        *told, _, _ = await asyncio.gather(*(ask(*each) for each in MIXED), ask("completions", drawn), dropped())
    return told


def test_two_ranks_answer_as_one_process_does(served: Ring, group: Ring) -> None:
    for at in (served, group):
        with httpx.Client(base_url=at.url, timeout=HANG_S) as http:
            for seed in (1, 2):
                assert upload(http, "both", weights(seed), CONFIG).status_code == 200
            assert upload(http, "steers", weights_of(LSTM, 1), {"network": LSTM}).status_code == 200
    assert asyncio.run(answers(group)) == asyncio.run(answers(served))
    with httpx.Client(base_url=group.url, timeout=HANG_S) as http:
        for path in ("/pause?mode=keep", "/resume"):
            assert http.post(path).status_code == 200
        assert http.post("/v1/completions", json=body("Hello again")).status_code == 200
        scraped = http.get("/metrics").text
    (worker,) = group.health()["workers"]
    assert [(rank["rank"], rank["sums_by"], rank["state"]) for rank in worker["ranks"]] == [
        (0, "ring", "ready"), (1, "ring", "ready"),
    ]  # fmt: skip
    assert 0 < worker["ranks"][1]["machine"]["footprint"] < worker["ranks"][1]["machine"]["memory_total"]
    assert f'mlx_parallm_worker_rank_memory_bytes{{model_name="{MODEL}",rank="1",worker="{worker["id"]}"}}' in scraped
    assert f'mlx_parallm_worker_ranks_ready{{model_name="{MODEL}",worker="{worker["id"]}"}} 2' in scraped


@pytest.mark.parametrize(
    ("victim", "number"), [("follower", signal.SIGKILL), ("follower", signal.SIGSTOP), ("rank 0", signal.SIGKILL)]
)
def test_a_stream_outlives_any_rank(whole: str, group: Ring, victim: str, number: signal.Signals) -> None:
    def is_there() -> bool:  # a busy machine may have had all of the stream before, in which the death before came late
        return httpx.post(f"{group.url}/v1/completions", json=body("Hello"), timeout=HANG_S).status_code == 200

    asyncio.run(wait_until(is_there))
    ends, text, is_hit = [], "", False
    leading = worker_of(group)
    pid = leading if victim == "rank 0" else children(leading)[0]
    with httpx.stream("POST", f"{group.url}/v1/completions", json={**LONG, "stream": True}, timeout=HANG_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            text += choice["text"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            if not is_hit and len(text) > 20:
                os.kill(pid, number)
                is_hit = True
    assert (text, ends) == (whole, ["length"])
    assert not alive(pid), "nothing is left behind of a group that was lost"


def worker_of(at: Ring) -> int:
    """The process that is rank 0 now."""
    return max(at.workers(), key=lambda worker: worker.started_ms).pid


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_strict_group_ends_with_its_rank(served: Ring, tmp_path: Path) -> None:
    worker = Process.start(
        "worker", "--redis", served.redis_url, "--model", f"models/{MODEL}", "--served-model-name", "strict", *RANKS,
        "--distributed-strict", "--adapter-cache-dir", str(tmp_path),
    )  # fmt: skip
    try:
        worker.wait_for_line("worker.ready")
        (follower,) = children(worker.popen.pid)
        os.kill(follower, signal.SIGKILL)
        assert worker.wait() == LOST_EXIT_CODE, worker.output
    finally:
        worker.stop(signal.SIGKILL)
