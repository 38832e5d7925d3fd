"""Where spans go, and what a sequence's spans say."""

import subprocess
import sys

import pytest

from shared.errors import SetupError
from shared.frames import Finish, VersionSpan
from shared.sequences import Claim, SamplingParams, SequenceResult, SequenceSpec, Timings, decode_spec, encode
from shared.telemetry import tracing
from shared.telemetry.spans import Past
from tests.e2e.rings import ROOT
from tests.waiting import HANG_S
from worker.reports import sequence_spans

COLLECTOR = "http://127.0.0.1:4318"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


@pytest.mark.parametrize(
    ("endpoint", "variables", "expected"),
    [
        ("", {}, ""),
        (COLLECTOR, {}, f"{COLLECTOR}/v1/traces"),
        (f"{COLLECTOR}/", {}, f"{COLLECTOR}/v1/traces"),
        ("https://host/tenant/v1/traces", {}, "https://host/tenant/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, f"{COLLECTOR}/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://host/in"}, "http://host/in"),
        (COLLECTOR, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other"}, f"{COLLECTOR}/v1/traces"),
        (COLLECTOR, {"OTEL_SDK_DISABLED": "true"}, ""),
        (COLLECTOR, {"OTEL_TRACES_EXPORTER": "none"}, ""),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ""),
    ],
)
def test_the_setting_wins_over_opentelemetrys_variables(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, variables: dict[str, str], expected: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracing.target(endpoint) == expected


def test_a_setting_that_cannot_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="looks like http://"):
        tracing.target("localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SetupError, match="grpc is not spoken"):
        tracing.target(COLLECTOR)


def test_while_traces_are_off_no_process_imports_the_sdk() -> None:
    code = (
        "import sys, api.app, api.__main__, worker.process, worker.jobs.runner, trainer.runs.loop\n"
        "from shared.telemetry import tracing\n"
        "tracing.start('', 'api')\n"
        "assert tracing.provider() is None and tracing.begin('x', {}) is None and tracing.traceparent() == ''\n"
        "with tracing.span('x'): pass\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr


def spans(times: Timings, finish: Finish, tokens: int = 0, attempt: int = 1) -> Past:
    spec = SequenceSpec("s", "m", (1, 2, 3), SamplingParams(8, 0), enqueued_ms=times.enqueued_ms)
    versions = (VersionSpan("p@1", 0, 1), VersionSpan("p@2", 1, tokens)) if tokens else ()
    result = SequenceResult("s", finish, "w", attempt, 3, tuple(range(tokens)), spans=versions, timings=times)
    return sequence_spans(Claim(spec, "stream", "0-1", attempt), result)


def test_stages_lie_end_to_end_in_their_sequence() -> None:
    past = spans(Timings(1_000, 1_010, 1_040, 1_100), Finish("stop", cached_tokens=2), tokens=4)
    lengths = {stage.name: (stage.end_ns - stage.start_ns) // 10**6 for stage in past.children}
    assert lengths == {"queue": 10, "prefill": 30, "decode": 60}
    assert (past.end_ns - past.start_ns) // 10**6 == 100
    assert past.attributes["gen_ai.latency.time_in_queue"] == 0.01
    assert past.attributes["gen_ai.latency.time_in_model_inference"] == 0.09
    assert past.attributes["parallm.adapter"] == "p@1,p@2"
    assert past.attributes["parallm.cached_tokens"] == 2
    assert past.error == ""


def test_a_worker_whose_clock_is_behind_makes_no_stage_of_negative_length() -> None:
    past = spans(Timings(1_000, 900, 950, 980), Finish("length"), tokens=4)
    for stage in (past, *past.children):
        assert past.start_ns <= stage.start_ns <= stage.end_ns <= past.end_ns


def test_a_sequence_that_failed_before_its_first_token_has_no_decode_stage() -> None:
    past = spans(Timings(1_000, 1_010, 0, 1_050), Finish("error", error_code="engine_error"), attempt=2)
    assert [stage.name for stage in past.children] == ["queue", "prefill"]
    assert past.error == "engine_error"
    assert past.attributes["parallm.attempt"] == 2


def test_the_trace_travels_with_the_sequence_and_is_no_byte_without_one() -> None:
    bare = SequenceSpec("s", "m", (1,), SamplingParams(1, 0))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    traced = SequenceSpec("s", "m", (1,), SamplingParams(1, 0), trace=parent)
    assert decode_spec(encode(traced)).trace == parent
    assert b"trace" not in encode(bare)
