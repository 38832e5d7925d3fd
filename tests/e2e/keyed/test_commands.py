"""`mlx_parallm adapters`, `batch`, `bench` on a real ring that wants a key; what any command says when it cannot."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import typer
from click.testing import Result
from safetensors.numpy import load_file
from typer.testing import CliRunner

from api.cli import adapters
from api.cli.main import app
from tests.e2e.keyed import KEY
from tests.e2e.rings import ROOT, Ring
from tests.e2e.test_adapters import CONFIG, weights
from tests.unit.adapter_files import write
from tests.unit.networks import MLP, weights_of
from tests.waiting import HANG_S

FOLDER = str(ROOT / "models" / "tiny")
PROGRAM = str(Path(sys.executable).with_name("mlx_parallm"))
SAY = [{"role": "user", "content": "say hello"}]


def call(server: Ring, *arguments: str, key: str = KEY) -> Result:
    environment = {"PARALLM_URL": server.url, "PARALLM_API_KEY": key, "COLUMNS": "200"}
    return CliRunner().invoke(app, list(arguments), env=environment)


def listed_as(server: Ring, name: str) -> list[dict[str, Any]]:
    """What the list says of an adapter."""
    found = json.loads(call(server, "adapters", "list", "--json").stdout)
    return [each for each in found if each["name"] == name]


def test_an_adapter_is_uploaded_shown_rolled_back_and_deleted(keyed: Ring, tmp_path: Path) -> None:
    write(tmp_path, CONFIG, weights(1))
    for version in (1, 2):
        done = call(keyed, "adapters", "upload", str(tmp_path), "--name", "mine", "--json")
        assert json.loads(done.stdout)["policy_version"] == version
    assert call(keyed, "adapters", "upload", str(tmp_path), "--name", "mine", "--candidate").exit_code == 0
    assert call(keyed, "adapters", "rollback", "mine", "1").stdout == "mine@1 is the latest version\n"
    shown = call(keyed, "adapters", "show", "mine")
    # Words, not lines: a table is as wide as the terminal was when the module was imported.
    words = shown.stdout.split()
    assert [word for word in words if word.startswith("mine@")] == ["mine@3", "mine@2", "mine@1"]
    assert words[words.index("mine@1") + 1] == "latest"
    refused = call(keyed, "adapters", "delete", "mine@1")
    assert (refused.exit_code, "is the latest version" in refused.stderr) == (1, True)
    assert call(keyed, "adapters", "delete", "mine@2").stdout == "mine@2 deleted\n"
    [listed] = listed_as(keyed, "mine")
    assert (listed["latest"], listed["versions"]) == (1, [1, 3])
    assert call(keyed, "adapters", "delete", "mine").exit_code == 2  # all of them only when that is said
    assert call(keyed, "adapters", "delete", "mine", "--all").exit_code == 0
    assert listed_as(keyed, "mine") == []


def test_a_version_is_downloaded_and_merged_into_its_base(
    keyed: Ring, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "lora", CONFIG, weights(1))
    assert call(keyed, "adapters", "upload", str(tmp_path / "lora"), "--name", "merges").exit_code == 0
    for form in ("mlx-lm", "peft"):
        got = call(keyed, "adapters", "download", "merges@1", str(tmp_path / form), "--format", form)
        assert got.exit_code == 0, got.stderr
    refused = call(keyed, "adapters", "download", "merges@1", str(tmp_path / "peft"))
    assert (refused.exit_code, "name a new folder" in refused.stderr) == (2, True)
    assert (tmp_path / "mlx-lm" / "adapters.safetensors").read_bytes() == (
        tmp_path / "lora" / "adapters.safetensors"
    ).read_bytes()
    merged = call(keyed, "adapters", "merge", "merges", str(tmp_path / "merged"), "--model", FOLDER)
    assert merged.exit_code == 0, capfd.readouterr().err
    assert f"merges@1 merged into {FOLDER}" in capfd.readouterr().out
    other = call(keyed, "adapters", "merge", "merges@1", str(tmp_path / "x"), "--model", str(tmp_path / "merged"))
    assert (other.exit_code, "another model, or other weights" in capfd.readouterr().err) == (1, True)
    wrong = call(keyed, "adapters", "merge", "merges@0", str(tmp_path / "x"), "--model", FOLDER)
    assert (wrong.exit_code, (tmp_path / "x").exists()) == (2, False)
    base, sums = (load_file(folder / "model.safetensors") for folder in (Path(FOLDER), tmp_path / "merged"))
    tensors = weights(1)
    for name, weight in base.items():
        lora = [tensors.get(name.replace("weight", part)) for part in ("lora_a", "lora_b")]
        delta = 0 if lora[0] is None or lora[1] is None else 2.0 * (lora[0] @ lora[1]).T
        assert np.allclose(sums[name], (weight.astype(np.float32) + delta).astype(weight.dtype), atol=2e-3)


def test_a_download_that_fails_leaves_no_folder_and_a_network_comes_with_its_description(
    keyed: Ring, tmp_path: Path
) -> None:
    write(tmp_path / "network", {"network": MLP}, weights_of(MLP))
    assert call(keyed, "adapters", "upload", str(tmp_path / "network"), "--name", "pole").exit_code == 0
    refused = call(keyed, "adapters", "download", "pole", str(tmp_path / "out"), "--format", "peft")
    assert (refused.exit_code, "no place in PEFT" in refused.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["network"]
    unmerged = call(keyed, "adapters", "merge", "pole", str(tmp_path / "out"), "--model", FOLDER)
    assert (unmerged.exit_code, "nothing to merge" in unmerged.stderr) == (1, True)
    assert call(keyed, "adapters", "download", "pole", str(tmp_path / "out")).exit_code == 0
    assert call(keyed, "adapters", "upload", str(tmp_path / "out"), "--name", "pole").exit_code == 0


def test_a_merge_is_ended_by_a_signal_that_comes_while_its_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def signalled(_: list[str]) -> "subprocess.Popen[bytes]":
        started.append(popen(["sleep", "20"]))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # else the fault would end the tests
    monkeypatch.setattr(subprocess, "Popen", signalled)
    try:
        with pytest.raises(typer.Exit):
            adapters._merge([])
        assert started[0].wait(HANG_S) == -signal.SIGTERM
    finally:
        started[0].kill()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("who", ["the command", "the process that merges"])
def test_a_merge_ends_with_its_command_and_says_what_has_ended_it(who: str, tmp_path: Path) -> None:
    write(tmp_path / "lora", CONFIG, weights(1))
    merging = ["adapters", "merge", f"{tmp_path}/lora", f"{tmp_path}/merged", "--model", FOLDER]
    with subprocess.Popen([PROGRAM, *merging], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            children = psutil.Process(command.pid).children()
            if children and children[0].memory_info().rss > 2**25:  # it has begun to import
                break
            time.sleep(0.01)
        if who == "the command":
            command.terminate()
        else:
            children[0].kill()
        said = command.communicate(timeout=HANG_S)[1]
    assert command.returncode in ((1, 130) if who == "the command" else (1,)), said
    assert who == "the command" or "ended by signal 9" in said
    assert not children[0].is_running()
    assert not (tmp_path / "merged").exists()


def test_a_bench_counts_every_token_that_was_asked_for(keyed: Ring) -> None:
    # So many tokens do not come in one event, however slow the api is, so that there are times between two.
    sizes = ("--streams", "3", "--requests", "5", "--prompt-tokens", "20", "--max-tokens", "100")
    done = call(keyed, "bench", *sizes, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["failed"], report["prompt_tokens"], report["completion_tokens"]) == (0, 100, 500)
    for name in ("ttft_ms", "inter_token_ms", "per_token_ms", "request_ms"):
        assert 0 <= report[name]["p50"] <= report[name]["p99"]


def test_a_bench_whose_requests_fail_says_why_and_fails(keyed: Ring) -> None:
    done = call(keyed, "bench", "--requests", "2", "--max-tokens", "1000000", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["failed"], report["completion_tokens"]) == (1, 2, 0)
    assert "context" in next(iter(report["errors"]))


def requests(folder: Path, *bodies: dict[str, object]) -> str:
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": f"line {at}", "method": "POST", "url": url, "body": {"messages": SAY, "max_tokens": 4, **body}}
        for at, body in enumerate(bodies)
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(folder / "requests.jsonl")


def lines_of(text: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_a_batch_is_submitted_waited_for_and_its_answers_written(keyed: Ring, tmp_path: Path) -> None:
    answers, errors = tmp_path / "answers.jsonl", tmp_path / "errors.jsonl"
    options = ("--metadata", "who=me", "--out", str(answers), "--errors", str(errors), "--json")
    done = call(keyed, "batch", requests(tmp_path, {}, {}), *options)
    assert done.exit_code == 0, done.output
    batch = json.loads(done.stdout)
    assert (batch["status"], batch["metadata"]) == ("completed", {"who": "me"})
    assert (lines_of(answers.read_text()), errors.read_text()) == (["line 0", "line 1"], "")
    shown = call(keyed, "batches", "show", batch["id"])
    assert (shown.exit_code, f"{batch['id']} completed: 2 of 2 lines" in shown.stdout) == (0, True)
    assert lines_of(call(keyed, "batches", "results", batch["id"]).stdout) == ["line 0", "line 1"]
    assert batch["id"] in call(keyed, "batches", "list").stdout
    assert call(keyed, "files", "get", batch["output_file_id"]).stdout == answers.read_text()
    stored = json.loads(call(keyed, "files", "list", "--purpose", "batch", "--json").stdout)
    assert batch["input_file_id"] in [each["id"] for each in stored]
    assert call(keyed, "files", "delete", batch["input_file_id"]).stdout == f"{batch['input_file_id']} deleted\n"
    assert call(keyed, "files", "get", batch["input_file_id"]).exit_code == 1


def test_a_batch_with_a_refused_line_exits_with_3_and_says_which(keyed: Ring, tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    done = call(keyed, "batch", requests(tmp_path, {}, {"colour": "red"}), "--errors", str(errors))
    assert (done.exit_code, "1 of 2 lines, 1 failed" in done.stdout) == (3, True), done.output
    assert lines_of(errors.read_text()) == ["line 1"]
    (tmp_path / "bad.jsonl").write_text('{"url": "/v1/completions"}\n{"broken\n')
    failed = call(keyed, "batch", str(tmp_path / "bad.jsonl"), "--wait")
    assert (failed.exit_code, "line 2: this line is not valid JSON" in failed.stdout) == (3, True), failed.output
    batch_id = failed.stdout.split()[0]
    assert call(keyed, "batches", "results", batch_id).exit_code == 1
    assert call(keyed, "batches", "cancel", batch_id).exit_code == 1


def test_a_batch_is_cancelled_and_keeps_what_is_answered(keyed: Ring, tmp_path: Path) -> None:
    file = requests(tmp_path, *({"max_tokens": 60, "ignore_eos": True} for _ in range(600)))
    batch_id = call(keyed, "batch", file).stdout.split()[0]
    early = call(keyed, "batches", "results", batch_id)
    assert (early.exit_code, "batches show --wait" in early.stderr) == (1, True)
    ended = json.loads(call(keyed, "batches", "cancel", batch_id, "--json").stdout)
    assert ended["status"] == "cancelled"
    answers, errors = tmp_path / "answers.jsonl", tmp_path / "errors.jsonl"
    written = call(keyed, "batches", "results", batch_id, "--out", str(answers), "--errors", str(errors))
    assert written.exit_code == 0
    both = lines_of(answers.read_text()) + lines_of(errors.read_text())
    assert sorted(both) == sorted(f"line {at}" for at in range(600))


def test_a_command_line_for_a_batch_that_makes_no_sense_ends_with_2_and_makes_nothing(
    keyed: Ring, tmp_path: Path
) -> None:
    (tmp_path / "no-url.jsonl").write_text("{}\n")
    wrong = [
        ("batch", str(tmp_path / "absent.jsonl")),
        ("batch", str(tmp_path / "no-url.jsonl")),
        ("batch", requests(tmp_path, {}), "--metadata", "who"),
        ("batch", requests(tmp_path, {}), "--out", str(tmp_path / "absent" / "x.jsonl")),
    ]
    before = [call(keyed, kind, "list", "--json").stdout for kind in ("batches", "files")]
    for arguments in wrong:
        done = call(keyed, *arguments)
        assert (done.exit_code, done.stderr.startswith("error: ")) == (2, True), done.output
    refused = call(keyed, "batch", requests(tmp_path, {}), "--endpoint", "/v1/images")
    assert (refused.exit_code, "endpoint" in refused.stderr) == (1, True)
    assert [call(keyed, kind, "list", "--json").stdout for kind in ("batches", "files")] == before


COMMANDS = [
    ("jobs",), ("job", "nobody"), ("results", "nobody"), ("cancel", "nobody"), ("models",), ("chat", "hi"),
    ("adapters", "list"), ("adapters", "show", "nobody"), ("adapters", "rollback", "nobody", "1"),
    ("adapters", "delete", "nobody@1"), ("deadletters", "list"), ("deadletters", "show", "nobody"), ("bench",),
    ("batches", "list"), ("batches", "show", "nobody"), ("batches", "cancel", "nobody"),
    ("batches", "results", "nobody"),
    ("files", "list"), ("files", "get", "nobody"), ("files", "delete", "nobody"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_wrong_key_and_an_unknown_id_are_one_line_and_exit_code_1(keyed: Ring, command: tuple[str, ...]) -> None:
    tries = [call(keyed, *command, key="wrong"), call(keyed, *command, key="é")]
    if "nobody" in " ".join(command):
        tries.append(call(keyed, *command))
    for done in tries:
        assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True), done.exception
        assert done.stderr.startswith("error: ") and "Traceback" not in done.output
