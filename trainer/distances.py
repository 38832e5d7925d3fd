"""How far the learning policy is from the one that sampled, and the sampler from itself.

For a token that policy step s sampled, logpi_theta - logmu = (logpi_theta - logpi_v) + (logpi_v - logmu), with v the
weights of step s. The first part is *staleness*: what training has changed since. The second is *mismatch*: the same
weights through another kernel, another batch, or keys and values from before a swap. Only weights that are still at
hand can be told apart, so tokens of older steps are left out.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from trainer.batches import Microbatch
from trainer.heads import TokenScores
from trainer.logprobs import BatchArrays, to_arrays
from trainer.policy import Policy
from trainer.reports import Distances
from trainer.state import Arrays

Scores = Callable[..., TokenScores]  # (model, arrays, entropy=...)


def measure(
    policy: Policy,
    scores: Scores,
    batches: Sequence[Microbatch],
    policy_step: int,
    older: dict[int, Arrays],
) -> Generator[None, None, Distances]:
    """Measure both over a train step's microbatches, before its first update; leaves the policy as it was."""
    mismatch: list[np.ndarray[Any, Any]] = []
    staleness: list[np.ndarray[Any, Any]] = []
    for batch in batches:
        arrays = to_arrays(batch)
        theta_BT = _logp(policy, scores, arrays)
        yield
        for step in sorted(set(batch.policy_step_BT[batch.mask_BT].tolist())):
            at_BT = batch.mask_BT & (batch.policy_step_BT == step)
            if step == policy_step:
                v_BT = theta_BT
            elif step in older:
                v_BT = _logp_with(policy, scores, arrays, older[step])
                yield
            else:
                continue
            mismatch.append((v_BT - batch.sampler_BT)[at_BT])
            staleness.append((theta_BT - v_BT)[at_BT])
    return _summary(mismatch, staleness)


def _logp(policy: Policy, scores: Scores, arrays: BatchArrays) -> np.ndarray[Any, Any]:
    logp_BT = scores(policy.model, arrays, entropy=False).logp_BT
    mx.eval(logp_BT)
    return np.array(logp_BT)


def _logp_with(policy: Policy, scores: Scores, arrays: BatchArrays, weights: Arrays) -> np.ndarray[Any, Any]:
    present = policy.weights()
    policy.load(weights)
    try:
        return _logp(policy, scores, arrays)
    finally:
        policy.load(present)


def _summary(mismatch: list[np.ndarray[Any, Any]], staleness: list[np.ndarray[Any, Any]]) -> Distances:
    if not mismatch:
        return Distances(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    m, s = np.concatenate(mismatch), np.concatenate(staleness)
    with np.errstate(over="ignore"):  # log-probabilities that somebody has posted: infinite, and the gate refuses them
        kl_m, kl_s = (float(np.mean(np.exp(x) - x - 1)) for x in (m, s))
    return Distances(
        tokens=m.size,
        mismatch_mean=float(np.abs(m).mean()),
        mismatch_max=float(np.abs(m).max()),
        mismatch_kl=kl_m,
        staleness_mean=float(np.abs(s).mean()),
        staleness_max=float(np.abs(s).max()),
        staleness_kl=kl_s,
    )
