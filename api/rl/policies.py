"""Policies that are a network or a head, applied to observations: which outputs mean an action, and how it is drawn.

Outputs of a network go by their names, and those of a head get the same ones. `action_logits` [N]: one of N actions.
`action_mean` [A] and `action_log_std` [A]: a vector, each number with a normal distribution of its own. `value` [1]
beside either.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequestError, UnsupportedModelError
from shared.heads import HeadSpec
from shared.networks.spec import LOG_STD, LOGITS, MEAN, VALUE, NetworkSpec
from shared.networks.tensors import Tensors

_LOG_ROOT_OF_2PI = 0.5 * math.log(2 * math.pi)

Doubles = npt.NDArray[np.float64]  # a row for each observation


def check_policy(id: str, network: NetworkSpec, names: Sequence[str] | None, temperature: float | None) -> None:
    """InvalidRequestError when the network is no policy, or not one of these actions."""
    shapes = {name: output.shape or () for name, output in network.outputs.items()}
    is_discrete = LOGITS in shapes
    if not is_discrete and not {MEAN, LOG_STD} <= shapes.keys():
        raise InvalidRequestError(
            f"{id} is no policy: it has neither an output '{LOGITS}' nor '{MEAN}' and '{LOG_STD}'; /v1/predict asks it",
            param="model",
        )
    actions = [shapes[LOGITS]] if is_discrete else [shapes[MEAN], shapes[LOG_STD]]
    if any(len(shape) != 1 for shape in actions) or actions[0] != actions[-1] or shapes.get(VALUE, (1,)) != (1,):
        raise InvalidRequestError(
            f"{id} is no policy: its actions are not one vector for a row, or its '{VALUE}' is not one number",
            param="model",
        )
    if names is not None and (not is_discrete or actions[0] != (len(names),)):
        has = f"{actions[0][0]} actions" if is_discrete else "no discrete actions"
        raise InvalidRequestError(f"{id} has {has}, and 'actions' names {len(names)}", param="actions")
    if not is_discrete:
        check_own_spread(id, temperature)


def check_own_spread(owner: str, temperature: float | None) -> None:
    """InvalidRequestError for a temperature of Gaussian actions."""
    if temperature not in (None, 1.0):
        raise InvalidRequestError(
            f"{owner} says its own spread: a temperature is for discrete actions", param="temperature"
        )


def outputs_of(spec: HeadSpec, outputs: npt.NDArray[np.float32]) -> Tensors:
    """A policy head's outputs under the names that those of networks have."""
    if spec.kind == "categorical":
        return {LOGITS: outputs}
    return {MEAN: outputs[:, : spec.size], LOG_STD: outputs[:, spec.size :]}


def act_by(
    outputs: Tensors, names: Sequence[str] | None, *, seed: int, deterministic: bool, temperature: float
) -> dict[str, Any]:
    """Actions of all rows; what is drawn for a row depends on the seed, its place and its outputs alone."""
    drawn = np.random.default_rng(seed)
    chosen = (
        _discrete(outputs[LOGITS].astype(np.float64), names, drawn, deterministic, temperature)
        if LOGITS in outputs
        else _gaussian(outputs[MEAN].astype(np.float64), outputs[LOG_STD].astype(np.float64), drawn, deterministic)
    )
    return {**chosen, "value_estimates": outputs[VALUE][:, 0].tolist() if VALUE in outputs else None}


def _discrete(
    logits: Doubles, names: Sequence[str] | None, drawn: np.random.Generator, deterministic: bool, temperature: float
) -> dict[str, Any]:
    with np.errstate(over="ignore"):  # at a temperature of almost nothing the others are beyond reach
        shifted = (logits - logits.max(-1, keepdims=True)) / temperature
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    probs = np.exp(logprobs)
    places = drawn.random((len(probs), 1)) * probs.sum(-1, keepdims=True)
    best = probs.argmax(-1)
    # Rounding may leave a place after the last sum: the most likely action is then as good as any.
    beyond = np.cumsum(probs, -1) > places
    at = best if deterministic else np.where(beyond.any(-1), beyond.argmax(-1), best)
    indices = at.tolist()
    return {
        "actions": indices if names is None else [names[index] for index in indices],
        "action_indices": indices,
        "action_log_probs": np.take_along_axis(logprobs, at[:, None], -1)[:, 0].tolist(),
        "action_probs": probs.tolist(),
    }


def _gaussian(mean: Doubles, log_std: Doubles, drawn: np.random.Generator, deterministic: bool) -> dict[str, Any]:
    noise = np.zeros_like(mean) if deterministic else drawn.standard_normal(mean.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        actions = mean + np.exp(log_std) * noise
    if not np.isfinite(actions).all():
        raise UnsupportedModelError(f"'{LOG_STD}' is too large: an action would be no finite number", param="model")
    logprobs = (-0.5 * noise**2 - log_std - _LOG_ROOT_OF_2PI).sum(-1)
    return {
        "actions": actions.tolist(),
        "action_log_probs": logprobs.tolist(),
        "action_means": mean.tolist(),
        "action_log_stds": log_std.tolist(),
    }
