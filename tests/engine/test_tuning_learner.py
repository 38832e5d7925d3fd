"""Tuning by cross entropy and by preferences: losses against numpy, gradients by differences, resumes to the byte."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlx_model.loader import LoadedModel
from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.compute import finished
from trainer.learn.options import AdapterShape, Schedule
from trainer.learners.data import DataOptions
from trainer.learners.tuning import TuneLearner
from trainer.learners.tuning_examples import Tuning
from trainer.state import Arrays

Logps = list[npt.NDArray[np.float64]]

BETA = 0.3
SHAPE = AdapterShape(rank=4)
OPTIONS = DataOptions(Schedule(peak=3e-3), SHAPE, 256, 1.0, 0.0, (0.9, 0.99), 0)
TUNINGS: list[Tuning] = ["sft", "dpo"]


def learner(llama: LoadedModel, tuning: Tuning, **options: Any) -> TuneLearner:
    return TuneLearner(llama.model, tuning, SHAPE, BETA, replace(OPTIONS, **options))


def examples(tuning: Tuning, count: int, seed: int) -> list[SampleGroup]:
    """Of sft, chats of several turns: some tokens in between do not count."""
    draw = np.random.default_rng(seed)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(draw.integers(20, 200, int(draw.integers(1, most))).tolist())

    def sample() -> Sample:
        said = ids(9)
        mask = draw.random(len(said)) < (0.6 if tuning == "sft" else 2)
        mask[[0, -1]] = True
        return Sample(said, (0.0,) * len(said), tuple(map(bool, mask)), (0,) * len(said), 0.0)

    return [SampleGroup("", ids(12), tuple(sample() for _ in range(1 if tuning == "sft" else 2))) for _ in range(count)]


def random_weights(learning: TuneLearner, seed: int) -> Arrays:
    draw = np.random.default_rng(seed)
    weights = sorted(learning.weights().items())
    return {name: (draw.standard_normal(value.shape) / 8).astype(np.float32) for name, value in weights}


def reference(model: Any, items: Sequence[SampleGroup]) -> tuple[Logps, list[bool]]:
    """Row by row from logits in numpy: log-probabilities of what counts, and whether each is the likeliest."""
    logps: Logps = []
    named: list[bool] = []
    for item in items:
        for sample in item.samples:
            ids = [*item.prompt_ids, *sample.completion_ids]
            logits = np.array(model(mx.array([ids[:-1]])).astype(mx.float32), np.float64)[0]
            at = np.flatnonzero(sample.mask) + len(item.prompt_ids) - 1
            wanted = np.array(ids)[at + 1]
            top = logits[at].max(-1, keepdims=True)
            logp = logits[at] - top - np.log(np.exp(logits[at] - top).sum(-1, keepdims=True))
            logps.append(logp[np.arange(len(at)), wanted])
            named += (logits[at].argmax(-1) == wanted).tolist()
    return logps, named


def gained(model: Any, before: Any, items: Sequence[SampleGroup]) -> npt.NDArray[np.float64]:
    now, then = (np.array([each.sum() for each in reference(at, items)[0]]) for at in (model, before))
    return np.asarray(BETA * ((now - then)[0::2] - (now - then)[1::2]))


@pytest.mark.parametrize("options", [{}, {"checkpoint_layers": True}, {"microbatch_tokens": 1}])
def test_the_loss_of_sft_is_the_mean_over_all_tokens_that_count(llama: LoadedModel, options: dict[str, Any]) -> None:
    learning, batch = learner(llama, "sft", **options), examples("sft", 12, seed=1)
    learning.begin_with(random_weights(learning, 5))
    logps, named = reference(learning._policy.model, batch)
    measured, report = finished(learning.measure(batch)), finished(learning.train(batch, 0))
    wanted = -np.concatenate(logps).mean()
    assert report.loss == pytest.approx(wanted, abs=1e-5) and measured.loss == pytest.approx(wanted, abs=1e-5)
    assert report.tokens == len(named) == sum(sum(item.samples[0].mask) for item in batch)
    assert measured.right == pytest.approx(np.mean(named), abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("options", [{}, {"checkpoint_layers": True}, {"microbatch_tokens": 1}])
def test_the_loss_of_dpo_is_held_against_what_the_run_began_with(
    llama: LoadedModel, options: dict[str, Any], started: bool
) -> None:
    learning, batch = learner(llama, "dpo", **options), examples("dpo", 8, seed=1)
    before = learner(llama, "dpo")._policy
    if started:
        start = random_weights(learning, 4)
        learning.begin_with(start)
        before.load(start)
    begins = finished(learning.measure(batch))
    assert (begins.right, begins.margin) == (0, 0) and begins.loss == pytest.approx(np.log(2), abs=1e-6)
    learning._load(random_weights(learning, 5))
    margin_N = gained(learning._policy.model, before.model, batch)
    measured, report = finished(learning.measure(batch)), finished(learning.train(batch, 0))
    wanted = np.log1p(np.exp(-margin_N)).mean()
    assert report.loss == pytest.approx(wanted, abs=1e-5) and measured.loss == pytest.approx(wanted, abs=1e-5)
    assert measured.margin == pytest.approx(margin_N.mean(), abs=1e-5)
    assert measured.right == np.mean(margin_N > 0)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_gradient_is_that_of_finite_differences(llama: LoadedModel, tuning: Tuning) -> None:
    learning, batch = learner(llama, tuning), examples(tuning, 3, seed=3)
    weights = random_weights(learning, 6)
    learning._load(weights)
    _, gradients = learning._gradient(batch, batch)
    found = {name: np.array(value) for name, value in _flat(gradients["body"])}

    def loss(name: str, at: tuple[int, ...], step: float) -> float:
        moved = {**weights, name: weights[name].copy()}
        moved[name][at] += step
        learning._load(moved)
        value, _ = learning._gradient(batch, batch)
        return float(value.item())

    for name in sorted(found)[:: max(1, len(found) // 5)]:
        at = tuple(int(i) for i in np.unravel_index(np.abs(found[name]).argmax(), found[name].shape))
        numeric = (loss(name, at, 1e-2) - loss(name, at, -1e-2)) / 2e-2
        assert found[name][at] == pytest.approx(numeric, rel=0.02, abs=1e-4), name


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    leaves: list[tuple[str, mx.array]] = tree_flatten(tree)
    return leaves


def test_the_reference_of_a_pair_is_computed_once(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    learning, batch = learner(llama, "dpo"), examples("dpo", 6, seed=7)
    finished(learning.train(batch[:4], 0))
    passes: list[Any] = []
    scores = learning._scores
    monkeypatch.setattr(learning, "_scores", lambda model, x: (passes.append(model), scores(model, x))[1])
    finished(learning.measure(batch))
    base = [model for model in passes if model is learning._policy.base]
    assert len(base) == 1 and len(passes) > 1, "of the two pairs that are new, in one pass"
    finished(learning.train(batch, 1))
    assert sum(model is learning._policy.base for model in passes) == 1


@pytest.mark.parametrize("tuning", TUNINGS)
def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(llama: LoadedModel, tuning: Tuning) -> None:
    one, other = learner(llama, tuning), learner(llama, tuning)
    start = random_weights(one, 8)
    one.begin_with(start)
    for step in range(2):
        finished(one.train(examples(tuning, 4, seed=step), step))
    other.begin_with(start)
    other.restore(one.snapshot())
    for learning in (one, other):
        finished(learning.train(examples(tuning, 4, seed=9), 2))
    for name, value in one.weights().items():
        np.testing.assert_array_equal(other.weights()[name], value)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_a_loss_that_is_not_finite_changes_nothing(llama: LoadedModel, tuning: Tuning) -> None:
    learning = learner(llama, tuning)
    learning._load({name: np.full_like(value, np.inf) for name, value in learning.weights().items()})
    before = learning.weights()
    assert not finished(learning.train(examples(tuning, 2, seed=1), 0)).is_finite
    for name, value in learning.weights().items():
        np.testing.assert_array_equal(before[name], value)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_what_is_shown_or_preferred_becomes_likelier(llama: LoadedModel, tuning: Tuning) -> None:
    learning, batch = learner(llama, tuning), examples(tuning, 8, seed=2)
    before = finished(learning.measure(batch))
    for step in range(8):
        finished(learning.train(batch, step))
    after = finished(learning.measure(batch))
    assert after.loss is not None and before.loss is not None and after.loss < 0.9 * before.loss
    assert after.right > before.right
