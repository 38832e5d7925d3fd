"""Samples that went on across adapter versions (partial rollouts, as in AReaL, arXiv 2505.24298): what their loss is.

A real engine draws the samples while another version is published. The reference knows nothing of microbatches, of
shared prompts and of the trainer's losses: it computes each row alone with mlx-lm's layers, each formula again in fp64
on the spans that the samples came with, and the derivatives by hand.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_model.loader import LoadedModel
from shared.frames import spans_of
from shared.sequences import SamplingParams, SequenceSpec
from shared.trajectories import Reward, Trajectory
from tests.engine.adapter_bench import AdapterBench
from tests.engine.adapter_models import MadeAdapter, make_adapter
from tests.engine.test_trainer_optimize import OPTIONS, finish
from trainer.learn.batches import SampleGroup, sample_groups
from trainer.learn.optimize import Optimizer
from trainer.learn.options import AdapterShape, ImportanceLevel, LossName, LossOptions, RatioBase
from trainer.learn.policy import Policy
from trainer.learn.steps import Sums
from trainer.rollouts.groups import RolloutGroup

TOLERANCE = 1e-5
GROUPS, SAMPLES, TOKENS = 2, 3, 14
STEPS = {"a@1": 1, "a@2": 2}  # policy step of each version; the present one is 2
TRUNCATION = 1.02  # low enough to cut some weights


@dataclass(frozen=True)
class Drawn:
    """What the engine has drawn, and the versions that it was drawn with."""

    groups: list[RolloutGroup]
    specs: dict[str, SequenceSpec]
    made: dict[str, MadeAdapter]

    @property
    def samples(self) -> list[Trajectory]:
        return [sample for group in self.groups for sample in group.trajectories]


@pytest.fixture(scope="module", params=["keep", "recompute"])
def drawn(request: pytest.FixtureRequest, llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    folder = tmp_path_factory.mktemp("adapters")
    made = {f"a@{at}": make_adapter(llama.model, folder, version=at, strength=0.1) for at in (1, 2)}
    specs = dict(_specs(request.param))
    with AdapterBench(llama, made) as bench:
        bench.publish("a@1")
        bench.submit(*specs.values())
        bench.until(lambda: len(bench.tokens("0-0")) > TOKENS // 2)
        bench.publish_and_read("a@2")
        bench.run()
        groups = [
            RolloutGroup(str(group), group, tuple(_sample(bench, specs, group, at) for at in range(SAMPLES)))
            for group in range(GROUPS)
        ]
    return Drawn(groups, specs, made)


def _specs(kv: Any) -> Iterator[tuple[str, SequenceSpec]]:
    for group in range(GROUPS):
        prompt = tuple(range(20 + group, 29 + 3 * group))
        for at in range(SAMPLES):
            name, sampling = f"{group}-{at}", SamplingParams(TOKENS, 97 * group + at, temperature=1.0, ignore_eos=True)
            spec = SequenceSpec(name, "m", prompt, sampling, adapter="a", adapter_policy="follow", kv_on_swap=kv)
            yield name, spec


def _sample(bench: AdapterBench, specs: dict[str, SequenceSpec], group: int, at: int) -> Trajectory:
    name = f"{group}-{at}"
    events = bench.events[name]
    logprobs = tuple(logprob for event in events for logprob in event.logprobs)
    mask = [1] * TOKENS
    if at == 1:
        mask[3:5] = [0, 0]  # as if a tool had said these
    return Trajectory(
        group, at, specs[name].prompt_ids, tuple(bench.tokens(name)), "", logprobs, "stop", spans_of(events),
        reward=Reward("r", float(at)), loss_mask=tuple(mask),
    )  # fmt: skip


def _logprobs(model: Any, sample: Trajectory) -> mx.array:
    """Of each completion token [T], of this row alone."""
    ids, start = [*sample.prompt_ids, *sample.completion_ids], len(sample.prompt_ids)
    logits_TV = model(mx.array(ids[:-1])[None])[0, start - 1 :]
    return mx.take_along_axis(nn.log_softmax(logits_TV), mx.array(sample.completion_ids)[:, None], axis=1)[:, 0]


def _versions(sample: Trajectory) -> list[str]:
    return [span.version for span in sample.spans for _ in range(span.start, span.end)]


def test_each_token_has_the_log_probability_of_the_version_that_drew_it(drawn: Drawn) -> None:
    for sample in drawn.samples:
        assert {span.version for span in sample.spans} == set(STEPS), "each sample has gone on across the versions"
        spec = drawn.specs[f"{sample.prompt_index}-{sample.sample_index}"]
        tokens, expected, cache = sample.completion_ids, list[float](), None
        for version, run in groupby(_versions(sample)):
            begin, end = len(expected), len(expected) + len(list(run))
            fed: list[int] = list(tokens[begin - 1 : end - 1])
            if cache is None or spec.kv_on_swap == "recompute":
                cache, fed = make_prompt_cache(drawn.made[version].reference), [*spec.prompt_ids, *tokens[: end - 1]]
            logits = drawn.made[version].reference(mx.array(fed)[None], cache=cache)[0, begin - end :]
            chosen = mx.take_along_axis(nn.log_softmax(logits), mx.array(tokens[begin:end])[:, None], axis=1)
            expected += chosen[:, 0].tolist()
        assert np.abs(np.array(sample.logprobs) - expected).max() < TOLERANCE


Case = tuple[LossName, RatioBase, int, ImportanceLevel]
CASES: list[Case] = [
    ("dapo", "sampler", 1, "token"),
    ("gspo", "sampler", 1, "token"),
    ("cispo", "sampler", 1, "token"),
    ("grpo", "trainer", 1, "token"),
    ("dapo", "trainer", 1, "sequence"),
    ("dr_grpo", "sampler", 2, "token"),
    ("gspo", "trainer", 1, "token"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_loss_and_its_gradient_equal_an_independent_reference(llama: LoadedModel, drawn: Drawn, case: Case) -> None:
    name, ratio, epochs, level = case
    low, high = (0.02, 0.03) if name == "gspo" else (0.1, 0.15)  # narrow, so that some tokens are clipped
    loss = LossOptions(name, low, high, truncation=TRUNCATION, level=level)
    policy = Policy(llama.model, AdapterShape(rank=8, scale=2.0))
    policy.load({name: np.array(value) for name, value in mx.load(str(drawn.made["a@2"].path)).items()})
    optimizer = Optimizer(policy, replace(OPTIONS, loss=loss, ratio=ratio, epochs=epochs, max_completion=TOKENS))
    groups, _ = sample_groups(drawn.groups, STEPS)
    plan = optimizer.plan(groups, 0)
    ahead = finish(optimizer.prepare(plan.minis[0], STEPS["a@2"], several=plan.several))
    old = [np.array(_logprobs(policy.model, sample), np.float64) for sample in drawn.samples]
    draw = np.random.default_rng(5)  # the weights after some updates
    policy.load({n: v + draw.normal(0, 0.004, v.shape).astype(np.float32) for n, v in policy.weights().items()})
    sums = Sums()
    gradient = finish(optimizer.gradient(ahead, plan.totals, sums))

    weighed = _Weighed(loss, ratio, several=epochs > 1)
    value, slopes = weighed.loss_and_slopes(drawn, groups, policy, old)
    assert sums.loss == pytest.approx(value, abs=TOLERANCE)

    def total(model: Any) -> mx.array:
        return sum((_logprobs(model, s) * mx.array(c)).sum() for s, c in zip(drawn.samples, slopes, strict=True))

    expected = dict(tree_flatten(nn.value_and_grad(policy.model, total)(policy.model)[1]))
    found = dict(tree_flatten(gradient))
    assert found.keys() == expected.keys()
    largest = max(float(mx.abs(value).max()) for value in expected.values())
    assert largest > 1e-3
    for name_, value_ in expected.items():
        assert float(mx.abs(found[name_] - value_).max()) < TOLERANCE * max(1.0, largest), name_
    if level == "token" and (epochs > 1 or ratio == "trainer"):
        assert weighed.cut, "some weight is truncated, or this says little"


class _Weighed:
    """The formulas of trainer/learn/losses.py in fp64, row by row."""

    def __init__(self, options: LossOptions, ratio: RatioBase, several: bool) -> None:
        self._options, self._own, self._several = options, ratio == "trainer", several
        self.cut = 0

    def loss_and_slopes(
        self, drawn: Drawn, groups: list[SampleGroup], policy: Policy, old: list[np.ndarray]
    ) -> tuple[float, list[np.ndarray]]:
        """The loss, and its derivative by the log-probability of each token."""
        samples = drawn.samples
        advantages = [float(s.sample_index) - (SAMPLES - 1) / 2 for s in samples]  # rewards are 0, 1, 2
        masks = [np.array(s.loss_mask, bool) for s in samples]
        assert [s.mask for g in groups for s in g.samples] == [tuple(map(bool, mask)) for mask in masks]
        tokens, rows = sum(map(np.sum, masks)), len(samples)
        loss, slopes = 0.0, []
        for sample, advantage, mask, before in zip(samples, advantages, masks, old, strict=True):
            logp = np.array(_logprobs(policy.model, sample), np.float64)
            mu = np.array(sample.logprobs, np.float64)
            weight = self._weights(_versions(sample), mask, before, mu)
            denominator = before if self._own or self._several else mu
            share = {
                "dapo": 1 / tokens, "cispo": 1 / tokens, "grpo": 1 / (rows * mask.sum()),
                "dr_grpo": 1 / (rows * TOKENS), "gspo": 1 / rows,
            }[self._options.name]  # fmt: skip
            value, slope = self._row(logp, denominator, weight, mask, advantage)
            loss -= share * value
            slopes.append((-share * slope).astype(np.float32))
        return loss, slopes

    def _weights(self, versions: list[str], mask: np.ndarray, before: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """pi_v / mu, truncated, of the tokens that are corrected: with the trainer's own ratio, of older versions'."""
        weights = np.ones(len(mask))
        if not (self._own or self._several):
            return weights
        corrected = mask & np.array([not self._own or version != "a@2" for version in versions])
        by = np.where(corrected, before - mu, 0.0)
        if self._options.level == "sequence":
            by = np.where(corrected, by.sum(), 0.0)
        self.cut += int((np.exp(by) > TRUNCATION).sum())
        return np.where(corrected, np.minimum(np.exp(by), TRUNCATION), 1.0)

    def _row(
        self, logp: np.ndarray, old: np.ndarray, weight: np.ndarray, mask: np.ndarray, advantage: float
    ) -> tuple[float, np.ndarray]:
        """The row's sum, and its derivatives [T]."""
        low, high, dual = 1 - self._options.clip_low, 1 + self._options.clip_high, self._options.dual_clip
        if self._options.name == "gspo":
            ratio = float(np.exp((logp - old)[mask].mean()))
            free = low <= ratio <= high or (ratio < low) == (advantage > 0)
            term = min(ratio * advantage, min(max(ratio, low), high) * advantage)
            mean = weight[mask].mean()
            return mean * term, np.where(mask, mean * free * ratio * advantage / mask.sum(), 0.0)
        value, slope = 0.0, np.zeros(len(logp))
        for at in np.flatnonzero(mask):
            ratio = float(np.exp(logp[at] - old[at]))
            if self._options.name == "cispo":
                bound = min(max(ratio, low), high)
                value += weight[at] * bound * advantage * logp[at]
                slope[at] = weight[at] * bound * advantage
                continue
            held = advantage < 0 and ratio > dual
            clipped = held or (ratio > high if advantage > 0 else ratio < low)
            at_most = dual if held else min(max(ratio, low), high) if clipped else ratio
            value += weight[at] * at_most * advantage
            slope[at] = 0.0 if clipped else weight[at] * ratio * advantage
        return value, slope
