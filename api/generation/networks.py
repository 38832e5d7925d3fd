"""Requests to a network: tensors from JSON, the sequences that carry them, and the tensors that come back.

Rows travel in sequences of kind "network", some in each: as many as a worker may compute in one piece. All are computed
by the version that the request was admitted with.
"""

import asyncio
import base64
import binascii
import contextlib
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import Request
from redis.exceptions import RedisError

from api.callers.fair_pool import aside
from api.generation.plan import plain_sequences
from api.generation.running import gather_all
from api.generation.target import Target
from api.http.bodies import LONG_BYTES
from api.ring.ring import Ring
from shared.adapters import AdapterManifest
from shared.errors import InvalidRequestError
from shared.networks.shapes import MAX_NUMBERS, NetworkPlan
from shared.networks.spec import Dtype, NetworkSpec, TensorSpec
from shared.networks.tensors import NUMPY, Array, Tensors, check_tensors, pack, shape_with_batch, unpack

LOOK_AGAIN_S = 1.0  # whether anybody is there who computes
MOST_ROWS = 1024  # of a request
ROWS_OF_A_SEQUENCE = 64
BYTES_OF_A_SEQUENCE = 1 << 20  # that it brings, and that it gives
MOST_NUMBERS = 1 << 20  # of an answer

MOST_SIZES = 4  # of a shape that a request says: rows, steps, width, and one to be refused for what it is

Format = Literal["float", "base64"]

_ROWS: dict[Dtype, tuple[Any, ...]] = {  # by the number of its dimensions
    "float32": (float, list[float], list[list[float]]),
    "int32": (int, list[int]),
}


@dataclass(frozen=True)
class NetworkQuestion:
    """Rows for a network, checked, and how many a sequence carries."""

    tensors: Tensors
    rows: int
    at_once: int

    @property
    def packed(self) -> list[bytes]:
        """Tensors of each sequence, as it carries them."""
        starts = range(0, self.rows, self.at_once)
        return [pack({name: each[at : at + self.at_once] for name, each in self.tensors.items()}) for at in starts]


async def question(request: Request, network: NetworkSpec, given: Mapping[str, Any], param: str) -> NetworkQuestion:
    """The rows of a request: named tensors as JSON has them. InvalidRequestError names the tensor and the reason.

    A long body is read off the event loop.
    """
    if len(await request.body()) > LONG_BYTES:
        return await aside(_question, network, given, param)
    return _question(network, given, param)


async def answer(ring: Ring, target: Target, name: str, asked: NetworkQuestion) -> Tensors:
    """The network's outputs and new state for all rows; `name` begins the ids of its sequences.

    Any model's workers compute them. Where those of the target's are all gone meanwhile, another model's are asked.
    """
    packed = tuple(asked.packed)
    while True:
        sequences = plain_sequences(name, target, ring.settings, [()] * len(packed), kind="network")
        sequences = msgspec.structs.replace(sequences, tensors=packed)
        gathering = asyncio.create_task(gather_all(ring, sequences))
        try:
            if (other := await _other_model(ring, sequences.template.model, gathering)) is None:
                parts = [unpack(events[-1].embedding or b"") for events in await gathering]
                return {each: np.concatenate([part[each] for part in parts]) for each in parts[0]}
        finally:
            while not gathering.done():  # redis-py may lose a cancellation
                gathering.cancel()
                await asyncio.wait({gathering}, timeout=0.5)
        target = replace(target, served=await ring.served(other))


async def _other_model(ring: Ring, model: str, gathering: "asyncio.Task[Any]") -> str | None:
    """A model that live workers serve, once none serves this one any more; None when the rows have come before."""
    while True:
        await asyncio.wait({gathering}, timeout=LOOK_AGAIN_S)
        if gathering.done():
            return None
        with contextlib.suppress(RedisError, OSError):  # then it is not known
            live = await ring.live_models()
            if live and model not in live:
                return min(live)


def first_stray(given: Iterable[str], known: Container[str]) -> str | None:
    """The first name that is not known; there may be very many."""
    return next((name for name in given if name not in known), None)


def manifest_of(target: Target) -> AdapterManifest:
    """Manifest of a target that is a network."""
    assert target.admitted is not None, "a network is a version"
    return target.admitted.manifest


def shown(tensor: Array, form: Format = "float") -> Any:
    """Nested lists, or base64 of the bytes, row-major, little-endian."""
    return tensor.tolist() if form == "float" else base64.b64encode(np.ascontiguousarray(tensor).data).decode()


def described(tensor: Array, form: Format = "float") -> dict[str, Any]:
    """Such as a request may send back."""
    dtype = "int32" if tensor.dtype.kind == "i" else "float32"
    return {"dtype": dtype, "shape": list(tensor.shape), "data": shown(tensor, form)}


def _question(network: NetworkSpec, given: Mapping[str, Any], param: str) -> NetworkQuestion:
    known = {**network.inputs, **network.state}
    tensors = {name: _tensor(given[name], spec, f"{param}.{name}") for name, spec in known.items() if name in given}
    if (stray := first_stray(given, known)) is not None:
        tensors[stray] = np.zeros((1,), np.float32)  # its name is what is wrong with it
    planned = check_tensors(network, tensors, param)
    rows = len(next(iter(tensors.values())))
    if rows > MOST_ROWS:
        raise InvalidRequestError(f"{rows} rows; a request may have {MOST_ROWS}", param=param)
    gives = _numbers(network, planned)
    if rows * gives > MOST_NUMBERS:
        raise InvalidRequestError(
            f"{rows} rows of {gives} numbers are more than {MOST_NUMBERS} for one answer: send fewer rows", param=param
        )
    row_bytes = max(4 * gives, sum(each[0].nbytes for each in tensors.values()), 1)
    at_once = planned.rows(max(1, min(ROWS_OF_A_SEQUENCE, BYTES_OF_A_SEQUENCE // row_bytes)))
    return NetworkQuestion(tensors, rows, at_once)


def _numbers(network: NetworkSpec, planned: NetworkPlan) -> int:
    """That one row is given."""
    shapes = [planned.shapes[output.of] for output in network.outputs.values()]
    shapes += [state.shape for state in network.state.values()]
    return sum(math.prod(size or 1 for size in shape) for shape in shapes)


def _tensor(value: Any, spec: TensorSpec, param: str) -> Array:
    if isinstance(value, np.ndarray):  # a state that we have kept
        return value
    if not isinstance(value, dict):
        return _from_lists(value, spec, param)
    if (stray := first_stray(value, ("dtype", "shape", "data"))) is not None:
        raise InvalidRequestError(
            f"{stray[:80]!r} is no part of a tensor: 'data', 'shape' and 'dtype' are", param=param
        )
    dtype, shape, data = value.get("dtype", spec.dtype), value.get("shape"), value.get("data")
    if dtype != spec.dtype:
        said = repr(dtype[:80]) if isinstance(dtype, str) else "that is no name"
        raise InvalidRequestError(f"dtype {said}; {spec.dtype} is wanted", param=param)
    if shape is not None and not _is_shape(shape):
        raise InvalidRequestError(
            f"'shape' is a list of sizes: up to {MOST_SIZES}, each up to {MAX_NUMBERS}", param=param
        )
    if not isinstance(data, str):
        tensor = _from_lists(data, spec, param)
        if shape is not None and list(tensor.shape) != shape:
            raise InvalidRequestError(f"'data' has shape {list(tensor.shape)}, and 'shape' says {shape}", param=param)
        return tensor
    if shape is None:
        raise InvalidRequestError("data in base64 needs 'shape'", param=param)
    try:
        read = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError("'data' is neither nested lists of numbers nor base64", param=param) from None
    wanted = math.prod(shape) * NUMPY[spec.dtype].itemsize
    if len(read) != wanted:
        raise InvalidRequestError(f"'data' has {len(read)} bytes; shape {shape} has {wanted}", param=param)
    return np.frombuffer(read, NUMPY[spec.dtype]).reshape(shape)


def _is_shape(shape: Any) -> bool:
    """So small that what follows from it is computed at once."""
    is_list = isinstance(shape, list) and len(shape) <= MOST_SIZES
    return is_list and all(type(size) is int and 0 <= size <= MAX_NUMBERS for size in shape)


def _from_lists(value: Any, spec: TensorSpec, param: str) -> Array:
    """Row by row: between two rows others may run."""
    if not isinstance(value, list):
        raise InvalidRequestError("nested lists of numbers are wanted, a row first", param=param)
    if len(value) > MOST_ROWS:
        raise InvalidRequestError(f"{len(value)} rows; a request may have {MOST_ROWS}", param=param)
    rows: list[Array] = []
    for at, each in enumerate(value):
        sizes, first = _sizes(each)
        if type(first) not in (int, float, NoneType):
            raise InvalidRequestError(f"row {at} holds what is no {spec.dtype}", param=param)
        if len(sizes) != len(spec.shape):
            raise InvalidRequestError(
                f"this has shape {[len(value), *sizes]}; {shape_with_batch(spec.shape)} is wanted", param=param
            )
        row = _row(at, each, spec, param)
        if rows and row.shape != rows[0].shape:
            raise InvalidRequestError(
                f"row {at} has shape {list(row.shape)}, row 0 has {list(rows[0].shape)}", param=param
            )
        if spec.dtype == "int32":
            row = np.clip(row, -1, spec.below)  # what lies beyond is wrong either way
        with np.errstate(over="ignore"):  # it is looked at whether they are finite
            rows.append(row.astype(NUMPY[spec.dtype]))
    return np.stack(rows) if rows else np.zeros((0,), NUMPY[spec.dtype])


def _sizes(value: Any) -> tuple[list[int], Any]:
    """The shape of nested lists, as their first ones have it, and the first thing that is none."""
    sizes = []
    while isinstance(value, list):
        sizes.append(len(value))
        value = value[0] if value else None
    return sizes, value


def _row(at: int, row: Any, spec: TensorSpec, param: str) -> Array:
    """Numbers and nothing else come before numpy, which would make every text as long as the longest."""
    try:
        return np.asarray(msgspec.convert(row, _ROWS[spec.dtype][len(spec.shape)]), np.float64)
    except (msgspec.ValidationError, OverflowError):
        raise InvalidRequestError(f"row {at} holds what is no {spec.dtype}", param=param) from None
    except ValueError:
        raise InvalidRequestError(f"row {at} is ragged: its lists differ in length", param=param) from None
