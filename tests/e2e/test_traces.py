"""Traces of real processes at a real OTLP receiver: one trace from the caller's span to the worker's decode."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.serve.embedded_redis import EmbeddedRedis
from tests.e2e.collector import Collector, Span, collector
from tests.e2e.rings import MODEL, ROOT, Process, Ring, ring
from tests.waiting import HANG_S, wait_until

KEY = "a-key-that-nobody-else-has"
WORD = "peculiarword"  # in prompts and stop strings; may turn up nowhere
CALLER = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
SERVER, INTERNAL, CONSUMER = 2, 1, 5


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ring, Collector]]:
    with collector() as kept, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
        patch.setenv("PARALLM_API_KEY", KEY)
        with ring(tmp_path_factory.mktemp("ring"), "--otlp-endpoint", kept.url) as served:
            yield served, kept


def ask(served: Ring, path: str, body: dict[str, object], **headers: str) -> httpx.Response:
    told = {"authorization": f"Bearer {KEY}", **headers}
    return httpx.post(f"{served.url}{path}", json=body, headers=told, timeout=HANG_S)


def inside(spans: list[Span], parent: Span) -> dict[str, Span]:
    """The children of a span by name; each name once."""
    found = [span for span in spans if span.parent == parent.id]
    assert len({span.name for span in found}) == len(found), found
    return {span.name: span for span in found}


def test_a_chat_is_one_trace_from_its_caller_to_the_decode_step(received: tuple[Ring, Collector]) -> None:
    served, kept = received
    chat = {
        "messages": [{"role": "user", "content": f"{WORD} 12+35="}], "max_tokens": 9, "min_tokens": 9,
        "temperature": 0.5, "stop": [WORD], "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = ask(served, "/v1/chat/completions", chat, traceparent=f"00-{CALLER[0]}-{CALLER[1]}-01")
    usage = json.loads(answer.text.split("data: ")[-2])["usage"]
    spans = kept.wait_for(lambda found: len([span for span in found if span.trace == CALLER[0]]) >= 6)
    spans = [span for span in spans if span.trace == CALLER[0]]
    assert len(spans) == 6

    [http] = [span for span in spans if span.parent == CALLER[1]]
    assert (http.service, http.kind, http.name) == ("parallm-api", SERVER, "POST /v1/chat/completions")
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["parallm.request_id"] == answer.headers["x-request-id"]
    assert any(CALLER[0] in line for line in served.server.printed("api.request")), "the log names the trace"

    work = inside(spans, http)[f"chat {MODEL}"]
    told = work.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == MODEL
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (9, 0.5)
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 9
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < told["gen_ai.latency.time_to_first_token"] < told["gen_ai.latency.e2e"]

    sequence = inside(spans, work)["sequence"]
    assert (sequence.service, sequence.kind) == ("parallm-worker", CONSUMER)
    assert sequence.attributes["parallm.completion_tokens"] == 9
    assert sequence.attributes["parallm.attempt"] == 1
    stages = inside(spans, sequence)
    queue, prefill, decode = (stages[name] for name in ("queue", "prefill", "decode"))
    assert sequence.start_ns == queue.start_ns <= queue.end_ns == prefill.start_ns
    # Both are noted, in milliseconds, when the event loop takes the tokens: all nine at once, if it was late.
    assert prefill.end_ns == decode.start_ns <= decode.end_ns == sequence.end_ns
    assert not any(span.failed for span in spans)
    assert all(headers["x-tenant"] == "blue" for headers in kept.headers), "OTEL_* variables are followed"


def test_several_samples_are_several_sequences_of_one_span(received: tuple[Ring, Collector]) -> None:
    served, kept = received
    body = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    name = ask(served, "/v1/completions", body).json()["id"]

    def whole(found: list[Span]) -> bool:
        work = [s for s in found if s.attributes.get("gen_ai.response.id") == name]
        return bool(work) and len([s for s in found if s.parent == work[0].id]) == 4

    spans = kept.wait_for(whole)
    [work] = [span for span in spans if span.attributes.get("gen_ai.response.id") == name]
    assert work.name == f"text_completion {MODEL}"
    assert work.attributes["gen_ai.usage.output_tokens"] == 20
    assert work.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4
    sequences = [span for span in spans if span.parent == work.id]
    assert {span.attributes["gen_ai.request.id"] for span in sequences} == {f"{name}-{i}" for i in range(4)}


def test_what_fails_says_so_and_probes_say_nothing(received: tuple[Ring, Collector]) -> None:
    served, kept = received
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 900, "ignore_eos": True, "deadline_s": 0.05}
    assert ask(served, "/v1/completions", body).status_code == 504
    spans = kept.wait_for(lambda found: len([span for span in found if span.kind == SERVER and span.failed]) == 1)
    [work] = [span for span in spans if span.name.startswith("text") and span.failed]
    assert work.attributes["error.type"] == "deadline"
    [http] = [span for span in spans if span.id == work.parent]
    assert http.failed and http.attributes["http.response.status_code"] == 504
    for path in ("/livez", "/metrics", "/dashboard"):
        httpx.get(f"{served.url}{path}", timeout=HANG_S)
    assert ask(served, "/v1/embeddings", {"model": MODEL, "input": "hello"}).status_code == 200
    spans = kept.wait_for(lambda found: any(span.name == f"embeddings {MODEL}" for span in found))
    assert {span.name for span in spans if span.kind == SERVER} <= {
        "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings", "POST /v1/jobs",
        "GET /v1/jobs/{job_id}",
    }  # fmt: skip


def test_a_jobs_ticks_are_traces_that_name_the_request_behind_them(received: tuple[Ring, Collector]) -> None:
    served, kept = received
    trace = "11111111111111111111111111111111"
    job = ask(
        served, "/v1/jobs",
        {"kind": "generate", "model": MODEL, "prompts": ["a", "b"], "n": 2, "max_tokens": 4},
        traceparent=f"00-{trace}-{CALLER[1]}-01",
    ).json()  # fmt: skip

    def whole(found: list[Span]) -> bool:
        ticks = {s.id for s in found if s.attributes.get("parallm.job.id") == job["id"]}
        return len([s for s in found if s.parent in ticks]) == 4

    spans = kept.wait_for(whole)
    ticks = [span for span in spans if span.attributes.get("parallm.job.id") == job["id"]]
    assert all((span.name, span.service, span.parent) == ("job tick", "parallm-runner", "") for span in ticks)
    assert all(span.links == [trace] for span in ticks)
    sequences = [span for span in spans if span.parent in {tick.id for tick in ticks}]
    assert {span.attributes["parallm.class"] for span in sequences} == {"batch"}


def test_a_train_step_is_a_trace_of_what_it_consists_of(received: tuple[Ring, Collector], tmp_path: Path) -> None:
    served, kept = received
    trainer = Process.start(
        "trainer", "--redis", served.redis_url, "--model", f"models/{MODEL}", "--run-dir", str(tmp_path),
        "--task-count", "8", "--steps", "2", "--prompts-per-step", "8", "--max-tokens", "8", "--adapter", "traced",
        "--otlp-endpoint", kept.url, "--learning-rate", "1e-3",
    )  # fmt: skip
    try:
        assert trainer.wait() == 0, trainer.output
    finally:
        trainer.stop()
    steps = [span for span in kept.spans if span.name == "train step"]
    assert [span.attributes["parallm.train_step"] for span in steps] == [0, 1]
    assert {span.service for span in steps} == {"parallm-trainer"}
    learned = [inside(kept.spans, step) for step in steps if step.attributes["parallm.tokens"]]
    assert learned, "at least one step had something to learn from"
    for stages in learned:
        assert set(stages) == {"collect", "train", "stage", "gate", "publish"}
        order = [stages[name].start_ns for name in ("collect", "train", "stage", "gate", "publish")]
        assert order == sorted(order)
    assert steps[-1].attributes["parallm.version"] >= 1


def test_no_span_holds_a_prompt_or_a_key(received: tuple[Ring, Collector]) -> None:
    served, kept = received
    body = {"model": MODEL, "prompt": WORD, "max_tokens": 2}
    name = ask(served, f"/v1/completions?also={WORD}", body).json()["id"]
    assert ask(served, f"/v1/completions?also={WORD}", body | {"top_k": "WRONG" + WORD}).status_code == 400
    kept.wait_for(lambda found: any(span.attributes.get("http.response.status_code") == 400 for span in found))
    kept.wait_for(lambda found: any(span.attributes.get("gen_ai.request.id") == f"{name}-0" for span in found))
    sent = b"".join(kept.bodies)
    assert name.encode() in sent
    assert KEY.encode() not in sent
    assert WORD.encode() not in sent


def test_a_collector_that_is_away_costs_no_request_and_no_time_at_the_end(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as redis:
        away = ("--redis", redis.url, "--otlp-endpoint", "http://127.0.0.1:9")
        worker = ("--model", f"models/{MODEL}", "--adapter-cache-dir", str(tmp_path))
        commands = (("api", "--port", "0"), ("worker.jobs",), ("worker", *worker))
        processes = [Process.start(module, *flags, *away) for module, *flags in commands]
        try:
            api, runner = processes[0], processes[1]
            served = Ring(api, api.wait_for_line(r"(http://127\.0\.0\.1:\d+)").group(1), redis.url)
            processes[2].wait_for_line("worker.ready")
            asyncio.run(wait_until(lambda: httpx.get(f"{served.url}/readyz", timeout=HANG_S).status_code == 200))
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
            for _ in range(20):
                assert ask(served, "/v1/completions", body).status_code == 200
            job = {"kind": "generate", "model": MODEL, "prompts": ["a"], "max_tokens": 4}
            assert ask(served, "/v1/jobs", job).status_code == 202
            asyncio.run(wait_until(lambda: "job.finished" in runner.output))
            for process in processes:
                process.popen.terminate()
            assert [process.wait() for process in processes] == [0, 0, 0], "each ended in time, by itself"
        finally:
            for process in processes:
                process.stop(signal.SIGKILL)


def test_without_the_packages_the_flag_says_what_to_install(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['opentelemetry.sdk'] = None; from api.serve.main import main; sys.exit(main())"
    command = [sys.executable, "-c", blocked, "--otlp-endpoint", "http://127.0.0.1:4318", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("--otlp-endpoint: traces need the extra of that name: "
                                        "pip install 'mlx-parallm[traces]'")  # fmt: skip
