"""Distilling: the loss against numpy, gradients by differences, runs that come nearer to their teacher and resume."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.errors import SetupError
from tests.engine.test_tuning_learner import OPTIONS, SHAPE, examples, random_weights
from tests.engine.test_tuning_runs import lines, settings
from tests.training.in_process import MemorySink
from tests.training.run import in_process_ring
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import finished
from trainer.learn.divergence import UNKNOWN, divergence, divergences
from trainer.learn.policy import Policy
from trainer.learners.distilling import DistillLearner, ScoredRow
from trainer.ring.http_client import HttpApi
from trainer.ring.join import Way
from trainer.runs.distillation.distilling import DistillRun
from trainer.settings import TrainSettings
from trainer.state import RunState

TOP_K = 6
Floats = npt.NDArray[np.float64]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def wanted_divergence(student: Floats, ids: npt.NDArray[np.int64], teacher: Floats) -> Floats:
    """In fp64, of log-probabilities [N, V] and the teacher's [N, K]."""
    q, p = np.exp(np.take_along_axis(student, ids, -1)), np.exp(teacher)
    p_rest, q_rest = 1 - p.sum(-1), 1 - q.sum(-1)
    return np.asarray((p * (teacher - np.log(q))).sum(-1) + p_rest * (np.log(p_rest) - np.log(q_rest)))


def drawn_scores(count: int, vocabulary: int, seed: int) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    """Logits of a student, a teacher's likeliest tokens and their log-probabilities."""
    draw = np.random.default_rng(seed)
    teacher = log_softmax(2 * draw.standard_normal((count, vocabulary)))
    ids = np.argsort(-teacher, axis=-1)[:, :TOP_K]
    return 2 * draw.standard_normal((count, vocabulary)), ids, np.take_along_axis(teacher, ids, -1)


def test_the_loss_is_the_divergence_over_the_teachers_tokens_and_the_rest() -> None:
    logits, ids, teacher = drawn_scores(9, 40, seed=1)
    told = np.array(divergence(mx.array(logits), mx.array(ids), mx.array(teacher)))
    assert np.allclose(told, wanted_divergence(log_softmax(logits), ids, teacher), rtol=0, atol=1e-5)
    filled = (np.pad(each, ((0, 0), (0, 2)), constant_values=fill) for each, fill in ((ids, 0), (teacher, UNKNOWN)))
    assert np.allclose(np.array(divergence(mx.array(logits), *map(mx.array, filled))), told, rtol=0, atol=1e-6)
    itself = np.full((9, 40), -np.log(40))
    even = np.take_along_axis(itself, ids, -1)
    assert np.allclose(np.array(divergence(mx.array(itself), mx.array(ids), mx.array(even))), 0, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences_whole_and_in_chunks() -> None:
    _, ids, teacher = drawn_scores(7, 30, seed=2)
    draw = np.random.default_rng(3)
    weights, hidden = draw.standard_normal((5, 30)), draw.standard_normal((7, 5))

    def loss(hidden_NH: mx.array, chunk: int) -> mx.array:
        head = mx.array(weights.astype(np.float32))
        return divergences(lambda x: x @ head, hidden_NH, mx.array(ids), mx.array(teacher), chunk).sum()

    given = mx.array(hidden.astype(np.float32))
    gradients = [np.array(mx.grad(loss)(given, chunk)) for chunk in (0, 3)]
    assert np.allclose(*gradients, rtol=0, atol=1e-5)
    for at in np.ndindex(*hidden.shape):
        values = []
        for step in (1e-6, -1e-6):
            moved = hidden.copy()
            moved[at] += step
            values.append(wanted_divergence(log_softmax(moved @ weights), ids, teacher).sum())
        assert gradients[0][at] == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-5)


def score(model: Any, items: Sequence[SampleGroup], teacher: str = "t@1") -> list[ScoredRow]:
    """What the ring would say of rows."""
    rows = []
    for item in items:
        (sample,) = item.samples
        ids = [*item.prompt_ids, *sample.completion_ids]
        logits = np.array(model(mx.array([ids[:-1]])).astype(mx.float32), np.float64)[0]
        logps = log_softmax(logits)[len(item.prompt_ids) - 1 :][np.array(sample.mask)]
        top = np.argsort(-logps, axis=-1)[:, :TOP_K]
        tops = tuple(map(tuple, top.tolist())), tuple(map(tuple, np.take_along_axis(logps, top, -1).tolist()))
        rows.append(ScoredRow(teacher, item.prompt_ids, sample.completion_ids, sample.mask, *tops))
    return rows


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"microbatch_tokens": 1}, {"checkpoint_layers": True}])
def test_a_learner_measures_and_learns_by_what_the_teacher_says_of_tokens_that_count(
    llama: LoadedModel, options: dict[str, Any]
) -> None:
    teaching = DistillLearner(llama.model, SHAPE, OPTIONS)
    teaching.begin_with(random_weights(teaching, 8))
    batch = score(teaching.policy.model, examples("sft", 8, seed=4))
    learning = DistillLearner(llama.model, SHAPE, replace(OPTIONS, **options))
    wanted, alike = [], []
    for row in batch:
        ids = [*row.prompt_ids, *row.completion_ids]
        logits = np.array(learning.policy.model(mx.array([ids[:-1]])), np.float64)[0]
        at = np.flatnonzero(row.counts) + len(row.prompt_ids) - 1
        wanted.append(wanted_divergence(log_softmax(logits[at]), np.array(row.top_ids), np.array(row.top_logprobs)))
        alike += (logits[at].argmax(-1) == np.array(row.top_ids)[:, 0]).tolist()
    measured, report = finished(learning.measure(batch)), finished(learning.train(batch, 0))
    assert measured.loss == pytest.approx(np.concatenate(wanted).mean(), abs=1e-5) == report.loss
    assert (measured.right, report.tokens) == (pytest.approx(np.mean(alike)), len(alike))
    for step in range(1, 15):
        finished(learning.train(batch, step))
    after = finished(learning.measure(batch))
    assert after.loss is not None and measured.loss is not None and after.loss < measured.loss / 2
    assert len(tree_flatten(learning.weights())) == len(learning.shapes)


async def distilled(run: TrainSettings) -> tuple[RunState, MemorySink]:
    sink = MemorySink(run.adapter)
    run.check()
    async with in_process_ring(run, sink) as (host, loaded, ring):
        distilling = DistillRun(run, host, Way(None, None), ring)  # type: ignore[arg-type]  (it asks no judge)
        await distilling.start(loaded)
        return await distilling.run(), sink


@pytest.mark.long
async def test_a_student_comes_nearer_to_its_teacher_whose_scores_are_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    tiny = load_model(EngineConfig("models/tiny"))
    teacher = Policy(tiny.model, SHAPE)
    draw = np.random.default_rng(1)
    teacher.load(
        {
            name: (draw.standard_normal(value.shape) / 12).astype(np.float32)
            for name, value in sorted(teacher.weights().items())
        }
    )

    async def scored(api: HttpApi, name: str, top_k: int, rows: Sequence[SampleGroup], tokenizer: str) -> Any:
        nonlocal asked
        asked += 1
        assert tokenizer == tiny.card.tokenizer_sha256
        return [beyond(row, top_k) for row in score(teacher.model, rows, name)]

    def beyond(row: ScoredRow, top_k: int) -> ScoredRow:
        ids = tuple((tiny.card.vocab_size, *each) for each in row.top_ids)
        logprobs = tuple((-0.01, *each) for each in row.top_logprobs)
        return msgspec.structs.replace(row, top_ids=ids, top_logprobs=logprobs, top_k=top_k)

    monkeypatch.setattr("trainer.runs.distillation.distilling.scored", scored)
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    asking: dict[str, Any] = {"mode": "distill", "teacher": "t@1", "connect_to": "127.0.0.1:1", "steps": 12}
    run = settings(tmp_path / "whole", **asking, evaluate_every=6)
    await distilled(run)
    told = lines(run)
    assert told[-1]["held_out_loss"] < 0.6 * told[0]["held_out_loss"], told
    pieces = [settings(tmp_path / "pieces", **asking | {"steps": steps}, evaluate_every=6) for steps in (6, 12)]
    for piece in pieces:
        await distilled(piece)
    assert asked == 2, "the second piece went on with the scores that it had"
    file = "checkpoints/step-000012/adapters.safetensors"
    assert (run.folder / file).read_bytes() == (pieces[1].folder / file).read_bytes()
    with pytest.raises(SetupError, match="holds a run whose teacher is t@1"):
        await distilled(settings(tmp_path / "pieces", **asking | {"teacher": "t@2"}))
    with pytest.raises(SetupError, match="holds a run with --teacher-top-k 20"):
        await distilled(settings(tmp_path / "pieces", **asking | {"teacher_top_k": 3}))
    assert run.dataset is not None
    other = tmp_path / "other.jsonl"
    other.write_bytes(b"".join(run.dataset.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(SetupError, match="scores of other rows than those of"):
        await distilled(pieces[1].model_copy(update={"dataset": other}))
    (pieces[1].folder / "teacher.jsonl").unlink()
    with pytest.raises(SetupError, match="holds a run without a teacher"):
        await distilled(pieces[1])


async def test_held_out_rows_may_be_a_data_set_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = load_model(EngineConfig("models/tiny"))

    async def scored(api: HttpApi, name: str, top_k: int, rows: Sequence[SampleGroup], tokenizer: str) -> Any:
        return score(tiny.model, rows, name)

    monkeypatch.setattr("trainer.runs.distillation.distilling.scored", scored)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    run = settings(tmp_path, mode="distill", teacher="t@1", connect_to="b:1", steps=1, held_out_dataset=other)
    await distilled(run)
    rows = (run.folder / "teacher.jsonl").read_bytes().splitlines()
    assert [b'"held_out":true' in row for row in rows] == [False] * 40 + [True]
    assert lines(run)[0]["held_out_right"] == 1.0, "the base is its own teacher"
