"""Where settings come from, and how wrong ones are named."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import main as cli
from shared.errors import SetupError
from shared.process.api_settings import ApiSettings
from shared.process.other_rings import named_urls
from shared.process.process_settings import ProcessSettings, RunnerSettings
from shared.process.serve_settings import ServeSettings
from shared.process.settings import load, version
from shared.process.worker_settings import WorkerSettings
from trainer.settings import TrainSettings


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("window: [", "is not YAML"), ("- window", "`name: value`"), ("windows: 3", "windows")],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SetupError, match=complaint):
        load(RunnerSettings, ["--config", str(path)])


def test_flags_go_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("window: 1\nmax_jobs: 1\nreward_processes: 1\n")
    monkeypatch.setenv("PARALLM_WINDOW", "2")
    monkeypatch.setenv("PARALLM_MAX_JOBS", "2")
    settings = load(RunnerSettings, ["--config", str(path), "--window", "3"])
    assert (settings.window, settings.max_jobs, settings.reward_processes) == (3, 2, 1)


def test_variables_without_our_prefix_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "MODEL_PATH", "REDIS", "REDIS_URL", "MAX_BATCH"):
        monkeypatch.setenv(name, "7")
    settings = load(WorkerSettings, [])
    assert (settings.model, settings.redis, settings.max_batch_size) == ("models/tiny", "", 32)


def test_aliases_count_in_the_environment_with_our_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLM_REDIS_URL", "redis://one")
    monkeypatch.setenv("PARALLM_MODEL", "elsewhere")
    settings = load(WorkerSettings, [])
    assert (settings.redis, settings.model) == ("redis://one", "elsewhere")


@pytest.mark.parametrize("kind", [ServeSettings, WorkerSettings, ApiSettings])
def test_a_command_tells_its_version(kind: type[ProcessSettings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(kind, ["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{version()}\n")
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"{version()}\n"


@pytest.mark.parametrize("flags", [["--kv-bits", "5"], ["--kv-bits", "16"], ["--kv-group-size", "16"]])
def test_kv_of_other_bits_or_groups_than_mlx_reads_is_refused(flags: list[str]) -> None:
    with pytest.raises(SetupError, match=flags[0][2:].replace("-", "_")):
        load(WorkerSettings, flags)


def test_a_prefill_chunk_is_measured_or_enough_for_a_forward() -> None:
    assert load(WorkerSettings, []).prefill_chunk == 0
    assert load(WorkerSettings, ["--prefill-chunk", "16"]).prefill_chunk == 16
    with pytest.raises(SetupError, match="16 at least"):
        load(WorkerSettings, ["--prefill-chunk", "15"])


def test_other_rings_have_names_of_their_own_and_their_passwords_are_not_shown() -> None:
    flags = ["--ring", "east=redis://u:secret@e:1", "--ring", "west=redis+sentinel://a,b/ring?password=secret"]
    settings = load(ApiSettings, flags)
    assert dict(named_urls(settings.ring))["west"] == "redis+sentinel://a,b/ring?password=secret"
    assert "secret" not in settings.resolved() and "east=redis://***@e:1" in settings.resolved()
    assert load(ServeSettings, flags).of(ApiSettings).ring == settings.ring
    for wrong in ("east", "=redis://e", "east=e:1", "East=redis://e", "home=redis://secret@e", "e/t=redis://secret@e"):
        with pytest.raises(SetupError, match="ring") as refused:
            load(ApiSettings, ["--ring", wrong])
        assert "secret" not in str(refused.value)
    with pytest.raises(SetupError, match="twice"):
        load(ApiSettings, ["--ring", "east=redis://e", "--ring", "east=redis://f"])


def test_it_is_known_which_settings_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lora_rank: 4\n")
    monkeypatch.setenv("PARALLM_LOSS", "dapo")
    settings = load(TrainSettings, ["--config", str(file), "--seed", "0"])
    assert settings.model_fields_set >= {"lora_rank", "loss", "seed"}
    assert not settings.model_fields_set & {"ratio", "minibatches"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--kv-bits", "3"], "kv_bits: 3 must be 8 or 4"),
        (["--rate-limit", "many"], "rate_limit: 'many' is no rate such as 600/minute"),
        (["--redis", "redis://one", "--connect-to", "two:1", "--dry-run"], "both name a ring"),
    ],
)
def test_a_wrong_value_is_refused_with_what_it_can_be(flags: list[str], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        load(ServeSettings, flags)


def test_rates_that_can_be_read_are_taken() -> None:
    for rate in ("", "600/minute", "10 per second"):
        assert load(ServeSettings, ["--rate-limit", rate]).rate_limit == rate
