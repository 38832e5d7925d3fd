"""A head learns: Bradley-Terry on pairs, squared error on scores, likelihood of labels and actions; LoRA or none."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_model.loader import LoadedModel
from shared.adapter_files.formats import prepare
from trainer.learn.compute import finished
from trainer.learn.options import AdapterShape, HeadSettings, Schedule
from trainer.learners.data import DataOptions
from trainer.learners.head_examples import ActionSpread, Form, HeadExample, HeadText, spread_of
from trainer.learners.heads import BLUR, HeadLearner, share_right
from trainer.versions.checkpoint import write_adapter

FORMS: list[Form] = ["pairs", "scores", "labels", "actions", "vectors"]


def text(*ids: int) -> HeadText:
    return HeadText(None, "", ids)


def examples(form: Form, count: int, seed: int) -> list[HeadExample]:
    """Texts end with one of twelve tokens: the higher, the better."""
    draw = np.random.default_rng(seed)

    def ending(with_: int) -> HeadText:
        return text(*draw.integers(20, 200, int(draw.integers(1, 9))).tolist(), with_)

    made = []
    for _ in range(count):
        low, high = sorted(draw.choice(12, 2, replace=False).tolist())
        if form == "pairs":
            made.append(HeadExample((ending(high), ending(low))))
        elif form == "vectors":
            made.append(
                HeadExample((ending(high),), action=(high / 4, 3000.0 - 100 * high), weight=draw.uniform(0.5, 2))
            )
        else:
            target = float(high > 6) if form in ("labels", "actions") else high / 4
            made.append(HeadExample((ending(high),), target, weight=2.0 if form == "actions" else 1.0))
    return made


SPREAD = spread_of(examples("vectors", 200, seed=7))


def learner(llama: LoadedModel, form: Form, *, lora: bool = True, **options: Any) -> HeadLearner:
    settings = HeadSettings(head_learning_rate=3e-2, **options)
    shape = AdapterShape(rank=4) if lora else None
    made = DataOptions(Schedule(peak=3e-3), shape, 512, 1.0, 0.0, (0.9, 0.99), 0)
    start = SPREAD if form == "vectors" else 0.0
    return HeadLearner(
        llama.model, form, ("low", "high") if form in ("labels", "actions") else (), start, settings, made
    )


@pytest.mark.long
@pytest.mark.parametrize("hidden", [0, 16])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_held_out_is_ranked_after_some_steps(llama: LoadedModel, form: Form, lora: bool, hidden: int) -> None:
    learning, held_out = learner(llama, form, lora=lora, head_hidden=hidden), examples(form, 60, seed=99)
    before = {name: np.array(value) for name, value in _leaves(llama)}
    losses = [finished(learning.train(examples(form, 32, seed=step), step)).loss for step in range(30)]
    enough = 0.8 if lora else 0.7  # the random model's own states say only so much
    if form == "vectors":  # a share of the variance, not of what is right
        enough -= 0.25
    assert finished(learning.measure(held_out)).right >= enough and losses[-1] < losses[0]
    weights = learning.weights()
    assert any(name.endswith("lora_b") for name in weights) == lora
    assert (f"heads.{learning.name}.hidden.weight" in weights) == bool(hidden)
    assert learning.name == ("policy" if form in ("actions", "vectors") else "reward")
    for name, value in _leaves(llama):
        np.testing.assert_array_equal(before[name], np.array(value))  # the base itself stands still


def _leaves(llama: LoadedModel) -> list[tuple[str, mx.array]]:
    leaves: list[tuple[str, mx.array]] = tree_flatten(llama.model.parameters())
    return leaves


def _surprise(out: Any, actions: Any) -> Any:
    """Of actions that are known up to a normal error of BLUR deviations, in nats of these."""
    stds = np.array(SPREAD.stds)
    z2 = ((actions - out[:, :2]) ** 2 + (BLUR * stds) ** 2) / np.exp(2 * out[:, 2:])
    return (0.5 * z2 + out[:, 2:] - np.log(stds) + 0.5 * np.log(2 * np.pi)).sum(1)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("actions", lambda out, target: np.log(np.exp(out).sum(1)) - out[np.arange(len(out)), target.astype(int)]),
        ("vectors", _surprise),
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
    targets = np.array([example.action or example.target for example in batch])
    wanted = np.mean(np.array([example.weight for example in batch]) * expected(out, targets))
    assert finished(learning.train(batch, 1)).loss == pytest.approx(float(wanted), rel=1e-4)


def test_a_published_head_is_what_the_learner_says_of_itself(llama: LoadedModel, tmp_path: Any) -> None:
    for lora, kind in ((True, "lora"), (False, "head")):
        form: Form = "labels" if lora else "vectors"
        learning = learner(llama, form, lora=lora, head_hidden=8, head="topic")
        folder = tmp_path / kind
        folder.mkdir()
        write_adapter(folder, learning.weights(), learning.config())
        config = (folder / "adapter_config.json").read_bytes()
        adapter = prepare(
            config, folder / "adapters.safetensors", tmp_path,
            shapes=llama.card.modules, hidden_size=llama.card.hidden_size,
        )  # fmt: skip
        assert adapter.kind == kind and adapter.heads == {"topic": learning.spec}
        described = json.loads(config)["heads"]["topic"]
        assert described.get("labels") == ["low", "high"] if lora else described["size"] == 2


def test_actions_that_are_always_the_same_make_no_spread_of_nothing(llama: LoadedModel) -> None:
    always = [HeadExample((text(1, 2, at),), action=(5.0, 5.0)) for at in range(20, 30)]
    assert spread_of(always) == ActionSpread((5.0, 5.0), (1.0, 1.0))
    learning = learner(llama, "vectors", lora=False)
    for step in range(60):
        assert finished(learning.train(always, step)).is_finite
    measured = finished(learning.measure(always))
    (said,) = finished(learning.read([always[0].texts[0]]))
    least = np.log(BLUR) + np.log(SPREAD.stds)
    assert np.isfinite(said).all() and (np.array(said[2:]) > least - 0.5).all()
    assert measured.loss is not None and 0 <= measured.right <= 1


@pytest.mark.parametrize(
    ("numbers", "std"),
    [
        ([0.1] * 60, 1.0),  # whose mean rounding moves away from them
        ([0.0, 1e-50], 1.0),
        ([1000.0, 1000.0 + 1e-5], 1.0),
        ([1.5e9, 1.5e9 + 1.0], 1.5e9 / 2**16),
        ([1e-20, 3e-20], 1e-20),
    ],
)
def test_a_spread_is_one_that_float32_can_tell(numbers: list[float], std: float) -> None:
    spread = spread_of([HeadExample((text(1),), action=(number,)) for number in numbers])
    assert spread.stds == pytest.approx((std,)) and np.log(spread.scale).min() > -np.inf
    step_N = np.spacing(np.float32(spread.means[0])) / spread.scale[:1]
    assert (step_N < 0.01).all(), "what a worker rounds is far below a deviation"


def test_of_actions_the_share_is_by_weight(llama: LoadedModel) -> None:
    learning = learner(llama, "actions")  # it holds the first one for as likely as the other
    heavy, light = HeadExample((text(1),), 0.0, weight=3.0), HeadExample((text(2),), 1.0)
    assert finished(learning.measure([heavy, light])) == pytest.approx((0.75, np.log(2), None))
    vectors = learner(llama, "vectors")
    (mean, other, *_) = finished(vectors.read([text(1)]))[0]
    exact, wrong = (HeadExample((text(1),), action=(mean + error, other)) for error in (0.0, SPREAD.stds[0]))
    assert finished(vectors.measure([exact])).right == pytest.approx(1.0)
    assert finished(vectors.measure([exact, wrong])).right == pytest.approx(0.75, abs=1e-4)


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
    report = finished(learning.train([HeadExample((text(1, 2),), float("inf"))], 0))
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
