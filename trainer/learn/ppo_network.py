"""The network that learns: its description, its outputs with gradients (in the MLX thread), its first weights.

Layers that learn: `linear`, `parameter`, `lstm` and `gru`. Shape suffixes: B sequences, L steps, R = B L rows,
I numbers observed, O gates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from mlx_model.networks.network import ACTIVATIONS, gru, lstm, state_parts
from shared.errors import SetupError
from shared.networks.shapes import plan, with_shapes
from shared.networks.spec import (
    LOG_STD,
    LOGITS,
    MEAN,
    VALUE,
    Gru,
    Linear,
    Lstm,
    NetworkSpec,
    OutputSpec,
    Parameter,
    Recurrent,
    TensorSpec,
)
from trainer.learn.options import MemoryKind
from trainer.state import Arrays

_FIRST_POLICY = 0.01  # of the layer of the actions: at first all are equally likely


class _File(msgspec.Struct, forbid_unknown_fields=True):
    network: NetworkSpec


def described(path: Path) -> NetworkSpec:
    """The network of an `adapter_config.json`; SetupError."""
    try:
        return with_shapes(msgspec.json.decode(path.read_bytes(), type=_File).network)
    except (OSError, ValueError) as error:
        raise SetupError(f"--network {path}: {error}") from error


def two_layers(observes: int, actions: int, *, discrete: bool, memory: MemoryKind = "") -> NetworkSpec:
    """A policy and values apart from each other, two layers of 64 each; with `memory` the first ones remember."""

    def first(name: str) -> Linear | Recurrent:
        if memory:
            return (Lstm if memory == "lstm" else Gru)(name=name, units=64, of=("observation",))
        return Linear(name=name, units=64, activation="tanh", of=("observation",))

    layers = (
        first("actor1"),
        Linear(name="actor2", units=64, activation="tanh"),
        Linear(name="pi", units=actions),
        first("critic1"),
        Linear(name="critic2", units=64, activation="tanh"),
        Linear(name="v", units=1),
    )
    outputs = {LOGITS if discrete else MEAN: OutputSpec("pi"), VALUE: OutputSpec("v")}
    inputs = {"observation": TensorSpec((observes,))}
    if discrete:
        return with_shapes(NetworkSpec(inputs, layers, outputs))
    spread = Parameter(name="sigma", units=actions)
    return with_shapes(NetworkSpec(inputs, (*layers, spread), {**outputs, LOG_STD: OutputSpec("sigma")}))


def check_learnable(network: NetworkSpec, observes: int, actions: int, *, discrete: bool) -> None:
    """SetupError when the network is no policy with values for such an environment.

    Of one vector only those layers can be made which can learn.
    """
    wanted = {LOGITS: (actions,), VALUE: (1,)} if discrete else {MEAN: (actions,), LOG_STD: (actions,), VALUE: (1,)}
    shapes = {name: each.shape for name, each in network.outputs.items()}
    if wrong := [name for name, shape in wanted.items() if shapes.get(name) != shape]:
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in wanted.items())
        raise SetupError(f"--network: output {wrong[0]!r} is missing or of another shape; wanted are {shown}")
    if [each.shape for each in network.inputs.values()] != [(observes,)]:
        raise SetupError(f"--network: one input of shape [{observes}] is wanted, which is what is observed")


def outputs_of(
    network: NetworkSpec,
    weights: Mapping[str, Any],
    observed_BLI: mx.array,
    begins_BL: mx.array,
    state: Mapping[str, mx.array],
) -> dict[str, mx.array]:
    """All outputs [R, ...] of sequences; `weights` is a tree, layer -> part.

    `state` [B, units] is what recurrent layers begin with; where `begins_BL` an episode begins, with zeros.
    """
    values = dict.fromkeys(network.inputs, observed_BLI)
    for at, layer in enumerate(network.layers):
        own = weights.get(layer.name, {})
        if isinstance(layer, Parameter):
            values[layer.name] = mx.broadcast_to(own["weight"], (*observed_BLI.shape[:2], layer.units))
            continue
        read = [values[name] for name in network.read_by(at)]
        x = mx.concatenate(read, axis=-1) if len(read) > 1 else read[0]
        if isinstance(layer, Linear):
            values[layer.name] = ACTIVATIONS[layer.activation](x @ own["weight"].T + own["bias"])
        else:
            assert isinstance(layer, Recurrent), "no other layer reads a vector"
            values[layer.name] = _recur(layer, own, x, 1.0 - begins_BL[..., None], state)
    return {name: values[each.of].reshape(begins_BL.size, -1) for name, each in network.outputs.items()}


def _recur(
    layer: Recurrent, own: Mapping[str, mx.array], x_BLI: mx.array, kept_BL1: mx.array, state: Mapping[str, mx.array]
) -> mx.array:
    gates_BLO = x_BLI @ own["weight_ih"].T + own["bias"]
    now = [state[f"{layer.name}.{part}"] for part in state_parts(layer)]
    shown: list[mx.array] = []
    for at in range(x_BLI.shape[1]):
        now = [kept_BL1[:, at] * each for each in now]
        of_h_BO = now[0] @ own["weight_hh"].T
        if isinstance(layer, Lstm):
            now = lstm(gates_BLO[:, at] + of_h_BO, now[1])
        else:
            now = gru(gates_BLO[:, at], of_h_BO, own["bias_hn"], now[0])
        shown.append(now[0])
    return mx.stack(shown, axis=1)


def first_weights(network: NetworkSpec, seed: int) -> Arrays:
    """Orthogonal rows, as large as what they read; biases and parameters are zeros, but an LSTM forgets little."""
    draw = np.random.default_rng(seed)
    policy = {each.of for name, each in network.outputs.items() if name in (LOGITS, MEAN)}
    values = {each.of for each in network.outputs.values()}
    recurrent = {layer.name: layer for layer in network.layers if isinstance(layer, Recurrent)}
    weights: Arrays = {}
    for name, shape in plan(network).tensors.items():
        layer = name.rpartition(".")[0]
        if len(shape) != 2:
            weights[name] = np.zeros(shape, np.float32)
            if isinstance(memory := recurrent.get(layer), Lstm) and name.endswith(".bias"):
                weights[name][memory.units : 2 * memory.units] = 1.0  # of the gate f
            continue
        tall = np.linalg.qr(draw.standard_normal((max(shape), min(shape))))[0]
        gain = _FIRST_POLICY if layer in policy else 1.0 if layer in values or layer in recurrent else 2**0.5
        # in rows: safetensors writes other arrays down as they lie
        weights[name] = np.ascontiguousarray(gain * (tall if shape[0] >= shape[1] else tall.T), np.float32)
    return weights
