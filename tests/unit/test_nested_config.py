"""One file in sections for server and trainer: each takes its own, and what nobody has is named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from api.serve.main import check_modes, share_file, worker_spec
from shared.errors import SetupError
from shared.process.process_settings import RunnerSettings
from shared.process.serve_settings import ServeSettings
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from trainer.hosted import hosted_settings
from trainer.settings import TrainSettings

FILE: dict[str, Any] = {
    "server": {"mode": "inference_and_training", "max_batch_size": 128},
    "model": {
        "base_model_path": "models/tiny",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_target_modules": ["q_proj", "v_proj"],
    },
    "rl_training": {
        "enabled": True,
        "trajectory_buffer_size": 1000,
        "update_frequency": 100,
        "scoring_batch_size": 32,
        "atropos_url": "http://localhost:8001",
        "environment": "gsm8k",
    },
    "checkpointing": {"interval": 500, "keep_n_checkpoints": 10, "checkpoint_dir": "./checkpoints"},
}


def changed(section: str, **changes: Any) -> dict[str, Any]:
    return FILE | {section: FILE[section] | changes}


def written(tmp_path: Path, given: dict[str, Any]) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


def test_the_server_takes_its_part_and_hands_the_file_to_its_trainer(tmp_path: Path) -> None:
    settings = load(ServeSettings, ["--config", written(tmp_path, FILE)])
    assert (settings.mode, settings.max_batch_size, settings.model) == ("inference_and_training", 128, "models/tiny")
    assert (settings.trajectory_buffer_size, settings.lora_rank) == (1000, 16)
    assert settings.atropos_url == "http://localhost:8001" and settings.trains
    share_file(settings)
    check_modes(settings)
    assert settings.train_config == tmp_path / "config.yaml"
    assert "PARALLM_RUN_DIR" not in worker_spec(settings, 0).environment, "the file says where"


def test_the_trainer_takes_its_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(TrainSettings, ["--config", written(tmp_path, FILE)])
    assert (settings.model, settings.lora_rank, settings.lora_scale) == ("models/tiny", 16, 2.0)
    assert settings.lora_targets == ("q_proj", "v_proj") and settings.mode == "rl"
    assert (settings.live_trajectories, settings.atropos_url) == (100, "http://localhost:8001")
    assert (settings.checkpoint_every, settings.keep_checkpoints, settings.run_dir) == (500, 10, Path("checkpoints"))
    assert settings.task == "arithmetic"
    said = capsys.readouterr().err
    assert "rl_training.scoring_batch_size has no effect" in said and "rl_training.environment has no effect" in said


def test_without_atropos_the_environment_is_the_task(tmp_path: Path) -> None:
    given = changed("rl_training", dataset="train.jsonl")
    del given["rl_training"]["atropos_url"]
    settings = load(TrainSettings, ["--config", written(tmp_path, given)])
    assert (settings.task, settings.dataset) == ("gsm8k", Path("train.jsonl"))


def test_a_hosted_trainer_reads_the_servers_file(tmp_path: Path) -> None:
    worker = WorkerSettings(model="another", train_config=Path(written(tmp_path, FILE)))
    settings = hosted_settings(worker)
    assert (settings.model, settings.checkpoint_every, settings.lora_scale) == ("another", 500, 2.0)


def test_an_empty_section_is_a_section(tmp_path: Path) -> None:
    assert load(ServeSettings, ["--config", written(tmp_path, {"rl_training": None, "port": 7})]).port == 7


def test_flags_and_flat_lines_go_with_sections(tmp_path: Path) -> None:
    path = written(tmp_path, FILE | {"port": 0})
    assert load(TrainSettings, ["--config", path]).checkpoint_every == 500
    settings = load(ServeSettings, ["--config", path, "--max-batch-size", "4"])
    assert (settings.port, settings.max_batch_size) == (0, 4)
    assert load(RunnerSettings, ["--config", written(tmp_path, FILE)]).trajectory_buffer_size == 1000


@pytest.mark.parametrize("kind", [ServeSettings, TrainSettings])
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (changed("server", max_batch_sise=1), r"server.max_batch_sise: .*did you mean max_batch_size\?"),
        (FILE | {"sever": {"mode": "inference"}}, "sever: there is no such setting"),
        (changed("model", lora_alpha="a lot"), "model.lora_alpha: 'a lot' with lora_rank 16"),
        ({"checkpointing": 500}, "checkpointing: a section has lines"),
        (FILE | {7: 8}, "7: there is no such setting"),
        (FILE | {"checkpointing": 500}, "checkpointing: a section has lines"),
        (changed("rl_training", enabled=False), "enabled: False contradicts server.mode: inference_and_training"),
        (FILE | {"model": FILE["model"] | {"model": "x"}}, "model.model: model is given twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, kind: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        load(kind, ["--config", written(tmp_path, given)])


@pytest.mark.parametrize("section", ["model", "rl_training", "checkpointing"])
def test_the_trainer_names_what_no_process_has(tmp_path: Path, section: str) -> None:
    with pytest.raises(SetupError, match=rf"{section}.learning_rat: .*did you mean learning_rate\?"):
        load(TrainSettings, ["--config", written(tmp_path, changed(section, learning_rat=1))])
