"""Measurements with the model that the gate needs: KL on fixed prompts, and log-probabilities to compare with a worker.

Both are generators that yield between prompts, like every other piece of MLX work (trainer/host.py).
"""

from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from shared.trajectories import Trajectory
from trainer.batches import Sample, SampleGroup, pad
from trainer.drawing import corrected
from trainer.logprobs import row_scores, to_arrays
from trainer.policy import Policy
from trainer.state import Arrays

_LONGEST = 64  # prompt positions that count; logits of long prompts would take gigabytes


def measure_probe_kl(policy: Policy, good: Arrays, prompts: Sequence[Sequence[int]]) -> Generator[None, None, float]:
    """Mean KL(good || present) of the next-token distributions at the last positions of fixed prompts, in nats.

    Leaves the policy with its present weights. Infinite when either side is not finite.
    """
    present = policy.weights()
    divergences: list[float] = []
    for prompt in prompts:
        tokens_1S = mx.array([list(prompt)[-_LONGEST:]])
        policy.load(good)
        good_SV = _logprobs(policy.model, tokens_1S)
        policy.load(present)
        present_SV = _logprobs(policy.model, tokens_1S)
        kl_S = (mx.exp(good_SV) * (good_SV - present_SV)).sum(axis=-1)
        divergences.append(float(kl_S.mean()))
        yield
    mean = float(np.mean(divergences)) if divergences else 0.0
    return mean if np.isfinite(mean) else float("inf")


def measure_parity(policy: Policy, trajectories: Sequence[Trajectory]) -> Generator[None, None, float]:
    """Mean |difference| between a worker's log-probabilities of its samples and ours, over all their tokens."""
    differences: list[float] = []
    for trajectory in trajectories:
        length = len(trajectory.completion_ids)
        mask, steps, drawn = (True,) * length, (0,) * length, corrected(trajectory)
        sample = Sample(trajectory.completion_ids, trajectory.logprobs, mask, steps, 0.0, drawn)
        arrays = to_arrays(pad([SampleGroup("", trajectory.prompt_ids, (sample,))]))
        logp_BT = row_scores(policy.model, arrays, entropy=False).logp_BT
        difference_BT = mx.where(arrays.mask_BT, mx.abs(logp_BT - arrays.sampler_BT), 0.0)
        mx.eval(difference_BT)
        differences += np.array(difference_BT)[0, :length].tolist()
        yield
    return float(np.mean(differences)) if differences else float("inf")


def _logprobs(model: Any, tokens_1S: mx.array) -> mx.array:
    logits_SV = model(tokens_1S)[0].astype(mx.float32)
    logp_SV: mx.array = logits_SV - mx.logsumexp(logits_SV, axis=-1, keepdims=True)
    mx.eval(logp_SV)
    return logp_SV
