"""Named tensors, batch first: in a message, and held against what a network reads.

A message has one row: msgpack of name -> [dtype, shape, bytes], row-major, little-endian.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequestError, UnreadableMessageError
from shared.networks.shapes import NetworkPlan, plan_row
from shared.networks.spec import MAX_STEPS, Dtype, NetworkSpec, Shape, TensorSpec

Array = npt.NDArray[Any]  # float32 or int32
Tensors = dict[str, Array]

NUMPY: dict[Dtype, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int32": np.dtype("<i4")}


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes


_decoder = msgspec.msgpack.Decoder(dict[str, _Packed])


def pack(tensors: Mapping[str, Array]) -> bytes:
    """Encode tensors as one msgpack message."""
    return msgspec.msgpack.encode(
        {
            name: _Packed("int32" if each.dtype.kind == "i" else "float32", each.shape, _little(each).tobytes())
            for name, each in tensors.items()
        }
    )


def unpack(data: bytes) -> Tensors:
    """The tensors of a message; UnreadableMessageError."""
    try:
        packed = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableMessageError(f"unreadable tensors: {error}") from error
    tensors: Tensors = {}
    for name, each in packed.items():
        dtype = NUMPY[each.dtype]
        if min(each.shape, default=1) < 0 or len(each.data) != math.prod(each.shape) * dtype.itemsize:
            raise UnreadableMessageError(f"tensor {name[:80]!r} of shape {list(each.shape)} has {len(each.data)} bytes")
        tensors[name] = np.frombuffer(each.data, dtype).reshape(each.shape)
    return tensors


def check_tensors(spec: NetworkSpec, tensors: Mapping[str, Array], param: str = "inputs") -> NetworkPlan:
    """Shapes of all layers for these rows; InvalidRequestError names the tensor that the network does not read like
    this.

    A state may be left out, whole.
    """
    state = spec.state
    wanted = {**spec.inputs, **(state if state.keys() & tensors.keys() else {})}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise InvalidRequestError(f"{missing[0]!r} is missing: {described(wanted)} are wanted", param=param)
    if unknown := sorted(tensors.keys() - wanted.keys()):
        known = described({**spec.inputs, **state})
        raise InvalidRequestError(f"the network reads no {unknown[0][:80]!r}; it reads {known}", param=param)
    rows: tuple[int, ...] = next(iter(tensors.values())).shape[:1]
    for name, tensor in tensors.items():
        _check(name, wanted[name], tensor, f"{param}.{name}")
        if tensor.shape[:1] != rows:
            raise InvalidRequestError(
                f"{name!r} has {tensor.shape[0]} rows, {next(iter(tensors))!r} has {rows[0]}", param=f"{param}.{name}"
            )
    try:
        return plan_row(spec, {name: tensors[name].shape[1:] for name in spec.inputs})
    except ValueError as error:
        raise InvalidRequestError(str(error), param=param) from error


def described(tensors: Mapping[str, TensorSpec]) -> str:
    """Names, dtypes and shapes, for an error."""
    return ", ".join(f"{name} ({each.dtype} {shape_with_batch(each.shape)})" for name, each in tensors.items())


def shape_with_batch(shape: Shape) -> str:
    """Such as `[B, T, 4]`."""
    return "[" + ", ".join(["B", *("T" if each is None else str(each) for each in shape)]) + "]"


def _check(name: str, spec: TensorSpec, tensor: Array, param: str) -> None:
    own = tensor.shape[1:]
    fits = len(own) == len(spec.shape) and all(
        size == wanted or (wanted is None and 1 <= size <= MAX_STEPS)
        for size, wanted in zip(own, spec.shape, strict=True)
    )
    if not tensor.shape or tensor.shape[0] < 1 or not fits:
        more = f", T from 1 to {MAX_STEPS}" if None in spec.shape else ""
        raise InvalidRequestError(
            f"{name!r} has shape {list(tensor.shape)}; {shape_with_batch(spec.shape)} is wanted{more}", param=param
        )
    if tensor.dtype != NUMPY[spec.dtype]:
        raise InvalidRequestError(f"{name!r} is {tensor.dtype}; {spec.dtype} is wanted", param=param)
    if spec.dtype == "float32":
        wrong = ~np.isfinite(tensor)
        reason = "no finite float32"
    else:
        wrong = (tensor < 0) | (tensor >= spec.below)
        reason = f"not within 0 to {spec.below - 1}"
    if wrong.any():
        at = [int(each) for each in np.argwhere(wrong)[0]]
        raise InvalidRequestError(f"{name!r}: the value at {at} is {reason}", param=param)


def _little(tensor: Array) -> Array:
    return np.ascontiguousarray(tensor, NUMPY["int32" if tensor.dtype.kind == "i" else "float32"])
