"""The file of several policies: what is whose, and what is refused by name."""

from pathlib import Path

import pytest

from shared.errors import SetupError
from trainer.runs.team import MOST, agents_of

TWO = """
steps = 7
learning_rate = 0.5

[agents.black]
seed = 1
task_options = {partner = "white"}

[agents.white]
seed = 2
learning_rate = 0.25
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "team.toml"
    file.write_text(text)
    return file


def test_a_tables_settings_win_over_flags_and_flags_over_what_all_have_in_common(tmp_path: Path) -> None:
    flags = ["--seed", "9", "--steps", "3", "--task", "some.module:Game", "--run-dir", str(tmp_path)]
    black, white = agents_of(flags, written(tmp_path, TWO))
    assert (black.adapter, black.seed, black.steps, black.learning_rate) == ("black", 1, 3, 0.5)
    assert (white.adapter, white.seed, white.steps, white.learning_rate) == ("white", 2, 3, 0.25)
    assert black.task_options == {"partner": "white"} and black.task == white.task == "some.module:Game"
    assert [black.folder, white.folder] == [tmp_path / "black", tmp_path / "white"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("steps = ", "Invalid value"),
        ("steps = 3", "a table"),
        ("agents = 3", "a table"),
        ("[agents]\nblack = 3", "a table"),
        ("\n".join(f"[agents.a{number}]" for number in range(MOST + 1)), "the most are"),
        ("adapter = 'x'\n[agents.a]", "adapter is each"),
        ("run = 'x'\n[agents.a]", "run is each"),
        ("[agents.a]\nmodel = 'x'", "model in .agents.a."),
        ("[agents.a]\nredis = 'x'", "redis in .agents.a."),
        ("[agents.a]\nstepz = 3", "agents.a.*stepz"),
        ("[agents.a]\nsteps = 0", "agents.a.*steps"),
        ("[agents.'a/b']", "agents.a/b.*--adapter"),
        ("[agents.a]\nmode = 'sft'", "agents.a.*own"),
        ("[agents.a]\ndataset = 'x'", "agents.a.*--dataset"),
        ("[agents.a]\n[agents.b]\nrun = 'a'", "two policies have the run 'a'"),
    ],
)
def test_what_is_wrong_is_said_with_its_table(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        agents_of([], written(tmp_path, text))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"none\.toml"):
        agents_of([], tmp_path / "none.toml")
