"""Events with fields: JSON lines off a terminal, also those of libraries that use `logging`."""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from shared.process.logs import configure
from tests.waiting import HANG_S


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_events_are_json_lines_with_fields_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", json=True)
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.info("worker.claimed", job="j", slot=3)
    log.debug("not.shown")
    (line,) = lines(capsys)
    assert {key: line[key] for key in ("event", "job", "slot", "request_id", "level")} == {
        "event": "worker.claimed",
        "job": "j",
        "slot": 3,
        "request_id": "r1",
        "level": "info",
    }


def test_logging_comes_out_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", json=True)
    logging.getLogger("library").warning("careful: %s", "x")
    logging.getLogger("httpx").info("HTTP Request")
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["logger"]) == ("careful: x", "warning", "library")


def test_exceptions_are_structured(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", json=True)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("api.fault")
    (line,) = lines(capsys)
    assert line["event"] == "api.fault"
    assert "broken" in json.dumps(line["exception"])


def test_where_native_code_crashed_is_on_stderr_without_values() -> None:
    program = """
import os, signal
from shared.process.logs import configure

def crash(prompt):
    os.kill(os.getpid(), signal.SIGSEGV)

configure()
crash("a secret")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr and "in crash" in ended.stderr and "secret" not in ended.stderr
