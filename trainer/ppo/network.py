"""The network that learns: its description, its outputs with gradients (in the MLX thread), its first weights.

Layers without time steps: `linear` and `parameter`. Shape suffix: B rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from shared.errors import SetupError
from shared.networks.shapes import plan, with_shapes
from shared.networks.spec import LOG_STD, LOGITS, MEAN, VALUE, Linear, NetworkSpec, OutputSpec, Parameter, TensorSpec
from trainer.state import Arrays
from worker.engine.networks.network import ACTIVATIONS

_FIRST_POLICY = 0.01  # of the layer that says what to do: it begins with all actions alike


class _File(msgspec.Struct, forbid_unknown_fields=True):
    network: NetworkSpec


def described(path: Path) -> NetworkSpec:
    """The network of an `adapter_config.json`; SetupError."""
    try:
        return with_shapes(msgspec.json.decode(path.read_bytes(), type=_File).network)
    except (OSError, ValueError) as error:
        raise SetupError(f"--network {path}: {error}") from error


def two_layers(observes: int, actions: int, *, discrete: bool) -> NetworkSpec:
    """A policy and values apart from each other, two layers of 64 each."""
    layers = (
        Linear(name="actor1", units=64, activation="tanh"),
        Linear(name="actor2", units=64, activation="tanh"),
        Linear(name="pi", units=actions),
        Linear(name="critic1", units=64, activation="tanh", of=("observation",)),
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
    """SetupError when the network is no policy with values for such an environment, or has layers that cannot learn."""
    wanted = {LOGITS: (actions,), VALUE: (1,)} if discrete else {MEAN: (actions,), LOG_STD: (actions,), VALUE: (1,)}
    shapes = {name: each.shape for name, each in network.outputs.items()}
    if wrong := [name for name, shape in wanted.items() if shapes.get(name) != shape]:
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in wanted.items())
        raise SetupError(f"--network: output {wrong[0]!r} is missing or of another shape; wanted are {shown}")
    if [each.shape for each in network.inputs.values()] != [(observes,)]:
        raise SetupError(f"--network: one input of shape [{observes}] is wanted, which is what is observed")
    for layer in network.layers:
        if not isinstance(layer, Linear | Parameter):
            raise SetupError(
                f"--network: layer {layer.name!r}: only 'linear' and 'parameter' can learn with --mode ppo"
            )


def outputs_of(network: NetworkSpec, weights: Mapping[str, Any], observed_BI: mx.array) -> dict[str, mx.array]:
    """All outputs; `weights` is a tree, layer -> part."""
    values = dict.fromkeys(network.inputs, observed_BI)
    for at, layer in enumerate(network.layers):
        own = weights.get(layer.name, {})
        if isinstance(layer, Linear):
            read = [values[name] for name in network.read_by(at)]
            y = (mx.concatenate(read, axis=-1) if len(read) > 1 else read[0]) @ own["weight"].T
            values[layer.name] = ACTIVATIONS[layer.activation](y + own["bias"])
        else:
            values[layer.name] = mx.broadcast_to(own["weight"], (len(observed_BI), own["weight"].shape[-1]))
    return {name: values[each.of] for name, each in network.outputs.items()}


def first_weights(network: NetworkSpec, seed: int) -> Arrays:
    """Orthogonal rows, as large as what they read; biases and parameters are zeros."""
    draw = np.random.default_rng(seed)
    policy = {each.of for name, each in network.outputs.items() if name in (LOGITS, MEAN)}
    values = {each.of for each in network.outputs.values()}
    weights: Arrays = {}
    for name, shape in plan(network).tensors.items():
        layer = name.rpartition(".")[0]
        if len(shape) != 2:
            weights[name] = np.zeros(shape, np.float32)
            continue
        tall = np.linalg.qr(draw.standard_normal((max(shape), min(shape))))[0]
        gain = _FIRST_POLICY if layer in policy else 1.0 if layer in values else 2**0.5
        weights[name] = (gain * (tall if shape[0] >= shape[1] else tall.T)).astype(np.float32)
    return weights
