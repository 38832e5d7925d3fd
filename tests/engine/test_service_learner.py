"""A learner of the training service: losses against numpy, gradients by differences, AdamW, states, refusals."""

import json
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save as write_safetensors

from mlx_model.loader import LoadedModel
from shared.errors import ConflictError, InvalidRequestError
from shared.learners import Datum, LearnerSpec, LossName, PassDone, PassRequest, StepRequest, Values, checked
from trainer.learn.compute import finished
from trainer.service.learner import ServiceLearner, _parts
from trainer.service.seat import DAMAGED

Array = npt.NDArray[Any]
RL: tuple[LossName, ...] = ("importance_sampling", "ppo", "cispo", "dro")
LOSSES: tuple[LossName, ...] = ("cross_entropy", *RL)


def learner(llama: LoadedModel, seed: int = 0, **more: Any) -> ServiceLearner:
    spec = LearnerSpec(id=f"l{seed}", model="m", rank=4, scale=2.0, seed=seed)
    return ServiceLearner(llama.model, spec, **more)


def moved(llama: LoadedModel, seed: int = 0, **more: Any) -> ServiceLearner:
    """One whose adapter is not 0 any more."""
    learning = learner(llama, seed, **more)
    draw = np.random.default_rng(seed)
    weights = sorted(learning.weights().items())
    learning.policy.load({name: (draw.standard_normal(w.shape) / 8).astype(np.float32) for name, w in weights})
    return learning


def data(loss: LossName, count: int = 5, seed: int = 0, targets: int = 0) -> tuple[Datum, ...]:
    draw = np.random.default_rng(seed)

    def datum() -> Datum:
        length = int(draw.integers(3, 30))
        shape = (length, targets) if targets else (length,)
        inputs = {"target_tokens": Values.of(draw.integers(0, 200, shape))}
        if loss == "cross_entropy":
            inputs["weights"] = Values.of(draw.random(shape).astype(np.float32))
        else:
            inputs["logprobs"] = Values.of((-5 - draw.random(shape)).astype(np.float32))
            inputs["advantages"] = Values.of(draw.standard_normal(shape).astype(np.float32))
        return Datum(draw.integers(0, 200, length).astype("<i4").tobytes(), inputs)

    return tuple(datum() for _ in range(count))


@pytest.mark.usefixtures("uncollected")
def test_a_dropped_learner_is_freed_at_once(llama: LoadedModel) -> None:
    learning = learner(llama)
    finished(learning.run(PassRequest(data("ppo"), "ppo")))
    learning.step(StepRequest(learning_rate=0.01))
    left = [weakref.ref(each) for each in (learning, learning.policy.model)]
    del learning
    assert [each() for each in left] == [None] * 2


def test_a_state_that_is_damaged_is_told_as_such(llama: LoadedModel) -> None:
    learning = moved(llama)
    whole = learning.state()
    for state in (
        b"",
        b"junk" * 100,
        whole[:-7],
        write_safetensors({"other": np.zeros(3)}),
        learner(llama).state()[:40],
    ):
        with pytest.raises(DAMAGED):
            learner(llama, 1).restore(state)
    learner(llama, 1).restore(whole)


def logps(learning: ServiceLearner, datum: Datum) -> Array:
    """From whole logits, in numpy."""
    logits = np.array(learning.policy.model(mx.array(datum.ids())[None])[0].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    said = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = datum.inputs["target_tokens"].array().reshape(len(said), -1)
    return np.take_along_axis(said, targets, -1).reshape(datum.inputs["target_tokens"].shape)


def expected(loss: LossName, p: Array, inputs: dict[str, Values]) -> Array:
    if loss == "cross_entropy":
        return -inputs["weights"].array() * p
    q, a = inputs["logprobs"].array().astype(np.float64), inputs["advantages"].array().astype(np.float64)
    r = np.exp(p - q)
    clipped = np.clip(r, 0.8, 1.2)
    values = {
        "importance_sampling": r * a,
        "ppo": np.minimum(r * a, clipped * a),
        "cispo": clipped * p * a,
        "dro": p * a - 0.025 * (p - q) ** 2,
    }
    return -values[loss]


def ran(learning: ServiceLearner, request: PassRequest) -> PassDone:
    return finished(learning.run(request))


def flat(learning: ServiceLearner) -> Array:
    waiting = dict(tree_flatten(learning.waiting))
    return np.concatenate([np.array(waiting[name]).ravel() for name in sorted(waiting)])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("microbatch_tokens", [8192, 64])
def test_losses_are_those_of_numpy(llama: LoadedModel, loss: LossName, microbatch_tokens: int) -> None:
    learning = moved(llama, microbatch_tokens=microbatch_tokens)
    given = data(loss)
    done = ran(learning, PassRequest(given, loss))
    total = 0.0
    for datum, output in zip(given, done.outputs, strict=True):
        p = logps(learning, datum)
        np.testing.assert_allclose(output["logprobs"].array(), p, atol=1e-5, rtol=1e-5)
        each = expected(loss, p, datum.inputs)
        if loss == "cross_entropy":
            np.testing.assert_allclose(output["elementwise_loss"].array(), each, atol=1e-5, rtol=1e-5)
        total += each.sum()
    assert done.metrics["loss:sum"] == pytest.approx(total, rel=1e-5, abs=1e-5)


def test_few_bytes_do_not_become_a_large_microbatch() -> None:
    def datum(length: int, targets: int) -> Datum:
        values = Values.of(np.zeros((length, targets), np.int64))
        return Datum(np.zeros(length, "<i4").tobytes(), {"target_tokens": values})

    given = [datum(8, 1) for _ in range(200)] + [datum(8, 4096)]
    parts = list(_parts(given, 256))
    assert sorted(i for part in parts for i in part) == list(range(201))
    assert [200] in parts, "padded to its targets, 32 rows would have a million"
    assert max(len(part) for part in parts) == 32


def test_targets_may_be_several_a_position(llama: LoadedModel) -> None:
    learning = moved(llama)
    given = (*data("cross_entropy", 2, targets=3), *data("cross_entropy", 1, seed=9))
    learning.chunk = 7  # positions that the head takes at once
    done = ran(learning, PassRequest(given, "cross_entropy"))
    for datum, output in zip(given, done.outputs, strict=True):
        np.testing.assert_allclose(output["logprobs"].array(), logps(learning, datum), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_differences(llama: LoadedModel, loss: LossName) -> None:
    learning, given = moved(llama), data(loss, 3, seed=2)
    ran(learning, PassRequest(given, loss))
    gradients = {name: np.array(value) for name, value in tree_flatten(learning.waiting)}
    weights = learning.weights()
    # cispo's coefficient is a constant of its gradient: with the ratio kept, its loss is that of cross entropy.
    if loss == "cispo":
        kept = []
        for datum in given:
            q, a = datum.inputs["logprobs"].array(), datum.inputs["advantages"].array()
            weight = (np.clip(np.exp(logps(learning, datum) - q), 0.8, 1.2) * a).astype(np.float32)
            inputs = {"target_tokens": datum.inputs["target_tokens"], "weights": Values.of(weight)}
            kept.append(Datum(datum.tokens, inputs))
        given, loss = tuple(kept), "cross_entropy"
    draw = np.random.default_rng(0)
    direction = {name: draw.standard_normal(value.shape).astype(np.float32) for name, value in weights.items()}
    slope = sum(float((gradients[name] * direction[name]).sum(dtype=np.float64)) for name in weights)

    def at(step: float) -> float:
        learning.policy.load({name: weights[name] + step * direction[name] for name in weights})
        return sum(expected(loss, logps(learning, datum), datum.inputs).sum() for datum in given)

    step = 2e-4
    assert (at(step) - at(-step)) / (2 * step) == pytest.approx(slope, rel=2e-2, abs=2e-2)


def test_passes_add_up_until_a_step_and_a_forward_adds_nothing(llama: LoadedModel) -> None:
    whole, parted = moved(llama), moved(llama)
    given = data("cross_entropy", 6)
    ran(whole, PassRequest(given, "cross_entropy"))
    ran(parted, PassRequest(given[:2], "cross_entropy"))
    ran(parted, PassRequest(given, "cross_entropy", backward=False))
    ran(parted, PassRequest(given[2:], "cross_entropy"))
    np.testing.assert_allclose(flat(parted), flat(whole), atol=1e-5, rtol=1e-4)


def test_a_step_is_adamw_with_clipping(llama: LoadedModel) -> None:
    learning = moved(llama)
    m = v = np.zeros(1)
    asked = StepRequest(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    for count in (1, 2):
        ran(learning, PassRequest(data("cross_entropy", seed=count), "cross_entropy"))
        gradient = flat(learning).astype(np.float64)
        before = learning.weights()
        old = np.concatenate([before[name].ravel() for name in sorted(before)])
        norm = np.linalg.norm(gradient)
        assert learning.step(asked).metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-4)
        gradient *= min(1, 0.5 / norm)
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        change = m / (1 - 0.8**count) / (np.sqrt(v / (1 - 0.9**count)) + 1e-6)
        after = learning.weights()
        new = np.concatenate([after[name].ravel() for name in sorted(after)])
        np.testing.assert_allclose(new, old * (1 - 0.001) - 0.01 * change, atol=2e-5)
    assert learning.steps == 2


def test_learners_side_by_side_are_those_alone_to_the_byte(llama: LoadedModel) -> None:
    def learn(learning: ServiceLearner, seed: int, count: int) -> None:
        ran(learning, PassRequest(data("cross_entropy", seed=10 * seed + count), "cross_entropy"))
        learning.step(StepRequest())

    alone = {}
    for seed in (1, 2, 3):
        learning = learner(llama, seed)
        for count in range(3):
            learn(learning, seed, count)
        alone[seed] = learning.state()
    together = {seed: learner(llama, seed) for seed in alone}
    for count in range(3):
        for seed, learning in together.items():
            learn(learning, seed, count)
    assert {seed: learning.state() for seed, learning in together.items()} == alone


def test_a_state_goes_on_to_the_byte_with_its_waiting_gradients(llama: LoadedModel) -> None:
    first, second = learner(llama), learner(llama, seed=5)
    ran(first, PassRequest(data("cross_entropy"), "cross_entropy"))
    first.step(StepRequest())
    ran(first, PassRequest(data("cross_entropy", seed=1), "cross_entropy"))
    second.restore(first.state())
    said = [learning.step(StepRequest(max_grad_norm=0.5)) for learning in (first, second)]
    assert said[0] == said[1]
    assert first.state() == second.state()
    fresh = learner(llama, seed=7)
    fresh.load(first.state(), optimizer=False)
    assert fresh.steps == 0
    assert all((fresh.weights()[name] == value).all() for name, value in first.weights().items())


def test_what_is_not_finite_changes_nothing_and_a_spoiled_step_is_refused(llama: LoadedModel) -> None:
    learning = moved(llama)
    ran(learning, PassRequest(data("cross_entropy"), "cross_entropy"))
    before = learning.state()
    (good,) = data("importance_sampling", 1)
    far = Values.of(np.full(good.inputs["logprobs"].shape, -1e4, np.float32))
    with pytest.raises(InvalidRequestError, match="not a finite"):
        ran(learning, PassRequest((Datum(good.tokens, good.inputs | {"logprobs": far}),), "importance_sampling"))
    assert learning.state() == before
    learning.spoil("it was not finite")
    kept = learner(llama, seed=3)
    kept.restore(learning.state())
    for each in (learning, kept):
        with pytest.raises(ConflictError, match="has failed"):
            each.step(StepRequest())
        with pytest.raises(ConflictError, match="no backward pass"):
            each.step(StepRequest())
    with pytest.raises(ConflictError, match="another shape"):
        ServiceLearner(llama.model, LearnerSpec(id="x", model="m", rank=2, scale=1.0)).load(before)


def test_an_adapter_may_be_on_a_part_of_the_layers(llama: LoadedModel) -> None:
    def modules(**parts: bool) -> set[str]:
        spec = LearnerSpec(id="x", model="m", rank=2, scale=1.0, **parts)
        return {name.split(".lora")[0] for name in ServiceLearner(llama.model, spec).weights()}

    attention, mlp = modules(mlp=False), modules(attention=False)
    assert attention and mlp and not attention & mlp and attention | mlp == modules()
    with pytest.raises(ValueError, match="needs"):
        modules(attention=False, mlp=False)


def test_a_dora_learns_its_magnitudes_and_goes_on_to_the_byte(llama: LoadedModel) -> None:
    spec = LearnerSpec(id="d", model="m", rank=4, scale=2.0, seed=1, kind="dora")
    first, second = ServiceLearner(llama.model, spec), ServiceLearner(llama.model, spec)
    given, before = data("cross_entropy"), first.weights()
    losses = []
    for _ in range(8):
        losses.append(ran(first, PassRequest(given, "cross_entropy")).metrics["loss:sum"])
        first.step(StepRequest(learning_rate=1e-2))
    assert losses[-1] < losses[0]
    changed = {name.rsplit(".", 1)[1] for name, value in first.weights().items() if (value != before[name]).any()}
    assert changed == {"lora_a", "lora_b", "m"}
    assert json.loads(first.config())["fine_tune_type"] == "dora"
    second.restore(first.state())
    for each in (first, second):
        ran(each, PassRequest(given, "cross_entropy"))
        each.step(StepRequest())
    assert first.state() == second.state()
    with pytest.raises(ConflictError, match="another shape"):
        learner(llama).load(first.state())


def _of(datum: Datum, **inputs: Values | None) -> Datum:
    changed = {name: value for name, value in {**datum.inputs, **inputs}.items() if value is not None}
    return Datum(datum.tokens, changed)


def test_wrong_data_is_refused_by_its_place() -> None:
    (good,) = data("ppo", 1)
    count = len(good.ids())
    checked(PassRequest((good,), "ppo"), 256, 64)
    wrong = {
        "context": Datum(np.zeros(65, "<i4").tobytes(), {}),
        "no tokens": Datum(b"", {}),
        "outside": Datum(np.full(count, 256, "<i4").tobytes(), good.inputs),
        "its inputs": _of(good, advantages=None),
        "int64": _of(good, target_tokens=good.inputs["logprobs"]),
        "of shape": _of(good, target_tokens=Values.of(np.zeros(count + 1, np.int64))),
        "a target outside": _of(good, target_tokens=Values.of(np.full(count, -1))),
        "finite": _of(good, logprobs=Values.of(np.full(count, np.nan, np.float32))),
        "reshape": _of(good, logprobs=Values("float32", (count,), b"1234")),
    }
    for about, datum in wrong.items():
        with pytest.raises(InvalidRequestError, match=about) as refused:
            checked(PassRequest((good, datum), "ppo"), 256, 64)
        assert refused.value.param == "data[1]"
    for request in (PassRequest((good,), "ppo", {"beta": 1.0}), PassRequest((), "ppo"), PassRequest((good,), "x")):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError):
            checked(request, 256, 64)
