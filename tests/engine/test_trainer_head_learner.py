"""A head learns: Bradley-Terry on pairs, squared error on scores, cross entropy on labels, with a LoRA or alone."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shared.adapter_files.formats import prepare
from trainer.datasets.learner import DataOptions
from trainer.heads.examples import Example, Form, Text
from trainer.heads.learner import HeadLearner, share_right
from trainer.learn.compute import finished
from trainer.learn.options import AdapterShape, HeadSettings, Schedule
from trainer.versions.checkpoint import write_adapter
from worker.engine.model.loader import LoadedModel

FORMS: list[Form] = ["pairs", "scores", "labels"]


def text(*ids: int) -> Text:
    return Text(None, "", ids)


def examples(form: Form, count: int, seed: int) -> list[Example]:
    """Texts end with one of twelve tokens: the higher, the better."""
    draw = np.random.default_rng(seed)

    def ending(with_: int) -> Text:
        return text(*draw.integers(20, 200, int(draw.integers(1, 9))).tolist(), with_)

    made = []
    for _ in range(count):
        low, high = sorted(draw.choice(12, 2, replace=False).tolist())
        if form == "pairs":
            made.append(Example((ending(high), ending(low))))
        else:
            made.append(Example((ending(high),), float(high > 6) if form == "labels" else high / 4))
    return made


def learner(llama: LoadedModel, form: Form, *, lora: bool = True, **options: Any) -> HeadLearner:
    settings = HeadSettings(head_learning_rate=3e-2, **options)
    shape = AdapterShape(rank=4) if lora else None
    made = DataOptions(Schedule(peak=3e-3), shape, 512, 1.0, 0.0, (0.9, 0.99), 0)
    return HeadLearner(llama.model, form, ("low", "high") if form == "labels" else (), 0.0, settings, made)


@pytest.mark.long
@pytest.mark.parametrize("hidden", [0, 16])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_held_out_is_ranked_after_some_steps(llama: LoadedModel, form: Form, lora: bool, hidden: int) -> None:
    learning, held_out = learner(llama, form, lora=lora, head_hidden=hidden), examples(form, 60, seed=99)
    before = {name: np.array(value) for name, value in _leaves(llama)}
    losses = [finished(learning.train(examples(form, 32, seed=step), step)).loss for step in range(30)]
    enough = 0.8 if lora else 0.7  # the random model's own states say only so much
    assert finished(learning.measure(held_out)).right >= enough and losses[-1] < losses[0]
    weights = learning.weights()
    assert any(name.endswith("lora_b") for name in weights) == lora
    assert ("heads.reward.hidden.weight" in weights) == bool(hidden)
    for name, value in _leaves(llama):
        np.testing.assert_array_equal(before[name], np.array(value))  # the base itself stands still


def _leaves(llama: LoadedModel) -> list[tuple[str, mx.array]]:
    leaves: list[tuple[str, mx.array]] = tree_flatten(llama.model.parameters())
    return leaves


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("pairs", lambda out, target: np.log1p(np.exp(out[1::2, 0] - out[0::2, 0]))),
        ("scores", lambda out, target: (out[:, 0] - target) ** 2),
        ("labels", lambda out, target: np.log(np.exp(out).sum(1)) - out[np.arange(len(out)), target.astype(int)]),
    ],
)
def test_the_loss_is_that_of_a_reference_however_the_batch_is_cut(
    llama: LoadedModel, form: Form, expected: Callable[[Any, Any], Any]
) -> None:
    learning, batch = learner(llama, form), examples(form, 16, seed=1)
    finished(learning.train(examples(form, 16, seed=2), 0))  # away from zeros
    texts = [each for example in batch for each in example.texts]
    out = np.array(finished(learning.read(texts)), np.float64)
    wanted = np.mean(expected(out, np.array([example.target for example in batch])))
    assert finished(learning.train(batch, 1)).loss == pytest.approx(float(wanted), rel=1e-4)


def test_a_published_head_is_what_the_learner_says_of_itself(llama: LoadedModel, tmp_path: Any) -> None:
    for lora, kind in ((True, "lora"), (False, "head")):
        learning = learner(llama, "labels", lora=lora, head_hidden=8, head="topic")
        folder = tmp_path / kind
        folder.mkdir()
        write_adapter(folder, learning.weights(), learning.config())
        config = (folder / "adapter_config.json").read_bytes()
        adapter = prepare(
            config, folder / "adapters.safetensors", tmp_path,
            shapes=llama.card.modules, hidden_size=llama.card.hidden_size,
        )  # fmt: skip
        assert adapter.kind == kind and adapter.heads == {"topic": learning.spec}
        assert json.loads(config)["heads"]["topic"]["labels"] == ["low", "high"]


def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(llama: LoadedModel) -> None:
    one, other = learner(llama, "pairs", head_hidden=8), learner(llama, "pairs", head_hidden=8)
    for step in range(3):
        finished(one.train(examples("pairs", 8, seed=step), step))
    other.restore(one.snapshot())
    for learning in (one, other):
        finished(learning.train(examples("pairs", 8, seed=9), 3))
    for name, value in one.weights().items():
        np.testing.assert_array_equal(other.weights()[name], value)


def test_what_the_gate_refuses_leaves_weights_and_moments_as_they_were(llama: LoadedModel) -> None:
    one, other = learner(llama, "pairs"), learner(llama, "pairs")
    for learning in (one, other):
        finished(learning.train(examples("pairs", 8, seed=1), 0))
        learning.accept()
    finished(one.train(examples("pairs", 8, seed=2), 1))
    one.revert()
    for learning in (one, other):
        finished(learning.train(examples("pairs", 8, seed=3), 2))
    for name, value in one.weights().items():
        np.testing.assert_array_equal(other.weights()[name], value)


def test_a_gradient_that_is_not_finite_changes_nothing(llama: LoadedModel) -> None:
    learning = learner(llama, "scores")
    before = learning.weights()
    report = finished(learning.train([Example((text(1, 2),), float("inf"))], 0))
    assert not report.is_finite
    for name, value in learning.weights().items():
        np.testing.assert_array_equal(before[name], value)


def test_scores_are_compared_two_by_two_without_a_table_of_all() -> None:
    draw = np.random.default_rng(1)
    wanted, said = draw.integers(0, 9, 300).astype(float), draw.integers(0, 20, 300).astype(np.float32)
    above = wanted[:, None] > wanted[None]
    expected = (said[:, None] > said[None])[above].mean()
    assert share_right("scores", said[:, None], wanted.tolist()) == pytest.approx(expected, abs=1e-12)
    tracemalloc.start()
    share_right("scores", np.arange(4000, dtype=np.float32)[:, None], list(range(4000)))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20, "16 million comparisons are 16 MB at least"
    tracemalloc.stop()


def test_how_much_is_right() -> None:
    said = np.array([[3.0], [1.0], [2.0], [4.0]], np.float32)
    assert share_right("pairs", said, [0, 0]) == 0.5
    assert share_right("scores", said, [3, 1, 1, 4]) == 1.0 and share_right("scores", said, [1, 1, 1, 1]) == 0.5
    assert share_right("labels", np.array([[0, 1], [1, 0]], np.float32), [1, 1]) == 0.5
