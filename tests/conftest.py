"""Fixtures for all layers. Tests that need Redis get a server of their own test process, on a free port.

PARALLM_TEST_REDIS names another server binary, such as a Redis 7.0.
"""

import functools
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

from api.serve.embedded_redis import EmbeddedRedis
from shared.process.garbage import leave_out_what_is_loaded
from shared.process.open_files import raise_file_limit
from tests.redis.clusters import Cluster

# What was measured on this machine would change what tests compute.
os.environ["PARALLM_TUNED"] = "0"

# The tests start hundreds of processes, and each would compile all of our code anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# An M5 computes products of fp32 in TF32 by default, in which paths that should agree do not.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# What each of these processes does first (tests/startup/sitecustomize.py).
ROOT = Path(__file__).parents[1]
os.environ["PARALLM_TEST_SCANS"] = str(ROOT / ".pytest_cache" / "transformers")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests/startup"), os.environ.get("PYTHONPATH")]))
importlib.import_module("tests.startup.sitecustomize")  # and this one, too

# Each client of httpx reads a few hundred certificates anew, also one for http: all of a process of tests share theirs.
for _http in ("httpx", "httpx2"):  # ours, and that of OpenAI's client
    _transports: Any = importlib.import_module(f"{_http}._transports.default")
    _transports.create_ssl_context = functools.cache(_transports.create_ssl_context)

# A module's logger keeps to the set-up of its first line, if told to cache: one that first logs while a test runs a
# command in this process would never again be heard by `capture_logs`.
_configure_logs = structlog.configure
structlog.configure = lambda **options: _configure_logs(**{**options, "cache_logger_on_first_use": False})

# Durations are no assertions: a machine that others use stops a test for seconds.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Files that take about 20 s and more when the machine is busy with others of them.
LONGEST = frozenset(
    {
        "test_bad_input",
        "test_batches",
        "test_benches",
        "test_chaos",
        "test_deaths",
        "test_demo",
        "test_event_loop",
        "test_hosted",
        "test_how_to",
        "test_largest_bodies",
        "test_memory",
    }
    | {"test_jobs_runner", "test_kv_kinds", "test_leaving_workers", "test_pipeline", "test_prometheus", "test_ranks"}
    | {"test_trainer_kills", "test_trainer_loop", "test_training", "test_training_api", "test_training_over_http"}
    | {"test_commands", "test_dashboard_browser", "test_examples", "test_joining", "test_pause", "test_readme"}
    | {"test_redis_roles", "test_room", "test_sentinel", "test_several_rings", "test_shared_steps", "test_tinker"}
    | {"test_speculation", "test_structured_outputs", "test_tools", "test_traces", "test_trainer_head_learner"}
    | {"test_trainer_values", "test_tuning_runs", "test_vision", "test_vision_group", "test_vision_learning"}
    | {"test_unread_checks", "test_warm_up", "test_webhook_delivery"}
)


SHARED = ("tests/docs/served/", *(f"tests/e2e/{folder}/" for folder in ("calling", "keyed", "served", "trained")))


def pytest_configure(config: pytest.Config) -> None:
    """A shell on macOS allows 256 open files, which the tests of many clients exceed."""
    gc.disable()  # until all is imported: each collection would look at what stays in any case
    if sys.platform == "darwin":
        raise_file_limit()
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if worker and all(Path(argument).is_dir() for argument in config.args):
        # In a fresh clone each process would compile all tests. So each begins with another folder, and finds the
        # others compiled by then.
        first = int(worker["workerid"].removeprefix("gw")) % len(config.args)
        config.args[:] = config.args[first:] + config.args[:first]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """One process runs a file, or a folder whose files share a ring."""

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((folder for folder in SHARED if file.startswith(folder)), file)

    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix the layers when several processes share the files (`make test`, `make quick`), which take them in this order.

    Else all that starts real processes would run at the same time, and a long file might begin when all else is done:
    the longest of each layer come first, and what starts no process comes last, to fill up.
    """
    if not hasattr(config, "workerinput"):
        return
    layers: dict[str, dict[Path, None]] = {}
    for item in items:
        layers.setdefault(item.path.parent.name, {})[item.path] = None
    place = {}
    for paths in layers.values():
        longest_first = sorted(paths, key=lambda path: (path.stem not in LONGEST, path))
        place |= {path: (i + 0.5) / len(paths) for i, path in enumerate(longest_first)}
    items.sort(key=lambda item: (item.path.parent.name == "unit", place[item.path], str(item.path)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line for each reason: pytest's own summary has one for each line of each file."""
    for line in why_skipped(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


def why_skipped(reports: Sequence[pytest.TestReport]) -> list[str]:
    """The most frequent reason first, and the files whose tests it keeps from running."""
    files: dict[str, list[str]] = {}
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        files.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid.partition("::")[0])
    often = sorted(files.items(), key=lambda item: -len(item[1]))
    return [f"SKIPPED {len(found):3} {reason} ({', '.join(sorted(set(found)))})" for reason, found in often]


def pytest_collection_finish() -> None:
    """What has been imported stays: a million objects that no collection of garbage has to look at from here on."""
    leave_out_what_is_loaded()
    gc.enable()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A test that starts a command in this process sets up logs for those after it: undo that."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    other = os.environ.get("PARALLM_TEST_REDIS")
    binary = Path(other) if other else None
    with EmbeddedRedis(tmp_path_factory.mktemp("redis-server"), binary=binary) as server:
        yield server


@pytest.fixture(scope="session")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three shards without replicas."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def redis_url(request: pytest.FixtureRequest, redis_server: EmbeddedRedis) -> Iterator[str]:
    """A Redis without keys; with PARALLM_TEST_CLUSTER=1, or given "cluster" as its parameter, a cluster."""
    import redis

    if os.environ.get("PARALLM_TEST_CLUSTER") or getattr(request, "param", "") == "cluster":
        cluster: Cluster = request.getfixturevalue("whole_cluster")
        cluster.wipe()
        yield cluster.url
        return
    client = redis.Redis.from_url(redis_server.url)
    try:
        client.flushall()
        client.script_flush()
        yield redis_server.url
    finally:
        client.close()
