"""`--dry-run` refuses what a start refuses, and prints all settings of all that would start."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from api.serve.main import main as serve
from worker.__main__ import main as work


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARALLM_CONFIG", raising=False)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--kv-bits 4 --max-kv-size 128", "--max-kv-size 128 with --kv-bits 4"),
        ("--kv-bits 4 --kv-group-size 48", "--kv-group-size 48"),
        ("--distributed-mode ring", "--distributed-mode ring needs ranks"),
        ("--model ./none", "no model folder './none'"),
        ("--spec-decode draft --draft-model-path ./docs", "cannot load the model at docs"),
        ("--guest trainer.hosted:Nobody", "--guest trainer.hosted:Nobody"),
        ("--num-local-ranks 2 --guest json:JSONDecoder", "it knows of one alone"),
    ],
)
def test_a_worker_refuses_before_it_reads_weights(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work([*flags.split(), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert complaint in said.err and not said.out


def test_a_bound_beyond_the_context_is_none_and_goes_with_bits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        work(["--kv-bits", "4", "--kv-group-size", "32", "--max-kv-size", "4096", "--dry-run"])
    assert not ended.value.code


def written(tmp_path: Path, **checkpointing: Any) -> list[str]:
    file = tmp_path / "ring.yaml"
    file.write_text(
        yaml.safe_dump({"server": {"mode": "inference_and_training", "port": 7}, "checkpointing": checkpointing})
    )
    return ["--config", str(file), "--dry-run"]


def test_a_server_refuses_what_its_trainer_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(written(tmp_path, intervall=3)) == 2
    said = capsys.readouterr()
    assert "checkpointing.intervall: there is no such setting" in said.err and not said.out


def test_a_server_prints_all_of_its_trainers_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    atropos = ["--atropos-url", "http://me:secret@elsewhere:1"]
    with pytest.raises(SystemExit) as ended:
        serve([*written(tmp_path, interval=3), "--data-dir", str(tmp_path / "data"), "--lora-rank", "5", *atropos])
    assert not ended.value.code
    printed = capsys.readouterr().out
    server, trainer = yaml.safe_load_all(printed)
    assert (server["port"], server["adapter_cache_dir"]) == (7, str(tmp_path / "data" / "adapters"))
    assert (trainer["checkpoint_every"], trainer["lora_rank"]) == (3, 5)
    assert trainer["run_dir"] == str(tmp_path / "data" / "train") and "learning_rate" in trainer
    assert server["atropos_url"] == trainer["atropos_url"] == "http://***@elsewhere:1" and "secret" not in printed


def test_a_server_without_workers_reads_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve(["--workers", "0", "--model", "./none", "--adapter-cache-dir", "mine", "--dry-run"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert not ended.value.code and (printed["workers"], printed["adapter_cache_dir"]) == (0, "mine")


def test_a_server_refuses_what_its_nights_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night = tmp_path / "night.yaml"
    flags = ["--workers", "0", "--learn-when", "idle", "--train-config", str(night), "--dry-run"]
    night.write_text("candidate: true\nsteps: 3\nwarmup_steps: 5\nschedule: linear\n")
    assert serve(flags) == 2 and "bad settings" in capsys.readouterr().err
    night.write_text("steps: 30\nrehearsal: prompts.jsonl\ndrafts: 4\n")
    with pytest.raises(SystemExit) as ended:
        serve(flags)
    assert not ended.value.code
