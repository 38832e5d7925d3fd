"""KV as bytes that anybody may hold, and back: a *parcel* is the KV of some blocks, or one snapshot. No files here.

A parcel is a safetensors file. Its metadata holds a label, which says what the KV is of and what computed it, and a
SHA-256 over all other bytes, label and layout included: `unpack` gives nothing of a parcel of which one bit differs,
or that something else has computed. Arrays lie in order: `cut.LEAF.N` of leaves that are cut, `state.LEAF.N` of others.

Threads. `as_bytes` and `as_array` are MLX's, and so for the engine's thread; what lies between, `pack` and `unpack`,
handles plain memory and may run anywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import mlx.core as mx
import msgspec

from mlx_model.kv.kinds import leaves

T = TypeVar("T")

FORMAT = 1
MAX_HEADER_BYTES = 32 << 20
_UNSIGNED = "0" * 64  # in place of the checksum while it is computed
_DTYPES: dict[str, tuple[mx.Dtype, int]] = {
    "BOOL": (mx.bool_, 1),
    "U8": (mx.uint8, 1),
    "I8": (mx.int8, 1),
    "U16": (mx.uint16, 2),
    "I16": (mx.int16, 2),
    "F16": (mx.float16, 2),
    "BF16": (mx.bfloat16, 2),
    "U32": (mx.uint32, 4),
    "I32": (mx.int32, 4),
    "F32": (mx.float32, 4),
    "U64": (mx.uint64, 8),
    "I64": (mx.int64, 8),
}
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}


class UnusableParcelError(Exception):
    """Cut short, altered, or of something else than we compute with; the message says which."""


class Label(msgspec.Struct, frozen=True):
    """Describes the content of a parcel. `identity` is that of the model which computed it (`identity_of`)."""

    identity: str
    keys: tuple[bytes, ...]  # of its blocks, in order; of a snapshot the key before its position
    version: str = ""  # of the adapter; "": none
    weights: str = ""  # digest of that adapter: a name and number may mean other weights in another ring
    tail: tuple[int, ...] | None = None  # of a snapshot: ids between the key's block and its position
    length: int = 0  # of a snapshot: ids read in all

    @property
    def name(self) -> str:
        """Equal for parcels that hold the same."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


@dataclass(frozen=True)
class HostArray:
    """An array's bytes, in C order."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    data: memoryview


HostLayers = list[tuple[HostArray, ...]]


@dataclass(frozen=True)
class KvParcel:
    """Arrays of one row: blocks of the leaves that are cut, or a snapshot's rest of these and the others' states."""

    label: Label
    cut: HostLayers
    states: HostLayers = field(default_factory=list)

    @property
    def arrays(self) -> Iterator[HostArray]:
        """All arrays, those of cut leaves first."""
        return (array for leaf in (*self.cut, *self.states) for array in leaf)


@dataclass(frozen=True)
class Packed:
    """A parcel's bytes, in parts that follow one another."""

    head: bytes
    parts: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of the head and all parts."""
        return len(self.head) + sum(part.nbytes for part in self.parts)


def identity_of(base_sha256: str, dtype: str, block_size: int, new_kv: Sequence[Any]) -> str:
    """Hash of the model and how it computes here; KV of another identity must not be used."""
    releases = [f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm")]
    layout = [_layout(leaf) for leaf in leaves(new_kv)]
    whole = json.dumps([FORMAT, base_sha256, dtype, block_size, releases, layout])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def _layout(leaf: Any) -> list[str]:
    """The class of an empty leaf with its sizes: a window's width, bits and group size of a quantised one."""
    sizes = {name: len(value) if isinstance(value, list) else value for name, value in vars(leaf).items()}
    return [type(leaf).__name__, *(f"{name}={sizes[name]}" for name in sorted(sizes) if _is_plain(sizes[name]))]


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str) or dataclasses.is_dataclass(value)


def arranged(flat: Iterable[T], *layouts: Sequence[Sequence[object]]) -> list[list[tuple[T, ...]]]:
    """Things that stand for arrays, one after another, arranged as the arrays are in these layers."""
    things = iter(flat)
    return [[tuple(islice(things, len(leaf))) for leaf in layers] for layers in layouts]


# -- in the engine's thread


def as_bytes(array: mx.array) -> mx.array:
    """The same array as bytes; evaluate it before `on_host`."""
    return mx.contiguous(array).view(mx.uint8).flatten()


def on_host(array: mx.array, bytes_of: mx.array) -> HostArray:
    """An array whose bytes are `bytes_of`, and live as long: no copy where CPU and GPU share their memory."""
    return HostArray(_NAMES[array.dtype], array.shape, memoryview(bytes_of))  # type: ignore[arg-type]


def as_array(host: HostArray) -> mx.array:
    """Copy into an MLX array."""
    if not host.data.nbytes:
        return mx.zeros(host.shape, _DTYPES[host.dtype][0])
    flat = mx.array(host.data)  # type: ignore[arg-type]  # anything that has a buffer
    return flat.view(_DTYPES[host.dtype][0]).reshape(host.shape)


# -- in any thread


def pack(parcel: KvParcel) -> Packed:
    """Serialise the parcel; the parts are views of its arrays."""
    tensors: dict[str, Any] = {}
    parts: list[memoryview] = []
    end = 0
    for prefix, layers in (("cut", parcel.cut), ("state", parcel.states)):
        for leaf, arrays in enumerate(layers):
            for number, array in enumerate(arrays):
                begin, end = end, end + array.data.nbytes
                shape = list(array.shape)
                tensors[f"{prefix}.{leaf}.{number}"] = {
                    "dtype": array.dtype, "shape": shape, "data_offsets": [begin, end]
                }  # fmt: skip
                parts.append(array.data)
    metadata = {"format": "mlx", "sha256": _UNSIGNED, "label": msgspec.json.encode(parcel.label).decode()}
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    unsigned = len(header).to_bytes(8, "little") + header
    signature = _checksum(unsigned, parts)
    return Packed(unsigned.replace(_UNSIGNED.encode(), signature.encode(), 1), parts)


def label_of(head: bytes | memoryview) -> tuple[Label, int]:
    """The label in a parcel's first bytes, unchecked, and how many bytes the parcel should have."""
    header, start = _header(head)
    ends = [int(each["data_offsets"][1]) for name, each in header.items() if name != "__metadata__"]
    return _label(header), start + max(ends, default=0)


def unpack(data: bytes | bytearray | memoryview, identity: str) -> KvParcel:
    """The parcel that these bytes are; its arrays are views of them. UnusableParcelError."""
    whole = memoryview(data).cast("B")
    header, start = _header(whole)
    metadata = header.pop("__metadata__")
    head = bytes(whole[:start])
    signature = str(metadata.get("sha256", ""))
    if len(signature) != len(_UNSIGNED):
        raise UnusableParcelError("no checksum")
    unsigned = head.replace(signature.encode(), _UNSIGNED.encode(), 1)
    if _checksum(unsigned, [whole[start:]]) != signature:
        raise UnusableParcelError("altered: its checksum is another")
    label = _label({"__metadata__": metadata})
    if label.identity != identity:
        raise UnusableParcelError("computed by another model, dtype, layout or release of mlx-lm")
    layers: dict[str, list[list[HostArray]]] = {"cut": [], "state": []}
    for name, each in header.items():
        prefix, leaf, _ = name.split(".")
        while len(layers[prefix]) <= int(leaf):
            layers[prefix].append([])
        layers[prefix][int(leaf)].append(_array(each, whole[start:]))
    return KvParcel(label, *([tuple(leaf) for leaf in layers[prefix]] for prefix in ("cut", "state")))


def _checksum(unsigned: bytes, parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256(unsigned)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _header(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where its arrays begin."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > MAX_HEADER_BYTES or len(data) < 8 + size:
        raise UnusableParcelError("cut short, or no parcel")
    try:
        header = msgspec.json.decode(bytes(data[8 : 8 + size]), type=dict[str, dict[str, Any]])
        header["__metadata__"]["label"]
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError) as error:
        raise UnusableParcelError("its header cannot be read") from error
    return header, 8 + size


def _label(header: dict[str, Any]) -> Label:
    try:
        return msgspec.json.decode(header["__metadata__"]["label"], type=Label)
    except (msgspec.DecodeError, TypeError) as error:
        raise UnusableParcelError("its label cannot be read") from error


def _array(described: dict[str, Any], data: memoryview) -> HostArray:
    try:
        begin, end = described["data_offsets"]
        shape = tuple(int(size) for size in described["shape"])
        fits = math.prod(shape) * _DTYPES[described["dtype"]][1] == end - begin
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableParcelError("an array's description cannot be read") from error
    if not fits or begin < 0 or end > data.nbytes:
        raise UnusableParcelError("an array does not have the bytes that it should")
    return HostArray(described["dtype"], shape, data[begin:end])
