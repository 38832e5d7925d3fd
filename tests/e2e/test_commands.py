"""`mlx_parallm adapters` and `bench` on a real ring that wants a key, and what any command says when it cannot."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli import app
from tests.e2e.rings import Ring, ring
from tests.e2e.test_adapters import CONFIG, weights
from tests.unit.adapter_files import write

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--api-key", KEY) as started:
        yield started


def call(server: Ring, *arguments: str, key: str = KEY) -> Result:
    environment = {"PARALLM_URL": server.url, "PARALLM_API_KEY": key, "COLUMNS": "200"}
    return CliRunner().invoke(app, list(arguments), env=environment)


def test_an_adapter_is_uploaded_shown_rolled_back_and_deleted(locked: Ring, tmp_path: Path) -> None:
    write(tmp_path, CONFIG, weights(1))
    for version in (1, 2):
        done = call(locked, "adapters", "upload", str(tmp_path), "--name", "mine", "--json")
        assert json.loads(done.stdout)["policy_version"] == version
    assert call(locked, "adapters", "upload", str(tmp_path), "--name", "mine", "--candidate").exit_code == 0
    assert call(locked, "adapters", "rollback", "mine", "1").stdout == "mine@1 is the latest version\n"
    shown = call(locked, "adapters", "show", "mine")
    # Words, not lines: a table is as wide as the terminal was when the module was imported.
    words = shown.stdout.split()
    assert [word for word in words if word.startswith("mine@")] == ["mine@3", "mine@2", "mine@1"]
    assert words[words.index("mine@1") + 1] == "latest"
    refused = call(locked, "adapters", "delete", "mine@1")
    assert (refused.exit_code, "is the latest version" in refused.stderr) == (1, True)
    assert call(locked, "adapters", "delete", "mine@2").stdout == "mine@2 deleted\n"
    (listed,) = json.loads(call(locked, "adapters", "list", "--json").stdout)
    assert (listed["latest"], listed["versions"]) == (1, [1, 3])
    assert call(locked, "adapters", "delete", "mine").exit_code == 2  # all of them only when that is said
    assert call(locked, "adapters", "delete", "mine", "--all").exit_code == 0
    assert json.loads(call(locked, "adapters", "list", "--json").stdout) == []


def test_a_bench_counts_every_token_that_was_asked_for(locked: Ring) -> None:
    sizes = ("--streams", "3", "--requests", "5", "--prompt-tokens", "20", "--max-tokens", "8")
    done = call(locked, "bench", *sizes, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["failed"], report["prompt_tokens"], report["completion_tokens"]) == (0, 100, 40)
    for name in ("ttft_ms", "inter_token_ms", "per_token_ms", "request_ms"):
        assert 0 <= report[name]["p50"] <= report[name]["p99"]


def test_a_bench_whose_requests_fail_says_why_and_fails(locked: Ring) -> None:
    done = call(locked, "bench", "--requests", "2", "--max-tokens", "1000000", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["failed"], report["completion_tokens"]) == (1, 2, 0)
    assert "context" in next(iter(report["errors"]))


COMMANDS = [
    ("jobs",), ("job", "nobody"), ("results", "nobody"), ("cancel", "nobody"), ("models",), ("chat", "hi"),
    ("adapters", "list"), ("adapters", "show", "nobody"), ("adapters", "rollback", "nobody", "1"),
    ("adapters", "delete", "nobody@1"), ("deadletters", "list"), ("deadletters", "show", "nobody"), ("bench",),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_wrong_key_and_an_unknown_id_are_one_line_and_exit_code_1(locked: Ring, command: tuple[str, ...]) -> None:
    tries = [call(locked, *command, key="wrong"), call(locked, *command, key="é")]
    if "nobody" in " ".join(command):
        tries.append(call(locked, *command))
    for done in tries:
        assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True), done.exception
        assert done.stderr.startswith("error: ") and "Traceback" not in done.output
