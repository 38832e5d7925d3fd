"""A network's definition in JSON: inputs, layers and outputs by name. Its weights lie in a safetensors file.

**input** what each row brings: a name, a shape without the batch, a dtype · **layer** computes one value of what it
reads (`of`: inputs or earlier layers, joined along the last dimension; by default the layer before) · **output** a
layer's value under a name · **state** what a recurrent layer hands from one call to the next, `LAYER.h` and `LAYER.c`:
an input that may be left out (it begins with zeros), and an output.

A value is a vector [F], or one for each time step [T, F]. A first dimension of null is a number of steps that each row
chooses. Unknown fields are refused: leaving one out would change what is computed.
"""

import re
from typing import Literal

import msgspec

Dtype = Literal["float32", "int32"]
Activation = Literal["", "relu", "tanh", "sigmoid", "gelu", "silu", "softplus"]
Shape = tuple[int | None, ...]

MAX_LAYERS = 64
MAX_ENDS = 16  # inputs, and outputs
MAX_WIDTH = 16_384  # numbers of a vector
MAX_STEPS = 1024  # vectors of a row
# Outputs by which a policy acts: discrete, or Gaussian; and what it expects
LOGITS, MEAN, LOG_STD, VALUE = "action_logits", "action_mean", "action_log_std", "value"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAKEN = {"text", "input_ids", "embedding", "next_token_ids", "next_token_log_probs"}  # a language model's


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input, or the state of a layer."""

    shape: Shape
    dtype: Dtype = "float32"
    below: int = 0  # int32: its values are 0 to below - 1


class OutputSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named output of a network: the layer that gives it, its shape and dtype."""

    of: str  # layer
    shape: Shape | None = None  # None in a file: what its layer gives
    dtype: Literal["float32"] = "float32"


class _Named(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"):
    """Fields that all kinds of layers have."""

    name: str
    of: tuple[str, ...] = ()


class Linear(_Named, frozen=True, tag="linear", kw_only=True):
    """`NAME.weight` [units, in], `NAME.bias` [units]: on the last dimension."""

    units: int
    activation: Activation = ""


class Conv1d(_Named, frozen=True, tag="conv1d", kw_only=True):
    """`NAME.weight` [channels, kernel, in], `NAME.bias` [channels]: over time steps."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0  # steps of zeros at either end
    activation: Activation = ""


class Lstm(_Named, frozen=True, tag="lstm", kw_only=True):
    """`NAME.weight_ih` [4 units, in], `NAME.weight_hh` [4 units, units], `NAME.bias` [4 units]; gates i, f, g, o."""

    units: int


class Gru(_Named, frozen=True, tag="gru", kw_only=True):
    """`NAME.weight_ih` [3 units, in], `NAME.weight_hh` [3 units, units], `NAME.bias` [3 units], `NAME.bias_hn` [units].

    Gates r, z, n; n = tanh(W x + b + r (U h + bias_hn)).
    """

    units: int


class Embedding(_Named, frozen=True, tag="embedding", kw_only=True):
    """`NAME.weight` [below, units]: a vector for each value of an int32 input."""

    units: int


class Parameter(_Named, frozen=True, tag="parameter", kw_only=True):
    """`NAME.weight` [units]: the same vector for every row, such as a policy's log-std."""

    units: int


class Steps(_Named, frozen=True, tag="steps", kw_only=True):
    """One vector out of those of all time steps."""

    take: Literal["last", "mean", "flatten"]


Layer = Linear | Conv1d | Lstm | Gru | Embedding | Parameter | Steps
Recurrent = Lstm | Gru


class NetworkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Definition of a network, without its weights."""

    inputs: dict[str, TensorSpec]
    layers: tuple[Layer, ...]
    outputs: dict[str, OutputSpec]

    def __post_init__(self) -> None:
        """ValueError for what is wrong whatever the shapes are."""
        for what, count, most in (
            ("inputs", len(self.inputs), MAX_ENDS),
            ("layers", len(self.layers), MAX_LAYERS),
            ("outputs", len(self.outputs), MAX_ENDS),
        ):
            if not 1 <= count <= most:
                raise ValueError(f"{count} {what}; 1 to {most} are taken")
        for name, tensor in self.inputs.items():
            _check_name(name)
            if name in _TAKEN:
                raise ValueError(f"input {name!r}: this is what a language model reads; choose another name")
            _check_input(name, tensor)
        known = set(self.inputs)
        for layer in self.layers:
            _check_name(layer.name)
            if layer.name in known:
                raise ValueError(f"two things are called {layer.name!r}")
            if len(set(layer.of)) < len(layer.of):
                raise ValueError(f"layer {layer.name!r} reads the same value twice")
            if unknown := sorted(set(layer.of) - known):
                raise ValueError(f"layer {layer.name!r} reads {unknown[0][:80]!r}, which is no input or earlier layer")
            _check_sizes(layer)
            known.add(layer.name)
        for name, output in self.outputs.items():
            _check_name(name)
            if output.of not in known - set(self.inputs):
                raise ValueError(f"output {name!r} is of {output.of[:80]!r}, and there is no such layer")

    def read_by(self, at: int) -> tuple[str, ...]:
        """Names of the layers or inputs that layer `at` reads."""
        layer = self.layers[at]
        if layer.of or isinstance(layer, Parameter):
            return layer.of
        return (self.layers[at - 1].name,) if at else tuple(self.inputs)

    @property
    def state(self) -> dict[str, TensorSpec]:
        """Shapes of the state that recurrent layers carry from one call to the next."""
        return {
            f"{layer.name}.{part}": TensorSpec((layer.units,))
            for layer in self.layers
            if isinstance(layer, Recurrent)
            for part in ("hc" if isinstance(layer, Lstm) else "h")
        }


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name: a small letter, then up to 31 small letters, digits or '_'")


def _check_input(name: str, tensor: TensorSpec) -> None:
    where = f"input {name!r}"
    rank = len(tensor.shape)
    if tensor.dtype == "float32" and not 1 <= rank <= 2:
        raise ValueError(f"{where}: a shape of float32 is [width] or [steps, width], this is {list(tensor.shape)}")
    if tensor.dtype == "int32" and rank > 1:
        raise ValueError(f"{where}: a shape of int32 is [] or [steps], this is {list(tensor.shape)}")
    if (tensor.below > 0) != (tensor.dtype == "int32") or tensor.below > 1 << 20:
        raise ValueError(f"{where}: int32 has 'below', 1 to {1 << 20}, and float32 has none")
    steps = tensor.shape[0] if rank and (rank == 2 or tensor.dtype == "int32") else 1
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"{where}: {steps} steps; 1 to {MAX_STEPS} are taken, or null")
    if tensor.dtype == "float32":
        width = tensor.shape[-1]
        if width is None or not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"{where}: width {width}; 1 to {MAX_WIDTH} is taken")


def _check_sizes(layer: Layer) -> None:
    sizes = {"units": MAX_WIDTH, "channels": MAX_WIDTH, "kernel": MAX_STEPS, "stride": MAX_STEPS}
    for field, most in sizes.items():
        value = getattr(layer, field, 1)
        if not 1 <= value <= most:
            raise ValueError(f"layer {layer.name!r}: {field} {value}; 1 to {most} is taken")
    if isinstance(layer, Conv1d) and not 0 <= layer.padding <= MAX_STEPS:
        raise ValueError(f"layer {layer.name!r}: padding {layer.padding}; 0 to {MAX_STEPS} is taken")
    if isinstance(layer, Parameter) and layer.of:
        raise ValueError(f"layer {layer.name!r}: a parameter reads nothing")
