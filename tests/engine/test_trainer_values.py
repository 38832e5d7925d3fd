"""A value head beside a policy (`--loss ppo`): what a train step computes, against numpy; and runs with one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlx_model.loader import LoadedModel
from shared.adapter_files.config import read_config
from shared.errors import SetupError
from tests.engine.test_trainer_loop import settings
from tests.engine.test_trainer_optimize import finish, groups_of
from tests.training.run import train
from trainer.learn.batches import SampleGroup, pad
from trainer.learn.optimize import Optimizer
from trainer.learn.options import AdapterShape, AdvantageScale, LossOptions, OptimizeOptions, Schedule, ValueOptions
from trainer.learners.policy import PolicyLearner
from trainer.runs.metrics import read
from trainer.settings import TrainSettings
from trainer.versions.checkpoint import CheckpointStore

VALUE = ValueOptions(coefficient=0.5, discount=0.9, decay=0.8, scale="std")
OPTIONS = OptimizeOptions(
    loss=LossOptions("ppo", 0.2, 0.2),
    value=VALUE,
    schedule=Schedule(peak=1e-3),
    microbatch_tokens=64,
    distances_every=0,
)


@pytest.fixture
def learner(llama: LoadedModel) -> PolicyLearner:
    """Its head says something else of each state, and its LoRA does something."""
    learner = PolicyLearner(llama.model, AdapterShape(rank=4), OPTIONS, limits(), seed=1)
    policy, rng = learner.policy, np.random.default_rng(3)
    drawn = {
        name: (0.3 * rng.standard_normal(each.shape)).astype(np.float32) for name, each in policy.weights().items()
    }
    policy.load(drawn | {name: each for name, each in policy.weights().items() if name.endswith("lora_a")})
    return learner


def limits() -> Any:
    return TrainSettings().limits()


def gaps(groups: list[SampleGroup]) -> list[SampleGroup]:
    """Every third token is not the model's own, as a tool's answer is not."""
    return [
        replace(
            group,
            samples=tuple(
                replace(each, mask=tuple(at % 3 != 1 for at in range(len(each.mask)))) for each in group.samples
            ),
        )
        for group in groups
    ]


def reference(optimizer: Optimizer, groups: list[SampleGroup]) -> tuple[float, float]:
    """Loss and value loss of a first train step, one row at a time, in float64."""
    policy = optimizer.policy
    assert policy.value is not None
    weight_H, bias = np.array(policy.value.weight, np.float64)[0], float(np.array(policy.value.bias)[0])
    deltas: list[npt.NDArray[np.float64]] = []
    returns, values, ratios = [], [], []
    for group in groups:
        for sample in group.samples:
            ids = mx.array([[*group.prompt_ids, *sample.completion_ids]])
            states_LH = np.array(policy.model.model(ids)[0], np.float64)
            logits_LV = np.array(policy.model(ids)[0], np.float64)
            at = [len(group.prompt_ids) - 1 + t for t, own in enumerate(sample.mask) if own]
            value_T = states_LH[at] @ weight_H + bias
            reward, found, later = sample.advantage, np.zeros(len(at)), 0.0
            for t in reversed(range(len(at))):
                after = VALUE.discount * value_T[t + 1] if t + 1 < len(at) else reward
                later = after - value_T[t] + (VALUE.discount * VALUE.decay * later if t + 1 < len(at) else 0.0)
                found[t] = later
            ids_T = np.array([sample.completion_ids[t] for t, own in enumerate(sample.mask) if own])
            logp_T = logits_LV[at, ids_T] - np.logaddexp.reduce(logits_LV[at], axis=-1)
            mu_T = np.array([sample.sampler_logprobs[t] for t, own in enumerate(sample.mask) if own])
            deltas.append(found)
            returns.append(found + value_T)
            values.append(value_T)
            ratios.append(np.exp(logp_T - mu_T))
    every, ratio = np.concatenate(deltas), np.concatenate(ratios)
    assert optimizer.options.value is not None
    scaled = (every - every.mean()) / (every.std() + 1e-4 if optimizer.options.value.scale == "std" else 1)
    policy_loss = -np.minimum(ratio * scaled, np.clip(ratio, 0.8, 1.2) * scaled).mean()
    value_loss = 0.5 * np.square(np.concatenate(values) - np.concatenate(returns)).mean()
    return policy_loss + VALUE.coefficient * value_loss, value_loss


@pytest.mark.parametrize("scale", ["mean", "std"])
def test_losses_are_those_of_the_papers(learner: PolicyLearner, scale: AdvantageScale) -> None:
    optimizer, groups = learner.optimizer, gaps(groups_of(learner.policy))
    optimizer.options = replace(OPTIONS, value=replace(VALUE, scale=scale))
    shifted = [  # the sampler was another one, so ratios are not 1 and some are clipped
        replace(
            group,
            samples=tuple(
                replace(each, sampler_logprobs=tuple(p + 0.3 * (-1) ** t for t, p in enumerate(each.sampler_logprobs)))
                for each in group.samples
            ),
        )
        for group in groups
    ]
    loss, value_loss = reference(optimizer, shifted)
    report = finish(optimizer.train_step(shifted, 0))
    assert report.value_loss == pytest.approx(value_loss, rel=1e-5)
    assert report.loss == pytest.approx(loss, rel=1e-5, abs=1e-5)
    assert report.clip_fraction > 0.2


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_gradients_are_those_of_finite_differences(
    learner: PolicyLearner, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, groups = learner.optimizer, gaps(groups_of(learner.policy))
    optimizer.options = replace(OPTIONS, value=replace(VALUE, clip=clip))
    policy, caught = learner.policy, []
    plain = optimizer._loss

    def loss(model: Any, prepared: Any, totals: Any) -> Any:
        caught.append((prepared, totals))
        return plain(model, prepared, totals)

    monkeypatch.setattr(optimizer, "_loss", loss)
    before = policy.weights()
    finish(optimizer.train_step(groups, 0))
    policy.load(before)
    prepared, totals = caught[0]
    moved = {name: each + 0.01 * np.sin(np.arange(each.size)).reshape(each.shape) for name, each in before.items()}
    policy.load({name: each.astype(np.float32) for name, each in moved.items()})  # a clip has its corner where it was
    _, found = nn.value_and_grad(policy.model, plain)(policy.model, prepared, totals)
    present = policy.weights()
    for name, slope in tree_flatten(found):
        if not (name.startswith("heads.") or "layers.0.self_attn.q_proj.lora_b" in name):
            continue
        way = np.random.default_rng(1).standard_normal(present[name].shape).astype(np.float32)
        sides = []
        for sign in (1, -1):
            policy.load(present | {name: (present[name] + sign * 5e-4 * way).astype(np.float32)})
            sides.append(float(plain(policy.model, prepared, totals)[0].item()))
        policy.load(present)
        assert (sides[0] - sides[1]) / 1e-3 == pytest.approx(
            float((np.array(slope) * way).sum()), rel=0.02, abs=2e-4
        ), name


def test_how_the_batch_is_cut_changes_no_advantage(llama: LoadedModel) -> None:
    losses = []
    for positions in (16, 4096):
        options = replace(OPTIONS, microbatch_tokens=positions)
        whole = PolicyLearner(llama.model, AdapterShape(rank=4), options, limits(), seed=1)
        report = finish(whole.optimizer.train_step(groups_of(whole.policy), 0))
        losses.append((report.loss, report.value_loss, report.grad_norm))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_values_learn_what_a_state_is_worth(llama: LoadedModel) -> None:
    """Alone, over the base: no token changes, and what a first token is worth is known before it is drawn."""
    options = replace(OPTIONS, value=ValueOptions(hidden=32, rate=10.0, decay=1.0))
    alone = PolicyLearner(llama.model, None, options, limits(), seed=1)
    groups = groups_of(alone.policy)
    reports = [finish(alone.optimizer.train_step(groups, step)) for step in range(30)]
    assert {name.split(".")[0] for name in alone.weights()} == {"heads"}
    known = [report.explained for report in reports]
    assert known[0] is not None and known[-1] is not None and known[0] < 0.1 and known[-1] > 0.5
    x = pad(groups)
    assert x.advantage_B.shape == (12,), "of each sample its reward"


@pytest.mark.long
async def test_a_run_with_a_value_head_learns_and_publishes_it(tmp_path: Path) -> None:
    recipe = settings(
        tmp_path, loss="ppo", task_count=16, prompts_per_step=16, steps=10, group_size=8, learning_rate=2e-3,
        ratio="trainer", max_lag=0,
    )  # fmt: skip
    _, sink = await train(recipe)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert lines[-1].reward > lines[0].reward + 0.2
    assert all(line.taught == 16 and line.value_loss is not None and line.explained is not None for line in lines)
    last = sink.versions[sink.latest]
    assert last["heads.value.weight"].shape == (1, 128) and np.any(last["heads.value.weight"])


@pytest.mark.long
async def test_a_run_with_a_value_head_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recipe = settings(
        tmp_path, loss="ppo", task_count=16, prompts_per_step=4, steps=4, group_size=4, learning_rate=2e-3,
        ratio="trainer", max_lag=0, checkpoint_every=2,
    )  # fmt: skip
    await train(recipe)
    checkpoint = CheckpointStore(tmp_path / "policy" / "checkpoints", 3).load("latest")
    assert checkpoint is not None and set(read_config(checkpoint.adapter_config).heads) == {"value"}
    again = tmp_path / "again"
    await train(recipe.model_copy(update={"run_dir": again, "steps": 2}))
    await train(recipe.model_copy(update={"run_dir": again}))
    twin = CheckpointStore(again / "policy" / "checkpoints", 3).load("latest")
    assert twin is not None and all(
        np.array_equal(twin.adapter[name], each) for name, each in checkpoint.adapter.items()
    )


@pytest.mark.long
async def test_it_may_begin_with_an_adapter_that_has_no_head(tmp_path: Path) -> None:
    plain = settings(tmp_path, loss="dapo", steps=1)
    await train(plain)
    folder = tmp_path / "policy" / "checkpoints"
    taught = CheckpointStore(folder, 3).load("latest")
    assert taught is not None
    warm = settings(
        tmp_path / "warm", loss="ppo", steps=1, start_from=str(next(each for each in folder.iterdir() if each.is_dir()))
    )
    state, sink = await train(warm)
    assert state.started_from == warm.start_from
    first = sink.versions[1]
    assert all(np.array_equal(first[name], each) for name, each in taught.adapter.items())
    assert not np.any(first["heads.value.weight"]), "which knows nothing yet"


async def test_it_may_begin_with_a_version_that_is_a_head_alone(tmp_path: Path) -> None:
    small = {"loss": "ppo", "steps": 1, "prompts_per_step": 2, "group_size": 2, "max_tokens": 4, "evaluate_every": 0}
    alone = settings(tmp_path / "alone", head_only=True, head_learning_rate=0.01, **small)
    _, sink = await train(alone)
    knows = sink.versions[sink.latest]
    assert set(knows) == {"heads.value.weight", "heads.value.bias"} and np.any(knows["heads.value.weight"])
    start = str(alone.folder / "versions" / str(sink.latest))
    for head_only in (True, False):
        on = settings(tmp_path / f"on-{head_only}", head_only=head_only, start_from=start, **small)
        state, sink = await train(on)
        first, last = sink.versions[1], sink.versions[sink.latest]
        assert state.started_from == start and all(np.array_equal(first[name], each) for name, each in knows.items())
        loras = {name for name in first if name.endswith("lora_b")}
        assert bool(loras) is not head_only and not any(np.any(first[name]) for name in loras)
        assert any(not np.array_equal(last[name], each) for name, each in first.items())
    with pytest.raises(SetupError, match="lora_kind lora there, head here"):
        taught = str(on.folder / "versions" / str(sink.latest))
        await train(settings(tmp_path / "less", head_only=True, start_from=taught, **small))


def test_further_epochs_are_updates_against_where_the_step_began(llama: LoadedModel) -> None:
    plain = replace(OPTIONS, loss=LossOptions("dapo"), value=None)
    whole = PolicyLearner(llama.model, AdapterShape(rank=4), replace(plain, epochs=2), limits(), seed=1)
    twice = PolicyLearner(llama.model, AdapterShape(rank=4), plain, limits(), seed=1)
    groups = groups_of(whole.policy)  # its own samples: mu is where the step begins
    report = finish(whole.optimizer.train_step(groups, 0))
    losses = [finish(twice.optimizer.train_step(groups, 0)).loss for _ in range(2)]
    assert report.loss == pytest.approx(np.mean(losses), rel=1e-3, abs=1e-6) and report.clip_fraction < 1
    for name, each in twice.weights().items():
        np.testing.assert_allclose(whole.weights()[name], each, atol=1e-5)


def test_values_learn_in_each_epoch_what_the_step_began_with_said(llama: LoadedModel) -> None:
    known: dict[int, float] = {}
    for epochs in (1, 4):
        options = replace(OPTIONS, value=ValueOptions(rate=10.0, decay=1.0), epochs=epochs, minibatches=2)
        learner = PolicyLearner(llama.model, None, options, limits(), seed=1)
        groups = groups_of(learner.policy)
        finish(learner.optimizer.train_step(groups, 0))
        explained = finish(learner.optimizer.train_step(groups, 1)).explained
        assert explained is not None
        known[epochs] = explained
    assert known[4] > known[1] + 0.02
    orders = [learner.optimizer._order(2, step) for step in range(8)]
    assert all(sorted(order) == [0, 0, 0, 0, 1, 1, 1, 1] for order in orders) and len(set(map(tuple, orders))) > 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"group_size": 1}, "--group-size 1 leaves a sample nothing"),
        (
            {"loss": "ppo", "advantage_scale": "leave_one_out"},
            "--advantage-scale leave_one_out compares the samples of a group",
        ),
        ({"gae_lambda": 0.5}, "--gae-lambda goes with --mode ppo or --loss ppo"),
        ({"head_hidden": 8}, "--head-hidden goes with --mode reward or --loss ppo"),
        ({"loss": "ppo", "rollout_steps": 8}, "--rollout-steps goes with --mode ppo$"),
        ({"loss": "ppo", "head": "worth"}, "--head goes with --mode reward$"),
        ({"mode": "sft", "dataset": "x", "update_epochs": 2}, "--update-epochs has no use with --mode sft"),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        TrainSettings(**changes).check()
    TrainSettings(loss="ppo", group_size=1, gae_lambda=1, head_hidden=8, value_clip=0.2).check()
