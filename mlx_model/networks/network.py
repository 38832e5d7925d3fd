"""One network in memory, and what it makes of many rows: all in fp32, layer by layer, in pieces.

Shape suffixes: B rows, T time steps, I and O widths of a layer's input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shared.errors import AdapterRejectedError
from shared.networks.shapes import MAX_PIECE, plan
from shared.networks.spec import (
    Activation,
    Conv1d,
    Embedding,
    Gru,
    Layer,
    Linear,
    Lstm,
    NetworkSpec,
    Parameter,
    Recurrent,
    Steps,
)
from shared.networks.tensors import Array, Tensors

STEPS_AT_ONCE = 16  # of a recurrent layer, in one piece
Pieces = Generator[None, None, Tensors]

ACTIVATIONS: Mapping[Activation, Callable[[mx.array], mx.array]] = {
    "": lambda x: x,
    "relu": nn.relu,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "softplus": nn.softplus,
}
MOST_AT_ONCE = 1 << 24  # numbers, 64 MiB: of the products that exist before they are summed


class Network:
    """A network that is no language model, with evaluated fp32 weights."""

    def __init__(self, spec: NetworkSpec, weights: Mapping[str, mx.array]) -> None:
        self.spec = spec
        self._weights = {name: each.astype(mx.float32) for name, each in weights.items()}
        mx.eval(list(self._weights.values()))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._weights.values())

    def run(self, inputs: Tensors) -> Pieces:
        """Outputs and new state of a batch; it yields when what was begun is evaluated, and something else may run.

        `inputs` are what `shared.networks.tensors.check_tensors` lets pass; a state that is not among them is zeros.
        """
        rows = len(next(iter(inputs.values())))
        values = {name: mx.array(inputs[name]) for name in self.spec.inputs}
        state: dict[str, mx.array] = {}
        for at, layer in enumerate(self.spec.layers):
            read = [values[name] for name in self.spec.read_by(at)]
            x = mx.concatenate(read, axis=-1) if len(read) > 1 else read[0] if read else mx.zeros((rows, 0))
            if isinstance(layer, Recurrent):
                before = [inputs.get(f"{layer.name}.{part}") for part in state_parts(layer)]
                begun = [mx.zeros((rows, layer.units)) if each is None else mx.array(each) for each in before]
                values[layer.name], ended = yield from self._recur(layer, x, begun)
                state |= {f"{layer.name}.{part}": each for part, each in zip(state_parts(layer), ended, strict=True)}
            else:
                values[layer.name] = self._compute(layer, x)
                mx.eval(values[layer.name])
            yield
        outputs = {name: values[output.of] for name, output in self.spec.outputs.items()}
        return {name: _host(each) for name, each in (outputs | state).items()}

    def _compute(self, layer: Layer, x: mx.array) -> mx.array:
        match layer:
            case Linear():
                return ACTIVATIONS[layer.activation](self._linear(layer.name, x))
            case Conv1d():
                return ACTIVATIONS[layer.activation](self._convolve(layer, x))
            case Embedding():
                return self._weights[f"{layer.name}.weight"][x]
            case Parameter():
                return mx.broadcast_to(self._weights[f"{layer.name}.weight"], (len(x), layer.units))
            case Steps(take="last"):
                return x[:, -1]
            case Steps(take="mean"):
                return mx.mean(x, axis=1)
            case Steps():
                return x.reshape(len(x), -1)
        raise AssertionError(f"a layer of type {type(layer).__name__}")

    def _linear(self, path: str, x: mx.array, weight: str = "weight", bias: str = "bias") -> mx.array:
        weight_OI, bias_O = self._weights[f"{path}.{weight}"], self._weights.get(f"{path}.{bias}")
        y = multiply(x.reshape(-1, x.shape[-1]), weight_OI.reshape(len(weight_OI), -1))
        y = y.reshape(*x.shape[:-1], len(weight_OI))
        return y if bias_O is None else y + bias_O

    def _convolve(self, layer: Conv1d, x_BTI: mx.array) -> mx.array:
        if layer.padding:
            x_BTI = mx.pad(x_BTI, [(0, 0), (layer.padding, layer.padding), (0, 0)])
        starts = np.arange(0, x_BTI.shape[1] - layer.kernel + 1, layer.stride)
        windows = mx.array(starts[:, None] + np.arange(layer.kernel))
        return self._linear(layer.name, x_BTI[:, windows].reshape(len(x_BTI), len(starts), -1))

    def _recur(
        self, layer: Lstm | Gru, x: mx.array, state: list[mx.array]
    ) -> Generator[None, None, tuple[mx.array, list[mx.array]]]:
        one_step = x.ndim == 2
        x_BTI = x[:, None] if one_step else x
        step = self._lstm if isinstance(layer, Lstm) else self._gru
        shown: list[mx.array] = []
        at_once = self._steps_at_once(layer, len(x))
        for begin in range(0, x_BTI.shape[1], at_once):
            gates = self._linear(layer.name, x_BTI[:, begin : begin + at_once], "weight_ih")
            for at in range(gates.shape[1]):
                state = step(layer.name, gates[:, at], state)
                shown.append(state[0])
            mx.eval(shown[begin:], state)
            yield
        return (shown[-1] if one_step else mx.stack(shown, axis=1)), state

    def _steps_at_once(self, layer: Lstm | Gru, rows: int) -> int:
        products = rows * sum(self._weights[f"{layer.name}.{part}"].size for part in ("weight_ih", "weight_hh"))
        return max(1, min(STEPS_AT_ONCE, MAX_PIECE // products))

    def _lstm(self, path: str, gates_BO: mx.array, state: list[mx.array]) -> list[mx.array]:
        h, c = state
        return lstm(gates_BO + multiply(h, self._weights[f"{path}.weight_hh"]), c)

    def _gru(self, path: str, gates_BO: mx.array, state: list[mx.array]) -> list[mx.array]:
        (h,) = state
        of_h_BO = multiply(h, self._weights[f"{path}.weight_hh"])
        return gru(gates_BO, of_h_BO, self._weights.get(f"{path}.bias_hn"), h)


def lstm(gates_BO: mx.array, c: mx.array) -> list[mx.array]:
    """The next h and c, of the gates i, f, g, o."""
    i, f, g, o = mx.split(gates_BO, 4, axis=-1)
    c = mx.sigmoid(f) * c + mx.sigmoid(i) * mx.tanh(g)
    return [mx.sigmoid(o) * mx.tanh(c), c]


def gru(of_x_BO: mx.array, of_h_BO: mx.array, bias_hn: mx.array | None, h: mx.array) -> list[mx.array]:
    """The next h, of what the gates r, z, n have of the input and of h."""
    from_r, from_z, from_n = mx.split(of_x_BO, 3, axis=-1)
    of_r, of_z, of_n = mx.split(of_h_BO, 3, axis=-1)
    r, z = mx.sigmoid(from_r + of_r), mx.sigmoid(from_z + of_z)
    n = mx.tanh(from_n + r * (of_n if bias_hn is None else of_n + bias_hn))
    return [(1 - z) * n + z * h]


def state_parts(layer: Recurrent) -> str:
    """One letter for each array of a recurrent layer's state."""
    return "hc" if isinstance(layer, Lstm) else "h"


def read_network(owner: str, spec: NetworkSpec, file: Path) -> Network:
    """The network in an adapter's file; AdapterRejectedError when its tensors are not those of the description."""
    planned = plan(spec)
    weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    shapes = {name: each.shape for name, each in weights.items()}
    wanted = {name: shape for name, shape in planned.tensors.items() if name in shapes or name not in planned.optional}
    if shapes != wanted:
        raise AdapterRejectedError(f"{owner}: its tensors are not those that its description names")
    return Network(spec, weights)


def _host(value: mx.array) -> Array:
    return np.array(value, np.float32)


def multiply(x_NI: mx.array, weight_OI: mx.array) -> mx.array:
    """x W^T, [N, O], in true fp32 whatever the machine.

    On a CPU numpy multiplies: MLX's own product takes several times as long there. GPUs may round the inputs of such a
    product, so there products and sums are computed apart from each other, in parts that fit into memory.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks that outputs are finite
            return mx.array(np.asarray(x_NI) @ np.asarray(weight_OI).T)
    rows = max(1, MOST_AT_ONCE // max(1, weight_OI.size))
    parts = [mx.sum(weight_OI * x_NI[at : at + rows, None], axis=-1) for at in range(0, x_NI.shape[0], rows)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
