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
from dataclasses import dataclass
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

    def __init__(self, model: nn.Module, apart: Callable[[str], bool] | None = None) -> None:
        self._model, self._apart = model, apart
        self._constants: tuple[Any, ...] = ()  # of the update that was made last
        self._updated: Callable[..., Any] = self._made
        self.reset()

    def reset(self) -> None:
        """Reset the moments to those before the first update."""
        self._parts = [optim.AdamW(learning_rate=0.0, bias_correction=True)]
        self._adam: Any = self._parts[0]
        if (apart := self._apart) is not None:
            self._parts.insert(0, optim.AdamW(learning_rate=0.0, bias_correction=True))
            self._adam = optim.MultiOptimizer(self._parts, [lambda name, _: apart(name)])
        self._adam.init(self._model.trainable_parameters())

    @property
    def count(self) -> int:
        """Number of updates made so far."""
        return int(self._parts[-1].step.item())

    def update(self, gradient: Any, sizes: StepSizes) -> tuple[float, bool]:
        """One update; the gradient's norm before clipping, and whether anything was changed."""
        constants = sizes.betas, sizes.eps, sizes.weight_decay, sizes.max_grad_norm
        if constants != self._constants:
            # As one graph of few operations; on a CPU a compiler would run for seconds, and gain little.
            self._constants = constants
            self._updated = self._made if on_cpu() else mx.compile(self._made)
        before = self.state()
        for adam in self._parts:
            adam.learning_rate = sizes.learning_rate
            adam.betas, adam.eps, adam.weight_decay = list(sizes.betas), sizes.eps, sizes.weight_decay
        if self._apart is not None:
            self._parts[0].learning_rate = sizes.apart_rate
        norm, is_finite, weights, state = self._updated(gradient, self.parameters(), self._adam.state)
        mx.eval(norm, is_finite, weights, state)
        if not is_finite.item():
            self.put_back(before)
            return norm.item(), False
        self.put_back(state, weights)
        return norm.item(), True

    def _made(self, gradient: Any, weights: Any, state: Any) -> tuple[mx.array, mx.array, Any, Any]:
        """Norm of the gradient, whether all is finite, and what an update makes of weights and state."""
        _, _, _, max_grad_norm = self._constants
        # Without a bound the gradient is multiplied by 1.
        clipped, norm = optim.clip_grad_norm(gradient, max_grad_norm or math.inf)
        self._adam.state = state
        updated = self._adam.apply_gradients(clipped, weights)
        checks = [mx.isfinite(value).all() for _, value in tree_flatten(updated)]
        return norm, mx.stack([mx.isfinite(norm), *checks]).all(), updated, self._adam.state

    def state(self) -> Any:
        """The present moments, to be put back by `put_back`; arrays are shared, since an update replaces them."""
        return tree_map(lambda value: value, self._adam.state)

    def parameters(self) -> Any:
        """The module's trainable parameters as a tree; arrays are shared, since an update replaces them."""
        return tree_map(lambda value: value, self._model.trainable_parameters())

    def put_back(self, state: Any, parameters: Any = None) -> None:
        """Restore a `state`, and with `parameters` the weights, from before an update that was refused."""
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
