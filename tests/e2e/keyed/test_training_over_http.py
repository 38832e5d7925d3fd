"""A trainer that knows the api's URL and a key, and nothing of Redis."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import mlx.core as mx
import numpy as np
import psutil
import pytest

from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from shared.errors import ParallmError, SetupError
from shared.jobs import SamplingOverrides
from tests.e2e.keyed import KEY
from tests.e2e.rings import MODEL, ROOT, Process, Ring
from tests.e2e.trained.test_training_api import pair
from tests.waiting import HANG_S, wait_until
from trainer.learn.batches import Sample, SampleGroup
from trainer.ring.http_client import HttpApi
from trainer.ring.over_http import HttpSource
from trainer.rollouts.groups import RolloutRequest
from trainer.runs.distillation.teacher import scored
from trainer.runs.metrics import read

RECIPE = (
    "--config",
    str(ROOT / "trainer/recipes/tiny-fixed.yaml"),
    "--prompts-per-step",
    "4",
    "--group-size",
    "8",
    "--probe-prompts",
    "2",
)


@pytest.fixture
def http(keyed: Ring) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=keyed.url, timeout=HANG_S, trust_env=False, headers=headers) as client:
        yield client


def is_api(process: psutil.Process) -> bool:
    return "api" in process.cmdline()[1:4]


@contextlib.contextmanager
def trainer(
    served: Ring, folder: Path, policy: str, *flags: str, key: str = KEY, module: str = "trainer"
) -> Iterator[Process]:
    process = Process.start(
        module, "--connect-to", served.url, "--over-http", "--model", f"models/{MODEL}", "--adapter", policy,
        "--run-dir", str(folder), "--log-json", "true", *flags, environment={"PARALLM_CONNECT_KEY": key},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.stop()


def talks_to(process: Process, url: str) -> bool:
    port = urlsplit(url).port
    found = psutil.Process(process.popen.pid).net_connections("tcp")
    return any(each.raddr and each.raddr.port == port for each in found)


def status(http: httpx.Client, policy: str) -> dict[str, Any]:
    answer = http.get("/v1/training/status", params={"policy": policy})
    return answer.json() if answer.status_code == 200 else {"trainer": None, "training_enabled": False}


def test_it_learns_shows_itself_and_leaves_no_jobs(keyed: Ring, http: httpx.Client, tmp_path: Path) -> None:
    flags = ("--steps", "8", "--evaluate-every", "4", "--parity-every", "3")
    with trainer(keyed, tmp_path, "policy", *RECIPE, *flags) as process:
        process.wait_for_line(r"train\.step")
        assert talks_to(process, keyed.url) and not talks_to(process, keyed.redis_url)
        told = status(http, "policy")
        assert told["training_enabled"] and told["trainer"]["train_step"] >= 1
        assert process.wait() == 0, process.output
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert [line.train_step for line in lines] == list(range(8))
    assert any(line.taught for line in lines) and all(line.failed == 0 and not line.gate for line in lines)
    told = status(http, "policy")
    assert (told["training_enabled"], told["trainer"]["state"], told["trainer"]["train_step"]) == (False, "ended", 8)
    assert told["current_lora"] == f"policy@{lines[-1].version}"
    versions = http.get("/v1/adapters/policy").json()
    latest = versions["versions"][-1]
    assert latest["train_step"] == 7 and {"loss", "reward"} <= latest["metrics"].keys()
    assert latest["parent"] == latest["version"] - 1 and all(check["passed"] for check in latest["gate"])
    assert versions["best"] >= 1
    assert len(http.get("/debug/training", params={"policy": "policy"}).json()["points"]) == 8

    def left() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = http.get("/v1/jobs", params={"limit": 1000}).json()["data"]
        return found

    assert len(left()) <= 16, "what was read is deleted; the two batches that were under way at the end are cancelled"
    asyncio.run(wait_until(lambda: all(job["status"] in ("cancelled", "succeeded") for job in left())))


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_next_turn_goes_on_from_the_kv_of_the_answer(keyed: Ring, goes_on: bool) -> None:
    prompt = tuple(10 + (7 * at + goes_on) % 400 for at in range(130))
    sampling = SamplingOverrides(max_tokens=150, ignore_eos=True, seed=5)

    async def played() -> list[tuple[int, int]]:
        async with HttpApi(keyed.url, KEY, patience_s=10) as api:
            source = HttpSource(api, MODEL, f"run-{goes_on}", 60.0)
            first = RolloutRequest("turn-0", prompt, 2, sampling, "", has_next_turn=goes_on)
            read = []
            for sample in await source.generate(first):
                ids = (*prompt, *sample.completion_ids, 11, 12, 13)
                again = RolloutRequest(f"turn-1-{sample.sample_index}", ids, 1, sampling, "")
                (turn,) = await source.generate(again)
                read.append((len(ids), turn.cached_tokens))
            return read

    read = asyncio.run(played())
    assert [length for length, _ in read] == [283, 283]
    assert [cached for _, cached in read] == [256 if goes_on else 128] * 2, "to a block of 64"


def test_a_policy_has_one_trainer(keyed: Ring, http: httpx.Client, tmp_path: Path) -> None:
    posted = ("--source", "posted", "--parity-every", "0")
    with trainer(keyed, tmp_path / "first", "shared", *posted) as first:
        asyncio.run(wait_until(lambda: (status(http, "shared")["trainer"] or {}).get("version") == 1))
        with trainer(keyed, tmp_path / "second", "shared", *posted, module="tests.e2e.hasty_trainer") as second:
            assert second.wait() == 2 and "has a trainer already" in second.output
        assert first.popen.poll() is None


def test_a_killed_one_resumes_and_an_api_that_dies_meanwhile_is_waited_for(
    keyed: Ring, http: httpx.Client, tmp_path: Path
) -> None:
    flags = (*RECIPE, "--steps", "8", "--checkpoint-every", "2", "--evaluate-every", "0", "--parity-every", "0")
    with trainer(keyed, tmp_path, "hard", *flags) as process:
        process.wait_for_line(r'"step": "3/8"')
        process.popen.kill()
        process.popen.wait()
    with trainer(keyed, tmp_path, "hard", *flags, "--task-count", "12") as process:
        process.wait_for_line(r'"step": "5/8"')
        while not process.printed("train.api_away"):  # it is told of a question that the api was asked, and left open
            assert process.popen.poll() is None, process.output
            (api,) = [each for each in psutil.Process(keyed.server.popen.pid).children() if is_api(each)]
            api.suspend()
            time.sleep(1)  # the trainer asks twice a second
            api.kill()
            with contextlib.suppress(AssertionError):
                asyncio.run(wait_until(lambda: bool(process.printed("train.api_away"))))
        assert process.wait() == 0, process.output
    assert process.printed("run.resumed") and '["task_count"]' in process.printed("run.changed")[0]
    lines = read(tmp_path / "hard" / "metrics.jsonl")
    assert [line.train_step for line in lines] == list(range(8))
    assert all(line.failed == 0 for line in lines)
    assert status(http, "hard")["trainer"]["train_step"] == 8


def test_orders_and_a_refused_version_go_the_same_way(keyed: Ring, http: httpx.Client, tmp_path: Path) -> None:
    def post(policy: str) -> dict[str, Any]:
        body = {"trajectories": pair(http, f"{policy}@1"), "policy": policy, "checkpoint_name": "mine"}
        answer = http.post("/v1/training/update", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    posted = ("--source", "posted", "--parity-every", "0", "--max-logprob-gap", "1e38", "--learning-rate")
    tame = trainer(keyed, tmp_path, "tame", *posted, "0.001")
    with tame as process, trainer(keyed, tmp_path, "wild", *posted, "1.0"):
        asyncio.run(wait_until(lambda: (status(http, "tame")["trainer"] or {}).get("version") == 1))
        asyncio.run(wait_until(lambda: (status(http, "wild")["trainer"] or {}).get("version") == 1))
        good = post("tame")
        assert (good["status"], good["lora"], good["checkpoint"]) == ("updated", "tame@2", "mine")
        saved = http.post("/training/checkpoint", json={"policy": "tame", "name": "later"}).json()
        assert saved["checkpoint"] == "later"
        bad = post("wild")
        assert bad["status"] == "rejected" and "update_norm" in bad["gate"]
        rejected = http.get("/v1/adapters/wild/versions/2").json()
        assert rejected["status"] == "rejected"
        assert "update_norm" in {check["name"] for check in rejected["gate"] if not check["passed"]}
        assert status(http, "wild")["alerts"]["gate_failed"] == 1
        assert process.stop() == 0, process.output
    assert http.get("/debug/training", params={"policy": "tame"}).json()["orders_waiting"] == 0


@pytest.mark.parametrize(
    ("flags", "key", "reason"),
    [
        ((), "another-key-that-is-long", "refuses the API key"),
        (("--source", "live"), KEY, "reads live traffic from Redis"),
        (("--redis", "redis://127.0.0.1:1"), KEY, "--over-http goes with --connect-to"),
        (("--reward", "judge", "--reward-options", '{"model": "nobody"}', "--task", "gsm8k", "--dataset",
          "data/gsm8k/test-64.jsonl"), KEY, "'nobody' does not exist"),
    ],
)  # fmt: skip
def test_what_keeps_it_from_training_is_said(
    keyed: Ring, tmp_path: Path, flags: tuple[str, ...], key: str, reason: str
) -> None:
    with trainer(keyed, tmp_path, "never", *flags, key=key) as process:
        assert process.wait() == 2
        assert reason in process.output


def test_a_judge_scores_for_it_over_http(keyed: Ring, tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text('{"prompt": "1+3="}\n{"prompt": "2+3="}\n')
    options = '{"model": "tiny", "template": "{prompt}{completion}", "marks": {"1": 0, "7": 1}}'
    flags = ("--task", "jsonl", "--dataset", str(data), "--reward", "judge", "--reward-options", options)
    with trainer(keyed, tmp_path, "judged", *flags, "--steps", "2", "--prompts-per-step", "2") as process:
        assert process.wait() == 0, process.output
    lines = read(tmp_path / "judged" / "metrics.jsonl")
    assert len(lines) == 2 and all(line.failed == 0 and 0 < line.reward < 1 for line in lines)


async def test_a_teacher_says_over_http_what_its_model_says(keyed: Ring) -> None:
    loaded = load_model(EngineConfig(str(ROOT / "models" / "tiny")))
    sample = Sample((7, 300, 12), (0.0,) * 3, (True, False, True), (0,) * 3, 0.0)
    row, digest = SampleGroup("", (5, 6, 90), (sample,)), loaded.card.tokenizer_sha256
    async with HttpApi(keyed.url, KEY) as api:
        (line,) = await scored(api, MODEL, 5, [row], digest)
        with pytest.raises(SetupError, match="the teacher tiny has another tokenizer"):
            await scored(api, MODEL, 5, [row], "another")
        with pytest.raises(ParallmError, match="nobody"):
            await scored(api, "nobody@1", 5, [row], digest)
    assert (line.prompt_ids, line.completion_ids, line.counts) == ((5, 6, 90), (7, 300, 12), (True, False, True))
    logits_LV = loaded.model(mx.array([[5, 6, 90, 7, 300]]))[0]
    logps_LV = logits_LV - mx.logsumexp(logits_LV, axis=-1, keepdims=True)
    for at, ids, logprobs in zip((2, 4), line.top_ids, line.top_logprobs, strict=True):
        assert list(ids) == mx.argsort(-logps_LV[at])[:5].tolist()
        assert np.allclose(logprobs, np.array(logps_LV[at])[list(ids)], atol=1e-4)
