from pathlib import Path

import pytest
import yaml

from shared.errors import SetupError
from shared.settings import load
from trainer.settings import TrainSettings
from trainer.tasks import held_out_tasks, training_tasks

RECIPES = sorted(Path("trainer/recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_names_its_task(recipe: Path) -> None:
    settings = load(TrainSettings, ["--config", str(recipe)])
    assert settings.optimize_options().schedule.peak == yaml.safe_load(recipe.read_text())["learning_rate"]
    assert training_tasks(settings, None).name == "arithmetic"
    assert held_out_tasks(settings, None) is not None


def test_flags_beat_the_environment_which_beats_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nnum_generations: 4\nmax_lag: 0\nlora_target_modules: [q_proj]\n")
    monkeypatch.setenv("PARALLM_STEPS", "8")
    monkeypatch.setenv("PARALLM_PROMPTS_PER_STEP", "5")
    settings = load(TrainSettings, ["--config", str(path), "--prompts-per-step", "6"])
    assert (settings.steps, settings.prompts_per_step) == (8, 6)
    assert (settings.group_size, settings.max_lag) == (4, 0)
    assert settings.adapter_shape().targets == ("q_proj",)


def test_an_unknown_key_fails_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rat: 0.1\n")
    with pytest.raises(SetupError, match="learning_rat"):
        load(TrainSettings, ["--config", str(path)])


def test_a_task_that_is_not_there_says_what_is() -> None:
    settings = TrainSettings(task="chess")
    with pytest.raises(SetupError, match="arithmetic, jsonl, gsm8k"):
        training_tasks(settings, None)
    with pytest.raises(SetupError, match="needs a dataset"):
        training_tasks(TrainSettings(task="gsm8k"), None)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SetupError, match="--source both"):
        TrainSettings(atropos_url="http://127.0.0.1:8001", source="posted").check()
    with pytest.raises(SetupError, match="warm-up"):
        TrainSettings(schedule="linear", steps=5, warmup_steps=10).check()
