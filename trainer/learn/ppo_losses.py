"""The losses of PPO (Schulman et al., arXiv 1707.06347) over actions of policies that are networks.

An action is a sequence of one token: its clipped term is that of `trainer/learn/losses.py`. Shape suffixes: T steps,
N copies of the environment, B sequences of L steps, R = B L rows, I numbers observed, A numbers of an action.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from shared.networks.spec import LOG_STD, LOGITS, MEAN, VALUE
from trainer.learn.losses import LOSSES, LossInputs, StepTotals, value_errors
from trainer.learn.options import LossOptions

Floats = npt.NDArray[np.float32]
State = dict[str, Floats]  # of recurrent layers, a row for each copy
_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Rollout:
    """Some steps of all copies."""

    observed_TNI: Floats
    actions_TN: npt.NDArray[Any]  # with a last dimension where an action is a vector
    logp_TN: Floats
    values_TN: Floats
    rewards_TN: Floats  # with what follows a time-out, discounted
    ended_TN: npt.NDArray[np.bool_]
    states_C: tuple[State, ...]  # before the first step of each sequence
    versions_T: tuple[int, ...]  # that acted
    next_N: Floats  # values of what was observed at the end
    returns: tuple[float, ...]  # of episodes that have ended


@dataclass(frozen=True)
class PpoOptions:
    """The constants of the loss."""

    policy: LossOptions
    value_clip: float  # 0: none
    value_coefficient: float


class PpoSteps(NamedTuple):
    """Steps to learn from, in sequences; all of it is constant. Arrays of numpy, and of MLX once they are moved."""

    observed_BLI: Any
    begins_BL: Any  # whether an episode begins there
    state: dict[str, Any]  # [B, units], of recurrent layers before the first step, as workers gave it
    actions: Any  # int32 [B, L], or float32 [B, L, A]
    logp_BL: Any  # of the version that has acted
    values_BL: Any  # likewise
    advantages_BL: Any
    returns_BL: Any

    def taken(self, rows: Any) -> "PpoSteps":
        """The sequences of these rows."""
        return self._each(lambda each: each[rows])

    def moved(self) -> "PpoSteps":
        """The same arrays in MLX."""
        return self._each(mx.array)

    def _each(self, make: Callable[[Any], Any]) -> "PpoSteps":
        whole = self._asdict() | {"state": {name: make(each) for name, each in self.state.items()}}
        return PpoSteps(**{name: each if name == "state" else make(each) for name, each in whole.items()})


class PpoParts(NamedTuple):
    """The parts of the PPO loss, as means over the rows."""

    loss: mx.array
    policy: mx.array
    value: mx.array
    entropy: mx.array
    clipped: mx.array  # share of the actions
    kl: mx.array  # from the version that has acted; the k3 estimate


def ppo(outputs: dict[str, mx.array], steps: PpoSteps, options: PpoOptions) -> PpoParts:
    """L = L_clip + c_v L_value - c_e H, of outputs [R, ...]."""
    rows = steps.logp_BL.size
    old_R, values_R, advantages_R, returns_R = (
        each.reshape(rows) for each in (steps.logp_BL, steps.values_BL, steps.advantages_BL, steps.returns_BL)
    )
    logp_R, entropy_R = log_probabilities(outputs, steps.actions.reshape(rows, *steps.actions.shape[2:]))
    one_R1 = mx.ones((rows, 1), mx.bool_)
    inputs = LossInputs(logp_R[:, None], old_R[:, None], one_R1, advantages_R)
    clipped = LOSSES["dapo"](inputs, options.policy, StepTotals(rows, rows, 1))
    errors_R = value_errors(outputs[VALUE][:, 0], values_R, returns_R, options.value_clip)
    value, entropy = 0.5 * mx.mean(errors_R), mx.mean(entropy_R)
    loss = clipped.loss + options.value_coefficient * value - options.policy.entropy_bonus * entropy
    apart_R = logp_R - old_R
    kl = mx.mean(mx.exp(apart_R) - 1 - apart_R)
    return PpoParts(loss, clipped.loss, value, entropy, mx.mean(clipped.clipped_BT), kl)


def log_probabilities(outputs: dict[str, mx.array], actions: mx.array) -> tuple[mx.array, mx.array]:
    """Log-probabilities [R] of the actions, and entropies [R] of the policy at each row."""
    if LOGITS in outputs:
        logits_RA = outputs[LOGITS]
        logps_RA = logits_RA - mx.logsumexp(logits_RA, axis=-1, keepdims=True)
        logp_R = mx.take_along_axis(logps_RA, actions[:, None], axis=-1)[:, 0]
        return logp_R, -mx.sum(mx.exp(logps_RA) * logps_RA, axis=-1)
    log_std_RA = outputs[LOG_STD]
    z_RA = (actions - outputs[MEAN]) * mx.exp(-log_std_RA)
    logp_R = mx.sum(-0.5 * mx.square(z_RA) - log_std_RA - 0.5 * _LOG_2PI, axis=-1)
    return logp_R, mx.sum(log_std_RA + 0.5 * (1 + _LOG_2PI), axis=-1)


def steps_of(rollout: Rollout, advantages_TN: Floats) -> PpoSteps:
    """One after another the sequences of all copies that begin at the same step, each with the state that it had then.

    An episode that begins inside of a sequence begins with zeros there; nothing that was seen before reaches it.
    """
    begins_TN = np.concatenate([np.zeros_like(rollout.ended_TN[:1]), rollout.ended_TN[:-1]])

    def cut(each_TN: npt.NDArray[Any]) -> npt.NDArray[Any]:
        sequences = len(rollout.states_C)
        each_CLN = each_TN.reshape(sequences, -1, *each_TN.shape[1:])
        each_BL: npt.NDArray[Any] = each_CLN.swapaxes(1, 2).reshape(-1, each_CLN.shape[1], *each_TN.shape[2:])
        return each_BL

    return PpoSteps(
        observed_BLI=cut(rollout.observed_TNI),
        begins_BL=cut(begins_TN.astype(np.float32)),
        state={name: np.concatenate([each[name] for each in rollout.states_C]) for name in rollout.states_C[0]},
        actions=cut(rollout.actions_TN),
        logp_BL=cut(rollout.logp_TN),
        values_BL=cut(rollout.values_TN),
        advantages_BL=cut((advantages_TN - advantages_TN.mean()) / (advantages_TN.std() + 1e-8)),
        returns_BL=cut(advantages_TN + rollout.values_TN),
    )
