"""Distances between the learning policy and the one that sampled, and of the sampler from itself.

For a token that policy step s sampled, logpi_theta - logmu = (logpi_theta - logpi_v) + (logpi_v - logmu), with v the
weights of step s. The first part is *staleness*: what training has changed since. The second is *mismatch*: the same
weights through another kernel, another batch, or keys and values from before a swap. Only weights that are still at
hand allow this split, so tokens of older steps are left out.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from shared.trajectories import Trajectory
from trainer.learn.batches import Microbatch, Sample, SampleGroup, microbatches, pad
from trainer.learn.drawing import corrected
from trainer.learn.logprobs import CHUNK_LOGITS, BatchArrays, TokenScores, row_scores, to_arrays
from trainer.learn.peers import Peers
from trainer.learn.policy import Policy
from trainer.state import Arrays


@dataclass(frozen=True)
class Distances:
    """Absolute differences of log-probabilities, and k3 estimates of KL, over the tokens whose weights were stored."""

    tokens: int
    mismatch_mean: float
    mismatch_max: float
    mismatch_kl: float  # of mu from v
    staleness_mean: float
    staleness_max: float
    staleness_kl: float  # of v from theta


Floats = np.ndarray[Any, Any]
Scores = Callable[..., TokenScores]  # (model, arrays, entropy=...)


def measure(
    policy: Policy,
    scores: Scores,
    batches: Sequence[Microbatch],
    policy_step: int,
    older: dict[int, Arrays],
) -> Generator[None, None, Distances]:
    """Measure mismatch and staleness of a train step's microbatches, before its first update."""
    mismatch: list[Floats] = []
    staleness: list[Floats] = []
    for batch in policy.peers.each(batches):
        if batch is None:
            yield
            continue
        parts = yield from policy.peers.unit(_apart(policy, scores, batch, policy_step, older))
        mismatch += [part for part, _ in parts]
        staleness += [part for _, part in parts]
    return _summary(mismatch, staleness, policy.peers)


def _apart(
    policy: Policy, scores: Scores, batch: Microbatch, policy_step: int, older: dict[int, Arrays]
) -> Generator[None, None, list[tuple[Floats, Floats]]]:
    """Mismatch and staleness of its tokens, by the policy step that sampled them."""
    found = []
    arrays = to_arrays(batch, policy.sight)
    theta_BT = _logp(policy.model, scores, arrays)
    yield
    for step in sorted(set(batch.policy_step_BT[batch.mask_BT].tolist())):
        at_BT = batch.mask_BT & (batch.policy_step_BT == step)
        if step == policy_step:
            v_BT = theta_BT
        elif step in older:
            with weights_in(policy, older[step]) as model:
                v_BT = _logp(model, scores, arrays)
            yield
        else:
            continue
        found.append(((v_BT - batch.sampler_BT)[at_BT], (theta_BT - v_BT)[at_BT]))
    return found


def _logp(model: Any, scores: Scores, arrays: BatchArrays) -> np.ndarray[Any, Any]:
    logp_BT = scores(model, arrays, entropy=False).logp_BT
    mx.eval(logp_BT)
    return np.array(logp_BT)


def _summary(mismatch: list[Floats], staleness: list[Floats], peers: Peers) -> Distances:
    none = np.zeros(0, np.float32)
    m, s = np.concatenate([none, *mismatch]), np.concatenate([none, *staleness])
    with np.errstate(over="ignore"):  # posted log-probabilities: infinite, and the gate refuses them
        own = [float(each.sum(dtype=np.float64)) for x in (m, s) for each in (np.abs(x), np.exp(x) - x - 1)]
    tokens, *sums = peers.numbers([float(m.size), *own])
    most = [peers.largest(float(np.abs(x).max(initial=0.0))) for x in (m, s)]
    mismatch_mean, mismatch_kl, staleness_mean, staleness_kl = (each / max(1.0, tokens) for each in sums)
    return Distances(int(tokens), mismatch_mean, most[0], mismatch_kl, staleness_mean, most[1], staleness_kl)


_LONGEST = 64  # prompt positions that count; logits of long prompts would take gigabytes


def measure_probe_kl(
    policy: Policy, anchors: Sequence[Mapping[str, Any] | None], prompts: Sequence[Sequence[int]]
) -> Generator[None, None, list[float]]:
    """Mean KL(anchor || present) of the next-token distributions at the last positions of fixed prompts, in nats.

    One figure an anchor; None is the base. Leaves the policy with its present weights. Infinite when either side is not
    finite.
    """
    divergences: list[list[float]] = [[] for _ in anchors]
    tails = [list(prompt)[-_LONGEST:] for prompt in prompts]
    width = max(map(len, tails), default=0)
    vocabulary = policy.model(mx.array([[0]])).shape[-1]  # never evaluated
    together = max(1, CHUNK_LOGITS // (max(1, width) * vocabulary))
    for at in range(0, len(tails), together):
        part = tails[at : at + together]
        tokens_PS = mx.array([tail + [0] * (width - len(tail)) for tail in part])  # a model sees nothing of the future
        seen_PS = mx.arange(width)[None] < mx.array([[len(tail)] for tail in part])
        present_PSV = _logprobs(policy.model, tokens_PS)
        for anchor, distances in zip(anchors, divergences, strict=True):
            with weights_in(policy, anchor) as model:
                anchor_PSV = _logprobs(model, tokens_PS)
            kl_PS = (mx.exp(anchor_PSV) * (anchor_PSV - present_PSV)).sum(axis=-1)
            mean_P = mx.where(seen_PS, kl_PS, 0.0).sum(axis=1) / seen_PS.sum(axis=1)
            distances += np.array(mean_P).tolist()
            yield
    means = [float(np.mean(distances)) if distances else 0.0 for distances in divergences]
    return [mean if np.isfinite(mean) else float("inf") for mean in means]


def measure_gaps(
    policy: Policy,
    weights: Arrays | None,
    samples: Sequence[SampleGroup],
    scores: Scores,
    positions: int,
) -> Generator[None, None, list[float]]:
    """Mean |difference| over each sample's masked tokens between its log-probabilities and those of `weights`.

    None is the base. In the order of the samples; leaves the policy with its present weights.
    """
    gaps: dict[int, float] = {}
    for part in microbatches(samples, lambda: positions):
        batch = pad(part)
        arrays = to_arrays(batch, policy.sight)
        with weights_in(policy, weights) as model:
            gap_BT = np.abs(_logp(model, scores, arrays).astype(np.float64) - batch.sampler_BT)
        rows = (sample for group in part for sample in group.samples)
        for row, sample in enumerate(rows):
            gaps[id(sample)] = float(np.nan_to_num(gap_BT[row][batch.mask_BT[row]].mean(), nan=np.inf))
        yield
    return [gaps[id(sample)] for group in samples for sample in group.samples]


@contextmanager
def weights_in(policy: Policy, weights: Mapping[str, Any] | None) -> Iterator[Any]:
    """The model with these weights, None: the base; afterwards the policy has its own again."""
    if weights is None:
        yield policy.base
        return
    present = policy.arrays()
    policy.load(weights)
    try:
        yield policy.model
    finally:
        policy.model.update(tree_unflatten(list(present.items())))


def measure_parity(policy: Policy, trajectories: Sequence[Trajectory]) -> Generator[None, None, float]:
    """Mean |difference| between a worker's log-probabilities of its samples and ours, over all their tokens."""
    differences: list[float] = []
    for trajectory in trajectories:
        length = len(trajectory.completion_ids)
        mask, steps, drawn = (True,) * length, (0,) * length, corrected(trajectory)
        ids, routes = trajectory.completion_ids, trajectory.routes
        sample = Sample(ids, trajectory.logprobs, mask, steps, 0.0, drawn, routes=routes)
        group = SampleGroup("", trajectory.prompt_ids, (sample,), trajectory.images, trajectory.image_token)
        arrays = to_arrays(pad([group]), policy.sight)
        logp_BT = row_scores(policy.model, arrays, entropy=False).logp_BT
        difference_BT = mx.where(arrays.mask_BT, mx.abs(logp_BT - arrays.sampler_BT), 0.0)
        mx.eval(difference_BT)
        differences += np.array(difference_BT)[0, :length].tolist()
        yield
    return float(np.mean(differences)) if differences else float("inf")


def _logprobs(model: Any, tokens_PS: mx.array) -> mx.array:
    logits_PSV = model(tokens_PS).astype(mx.float32)
    logp_PSV: mx.array = logits_PSV - mx.logsumexp(logits_PSV, axis=-1, keepdims=True)
    mx.eval(logp_PSV)
    return logp_PSV
