from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.errors import SetupError
from shared.process.settings import load
from trainer.rollouts.held_out import TRUE
from trainer.rollouts.scorers import ring_judges
from trainer.runs.rl import held_out_tasks, tasks, training_tasks
from trainer.settings import TrainSettings

RECIPES = sorted(Path("trainer/recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_names_its_task(recipe: Path) -> None:
    settings = load(TrainSettings, ["--config", str(recipe)])
    assert settings.optimize_options().schedule.peak == yaml.safe_load(recipe.read_text())["learning_rate"]
    if settings.mode == "ppo":
        assert settings.task == "cart-pole"
        return
    if settings.dataset is not None:  # examples/short_answers.py makes it; tests/bench/learning.py runs these recipes
        assert settings.dataset.parent.name == "short-answers"
        return
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


def test_every_setting_stands_in_one_panel_of_the_help_the_common_ones_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = [name for names in TrainSettings.panels.values() for name in names]
    assert sorted(listed) == sorted(TrainSettings.model_fields), "one in no panel, in two, or gone"
    with pytest.raises(SystemExit):
        load(TrainSettings, ["--help"])
    help = capsys.readouterr().out
    titles = [f"\n{title}:\n" for title in TrainSettings.panels]
    assert [help.index(title) for title in titles] == sorted(help.index(title) for title in titles)
    common = help[: help.index(titles[1])]
    assert 18 <= len(TrainSettings.panels["common"]) <= 22
    assert all(f"--{name.replace('_', '-')}" in common for name in TrainSettings.panels["common"])
    assert "--distributed-mode" not in common and "PARALLM" not in help
    with pytest.raises(SystemExit):
        load(TrainSettings, ["--bogus"])
    assert len(capsys.readouterr().err.splitlines()) == 2, "a wrong flag is not buried under all the right ones"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_completion_length", "max_tokens"),  # TRL
        ("beta", "kl_coefficient"),
        ("max_response_length", "max_tokens"),  # verl
        ("train_batch_size", "prompts_per_step"),
        ("kl_loss_coef", "kl_coefficient"),
    ],
)
def test_names_of_trl_and_verl_are_taken(tmp_path: Path, theirs: str, ours: str) -> None:
    flag = load(TrainSettings, [f"--{theirs.replace('_', '-')}", "3"])
    (tmp_path / "run.yaml").write_text(f"{theirs}: 3\n")
    file = load(TrainSettings, ["--config", str(tmp_path / "run.yaml")])
    assert getattr(flag, ours) == getattr(file, ours) == 3


def test_a_bare_no_in_yaml_is_the_word(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("resume: no\n")
    assert load(TrainSettings, ["--config", str(path)]).resume == "no"


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


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dataset": Path("sums.jsonl")}, "--dataset has no use with --task arithmetic: it goes with --task jsonl"),
        ({"reward": "math"}, "--reward has no use with --task arithmetic"),
        ({"held_out_dataset": Path("sums.jsonl")}, "--held-out-dataset has no use with --task arithmetic"),
        ({"task": "jsonl", "task_options": {"first": 1}}, "--task-options has no use with --task jsonl"),
        ({"task": "package.module:Class", "system_prompt": "Be brief."}, "--system-prompt has no use"),
        ({"task": "package.module:Class", "task_count": 4}, "it goes with --task arithmetic, jsonl or gsm8k"),
        ({"adapter": "my policy"}, "--adapter: 'my policy' is no adapter name"),
        ({"run": "../up"}, "--run: '../up' is no"),
        ({"chat_template_kwargs": {"tools": []}}, "--chat-template-kwargs: 'tools' is not"),
        ({"held_out_reward": "exact"}, "--held-out-reward measures .*: it goes with --held-out-dataset"),
        ({"held_out_reward_options": {"a": 1}}, "--held-out-reward-options has no use without --held-out-reward"),
        (
            {"task": "jsonl", "held_out_dataset": Path("x"), "held_out_reward": "exact"},
            "--held-out-reward .* it goes with --evaluate-every",
        ),
        ({"mode": "sft", "dataset": Path("x"), "held_out_reward": "exact"}, "--held-out-reward has no use with --mode"),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        TrainSettings(**changes).check()


def test_a_reward_beside_an_environment_scores_its_held_out_data_set() -> None:
    held_out = {"held_out_dataset": Path("x.jsonl"), "reward": "gsm8k", "system_prompt": "Be brief."}
    TrainSettings(task="package.module:Class", task_options={"first": 1}, **held_out).check()
    TrainSettings(task="gsm8k", dataset=Path("x.jsonl"), task_count=4, reward="math").check()


def test_a_dry_run_finds_contradictions_and_a_wrong_name_finds_its_neighbour(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="warm-up"):
        load(TrainSettings, ["--dry-run", "--schedule", "linear", "--steps", "3", "--warmup-steps", "5"])
    path = tmp_path / "run.yaml"
    path.write_text("learning_rat: 0.1\n")
    with pytest.raises(SetupError, match="learning_rat: there is no such setting; did you mean learning_rate"):
        load(TrainSettings, ["--config", str(path)])


def test_the_clip_range_follows_the_loss_unless_it_is_given() -> None:
    def clips(**changes: Any) -> tuple[float, float]:
        loss = TrainSettings(**changes).optimize_options().loss
        return loss.clip_low, loss.clip_high

    assert clips() == (0.2, 0.28)
    assert clips(loss="gspo") == (3e-4, 4e-4)
    assert clips(loss="gspo", clip_high=0.01) == (3e-4, 0.01)


def test_what_is_seldom_meant_is_said() -> None:
    assert TrainSettings().cautions() == []
    assert TrainSettings(temperature=0.7).cautions() == [], "the loss takes it into account"
    assert "filtered distributions" in TrainSettings(top_p=0.7).cautions()[0]
    evaluated = {"task": "gsm8k", "dataset": Path("x"), "evaluate_every": 5}
    assert "on the training tasks" in TrainSettings(**evaluated).cautions()[0]
    assert TrainSettings(**evaluated, held_out_dataset=Path("y")).cautions() == []


def test_the_store_keeps_what_samples_on_their_way_may_be_pinned_to() -> None:
    kept = [TrainSettings(adapter_keep_n=n, max_lag=8).versions_kept for n in (0, 2, 40)]
    assert kept == [0, 11, 40]


def test_rollouts_that_are_tempered_or_filtered_come_with_the_samplers_own_logprobs() -> None:
    assert TrainSettings().sampling().logprobs_mode == "raw_logprobs", "the same numbers, for less"
    for changes in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
        sampling = TrainSettings(**changes).sampling()
        assert sampling.logprobs_mode == "processed_logprobs"
        assert [getattr(sampling, name) for name in changes] == list(changes.values())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--mode", "reward"], "--mode reward needs a --dataset"),
        (["--mode", "reward", "--dataset", "x", "--group-size", "4"], "--group-size has no use with --mode reward"),
        (["--mode", "reward", "--dataset", "x", "--task", "gsm8k"], "--task has no use with --mode reward"),
        (["--mode", "reward", "--dataset", "x", "--logger", "wandb"], "--logger has no use with --mode reward"),
        (["--mode", "reward", "--dataset", "x", "--head", "My Head"], "--head: 'My Head'"),
        (["--head-only"], "--head-only goes with --mode reward"),
        (["--head-hidden", "8"], "--head-hidden goes with --mode reward"),
        (["--dpo-beta", "0.2"], "--dpo-beta goes with --mode dpo"),
        (["--mode", "reward", "--dataset", "x", "--dpo-beta", "0.2"], "--dpo-beta has no use with --mode reward"),
        (["--mode", "sft"], "--mode sft needs a --dataset of messages or completions"),
        (["--mode", "dpo"], "--mode dpo needs a --dataset of pairs"),
        (["--mode", "sft", "--dataset", "x", "--dpo-beta", "0.2"], "--dpo-beta has no use with --mode sft"),
        (["--mode", "sft", "--dataset", "x", "--head-only"], "--head-only has no use with --mode sft"),
        (["--mode", "dpo", "--dataset", "x", "--kl-coefficient", "1"], "--kl-coefficient has no use with --mode dpo"),
        (["--mode", "dpo", "--dataset", "x", "--feedback-max-age-days", "3"], "goes with --dataset feedback:POLICY"),
        (["--mode", "sft", "--dataset", "feedback:a", "--connect-to", "b:1"], "preferences are for --mode dpo"),
        (["--mode", "dpo", "--dataset", "feedback:a"], "is read through an api: give --connect-to HOST:PORT"),
        (["--mode", "dpo", "--dataset", "feedback:a", "--connect-to", "redis://b:1"], "give --connect-to HOST:PORT"),
        (["--mode", "dpo", "--dataset", "feedback:", "--connect-to", "b:1"], "'' is no adapter name"),
        (["--mode", "distill", "--teacher", "a@1"], "--mode distill needs a --dataset of messages or completions"),
        (["--mode", "distill", "--dataset", "x"], "--mode distill needs a --teacher"),
        (
            ["--mode", "distill", "--dataset", "x", "--teacher", "a@1"],
            "is reached through an api: give --connect-to HOST:PORT",
        ),
        (["--mode", "sft", "--dataset", "x", "--teacher", "a@1"], "--teacher has no use with --mode sft"),
        (["--learner", "shared", "--over-http", "--connect-to", "a:1"], "leave out --over-http"),
        (["--trainers", "2"], "--trainers 2 goes with --learner shared"),
        (["--exchange", "bfloat16"], "--exchange bfloat16 goes with --learner shared"),
        (["--join-run", "a", "--learner", "shared"], "leave out --learner"),
        (["--join-run", "a b"], "--join-run: 'a b'"),
        (["--mode", "sft", "--dataset", "x", "--join-run", "a"], "--join-run has no use with --mode sft"),
        (["--sync-every", "5"], "--sync-every goes with --federation NAME"),
        (["--sync-moments", "average"], "--sync-moments goes with --federation NAME"),
        (["--federation", "a"], "--federation needs --sync-every"),
        (["--federation", "a b", "--sync-every", "5"], "--federation: 'a b'"),
        (["--federation", "a", "--sync-every", "5", "--learner", "service"], "leave out --learner"),
        (["--federation", "a", "--sync-every", "5", "--over-http", "--connect-to", "h:1"], "needs --sync-redis"),
        (["--mode", "dpo", "--dataset", "x", "--temperature", "0.5"], "--temperature has no use with --mode dpo"),
    ],
)
def test_each_mode_takes_what_it_has_a_use_for(arguments: list[str], word: str) -> None:
    with pytest.raises(SetupError) as refused:
        load(TrainSettings, arguments).check()
    assert word in str(refused.value)


def test_a_run_that_trains_a_head_is_a_run() -> None:
    settings = load(TrainSettings, ["--mode", "reward", "--dataset", "x", "--head-only", "--start-from", "a@1"])
    settings.check()
    assert settings.head_only


def test_runs_that_tune_are_runs() -> None:
    given = ["--dataset", "x", "--start-from", "taught@3", "--chat-template-kwargs", '{"enable_thinking": false}']
    load(TrainSettings, ["--mode", "sft", *given]).check()
    load(TrainSettings, ["--mode", "dpo", "--dpo-beta", "0.2", *given]).check()
    load(TrainSettings, ["--start-from", "taught@3"]).check()


async def test_only_answers_to_held_out_tasks_are_scored_by_the_second_reward(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1+1=", "reference": "2"}\n')
    settings = TrainSettings(
        task="jsonl", dataset=path, held_out_dataset=path, evaluate_every=1,
        reward="length", reward_options={"target": 3}, held_out_reward="exact",
    )  # fmt: skip
    async with ring_judges("redis://127.0.0.1:1") as judges, tasks(settings, judges) as found:
        assert found.held_out is not None
        rewards = []
        for environment in (found.environment, found.held_out):
            outcome = await environment.step(await environment.reset(0), "2")
            rewards.append((outcome.reward, outcome.components.get(TRUE)))
    (learned, nothing), (measured, true) = rewards
    assert learned == measured and nothing is None and true == 1.0
    wrong = settings.model_copy(update={"held_out_reward_options": {"nothing": 1}})
    async with ring_judges("redis://127.0.0.1:1") as judges:
        with pytest.raises(SetupError, match="nothing"):
            async with tasks(wrong, judges):
                pass
