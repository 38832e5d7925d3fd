"""A trainer inside the worker that serves: it learns while streams go on, and none of its troubles is theirs."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from shared.redis.connection.client import connect
from shared.redis.training.board import TrainingBoard
from shared.training import TrainerStatus
from tests.e2e.rings import MODEL, ROOT, Process, Ring, ring
from tests.waiting import HANG_S, wait_until
from trainer.runs.metrics import StepMetrics, read

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0, "stream": True}
HOSTED = ("--mode", "inference_and_training", "--log-json", "true")


def config(folder: Path, **changes: Any) -> Path:
    """The recipe for sixteen tasks, in a file, with half its samples."""
    recipe = yaml.safe_load((ROOT / "trainer/recipes/tiny-fixed.yaml").read_bytes())
    path = folder / "run.yaml"
    path.write_text(
        yaml.safe_dump(recipe | {"run_dir": str(folder / "run"), "group_size": 8, "probe_prompts": 2} | changes)
    )
    return path


def metrics(folder: Path) -> list[StepMetrics]:
    return read(folder / "run" / "policy" / "metrics.jsonl")


def status(served: Ring) -> TrainerStatus | None:
    async def look() -> TrainerStatus | None:
        redis = connect(served.redis_url)
        try:
            return await TrainingBoard(redis, "policy").status()
        finally:
            await redis.aclose()

    return asyncio.run(look())


class Streams:
    """Chats on the base and on the policy, one after another, until told to stop."""

    def __init__(self, url: str, models: tuple[str, ...] = (MODEL, "policy")) -> None:
        self.answers = dict.fromkeys(models, 0)
        self.texts: set[str] = set()
        self._url = url
        self._going = True

    async def run(self, model: str) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=HANG_S) as http:
            while self._going:
                await wait_until(lambda: self._answered(http, model))

    async def _answered(self, http: httpx.AsyncClient, model: str) -> bool:
        async with http.stream("POST", "/v1/chat/completions", json={**ASK, "model": model}) as answer:
            if answer.status_code == 503:  # the only worker was killed, and the next one is not there yet
                assert "no live worker serves" in (text := (await answer.aread()).decode()), text
                return not self._going
            assert answer.status_code == 200, await answer.aread()
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons[-1] in ("stop", "length")
        self.answers[model] += 1
        if model == MODEL:
            self.texts.add("".join(c["delta"].get("content") or "" for k in chunks for c in k["choices"]))
        return True

    @contextlib.asynccontextmanager
    async def going(self) -> Any:
        tasks = [asyncio.create_task(self.run(model)) for model in self.answers]
        try:
            yield
        finally:
            self._going = False
            await asyncio.gather(*tasks)


async def steps(folder: Path, count: int) -> list[StepMetrics]:
    await wait_until(lambda: len(metrics(folder)) >= count)
    return metrics(folder)


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Ring]:
    file = config(tmp_path, steps=8, checkpoint_every=2, learning_rate=3e-3, evaluate_every=4)
    with ring(tmp_path / "ring", *HOSTED, "--train-config", str(file), "--training-share", "0.6") as served:
        yield served


async def test_it_learns_while_streams_go_on_and_goes_on_after_a_kill(hosted: Ring, tmp_path: Path) -> None:
    await steps(tmp_path, 1)
    streams = Streams(hosted.url)
    async with streams.going():
        await steps(tmp_path, 3)
        (worker,) = await asyncio.to_thread(hosted.workers)
        os.kill(worker.pid, signal.SIGKILL)
        await wait_until(lambda: bool(hosted.server.printed("train.ended")))
    lines = metrics(tmp_path)
    assert hosted.server.printed("run.resumed"), "the new worker goes on from the checkpoint"
    assert [line.train_step for line in lines] == list(range(8))
    consumed = [index for line in lines for index in line.indices]
    assert len(set(consumed)) == len(consumed), "each group was learned from once"
    assert lines[-1].held_out is not None and lines[-1].held_out >= 0.7, "0.56 before training"
    assert min(streams.answers.values()) > 3
    assert len(streams.texts) == 1, "greedy answers of the base do not notice the trainer"
    last = await asyncio.to_thread(status, hosted)
    assert last is not None and (last.state, last.train_step) == ("ended", 8)


def test_training_that_fails_says_why_and_the_worker_serves_on(tmp_path: Path) -> None:
    file = config(tmp_path, learning_rate=1.0, warmup_steps=0, max_rejections=2, evaluate_every=0, prompts_per_step=4)
    with ring(tmp_path / "ring", *HOSTED, "--train-config", str(file)) as served:
        served.server.wait_for_line(r"failed the gate.*training\.failed")
        served.server.wait_for_line(r"worker\.guest_left")
        last = status(served)
        assert last is not None and last.state == "failed" and "update_norm" in last.problem
        answer = httpx.post(
            f"{served.url}/v1/chat/completions", json={**ASK, "stream": False, "model": MODEL}, timeout=HANG_S
        )
        assert answer.status_code == 200, answer.text

        async def computed() -> bool:  # told with its next heartbeat
            (worker,) = await asyncio.to_thread(served.workers)
            return worker.extra["guest_units"] > 0

        asyncio.run(wait_until(computed))


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_only_ends_with_the_training(tmp_path: Path, ranks: int) -> None:
    file = config(tmp_path, evaluate_every=0, steps=2, prompts_per_step=4)
    done = subprocess.run(
        [
            sys.executable, "-m", "api.serve.main", "--model", f"models/{MODEL}", "--data-dir", str(tmp_path / "ring"),
            "--mode", "training_only", "--train-config", str(file), "--lora-rank", "4",
            "--num-local-ranks", str(ranks),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(tmp_path)) == 2
    adapter = json.loads((tmp_path / "run/policy/checkpoints/step-000002/adapter_config.json").read_text())
    assert adapter["lora_parameters"]["rank"] == 4, "the flag goes before the file"


async def test_a_member_computes_for_a_worker_that_learns(tmp_path: Path) -> None:
    """`learner: shared`: the worker leads, and its streams go on."""
    file = config(tmp_path, steps=2, prompts_per_step=4, evaluate_every=0, max_lag=0, learner="shared", trainers=2)
    with ring(tmp_path / "ring", *HOSTED, "--train-config", str(file)) as served:
        member = Process.start(
            "trainer", "--redis", served.redis_url, "--model", f"models/{MODEL}", "--join-run", "policy",
            "--log-json", "true",
        )  # fmt: skip
        try:
            await steps(tmp_path, 1)  # before that there is no policy to ask
            streams = Streams(served.url)
            async with streams.going():
                await wait_until(lambda: bool(served.server.printed("train.ended")))
            assert await asyncio.to_thread(member.wait) == 0, member.output
            assert member.printed('"member.ready"')
        finally:
            member.stop(signal.SIGKILL)
        shared = [json.loads(line) for line in served.server.printed('"shared.step"')]
    # A step of few samples, or beside streams that slow one of the two, may fall to one of them alone.
    assert len(shared) == 2 and shared[0]["trainers"] == 2 and not any(each["lost"] for each in shared)
    assert [line.train_step for line in metrics(tmp_path)] == [0, 1]
    assert min(streams.answers.values()) > 0 and len(streams.texts) == 1


def test_a_worker_that_learns_and_a_run_over_http_average_their_weights(tmp_path: Path) -> None:
    """The run that comes later counts from its first round on."""
    rounds = {"federation": "both", "sync_every": 1, "sync_wait_s": 60, "prompts_per_step": 4}
    file = config(tmp_path, evaluate_every=0, parity_every=0, steps=1000, **rounds)
    with ring(tmp_path / "ring", *HOSTED, "--train-config", str(file)) as served:
        other = Process.start(
            "trainer", "--connect-to", served.url, "--over-http", "--sync-redis", served.redis_url,
            "--model", f"models/{MODEL}", "--config", str(file), "--adapter", "other", "--steps", "3",
            "--log-json", "true",
        )  # fmt: skip
        try:
            assert other.wait() == 0, other.output
        finally:
            other.stop(signal.SIGKILL)
        for process in (other, served.server):
            rounds_over = [json.loads(line) for line in process.printed('"round.over"')]
            assert sum((each["runs"], each["counted"]) == (2, True) for each in rounds_over) >= 2
