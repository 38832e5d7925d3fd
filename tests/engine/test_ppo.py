"""PPO on networks: outputs, losses and gradients against numpy in double precision; what a learner keeps."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shared.errors import SetupError
from shared.networks.spec import NetworkSpec
from shared.process.settings import load
from tests.unit.networks import GAUSSIAN, LSTM, MLP, computed, inputs_of, spec_of, weights_of
from trainer.learn.compute import finished
from trainer.learn.options import LossOptions, MemoryKind, Schedule
from trainer.learn.ppo_losses import PpoOptions, PpoSteps, ppo
from trainer.learn.ppo_network import check_learnable, first_weights, outputs_of, two_layers
from trainer.learners.ppo import PpoLearner, PpoLearnerOptions
from trainer.runs.ppo import network_of, options_of
from trainer.settings import TrainSettings

Array = np.ndarray[Any, Any]
OPTIONS = PpoOptions(LossOptions(clip_low=0.2, clip_high=0.3, entropy_bonus=0.02, dual_clip=3.0), 0.3, 0.5)
FORCED = {
    **GAUSSIAN,
    "layers": [*GAUSSIAN["layers"], {"type": "linear", "name": "v", "units": 1, "of": ["mu"], "activation": "silu"}],
    "outputs": {**GAUSSIAN["outputs"], "value": {"of": "v"}},
}
MEMORY = {
    "inputs": {"observation": {"shape": [4]}},
    "layers": [
        {"type": "lstm", "name": "first", "units": 5},
        {"type": "gru", "name": "second", "units": 6},
        {"type": "linear", "name": "pi", "units": 2},
        {"type": "linear", "name": "v", "units": 1, "of": ["first", "second"]},
    ],
    "outputs": {"action_logits": {"of": "pi"}, "value": {"of": "v"}},
}
EACH = pytest.mark.parametrize("described", [MLP, FORCED, MEMORY], ids=["discrete", "gaussian", "memory"])


def flat(steps: PpoSteps) -> dict[str, Array]:
    """As rows, without state."""
    shown = {name: each for name, each in steps._asdict().items() if name != "state"}
    return {name: each.reshape(-1, *each.shape[2:]) for name, each in shown.items()}


def steps_for(described: dict[str, Any], rows: int = 64) -> PpoSteps:
    """Steps of a policy whose log-probabilities and values are somewhat off; four in each sequence if it remembers."""
    draw, spec = np.random.default_rng(2), spec_of(described)
    shape = (rows // 4, 4) if spec.state else (rows, 1)
    observed = inputs_of(described, rows)["observation"]
    if "action_logits" in spec.outputs:
        actions: Array = draw.integers(0, 2, rows).astype(np.int32)
    else:
        actions = draw.normal(0.7, 1, (rows, 2)).astype(np.float32)

    def drawn(around: Any, spread: float) -> Array:
        return np.asarray(around + draw.normal(0, spread, shape), np.float32)

    steps = PpoSteps(
        observed_BLI=observed.reshape(*shape, -1),
        begins_BL=(draw.random(shape) < 0.3).astype(np.float32),
        state={
            name: draw.normal(0, 1, (shape[0], *each.shape)).astype(np.float32) for name, each in spec.state.items()
        },
        actions=actions.reshape(*shape, *actions.shape[1:]),
        logp_BL=np.zeros(shape),
        values_BL=np.zeros(shape),
        advantages_BL=drawn(0, 1),
        returns_BL=drawn(0, 1),
    )
    logp, values, _ = reference(described, weights_of(described), steps)
    return steps._replace(logp_BL=drawn(logp.reshape(shape), 0.4), values_BL=drawn(values.reshape(shape), 0.4))


def shown(described: dict[str, Any], weights: dict[str, Array], steps: PpoSteps) -> dict[str, Array]:
    """Outputs of all rows, in double precision, one step after the other."""
    state: dict[str, Array] = {name: each.astype(np.float64) for name, each in steps.state.items()}
    told: list[dict[str, Array]] = []
    for at in range(steps.begins_BL.shape[1]):
        begins = steps.begins_BL[:, at, None]
        inputs = {"observation": steps.observed_BLI[:, at].astype(np.float64)}
        outputs = computed(described, weights, inputs | {name: each * (1 - begins) for name, each in state.items()})
        state = {name: outputs.pop(name) for name in state}
        told.append(outputs)
    stacked = {name: np.stack([each[name] for each in told], axis=1) for name in told[0]}
    return {name: each.reshape(-1, each.shape[-1]) for name, each in stacked.items()}


def reference(described: dict[str, Any], weights: dict[str, Array], steps: PpoSteps) -> tuple[Array, Array, Array]:
    """Log-probabilities, values and entropies of all rows, in double precision."""
    outputs, actions = shown(described, weights, steps), flat(steps)["actions"]
    values = outputs["value"][:, 0]
    if "action_logits" in outputs:
        logits = outputs["action_logits"]
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return np.log(probs[np.arange(len(probs)), actions]), values, -(probs * np.log(probs)).sum(-1)
    std = np.exp(outputs["action_log_std"])
    density = np.exp(-0.5 * ((actions - outputs["action_mean"]) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    return np.log(density).sum(-1), values, (0.5 * np.log(2 * np.pi * np.e * std**2)).sum(-1)


def wanted(described: dict[str, Any], weights: dict[str, Array], sequences: PpoSteps) -> dict[str, float]:
    """The losses, row by row."""
    steps = flat(sequences)
    logp, values, entropies = reference(described, weights, sequences)
    policy, value, clipped = 0.0, 0.0, 0
    for b in range(len(logp)):
        ratio, advantage = np.exp(logp[b] - float(steps["logp_BL"][b])), float(steps["advantages_BL"][b])
        term = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        if advantage < 0:
            term = max(term, 3.0 * advantage)
        clipped += (ratio > 1.3 and advantage > 0) or (ratio < 0.8 and advantage < 0) or (ratio > 3 and advantage < 0)
        policy -= term / len(logp)
        old, target = float(steps["values_BL"][b]), float(steps["returns_BL"][b])
        near = old + min(max(values[b] - old, -0.3), 0.3)
        value += 0.5 * max((values[b] - target) ** 2, (near - target) ** 2) / len(logp)
    entropy = float(entropies.mean())
    loss = policy + 0.5 * value - 0.02 * entropy
    return {"loss": loss, "policy": policy, "value": value, "entropy": entropy, "clipped": clipped / len(logp)}


def tree(weights: dict[str, Array]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, each in weights.items():
        layer, part = name.split(".")
        nested.setdefault(layer, {})[part] = mx.array(each)
    return nested


def told(spec: NetworkSpec, weights: dict[str, Any], steps: PpoSteps) -> dict[str, mx.array]:
    return outputs_of(spec, weights, steps.observed_BLI, steps.begins_BL, steps.state)


@EACH
def test_outputs_are_those_of_numpy(described: dict[str, Any]) -> None:
    steps, weights = steps_for(described), weights_of(described)
    outputs = told(spec_of(described), tree(weights), steps.moved())
    for name, value in shown(described, weights, steps).items():
        np.testing.assert_allclose(np.array(outputs[name]), value, rtol=1e-5, atol=1e-5)


@EACH
def test_the_loss_and_its_parts_are_those_of_numpy(described: dict[str, Any]) -> None:
    weights, steps = weights_of(described), steps_for(described)
    batch = steps.moved()
    parts = ppo(told(spec_of(described), tree(weights), batch), batch, OPTIONS)
    expected = wanted(described, weights, steps)
    assert 0.1 < expected["clipped"] < 0.6, "both sides of the clip are in it"
    for name, value in expected.items():
        assert abs(float(getattr(parts, name)) - value) < 1e-5, name
    assert float(parts.kl) > 0


@pytest.mark.long
@EACH
def test_gradients_are_differences_of_the_loss(described: dict[str, Any]) -> None:
    weights, steps = weights_of(described), steps_for(described)
    spec = spec_of(described)
    batch = steps.moved()
    of_loss = mx.grad(lambda tree: ppo(told(spec, tree, batch), batch, OPTIONS).loss)
    gradients = {name: np.array(each) for name, each in tree_flatten(of_loss(tree(weights)))}
    assert gradients.keys() == weights.keys()
    draw, tiny = np.random.default_rng(4), 1e-6
    for name, value in weights.items():
        for at in draw.choice(value.size, min(4, value.size), replace=False):
            moved = []
            for sign in (1, -1):
                other = {each: array.astype(np.float64) for each, array in weights.items()}
                other[name].flat[at] += sign * tiny
                moved.append(wanted(described, other, steps)["loss"])
            slope = (moved[0] - moved[1]) / (2 * tiny)
            assert abs(gradients[name].flat[at] - slope) < 1e-5 * max(1, abs(slope)), (name, at)


def learner(rate: float = 0.01) -> PpoLearner:
    options = PpoLearnerOptions(OPTIONS, Schedule(peak=rate), 2, 3, 0.5, 0.0, (0.9, 0.99), 7)
    return PpoLearner(spec_of(MLP), weights_of(MLP), options)


def test_a_learner_goes_on_from_a_snapshot_to_the_byte_and_falls_back_to_what_was_good() -> None:
    whole, steps = learner(), steps_for(MLP)
    first = finished(whole.train(steps, 0))
    assert first.left_out == 0 and first.kl > 0
    half = whole.snapshot()
    resumed = learner()
    resumed.restore(half)
    assert finished(whole.train(steps, 1)) == finished(resumed.train(steps, 1))
    for name, value in whole.weights().items():
        assert (value == resumed.weights()[name]).all() and (value != half.adapter[name]).any(), name
    resumed.revert()
    assert all((value == half.adapter[name]).all() for name, value in resumed.weights().items())


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    one, steps = learner(), steps_for(MLP)
    steps = steps._replace(returns_BL=np.full_like(steps.returns_BL, np.inf))
    assert finished(one.train(steps, 0)).left_out == 6
    assert all((value == weights_of(MLP)[name]).all() for name, value in one.weights().items())


def test_what_a_train_step_reports_is_of_the_updates_that_were_made() -> None:
    one, steps = learner(), steps_for(MLP)
    steps.returns_BL[0] = np.inf
    learned = finished(one.train(steps, 0))
    assert learned.left_out == 2, "one of the three minibatches of each epoch"
    assert np.isfinite(learned).all(), learned


def test_learning_makes_what_was_better_likelier() -> None:
    one, steps = learner(rate=0.003), steps_for(MLP)
    logp, values = one.policy(one.weights(), steps)
    better = np.where(steps.actions == 1, 1, -1).astype(np.float32)
    steps = steps._replace(logp_BL=logp, values_BL=values, returns_BL=values, advantages_BL=better)
    for at in range(5):
        finished(one.train(steps, at))
    now, _ = one.policy(one.weights(), steps)
    assert (now > logp)[steps.actions == 1].all() and (now < logp)[steps.actions == 0].all()


@pytest.mark.parametrize("memory", ["gru", ""])
def test_what_was_seen_three_steps_ago_is_learned_by_a_network_that_remembers(memory: MemoryKind) -> None:
    """The first of four observations says what is right to do in all of them; the others say nothing."""
    spec = two_layers(1, 2, discrete=True, memory=memory)
    options = PpoLearnerOptions(OPTIONS, Schedule(peak=0.01), 2, 2, 0.5, 0.0, (0.9, 0.99), 7)
    one, draw, rows = PpoLearner(spec, first_weights(spec, 0), options), np.random.default_rng(0), 64
    for at in range(16):
        right = np.repeat(draw.integers(0, 2, (rows, 1)), 4, axis=1)
        observed = np.zeros((rows, 4, 1), np.float32)
        observed[:, 0, 0] = 2 * right[:, 0] - 1
        none = np.zeros((rows, 4), np.float32)
        state = {name: np.zeros((rows, *each.shape), np.float32) for name, each in spec.state.items()}
        asked = PpoSteps(observed, none, state, np.ones((rows, 4), np.int32), none, none, none, none)
        logp_of_1, values = one.policy(one.weights(), asked)
        chances = np.exp(logp_of_1)
        actions = (draw.random((rows, 4)) < chances).astype(np.int32)
        logp = np.log(np.where(actions == 1, chances, 1 - chances)).astype(np.float32)
        worth = np.where(actions == right, 1, -1).astype(np.float32)
        finished(one.train(PpoSteps(observed, none, state, actions, logp, values, worth, none), at))
    sure = np.where(right == 1, chances, 1 - chances).mean(axis=0)
    assert sure[0] > 0.9 and (sure[3] > 0.9 if memory else 0.4 < sure[3] < 0.6), sure


def test_a_new_network_holds_all_actions_alike() -> None:
    network = two_layers(4, 2, discrete=True)
    observed = mx.array(np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32))
    outputs = outputs_of(network, tree(first_weights(network, 3)), observed[:, None], mx.zeros((50, 1)), {})
    assert np.abs(np.array(outputs["action_logits"])).max() < 0.1 < np.abs(np.array(outputs["value"])).max()
    assert (first_weights(network, 3)["pi.weight"] != first_weights(network, 4)["pi.weight"]).any()


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (LSTM, "output 'action_logits' is missing or of another shape; wanted are action_logits [2], value [1]"),
        (FORCED, "output 'action_logits' is missing"),
        ({**MLP, "inputs": {"observation": {"shape": [5]}}}, "one input of shape [4]"),
    ],
)
def test_a_network_that_cannot_learn_this_is_refused_by_name(described: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError) as refused:
        check_learnable(spec_of(described), 4, 2, discrete=True)
    assert words in str(refused.value)


def test_a_network_of_ones_own_is_read_from_its_description(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_bytes(msgspec.json.encode({"network": MLP}))
    settings = load(TrainSettings, ["--mode", "ppo", "--task", "cart-pole", "--network", str(file)])
    assert network_of(settings) == spec_of(MLP)
    file.write_text('{"network": {"layers": []}}')
    with pytest.raises(SetupError, match=r"--network .*adapter_config.json"):
        network_of(settings)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "ppo", "--dataset", "x.jsonl"], "--dataset has no use with --mode ppo"),
        (["--mode", "ppo", "--group-size", "3"], "--group-size has no use with --mode ppo"),
        (["--mode", "ppo", "--task-count", "3"], "--task-count has no use with --mode ppo"),
        (["--memory", "gru"], "--memory goes with --mode ppo"),
        (["--discount", "0.5"], "--discount goes with --mode ppo"),
        (["--mode", "ppo", "--seed", "-5"], "seed: Input should be greater than or equal to 0"),
        (["--mode", "sft", "--dataset", "x.jsonl", "--gae-lambda", "1"], "--gae-lambda has no use with --mode sft"),
    ],
)
def test_settings_that_a_mode_has_no_use_for_are_refused_by_name(flags: list[str], words: str) -> None:
    with pytest.raises(SetupError) as refused:
        load(TrainSettings, flags).check()
    assert words in str(refused.value)


def test_the_recipe_learns_with_what_it_says() -> None:
    settings = load(TrainSettings, ["--config", "trainer/recipes/cart-pole.yaml"])
    settings.check()
    options = options_of(settings)
    assert (options.loss.policy.clip_low, options.loss.policy.clip_high) == (0.2, 0.2)
    assert options.schedule.rate(0) == 0.003 > options.schedule.rate(settings.steps) and options.minibatches == 8
