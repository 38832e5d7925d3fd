"""Where settings come from, and how wrong ones are named."""

from pathlib import Path

import pytest

from shared.errors import SetupError
from shared.settings import RunnerSettings, load


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
