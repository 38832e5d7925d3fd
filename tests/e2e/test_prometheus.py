"""deploy/ in a real Prometheus: it takes our configuration, and every expression of the Grafana board finds something.

Skipped where no `prometheus` is installed (Debian and Homebrew have it under that name).
"""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.rings import MODEL, ROOT, Process, Ring, ring
from tests.waiting import HANG_S

CONFIGURATION = ROOT / "deploy/prometheus.yml"
BOARD = ROOT / "deploy/grafana/parallm.json"
SCRAPE_S = 1
# Of one worker without drafts there is none
RARE = ("Time of a transfer of KV", "Share of drafted tokens that was accepted", "Accepted tokens a draft")
WINDOW = "30s"  # for $__rate_interval: Grafana takes at least four scrapes

_HISTOGRAMS = (
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:request_queue_time_seconds", "vllm:iteration_tokens_total",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens", "http_request_duration_seconds",
)  # fmt: skip
VLLM = (
    *(f"{name}_{part}" for name in _HISTOGRAMS for part in ("bucket", "sum", "count")),
    *(f'vllm:request_success_total{{finished_reason="{reason}"}}' for reason in ("stop", "length", "abort", "error")),
    *(f'vllm:num_requests_waiting_by_reason{{reason="{reason}"}}' for reason in ("capacity", "deferred")),
    *(f'vllm:prompt_tokens_by_source_total{{source="local_{source}"}}' for source in ("compute", "cache_hit")),
    'vllm:time_to_first_token_seconds_bucket{le="1.0"}',  # the service levels that one can choose there
    'vllm:request_time_per_output_token_seconds_bucket{le="0.1"}',
    'http_requests_total{status="2xx", handler="/v1/chat/completions"}',
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:num_preemptions_total",
)

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no `prometheus` on the PATH (apt install prometheus)"
)


@dataclass(frozen=True)
class Prometheus:
    """A running server that scrapes our ring, to be asked of one moment: a later scrape may come too late for it."""

    url: str
    at: float = 0.0  # Unix time

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """What an expression finds then; AssertionError, with Prometheus' words, when it cannot be read."""
        asked = {"query": expression, "time": str(self.at)}
        answer = httpx.get(f"{self.url}/api/v1/query", params=asked, timeout=HANG_S).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ring, Prometheus]]:
    """A ring that has chatted, run a rewarded job and trained, and Prometheus, which has watched."""
    tiers = ("--ssd-cache-dir", str(tmp_path_factory.mktemp("kv")), "--ssd-policy", "write_through", "--kv-transfer")
    folders = tmp_path_factory.mktemp("ring"), tmp_path_factory.mktemp("prom")
    with ring(folders[0], *tiers) as served, prometheus(served, folders[1]) as server:
        run = tmp_path_factory.mktemp("run")
        trainer = Process.start(  # on tasks that it never quite learns, so that versions keep coming
            "trainer", "--redis", served.redis_url, "--model", f"models/{MODEL}", "--run-dir", str(run),
            "--steps", "100000", "--prompts-per-step", "8", "--max-tokens", "8", "--learning-rate", "1e-5",
        )  # fmt: skip
        try:
            trainer.wait_for_line(r"train\.step")
            with load(served):
                whole = with_samples(server)
        finally:
            trainer.stop()
        yield served, whole


@contextlib.contextmanager
def prometheus(served: Ring, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with our configuration; only the address and the pace are ours to change."""
    text = CONFIGURATION.read_text()
    text = text.replace("api:8000", served.url.removeprefix("http://"))
    text = text.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_S}s")
    (folder / "prometheus.yml").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]
    )  # fmt: skip
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(HANG_S)


@contextlib.contextmanager
def load(served: Ring) -> Iterator[None]:
    """Chats, one of them on the policy, and jobs, until the end."""
    chatting = Process.start("tests.e2e.test_prometheus", served.url)
    try:
        yield
    finally:
        chatting.stop()


async def chat(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
        while True:
            body = {"messages": [{"role": "user", "content": "12+35= " * 20}], "max_tokens": 12}
            for model in (MODEL, "policy"):
                await http.post("/v1/chat/completions", json={**body, "model": model})
            job = {"kind": "rollout", "model": MODEL, "prompts": ["1+1="], "references": ["2"]}
            await http.post("/v1/jobs", json={**job, "reward": {"name": "exact"}})
            await asyncio.sleep(0.1)


def with_samples(server: Prometheus) -> Prometheus:
    """Of a moment when there was enough of everything for a rate, and no scrape that might still fail had begun."""
    deadline = time.monotonic() + HANG_S
    wanted = (
        "sum(rate(mlx_parallm_reward_count[20s])) > 0 and on () count_over_time(mlx_parallm_rl_lag[1m]) > 5"
        ' and on () up{job="parallm"} == 1'
    )
    while True:
        then = replace(server, at=time.time() - 2 * SCRAPE_S)
        with contextlib.suppress(httpx.TransportError):
            if then.ask(wanted):
                return then
        assert time.monotonic() < deadline, "Prometheus did not get what it needs"
        time.sleep(0.2)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def resolved(expression: str) -> str:
    """As Grafana sends it with all models chosen."""
    return expression.replace("$__rate_interval", WINDOW).replace("$model", ".*")


def test_prometheus_takes_the_configuration() -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "it comes with prometheus"
    done = subprocess.run([promtool, "check", "config", str(CONFIGURATION)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_scrape_is_whole(watched: tuple[Ring, Prometheus]) -> None:
    _, server = watched
    [up] = server.ask('up{job="parallm"}')
    assert up["value"][1] == "1"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_expression_of_the_board_finds_something(watched: tuple[Ring, Prometheus], panel: dict[str, Any]) -> None:
    _, server = watched
    for target in panel["targets"]:
        found = server.ask(resolved(target["expr"]))
        values = [sample["value"][1] for sample in found]
        assert values or panel["title"] in RARE, target["expr"]
        assert "NaN" not in values or len(set(values)) > 1, target["expr"]
        labels = {name for sample in found for name in sample["metric"]}
        named = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
        assert named <= labels, f"the legend of {target['expr']} names {named - labels}"


@pytest.mark.parametrize("expression", VLLM, ids=lambda expression: expression.split("{")[0])
def test_what_vllms_own_boards_read_is_there(watched: tuple[Ring, Prometheus], expression: str) -> None:
    _, server = watched
    assert server.ask(expression), expression


if __name__ == "__main__":
    import sys

    from shared.process.lifeline import follow_parent

    follow_parent()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(chat(sys.argv[1]))
