"""The update of an adapter: gradients added up over microbatches, clipped, one AdamW step. All that trains one uses it.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101; moments with bias correction.

Invariants.
- An update whose gradient or whose weights would not be finite changes nothing, neither weights nor moments.
- What an update makes depends on weights, moments, gradient and constants alone, to the byte: gradients go in the order
  of the model's parameters (`ordered`), because the last bits of their norm depend on it.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from mlx_model.device import on_cpu
from trainer.state import GradientMeans, Moments


@dataclass(frozen=True)
class StepSizes:
    """The constants of one update."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float = 0.0
    eps: float = 1e-8
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: they are not
    apart_rate: float = 0.0  # the learning rate of the parameters that learn apart


class AdamSteps:
    """AdamW over a module's trainable parameters, fp32; belongs to the module's thread.

    `apart` names parameters that have a learning rate of their own: a value head's.
    """

    def __init__(
        self, model: nn.Module, apart: Callable[[str], bool] | None = None, *, are_constant: bool = False
    ) -> None:
        """`are_constant`: all but the learning rates, in all updates; then these are compiled on a GPU."""
        self._model, self._apart, self._are_constant = model, apart, are_constant
        self._update: tuple[StepSizes, Callable[..., Any]] | None = None  # with its constants
        self.reset()

    def reset(self) -> None:
        """Reset the moments to those before the first update."""
        self._parts, self._adam = _adams(self._apart)
        self._adam.init(self._model.trainable_parameters())

    @property
    def count(self) -> int:
        """Number of updates made so far."""
        return int(self._parts[-1].step.item())

    def update(self, gradient: Any, sizes: StepSizes) -> tuple[float, bool]:
        """One update; the gradient's norm before clipping, and whether anything was changed."""
        state = self.state()
        rates = (sizes.learning_rate,) if self._apart is None else (sizes.apart_rate, sizes.learning_rate)
        for part, rate in zip(state.get("states", [state]), rates, strict=True):
            part["learning_rate"] = mx.array(rate)
        norm, is_finite, weights, state = self._updated(sizes)(gradient, self.parameters(), state)
        mx.eval(norm, is_finite, weights, state)
        if not is_finite.item():
            return norm.item(), False
        self.put_back(state, weights)
        return norm.item(), True

    def _updated(self, sizes: StepSizes) -> Callable[..., Any]:
        """The function of an update, which knows nothing of this object: a compiled one would hold it."""
        constants = replace(sizes, learning_rate=0.0, apart_rate=0.0)
        if self._update is None or self._update[0] != constants:
            update: Callable[..., Any] = partial(_update_by, constants, self._apart)
            if self._are_constant and not on_cpu():  # there a compiler would run for seconds, and gain little
                update = mx.compile(update)
            self._update = constants, update
        return self._update[1]

    def state(self) -> Any:
        """The present moments, to be put back by `put_back`; arrays are shared, since an update replaces them."""
        return tree_map(lambda value: value, self._adam.state)

    def parameters(self) -> Any:
        """The module's trainable parameters as a tree; arrays are shared, since an update replaces them."""
        return tree_map(lambda value: value, self._model.trainable_parameters())

    def put_back(self, state: Any, parameters: Any = None) -> None:
        """Have this `state`, and with `parameters` these weights."""
        self._adam.state = state
        if parameters is not None:
            self._model.update(parameters)

    def moments(self) -> Moments:
        """The state as plain data."""
        return {name: np.array(value) for name, value in tree_flatten(self._adam.state)}

    def load_moments(self, moments: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue with such a state; ValueError when it is another adapter's."""
        mine = {name: tuple(value.shape) for name, value in tree_flatten(self._adam.state)}
        if mine != {name: tuple(value.shape) for name, value in moments.items()}:
            raise ValueError("the optimizer's moments do not fit this adapter")
        self._adam.state = self.as_state(moments)

    def means(self, betas: tuple[float, float]) -> GradientMeans:
        """The moments without their bias towards 0, by parameter; `betas`: of the updates so far."""
        if not self.count:
            return GradientMeans()
        first, second = (
            {_parameter(n): (at / weight).astype(np.float32) for n, at in self.moments().items() if n.endswith(kind)}
            for kind, weight in self._weights(betas)
        )
        return GradientMeans(first, second)

    def take_means(self, means: GradientMeans, betas: tuple[float, float]) -> None:
        """Have the moments whose means these are; the number of updates, on which their bias depends, stays."""
        moments = self.moments()
        for (kind, weight), arrays in zip(self._weights(betas), (means.first, means.second), strict=True):
            ours = [name for name in moments if name.endswith(kind)]
            moments |= {name: arrays[_parameter(name)] * weight for name in ours}
        self.load_moments(moments)

    def _weights(self, betas: tuple[float, float]) -> list[tuple[str, np.float32]]:
        """Suffix of each moment's name, with the sum of the weights that all gradients so far have in it: 1 -
        beta^count.
        """
        return [(kind, np.float32(1 - beta**self.count)) for kind, beta in zip((".m", ".v"), betas, strict=True)]

    def as_state(self, moments: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Arrays that `state` returned when `moments` returned these; argument of `put_back`."""
        # In the present state's tree: it has empty places where a module has lists that are no parameters.
        return tree_map_with_path(lambda name, _: mx.array(moments[name]), self._adam.state)

    def ordered(self, gradient: Mapping[str, npt.NDArray[Any]]) -> Any:
        """A gradient by parameter name as a tree in the order of the parameters."""
        return tree_map_with_path(lambda name, _: mx.array(gradient[name]), self._model.trainable_parameters())


def _adams(apart: Callable[[str], bool] | None) -> tuple[list[Any], Any]:
    """MLX's optimizers, that of parameters which learn apart first, and the one of all."""
    parts = [optim.AdamW(learning_rate=0.0, bias_correction=True) for _ in range(1 if apart is None else 2)]
    return parts, parts[0] if apart is None else optim.MultiOptimizer(parts, [lambda name, _: apart(name)])


def _update_by(
    constants: StepSizes, apart: Callable[[str], bool] | None, gradient: Any, weights: Any, state: Any
) -> tuple[mx.array, mx.array, Any, Any]:
    """Norm of the gradient, whether all is finite, and what an update makes of weights and state."""
    # Without a bound the gradient is multiplied by 1.
    clipped, norm = optim.clip_grad_norm(gradient, constants.max_grad_norm or math.inf)
    parts, adam = _adams(apart)
    for part in parts:
        part.betas, part.eps, part.weight_decay = list(constants.betas), constants.eps, constants.weight_decay
    adam.state = state
    updated = adam.apply_gradients(clipped, weights)
    checks = [mx.isfinite(value).all() for _, value in tree_flatten(updated)]
    return norm, mx.stack([mx.isfinite(norm), *checks]).all(), updated, adam.state


def update_together(
    adams: Mapping[str, AdamSteps], gradients: Mapping[str, Any], sizes: Mapping[str, StepSizes], max_grad_norm: float
) -> tuple[float, bool]:
    """One update of several modules, scaled down by the norm of all gradients; the norm, and whether it was made.

    All of them are updated or none is: an update that would not be finite changes nothing.
    """
    clipped, norm = optim.clip_grad_norm(dict(gradients), max_grad_norm or math.inf)
    if not math.isfinite(norm.item()):
        return norm.item(), False
    before = {name: (adam.parameters(), adam.state()) for name, adam in adams.items()}
    for name, adam in adams.items():
        if not adam.update(clipped[name], sizes[name])[1]:
            for other, (parameters, moments) in before.items():
                adams[other].put_back(moments, parameters)
            return norm.item(), False
    return norm.item(), True


def _parameter(name: str) -> str:
    """Name of the parameter that a moment belongs to, without its optimizer's number and the moment's suffix."""
    return re.sub(r"^states\.\d+\.|\.[mv]$", "", name)


def added(gradient: Any, more: Any) -> Any:
    """The sum of two gradients of the same parameters; None is that of nothing."""
    return more if gradient is None else tree_map(mx.add, gradient, more)


def all_finite(tree: Any) -> bool:
    """True if all numbers of a tree of arrays are finite."""
    if tree is None:
        return True
    checks = [mx.isfinite(value).all() for _, value in tree_flatten(tree)]
    return bool(mx.stack(checks).all().item())  # one wait for all of them
