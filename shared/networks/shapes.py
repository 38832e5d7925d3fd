"""Every shape, tensor and cost of a network, worked out before anything is built or multiplied.

The same rules serve a signature, in which a number of time steps may be open (None), and a row, in which none is.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from shared.networks.spec import (
    MAX_STEPS,
    MAX_WIDTH,
    Conv1d,
    Embedding,
    Gru,
    Layer,
    Linear,
    Lstm,
    NetworkSpec,
    Parameter,
    Recurrent,
    Shape,
    Steps,
)

MAX_WEIGHTS = 1 << 24  # of a network, 64 MiB
MAX_PIECE = 1 << 26  # products of a row in one layer, of a recurrent one in one step: decoding waits meanwhile
MAX_ROW = 1 << 30  # products of a row
MAX_NUMBERS = 1 << 18  # of a row's inputs, of its outputs, and of each value between them
PRODUCTS_OF_A_NUMBER = 16  # that a number of a value counts for, since it takes memory
PRODUCTS_OF_A_KEPT_NUMBER = 4  # that each number of all values counts for: they are stored to the end
MAX_BESIDE = 1 << 22  # numbers that a layer copies for a row, side by side, before it computes

TensorShape = tuple[int, ...]


class NetworkPlan(NamedTuple):
    """A network whose parts fit each other."""

    shapes: dict[str, Shape]  # of each input and layer, for one row
    tensors: dict[str, TensorShape]  # that its file must have
    optional: frozenset[str]  # that may be left out: biases
    piece: int  # products, or what memory counts for, of the layer that has the most in one go, or of all values
    products: int  # of all, with open numbers of steps taken as one

    def rows(self, most: int) -> int:
        """How many rows, at most so many, are computed in one go."""
        return max(1, min(most, MAX_PIECE // max(1, self.piece)))


def plan(spec: NetworkSpec) -> NetworkPlan:
    """Shapes of all layers for inputs of the signature's shapes; ValueError names the layer and the reason."""
    return _plan(spec, {name: each.shape for name, each in spec.inputs.items()})


def plan_row(spec: NetworkSpec, shapes: Mapping[str, TensorShape]) -> NetworkPlan:
    """Shapes of all layers for one row with inputs of these shapes; ValueError when they exceed the limits."""
    planned = _plan(spec, dict(shapes))
    if (numbers := sum(map(math.prod, shapes.values()))) > MAX_NUMBERS:
        raise ValueError(f"its inputs have {numbers} numbers for one row; {MAX_NUMBERS} is the limit")
    numbers = sum(_count(planned.shapes[output.of]) for output in spec.outputs.values())
    if numbers > MAX_NUMBERS:
        raise ValueError(f"its outputs have {numbers} numbers for one row; {MAX_NUMBERS} is the limit")
    return planned


def with_shapes(spec: NetworkSpec) -> NetworkSpec:
    """The network with the shapes of its outputs filled in; ValueError when it declares other ones."""
    shapes = plan(spec).shapes
    outputs = {}
    for name, output in spec.outputs.items():
        shape = shapes[output.of]
        if output.shape not in (None, shape):
            raise ValueError(
                f"output {name!r}: shape {_shown(output.shape)}, layer {output.of!r} gives {_shown(shape)}"
            )
        outputs[name] = msgspec.structs.replace(output, shape=shape)
    return msgspec.structs.replace(spec, outputs=outputs)


def _plan(spec: NetworkSpec, inputs: dict[str, Shape]) -> NetworkPlan:
    shapes = dict(inputs)
    ids = {name: each.below for name, each in spec.inputs.items() if each.dtype == "int32"}
    tensors: dict[str, TensorShape] = {}
    optional: set[str] = set()
    piece = products = kept = 0
    for at, layer in enumerate(spec.layers):
        try:
            own, shape, beside = _fitted(layer, spec.read_by(at), shapes, ids)
            in_one_go, in_all = _cost(layer, own, beside, shape)
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r} {error}") from None
        shapes[layer.name] = shape
        tensors |= {f"{layer.name}.{part}": each for part, each in own.items()}
        optional |= {f"{layer.name}.{part}" for part in own if part.startswith("bias")}
        piece, products, kept = max(piece, in_one_go), products + in_all, kept + _count(shape)
    if (count := sum(math.prod(each) for each in tensors.values())) > MAX_WEIGHTS:
        raise ValueError(f"it has {count:,} weights; a network may have {MAX_WEIGHTS:,}")
    if products > MAX_ROW:
        raise ValueError(f"it takes {products:,} products for a row; {MAX_ROW:,} is the limit")
    return NetworkPlan(shapes, tensors, frozenset(optional), max(piece, PRODUCTS_OF_A_KEPT_NUMBER * kept), products)


def _fitted(
    layer: Layer, read: tuple[str, ...], shapes: Mapping[str, Shape], ids: Mapping[str, int]
) -> tuple[dict[str, TensorShape], Shape, int]:
    """A layer's tensors, the shape of its value, which is not too large, and how many numbers it lays side by side.

    `ids`: bounds of inputs of int32.
    """
    own: dict[str, TensorShape]
    shape: Shape
    beside = 0
    if isinstance(layer, Embedding):
        if len(read) != 1 or read[0] not in ids:
            raise ValueError("reads something else than one input of dtype int32, as an embedding does")
        own, shape = {"weight": (ids[read[0]], layer.units)}, (*shapes[read[0]], layer.units)
    else:
        if wrong := sorted(set(read) & set(ids)):
            raise ValueError(f"reads input {wrong[0]!r}, which is int32: only an embedding does")
        joined = _joined([shapes[name] for name in read])
        own, shape = _tensors(layer, joined[-1] or 0), _shape(layer, joined)
        beside = _laid_side_by_side(layer, joined, shape) if len(read) > 1 or isinstance(layer, Conv1d) else 0
    if (numbers := _count(shape)) > MAX_NUMBERS:
        raise ValueError(f"gives {numbers} numbers for one row; {MAX_NUMBERS} is the limit")
    if (shape[-1] or 0) > MAX_WIDTH:
        raise ValueError(f"gives vectors of {shape[-1]} numbers; {MAX_WIDTH} is the limit")
    if len(shape) == 2 and (shape[0] or 1) > MAX_STEPS:
        raise ValueError(f"gives {shape[0]} steps; {MAX_STEPS} is the limit")
    return own, shape, beside


def _laid_side_by_side(layer: Layer, joined: Shape, shape: Shape) -> int:
    """Numbers that it copies for a row before it computes: what it joins, pads, or reads in windows.

    ValueError when they are too many.
    """
    numbers, width = _count(joined), joined[-1] or 0
    if isinstance(layer, Conv1d):
        windows = (shape[0] or 1) * layer.kernel * width
        numbers = max(windows, numbers + 2 * layer.padding * width)
    if numbers > MAX_BESIDE:
        raise ValueError(f"reads {numbers:,} numbers; {MAX_BESIDE:,} is the limit")
    return numbers


def _cost(layer: Layer, own: Mapping[str, TensorShape], beside: int, shape: Shape) -> tuple[int, int]:
    """Products of one row: in one go, as `NetworkPlan.piece` counts them, and in all."""
    weights = 0 if isinstance(layer, Embedding | Parameter) else sum(math.prod(each) for each in own.values())
    steps = (shape[0] or 1) if len(shape) == 2 else 1
    in_one_go = weights if isinstance(layer, Recurrent) else weights * steps
    if in_one_go > MAX_PIECE:
        raise ValueError(f"takes {in_one_go:,} products for a row; {MAX_PIECE:,} is the limit")
    return max(in_one_go, PRODUCTS_OF_A_NUMBER * max(beside, _count(shape))), weights * steps


def _count(shape: Shape) -> int:
    return math.prod(each or 1 for each in shape)


def _joined(shapes: list[Shape]) -> Shape:
    """The shape of several values side by side; a parameter's vector is not repeated for time steps."""
    if not shapes:
        return (0,)
    first, *others = shapes
    for other in others:
        if other[:-1] != first[:-1]:
            raise ValueError(f"joins {_shown(first)} and {_shown(other)}, which differ before the last dimension")
    return (*first[:-1], sum(each[-1] or 0 for each in shapes))


def _shape(layer: Layer, read: Shape) -> Shape:
    match layer:
        case Linear(units=units) | Lstm(units=units) | Gru(units=units):
            return (*read[:-1], units)
        case Conv1d():
            if len(read) != 2:
                raise ValueError(f"reads {_shown(read)}; a convolution reads [steps, channels]")
            return (_windows(layer, read[0]), layer.channels)
        case Steps(take=take):
            if len(read) != 2:
                raise ValueError(f"reads {_shown(read)}; '{take}' reads [steps, width]")
            if take != "flatten":
                return read[1:]
            if read[0] is None:
                raise ValueError("reads open steps; 'flatten' needs a fixed number of steps")
            return (read[0] * (read[1] or 0),)
        case Parameter(units=units):
            return (units,)
    raise AssertionError(f"a layer of type {type(layer).__name__}")


def _windows(layer: Conv1d, steps: int | None) -> int | None:
    if steps is None:
        return None
    if steps + 2 * layer.padding < layer.kernel:
        raise ValueError(f"reads {steps} steps: with padding {layer.padding} fewer than kernel {layer.kernel}")
    return (steps + 2 * layer.padding - layer.kernel) // layer.stride + 1


def _tensors(layer: Layer, inputs: int) -> dict[str, TensorShape]:
    match layer:
        case Linear(units=units):
            return {"weight": (units, inputs), "bias": (units,)}
        case Conv1d(channels=channels, kernel=kernel):
            return {"weight": (channels, kernel, inputs), "bias": (channels,)}
        case Lstm(units=units):
            return {"weight_ih": (4 * units, inputs), "weight_hh": (4 * units, units), "bias": (4 * units,)}
        case Gru(units=units):
            gates = {"weight_ih": (3 * units, inputs), "weight_hh": (3 * units, units), "bias": (3 * units,)}
            return {**gates, "bias_hn": (units,)}
        case Parameter(units=units):
            return {"weight": (units,)}
    return {}


def _shown(shape: Shape | None) -> str:
    return "[" + ", ".join("null" if each is None else str(each) for each in shape or ()) + "]"
