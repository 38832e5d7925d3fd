"""Networks of every kind of layer, their weights, and what numpy makes of them in double precision."""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.networks.shapes import plan, with_shapes
from shared.networks.spec import Conv1d, Embedding, Gru, Linear, Lstm, NetworkSpec, Parameter, Steps

Array = npt.NDArray[Any]

MLP: dict[str, Any] = {
    "inputs": {"observation": {"shape": [4]}},
    "layers": [
        {"type": "linear", "name": "body", "units": 16, "activation": "tanh"},
        {"type": "linear", "name": "pi", "units": 2},
        {"type": "linear", "name": "v", "units": 1, "of": ["body"]},
    ],
    "outputs": {"action_logits": {"of": "pi"}, "value": {"of": "v"}},
}
GAUSSIAN: dict[str, Any] = {
    "inputs": {"observation": {"shape": [3]}},
    "layers": [
        {"type": "linear", "name": "mu", "units": 2, "activation": "softplus"},
        {"type": "parameter", "name": "sigma", "units": 2},
    ],
    "outputs": {"action_mean": {"of": "mu"}, "action_log_std": {"of": "sigma"}},
}
LSTM: dict[str, Any] = {
    "inputs": {"observation": {"shape": [4]}},
    "layers": [
        {"type": "lstm", "name": "memory", "units": 8},
        {"type": "linear", "name": "pi", "units": 3},
    ],
    "outputs": {"action_logits": {"of": "pi"}},
}
SERIES: dict[str, Any] = {
    "inputs": {"series": {"shape": [None, 5]}, "last": {"shape": [None, 2]}},
    "layers": [
        {"type": "lstm", "name": "first", "units": 6, "of": ["series", "last"]},
        {"type": "gru", "name": "second", "units": 7},
        {"type": "steps", "name": "end", "take": "last"},
        {"type": "steps", "name": "middle", "take": "mean", "of": ["first"]},
        {"type": "linear", "name": "y", "units": 2, "of": ["end", "middle"], "activation": "gelu"},
    ],
    "outputs": {"y": {"of": "y"}, "each": {"of": "first", "shape": [None, 6]}},
}
CONV: dict[str, Any] = {
    "inputs": {"signal": {"shape": [20, 3]}},
    "layers": [
        {"type": "conv1d", "name": "c1", "channels": 8, "kernel": 3, "padding": 1, "activation": "relu"},
        {"type": "conv1d", "name": "c2", "channels": 4, "kernel": 5, "stride": 2, "activation": "silu"},
        {"type": "steps", "name": "flat", "take": "flatten"},
        {"type": "linear", "name": "y", "units": 3, "activation": "sigmoid"},
    ],
    "outputs": {"y": {"of": "y"}},
}
TOKENS: dict[str, Any] = {
    "inputs": {"cell": {"shape": [], "dtype": "int32", "below": 9}},
    "layers": [
        {"type": "embedding", "name": "place", "units": 5},
        {"type": "gru", "name": "memory", "units": 4},
    ],
    "outputs": {"action_logits": {"of": "memory"}},
}
ALL = {"mlp": MLP, "gaussian": GAUSSIAN, "lstm": LSTM, "series": SERIES, "conv": CONV, "tokens": TOKENS}


def spec_of(described: dict[str, Any]) -> NetworkSpec:
    return with_shapes(msgspec.convert(described, NetworkSpec))


def weights_of(described: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    shapes = plan(spec_of(described)).tensors
    return {name: (draw.standard_normal(shape) / 2).astype(np.float32) for name, shape in shapes.items()}


def inputs_of(described: dict[str, Any], rows: int, steps: int = 3, seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for name, each in spec_of(described).inputs.items():
        shape = (rows, *(steps if size is None else size for size in each.shape))
        if each.dtype == "int32":
            inputs[name] = draw.integers(0, each.below, shape).astype(np.int32)
        else:
            inputs[name] = draw.standard_normal(shape).astype(np.float32)
    return inputs


def computed(described: dict[str, Any], weights: dict[str, Array], inputs: dict[str, Array]) -> dict[str, Array]:
    """Outputs and new state, in float64, of one row after the other and one step after the other."""
    rows = len(next(iter(inputs.values())))
    each = [
        _row(spec_of(described), weights, {name: value[at] for name, value in inputs.items()}) for at in range(rows)
    ]
    return {name: np.stack([row[name] for row in each]) for name in each[0]}


def _row(spec: NetworkSpec, weights: dict[str, Array], inputs: dict[str, Array]) -> dict[str, Array]:
    values: dict[str, Array] = dict(inputs)
    state: dict[str, Array] = {}
    for at, layer in enumerate(spec.layers):
        of = [values[name] for name in spec.read_by(at)]
        x = np.concatenate([part.astype(np.float64) for part in of], -1) if of and of[0].ndim else np.zeros(0)
        own = {name.partition(".")[2]: each for name, each in weights.items() if name.startswith(f"{layer.name}.")}
        match layer:
            case Linear():
                y = _activated(layer.activation, x @ own["weight"].T + own["bias"])
            case Conv1d():
                padded = np.pad(x, [(layer.padding, layer.padding), (0, 0)])
                starts = range(0, len(padded) - layer.kernel + 1, layer.stride)
                seen = np.stack([np.einsum("oki,ki->o", own["weight"], padded[t : t + layer.kernel]) for t in starts])
                y = _activated(layer.activation, seen + own["bias"])
            case Embedding():
                y = own["weight"][of[0]]
            case Parameter():
                y = own["weight"]
            case Steps():
                y = x[-1] if layer.take == "last" else x.mean(0) if layer.take == "mean" else x.reshape(-1)
            case Lstm() | Gru():
                zero = np.zeros(layer.units)
                h, c = inputs.get(f"{layer.name}.h", zero), inputs.get(f"{layer.name}.c", zero)
                shown = []
                for x_I in x if x.ndim == 2 else x[None]:
                    h, c = (_lstm if isinstance(layer, Lstm) else _gru)(own, x_I, h, c)
                    shown.append(h)
                y = np.stack(shown) if x.ndim == 2 else h
                state |= {f"{layer.name}.h": h} | ({f"{layer.name}.c": c} if isinstance(layer, Lstm) else {})
        values[layer.name] = y
    return {name: values[output.of] for name, output in spec.outputs.items()} | state


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _lstm(own: dict[str, Array], x: Array, h: Array, c: Array) -> tuple[Array, Array]:
    i, f, g, o = np.split(own["weight_ih"] @ x + own["weight_hh"] @ h + own["bias"], 4)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(c), c


def _gru(own: dict[str, Array], x: Array, h: Array, c: Array) -> tuple[Array, Array]:
    r_x, z_x, n_x = np.split(own["weight_ih"] @ x + own["bias"], 3)
    r_h, z_h, n_h = np.split(own["weight_hh"] @ h, 3)
    r, z = _sigmoid(r_x + r_h), _sigmoid(z_x + z_h)
    n = np.tanh(n_x + r * (n_h + own["bias_hn"]))
    return (1 - z) * n + z * h, c


def _activated(name: str, x: Array) -> Array:
    if name == "gelu":
        return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))
    known: dict[str, Any] = {
        "": lambda x: x,
        "relu": lambda x: np.maximum(x, 0),
        "tanh": np.tanh,
        "sigmoid": _sigmoid,
        "silu": lambda x: x * _sigmoid(x),
        "softplus": lambda x: np.log1p(np.exp(x)),
    }
    return np.asarray(known[name](x))
