from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_model.loader import LoadedModel
from trainer.learn import adam as adam_module
from trainer.learn import gate, optimize
from trainer.learn.adam import AdamSteps, StepSizes
from trainer.learn.batches import Sample, SampleGroup, pad
from trainer.learn.compute import at_once
from trainer.learn.gate import GateLimits
from trainer.learn.logprobs import shared_scores, to_arrays
from trainer.learn.losses import LOSSES
from trainer.learn.measures import measure_probe_kl
from trainer.learn.optimize import Optimizer
from trainer.learn.options import AdapterShape, LossName, LossOptions, OptimizeOptions, RatioBase, Schedule
from trainer.learn.policy import Policy
from trainer.learn.prompt_kv import PromptKeys
from trainer.learn.steps import StepReport
from trainer.learners.policy import PolicyLearner, Trained
from trainer.state import Arrays, GradientMeans

OPTIONS = OptimizeOptions(schedule=Schedule(peak=1e-3), microbatch_tokens=64, max_completion=8, distances_every=0)


def finish(work: Any) -> Any:
    """Run a piece of work to its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def groups_of(policy: Policy, seed: int = 0) -> list[SampleGroup]:
    """Three groups of four samples whose sampler is the policy itself: reward 1 for low token ids."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(3):
        prompt = tuple(int(i) for i in rng.integers(0, 250, 4 + number))
        completions = [tuple(int(i) for i in rng.integers(0, 250, 1 + s)) for s in range(4)]
        blank = [Sample(ids, (0.0,) * len(ids), (True,) * len(ids), (0,) * len(ids), 0.0) for ids in completions]
        batch = pad([SampleGroup("", prompt, tuple(blank))])
        logp_BT = np.array(shared_scores(policy.model, to_arrays(batch)).logp_BT)
        samples = [
            replace(s, sampler_logprobs=tuple(logp_BT[row, : len(s.mask)].tolist()), advantage=0.5 - row % 2)
            for row, s in enumerate(blank)
        ]
        groups.append(SampleGroup(str(number), prompt, tuple(samples)))
    return groups


@pytest.fixture
def policy(llama: LoadedModel) -> Policy:
    return Policy(llama.model, AdapterShape(rank=4), seed=1)


def likelihood(policy: Policy, groups: Sequence[SampleGroup]) -> float:
    """sum A log pi: what a policy gradient climbs."""
    x = to_arrays(pad(groups))
    logp_BT = mx.where(x.mask_BT, shared_scores(policy.model, x).logp_BT, 0.0)
    return float((logp_BT * x.advantage_B[:, None]).sum())


@pytest.mark.long
@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_train_step_makes_good_samples_likelier(policy: Policy, name: LossName, minibatches: int) -> None:
    options = replace(OPTIONS, loss=LossOptions(name), minibatches=minibatches)
    optimizer, groups = Optimizer(policy, options), groups_of(policy)
    before = likelihood(policy, groups)
    reports = [finish(optimizer.train_step(groups, step)) for step in range(3)]
    assert likelihood(policy, groups) > before
    assert all(report.updated for report in reports)
    if name not in ("gspo", "cispo") and minibatches == 1:
        # On the first step every ratio is 1; then the surrogate falls on the fixed batch.
        assert reports[2].loss < reports[1].loss < reports[0].loss


def test_gradients_do_not_depend_on_how_the_batch_is_cut(llama: LoadedModel) -> None:
    results = []
    for tokens in (8, 30, 10_000):
        policy = Policy(llama.model, AdapterShape(rank=4), seed=1)
        optimizer = Optimizer(policy, replace(OPTIONS, microbatch_tokens=tokens))
        groups = groups_of(policy)
        work, parts = optimizer.train_step(groups, 0), 0
        while True:
            try:
                next(work)
                parts += 1
            except StopIteration as end:
                results.append((parts, end.value, policy.weights()))
                break
    assert [parts for parts, _, _ in results] == sorted((parts for parts, _, _ in results), reverse=True)
    assert results[0][0] > results[2][0]
    for _, report, weights in results[1:]:
        assert report.grad_norm == pytest.approx(results[0][1].grad_norm, rel=1e-3)
        assert report.loss == pytest.approx(results[0][1].loss, abs=1e-5)
        for name, value in weights.items():
            # Adam's first step is the sign of the gradient: where that is all but zero, rounding decides.
            assert np.mean(np.abs(value - results[0][2][name]) > 1e-4) < 0.01


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_rows_that_fill_up_change_no_gradient(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: LossName
) -> None:
    steps = []
    for cuda in (False, True):
        monkeypatch.setattr(optimize, "on_cuda", lambda cuda=cuda: cuda)
        policy = Policy(llama.model, AdapterShape(rank=4), seed=1)
        groups = groups_of(policy)
        groups[0] = replace(groups[0], samples=groups[0].samples[:3])  # 11 rows, which become 12
        options = replace(OPTIONS, loss=LossOptions(name, kl_coefficient=0.1, entropy_bonus=0.1))
        steps.append(finish(Optimizer(policy, options).train_step(groups, 0)))
    plain, filled = steps
    assert filled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-3)
    assert (filled.loss, filled.entropy) == pytest.approx((plain.loss, plain.entropy), rel=1e-3)


def test_probes_of_many_lengths_diverge_together_as_one_by_one(policy: Policy) -> None:
    origin, prompts = policy.weights(), [(1, 2, 3), (4,), tuple(range(5, 80))]
    finish(Optimizer(policy, OPTIONS).train_step(groups_of(policy), 0))
    together = finish(measure_probe_kl(policy, (origin, None), prompts))
    each = [finish(measure_probe_kl(policy, (origin, None), [prompt])) for prompt in prompts]
    assert together == pytest.approx(np.mean(each, axis=0).tolist(), rel=1e-3) and min(together) > 0
    assert finish(measure_probe_kl(policy, (origin,), [])) == [0.0]


def test_padding_is_seen_by_itself_alone() -> None:
    """A query that sees nothing makes gradients that are not finite on CUDA."""
    keys = PromptKeys(mx.array([0, 3]))
    mask_BLL = np.array(keys.make_mask(5))[:, 0]
    assert mask_BLL.any(axis=-1).all()
    assert (mask_BLL[0] == np.tri(5, dtype=bool)).all()
    assert not mask_BLL[1, 3:, :3].any() and (mask_BLL[1, 3:, 3:] == np.tri(2, dtype=bool)).all()
    keys.update_and_fetch(mx.zeros((2, 1, 5, 4)), mx.zeros((2, 1, 5, 4)))
    behind_BTL = np.array(keys.make_mask(2))[:, 0]
    assert (
        behind_BTL == np.array([[[1] * 6 + [0], [1] * 7], [[0] * 3 + [1] * 3 + [0], [0] * 3 + [1] * 4]], bool)
    ).all()


def test_kl_to_the_base_is_zero_at_the_start_and_grows(policy: Policy) -> None:
    optimizer = Optimizer(policy, replace(OPTIONS, loss=LossOptions(kl_coefficient=0.1)))
    groups = groups_of(policy)
    kls = [finish(optimizer.train_step(groups, step)).kl for step in range(3)]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert 0 < kls[1] < kls[2]


def test_a_strong_kl_holds_the_policy_near_the_base(llama: LoadedModel) -> None:
    moved = []
    for beta in (0.0, 50.0):
        policy = Policy(llama.model, AdapterShape(rank=4), seed=1)
        optimizer, groups = Optimizer(policy, replace(OPTIONS, loss=LossOptions(kl_coefficient=beta))), None
        groups = groups_of(policy)
        for step in range(8):
            finish(optimizer.train_step(groups, step))
        x = to_arrays(pad(groups))
        d = shared_scores(policy.model, x).logp_BT - shared_scores(policy.base, x).logp_BT
        moved.append(float(mx.where(x.mask_BT, mx.abs(d), 0.0).sum()))
    assert moved[1] < moved[0] / 2


def test_an_entropy_bonus_raises_entropy(llama: LoadedModel) -> None:
    entropies = []
    for bonus in (0.0, 1.0):
        policy = Policy(llama.model, AdapterShape(rank=4), seed=1)
        optimizer = Optimizer(policy, replace(OPTIONS, loss=LossOptions(entropy_bonus=bonus)))
        groups = groups_of(policy)
        entropies.append([finish(optimizer.train_step(groups, step)).entropy for step in range(4)][-1])
    assert entropies[1] > entropies[0]


def test_a_gradient_that_is_not_finite_changes_nothing(policy: Policy) -> None:
    optimizer = Optimizer(policy, OPTIONS)
    groups = groups_of(policy)
    bad = replace(groups[0].samples[0], advantage=float("inf"))
    groups[0] = replace(groups[0], samples=(bad, *groups[0].samples[1:]))
    before, moments = policy.weights(), optimizer.adam.moments()
    report: StepReport = finish(optimizer.train_step(groups, 0))
    assert not report.updated and report.nonfinite_gradients == 1
    assert all(np.array_equal(value, before[name]) for name, value in policy.weights().items())
    assert all(np.array_equal(value, moments[name]) for name, value in optimizer.adam.moments().items())


@pytest.mark.parametrize("apart", [None, lambda name: name.startswith("heads.")])
def test_moments_of_any_age_say_the_same_of_the_same_gradient(apart: Callable[[str], bool] | None) -> None:
    def learned(updates: int, by: float) -> AdamSteps:
        model = nn.Module()
        model.layers, model.heads = [nn.Linear(2, 3), nn.Linear(3, 1)], {"value": nn.Linear(3, 1)}
        adam = AdamSteps(model, apart)
        for _ in range(updates):
            gradient = tree_map(lambda value: mx.full(value.shape, by), model.trainable_parameters())
            adam.update(gradient, StepSizes(1e-3, betas, apart_rate=1e-2))
        return adam

    betas = (0.9, 0.99)
    assert learned(0, 0.5).means(betas) == GradientMeans()
    young, old, other = learned(1, 0.5), learned(30, 0.5), learned(30, -2.0)
    for adam in (young, old):
        means = adam.means(betas)
        assert means.first.keys() == means.second.keys() >= {"layers.0.weight", "heads.value.bias"}
        assert all(value == pytest.approx(0.5, rel=1e-5) for value in means.first.values())
        assert all(value == pytest.approx(0.25, rel=1e-5) for value in means.second.values())
    other.take_means(young.means(betas), betas)
    expected = old.moments()
    assert all(value == pytest.approx(expected[name], rel=1e-5) for name, value in other.moments().items())


def test_a_compiled_update_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that would not be finite changes nothing, and the next one goes on as if it had not been."""

    def learned() -> tuple[list[bool], dict[str, Any], int]:
        mx.random.seed(1)
        model = nn.Linear(2, 3)
        adam = AdamSteps(model, lambda name: name == "bias", are_constant=True)
        made = []
        for at, by in enumerate((0.5, float("nan"), -2.0)):
            before, gradient = adam.moments(), tree_map(lambda value, by=by: value * by, model.trainable_parameters())
            made.append(adam.update(gradient, StepSizes(1e-2 * (at + 1), (0.9, 0.99), 0.1, 1e-8, 0.3, 1e-3))[1])
            if not made[-1]:
                assert all(np.array_equal(value, before[name]) for name, value in adam.moments().items())
        return made, {**model.parameters(), **adam.moments()}, adam.count

    plain = learned()
    monkeypatch.setattr(adam_module, "on_cpu", lambda: False)
    compiled = learned()
    assert plain[0] == compiled[0] == [True, False, True]
    assert plain[2] == compiled[2] == 2
    for name, value in plain[1].items():
        assert np.allclose(compiled[1][name], value, rtol=1e-6, atol=0), name


def test_mismatch_and_staleness_are_told_apart(policy: Policy) -> None:
    """A sampler that rounds differently is mismatch; a policy that has learned since is staleness."""
    optimizer = Optimizer(policy, replace(OPTIONS, distances_every=1))
    groups = groups_of(policy)  # sampled at policy step 0
    old = policy.weights()
    first: StepReport = finish(optimizer.train_step(groups, 0, policy_step=0))
    assert first.distances is not None
    assert first.distances.mismatch_max < 1e-4 and first.distances.staleness_max == 0
    off = [
        replace(
            g, samples=tuple(replace(s, sampler_logprobs=tuple(v + 0.3 for v in s.sampler_logprobs)) for s in g.samples)
        )
        for g in groups
    ]
    later: StepReport = finish(optimizer.train_step(off, 1, policy_step=1, older={0: old}))
    assert later.distances is not None
    assert later.distances.mismatch_mean == pytest.approx(0.3, abs=1e-3)
    assert 0 < later.distances.staleness_mean < 0.25
    unknown: StepReport = finish(optimizer.train_step(off, 2, policy_step=2, older={}))
    assert unknown.distances is not None and unknown.distances.tokens == 0


def learner(loaded: LoadedModel, rate: float = 1e-3) -> PolicyLearner:
    options = replace(OPTIONS, schedule=Schedule(peak=rate), minibatches=2)
    return PolicyLearner(loaded.model, AdapterShape(rank=4), options, GateLimits(), seed=3)


def train(learner: PolicyLearner, groups: list[SampleGroup], step: int) -> Trained:
    trained: Trained = finish(learner.train(groups, step, step, [(1, 2, 3, 4), (9, 8, 7)]))
    learner.accept()
    return trained


def test_a_restored_learner_goes_on_bit_for_bit(llama: LoadedModel, policy: Policy) -> None:
    batches = [groups_of(policy, seed) for seed in range(4)]
    through = learner(llama)
    for step in (0, 1):
        train(through, batches[step], step)
    saved = through.snapshot()
    for step in (2, 3):
        train(through, batches[step], step)
    resumed = learner(llama)
    resumed.restore(saved)
    for step in (2, 3):
        train(resumed, batches[step], step)
    expected = through.weights()
    assert all(np.array_equal(value, expected[name]) for name, value in resumed.weights().items())


def test_a_learning_rate_a_thousand_times_too_high_fails_by_name(llama: LoadedModel, policy: Policy) -> None:
    trained = finish(learner(llama, rate=1.0).train(groups_of(policy), 0, 0, [(1, 2, 3, 4)]))
    failed = {check.name for check in trained.checks if not check.passed}
    assert {"update_norm", "probe_kl"} <= failed


def test_small_steps_that_add_up_are_held_by_their_anchors(llama: LoadedModel, policy: Policy) -> None:
    """Each is near the one before; the base, and the best version that was judged, stay where they are."""
    options = replace(OPTIONS, schedule=Schedule(peak=1e-3), minibatches=2)
    limits = GateLimits(max_update_rms=1.0, max_probe_kl=1e-3, max_base_kl=3e-3, max_best_kl=1.6e-3)
    mine = PolicyLearner(llama.model, AdapterShape(rank=4), options, limits, seed=3)
    failed: list[set[str]] = []
    for step in range(12):
        trained: Trained = finish(mine.train(groups_of(policy, step), step, step, [(1, 2, 3, 4), (9, 8, 7)]))
        failed.append({check.name for check in trained.checks if not check.passed})
        if failed[-1]:
            break
        mine.accept()
        if step == 0:
            mine.anchor(trained.weights)
    assert failed[-1] == {"base_kl", "best_kl"}, "no step was large"
    assert len(failed) > 3


def test_a_step_without_signal_leaves_no_trace(llama: LoadedModel, policy: Policy) -> None:
    mine = learner(llama)
    before = mine.weights()
    silent = [
        replace(g, samples=tuple(replace(s, mask=(False,) * len(s.mask)) for s in g.samples)) for g in groups_of(policy)
    ]
    trained = finish(mine.train(silent, 0, 0, [(1, 2)]))
    assert not trained.report.updated and trained.checks == ()
    assert all(np.array_equal(value, before[name]) for name, value in mine.weights().items())


def test_revert_takes_a_train_step_back(llama: LoadedModel, policy: Policy) -> None:
    mine = learner(llama)
    train(mine, groups_of(policy), 0)
    good = mine.weights()
    trained = finish(mine.train(groups_of(policy, 1), 1, 1, [(1, 2, 3)]))
    assert gate.passed(trained.checks)
    assert any(not np.array_equal(value, good[name]) for name, value in mine.weights().items())
    mine.revert()
    assert all(np.array_equal(value, good[name]) for name, value in mine.weights().items())


def test_short_work_is_work_too() -> None:
    function: Callable[[], int] = lambda: 7  # noqa: E731
    assert finish(at_once(function)()) == 7


def test_with_the_trainers_own_ratio_the_last_bits_of_the_sampler_change_nothing(policy: Policy) -> None:
    """A run repeats to the byte only if what depends on the sampler's batch is left out."""
    start = policy.weights()
    results: dict[str, list[Arrays]] = {}
    ratios: tuple[RatioBase, ...] = ("sampler", "trainer")
    for ratio in ratios:
        for noise in (0.0, 3e-5):
            policy.load(start)
            groups = [noisy(group, noise) for group in groups_of(policy)]
            optimizer = Optimizer(policy, replace(OPTIONS, ratio=ratio))
            finish(optimizer.train_step(groups, 1, policy_step=0))
            results.setdefault(ratio, []).append(policy.weights())
    assert same(*results["trainer"]) and not same(*results["sampler"])


def test_with_the_trainers_own_ratio_older_samples_keep_their_truncated_weight(policy: Policy) -> None:
    start = policy.weights()
    results: list[Arrays] = []
    for noise in (0.0, 0.5):
        policy.load(start)
        optimizer = Optimizer(policy, replace(OPTIONS, ratio="trainer"))
        finish(optimizer.train_step([noisy(group, noise) for group in groups_of(policy)], 1, policy_step=1))
        results.append(policy.weights())
    assert not same(*results)


def same(one: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def noisy(group: SampleGroup, noise: float) -> SampleGroup:
    """The same samples, as if another kernel had computed their log-probabilities."""
    samples = [replace(s, sampler_logprobs=tuple(x + noise for x in s.sampler_logprobs)) for s in group.samples]
    return replace(group, samples=tuple(samples))
