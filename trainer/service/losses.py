"""The losses of Tinker's protocol, each summed over all targets of a microbatch.

Source: https://tinker-docs.thinkingmachines.ai/losses. p is the log-probability of a target under the learner, q the
one that it was sampled with, A its advantage, w its weight, r = exp(p - q):

    cross_entropy         -w p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)
    cispo                 -stop_gradient(clip(r)) p A
    dro                   -(p A - beta / 2 (p - q)^2)

All arrays are [B, L] or [B, L, K], fp32; `seen` is 0 where a row is padded.
"""

from collections.abc import Mapping

import mlx.core as mx

from shared.learners import CONSTANTS, LossName

Inputs = Mapping[str, mx.array]


def elementwise(
    loss: LossName, logp: mx.array, inputs: Inputs, constants: Mapping[str, float], seen: mx.array
) -> mx.array:
    """The loss of each target, 0 where nothing is seen; of the shape of `logp`."""
    if loss == "cross_entropy":
        return mx.where(seen, -inputs["weights"] * logp, 0.0)
    known = {**CONSTANTS[loss], **constants}
    advantage = inputs["advantages"]
    distance = mx.where(seen, logp - inputs["logprobs"], 0.0)  # padding has no ratio that could overflow
    if loss == "dro":
        value = advantage * logp - 0.5 * known["beta"] * mx.square(distance)
        return mx.where(seen, -value, 0.0)
    ratio = mx.exp(distance)
    if loss == "importance_sampling":
        return mx.where(seen, -ratio * advantage, 0.0)
    clipped = mx.clip(ratio, known["clip_low_threshold"], known["clip_high_threshold"])
    if loss == "ppo":
        return mx.where(seen, -mx.minimum(ratio * advantage, clipped * advantage), 0.0)
    return mx.where(seen, -mx.stop_gradient(clipped) * logp * advantage, 0.0)
