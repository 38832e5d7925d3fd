"""Processed log-probabilities are those of the very distribution that a token was drawn from, and a trainer's ratio on
them is 1 where sampler and trainer have the same weights.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent, TokenLogprob
from shared.sequences import SamplingParams, SequenceSpec, Timings
from shared.trajectories import Drawing, Reward, Trajectory, result_of, trajectory_of
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.test_sampling import params, reference, row_of
from trainer.learn.batches import pad, sample_groups
from trainer.learn.drawing import positions_of, rows_of, uncorrected
from trainer.learn.logprobs import TokenScores, from_logits, row_scores, shared_scores, to_arrays, token_scores
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy
from trainer.rollouts.groups import RolloutGroup
from worker.engine.batch.sampler import _Plan

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 7},
    {"top_p": 0.9},
    {"min_p": 0.05, "top_p": 0.9, "top_k": 30, "temperature": 1.3},
    {"logit_bias": {4: 6.0, 0: -100.0}, "temperature": 0.7},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_p": 0.8},
    {"min_tokens": 6, "stop_token_ids": (3, 4)},
]


def reported(logits_BV: np.ndarray, samplings: list[SamplingParams]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B] and reported log-probabilities [B, V] of one step."""
    rows, vocab = tuple(map(row_of, samplings)), logits_BV.shape[1]
    plan, logits = _Plan(rows, vocab, 16), mx.array(logits_BV.astype(np.float32))
    tokens_B = plan.draw(logits, mx.zeros((len(rows), 1), mx.uint32))
    return np.array(tokens_B), np.array(plan.reported.of(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))


@pytest.mark.parametrize("vocab", [50, 2048])
def test_processed_logprobs_equal_a_numpy_reference(vocab: int) -> None:
    """All kinds of rows in one batch, each beside a twin that wants the model's own."""
    rng = np.random.default_rng(3)
    processed = [params(**s, logprobs_mode="processed_logprobs", seed=i) for i, s in enumerate(SAMPLINGS)]
    raw = [params(**s, seed=i) for i, s in enumerate(SAMPLINGS)]
    logits_BV = np.repeat(rng.normal(size=(len(SAMPLINGS), vocab)) * 3, 2, axis=0)
    each = [s for pair in zip(processed, raw, strict=True) for s in pair]
    tokens_B, logprobs_BV = reported(logits_BV, each)
    for at, (s, logits_V) in enumerate(zip(each, logits_BV, strict=True)):
        wanted_V = reference(logits_V, params() if at % 2 else s)
        possible = wanted_V > 1e-30
        assert np.allclose(logprobs_BV[at][possible], np.log(wanted_V[possible]), atol=2e-4), s
        assert (logprobs_BV[at][~possible] < -60).all()
        assert possible[tokens_B[at]]
    assert tokens_B[::2].tolist() == tokens_B[1::2].tolist(), "what is reported changes nothing that is drawn"


@pytest.mark.parametrize("beside", [[], [params(temperature=0.8)]])
def test_a_greedy_row_reports_its_edited_logits(beside: list[SamplingParams]) -> None:
    """It draws from nothing, so temperature and filters mean nothing either; the same in vLLM."""
    greedy = params(temperature=0.0, top_k=2, presence_penalty=1.0, logprobs_mode="processed_logprobs")
    logits_BV = np.random.default_rng(4).normal(size=(1 + len(beside), 50))
    _, logprobs_BV = reported(logits_BV, [greedy, *beside])
    assert np.allclose(logprobs_BV[0], np.log(reference(logits_BV[0], params(presence_penalty=1.0))), atol=1e-4)


def test_a_batch_without_such_rows_computes_nothing_more() -> None:
    logits = mx.zeros((2, 50))
    plan = _Plan((row_of(params()), row_of(params(temperature=0.5, top_p=0.5))), 50, 16)
    plan.draw(logits, mx.zeros((2, 1), mx.uint32))
    assert plan.reported.of(logits) is logits


def sampled(loaded: LoadedModel, **sampling: Any) -> list[Trajectory]:
    """Eight samples of one prompt, from the engine itself."""
    bench, prompt = Bench(loaded), prompt_of(7)
    specs = [spec(str(seed), prompt, max_tokens=8, seed=seed, top_logprobs=3, **sampling) for seed in range(8)]
    bench.submit(*specs)
    bench.run()
    return [_trajectory(each, bench.events[each.id], at) for at, each in enumerate(specs)]


def _trajectory(of: SequenceSpec, events: list[TokenEvent], sample: int) -> Trajectory:
    result = result_of(of, 1, "w", events, Timings())
    trajectory = trajectory_of(of, result, "", sample, {}, Reward("r", float(sample % 2)))
    tops = [top for event in events for top in event.top_logprobs or []]
    for token, logprob, top in zip(trajectory.completion_ids, trajectory.logprobs, tops, strict=True):
        assert TokenLogprob(token, pytest.approx(logprob)) in top or logprob <= top[-1].logprob
    return trajectory


def ratios(loaded: LoadedModel, trajectories: list[Trajectory], *, shared: bool = True) -> np.ndarray:
    """pi / mu of each token, by the trainer's own code, with the weights that sampled them."""
    group = RolloutGroup("g", 0, tuple(trajectories))
    groups, _ = sample_groups([group], {}, mask_overlong=False)
    batch = pad(groups)
    model = Policy(loaded.model, AdapterShape(rank=2)).model
    logp_BT = np.array((shared_scores if shared else row_scores)(model, to_arrays(batch), chunk=5).logp_BT)
    return np.asarray(np.exp(logp_BT - batch.sampler_BT)[batch.mask_BT])


@pytest.mark.long
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.6}, {"temperature": 1.4}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 1.5, "min_p": 0.1}],
    ids=str,
)
def test_the_ratio_at_zero_lag_is_1_with_the_samplers_own_logprobs(
    llama: LoadedModel, sampling: dict[str, Any], shared: bool
) -> None:
    sampling = {"temperature": 1.0} | sampling
    own = sampled(llama, **sampling, logprobs_mode="processed_logprobs")
    assert not any(map(uncorrected, own))
    assert np.allclose(ratios(llama, own, shared=shared), 1, atol=2e-3)
    # Without: the tempered policy against the model's own log-probabilities, and the other way round.
    raw = sampled(llama, **sampling)
    assert [t.completion_ids for t in raw] == [t.completion_ids for t in own]
    assert all("processed_logprobs" in uncorrected(t) for t in raw)
    mixed = [_with(t, logprobs=r.logprobs) for t, r in zip(own, raw, strict=True)]
    assert np.abs(ratios(llama, mixed, shared=shared) - 1).mean() > 0.05
    mixed = [_with(r, logprobs=t.logprobs) for t, r in zip(own, raw, strict=True)]
    assert np.abs(ratios(llama, mixed, shared=shared) - 1).mean() > 0.05


def _with(trajectory: Trajectory, **changes: Any) -> Trajectory:
    fields = {name: getattr(trajectory, name) for name in trajectory.__struct_fields__}
    return Trajectory(**(fields | changes))


def test_samples_drawn_in_different_ways_share_a_microbatch(llama: LoadedModel) -> None:
    ways: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.7}]
    each = [sampled(llama, **way, logprobs_mode="processed_logprobs")[:3] for way in ways]
    assert [group[0].drawn for group in each] == [None, Drawing(temperature=0.5), Drawing(top_p=0.7)]
    assert np.allclose(ratios(llama, [t for group in each for t in group]), 1, atol=2e-3)


def test_scores_of_filtered_distributions_are_the_same_in_chunks_and_have_gradients() -> None:
    rng = np.random.default_rng(5)
    hidden, targets = mx.array(rng.normal(size=(3, 4, 20)).astype(np.float32)), mx.array(rng.integers(0, 20, (3, 4)))
    drawn = positions_of(rows_of([Drawing(0.5, top_k=3), None, Drawing(2.0, top_p=0.6, min_p=0.1)]), (3, 4))
    whole = TokenScores(*from_logits(hidden, targets, drawn=drawn))
    parts = token_scores(lambda h: h, hidden, targets, 5, drawn=drawn)
    for a, b in ((whole.logp_BT, parts.logp_BT), (whole.entropy_BT, parts.entropy_BT)):
        assert mx.allclose(a, b, atol=1e-6)

    def loss(h: mx.array) -> mx.array:
        scores = token_scores(lambda x: x, h, targets, 5, drawn=drawn)
        return scores.logp_BT.sum() + scores.entropy_BT.sum()

    assert np.isfinite(np.array(mx.grad(loss)(hidden))).all()
    assert bool((whole.logp_BT <= 0).all()), "the drawn token is always among those that are kept"


def test_what_is_not_corrected_says_why() -> None:
    def drawn(mode: Any = "processed_logprobs", **how: Any) -> Trajectory:
        return Trajectory(0, 0, (1,), (2,), "", (-1.0,), "stop", logprobs_mode=mode, drawn=Drawing(**how))

    assert uncorrected(drawn(temperature=0.0)) == "decoded greedily"
    assert "penalties" in uncorrected(drawn(edited=True))
    assert "processed_logprobs" in uncorrected(drawn("raw_logprobs", top_p=0.5))
    assert uncorrected(drawn(top_p=0.5)) == ""
