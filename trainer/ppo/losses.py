r"""The losses of PPO (Schulman et al., arXiv 1707.06347) over actions of policies that are networks.

An action is a sequence of one token: its clipped term is that of `trainer/learn/losses.py`. Shape suffixes: B rows,
A numbers of an action.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from shared.networks.spec import LOG_STD, LOGITS, MEAN, VALUE
from trainer.learn.losses import LOSSES, LossInputs, StepTotals, value_errors
from trainer.learn.options import LossOptions

_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class PpoOptions:
    """The constants of the loss."""

    policy: LossOptions
    value_clip: float  # 0: none
    value_coefficient: float


class Steps(NamedTuple):
    """Steps to learn from; all of it is constant."""

    observed_BI: mx.array
    actions: mx.array  # int32 [B], or float32 [B, A]
    logp_B: mx.array  # of the version that has acted
    values_B: mx.array  # likewise
    advantages_B: mx.array
    returns_B: mx.array


class PpoParts(NamedTuple):
    """What the loss is made of; means over the rows."""

    loss: mx.array
    policy: mx.array
    value: mx.array
    entropy: mx.array
    clipped: mx.array  # share of the actions
    kl: mx.array  # from the version that has acted; the k3 estimate


def ppo(outputs: dict[str, mx.array], steps: Steps, options: PpoOptions) -> PpoParts:
    """L = L_clip + c_v L_value - c_e H."""
    logp_B, entropy_B = log_probabilities(outputs, steps.actions)
    rows = len(logp_B)
    one_B1 = mx.ones((rows, 1), mx.bool_)
    inputs = LossInputs(logp_B[:, None], steps.logp_B[:, None], one_B1, steps.advantages_B)
    clipped = LOSSES["dapo"](inputs, options.policy, StepTotals(rows, rows, 1))
    errors_B = value_errors(outputs[VALUE][:, 0], steps.values_B, steps.returns_B, options.value_clip)
    value, entropy = 0.5 * mx.mean(errors_B), mx.mean(entropy_B)
    loss = clipped.loss + options.value_coefficient * value - options.policy.entropy_bonus * entropy
    apart_B = logp_B - steps.logp_B
    kl = mx.mean(mx.exp(apart_B) - 1 - apart_B)
    return PpoParts(loss, clipped.loss, value, entropy, mx.mean(clipped.clipped_BT), kl)


def log_probabilities(outputs: dict[str, mx.array], actions: mx.array) -> tuple[mx.array, mx.array]:
    """Of actions [B], and the entropy of the policy that they come from [B]."""
    if LOGITS in outputs:
        logits_BA = outputs[LOGITS]
        logps_BA = logits_BA - mx.logsumexp(logits_BA, axis=-1, keepdims=True)
        logp_B = mx.take_along_axis(logps_BA, actions[:, None], axis=-1)[:, 0]
        return logp_B, -mx.sum(mx.exp(logps_BA) * logps_BA, axis=-1)
    log_std_BA = outputs[LOG_STD]
    z_BA = (actions - outputs[MEAN]) * mx.exp(-log_std_BA)
    logp_B = mx.sum(-0.5 * mx.square(z_BA) - log_std_BA - 0.5 * _LOG_2PI, axis=-1)
    return logp_B, mx.sum(log_std_BA + 0.5 * (1 + _LOG_2PI), axis=-1)
