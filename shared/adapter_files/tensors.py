"""Reading and writing safetensors files without MLX, suspicious of every byte.

The layout (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, little-endian; the
header, a JSON object of name -> {dtype, shape, data_offsets}; then the tensors' bytes, row-major, without holes.

Why not the `safetensors` package: numpy has no bfloat16, and a refusal here names the key and the reason. Values are
touched only through a memory map, so that a large file costs no memory.
"""

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import AdapterRejectedError

MAX_HEADER_BYTES = 16 * 2**20
_METADATA = "__metadata__"
_BLOCK = 2**22  # values that one check of finiteness looks at

Words = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class _Dtype(NamedTuple):
    bits: npt.DTypeLike  # an unsigned integer of the same width
    size: int
    exponent: int  # mask; all ones there means infinite or not a number (IEEE 754; bfloat16 is float32's upper half)


_DTYPES = {
    "F32": _Dtype(np.dtype("<u4"), 4, 0x7F80_0000),
    "F16": _Dtype(np.dtype("<u2"), 2, 0x7C00),
    "BF16": _Dtype(np.dtype("<u2"), 2, 0x7F80),
}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Tensor(NamedTuple):
    """One tensor: its values as raw bits, viewed in the file."""

    dtype: str
    bits: Words

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def first_not_finite(self) -> int | None:
        """Flat index of the first value that is infinite or not a number."""
        flat, exponent = self.bits.reshape(-1), self.bits.dtype.type(_DTYPES[self.dtype].exponent)
        for start in range(0, flat.size, _BLOCK):
            wrong = (flat[start : start + _BLOCK] & exponent) == exponent
            if wrong.any():
                return start + int(wrong.argmax())
        return None

    def magnitudes(self) -> Iterator[npt.NDArray[np.float32]]:
        """The values without their signs as float32, some rows of the first dimension at a time."""
        rows = max(1, _BLOCK // max(1, math.prod(self.shape[1:])))
        sign = self.bits.dtype.type(1 << (8 * self.bits.itemsize - 1))
        for start in range(0, self.shape[0], rows):
            yield Tensor(self.dtype, self.bits[start : start + rows] & ~sign).floats()

    def floats(self) -> npt.NDArray[np.float32]:
        """Values converted to float32, whatever the dtype in the file."""
        if self.dtype == "BF16":
            return (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.asarray(self.bits.view(np.float16 if self.dtype == "F16" else np.float32), dtype=np.float32)


def read_tensors(path: Path, *, max_bytes: int) -> dict[str, Tensor]:
    """The tensors of a file; AdapterRejectedError when the file is not whole and honest.

    They are views into a memory map, which lives as long as the last of them: nobody may shorten the file meanwhile.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise AdapterRejectedError(f"{path.name} has {size} bytes; this server takes at most {max_bytes}")
    if size < 8:
        raise AdapterRejectedError(f"{path.name} is torn: {size} bytes hold no safetensors header")
    with path.open("rb") as file:
        return _tensors(path.name, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; the order of `tensors` is the order of their bytes."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.bits.nbytes
        header[name] = _Entry(tensor.dtype, tensor.shape, (offset, end))
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.bits).data)


def _tensors(file: str, buffer: mmap.mmap) -> dict[str, Tensor]:
    length = int.from_bytes(buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterRejectedError(f"{file} is no safetensors file: its header would have {length} bytes")
    start = 8 + length
    if start > len(buffer):
        raise AdapterRejectedError(f"{file} is torn: {len(buffer)} bytes, and the header alone ends at {start}")
    entries = _entries(file, buffer[8:start])
    _check_layout(file, entries, len(buffer) - start)
    return {name: _view(buffer, start, entry) for name, entry in entries.items()}


def _entries(file: str, header: bytes) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterRejectedError(f"{file} has a header that is no JSON object: {error}") from error
    raw.pop(_METADATA, None)
    entries: dict[str, _Entry] = {}
    for name, value in raw.items():
        try:
            entries[name] = msgspec.json.decode(value, type=_Entry)
        except msgspec.DecodeError as error:
            raise AdapterRejectedError(f"{file}, {_shown(name)}: malformed header entry: {error}") from error
    return entries


def _check_layout(file: str, entries: Mapping[str, _Entry], data_size: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise AdapterRejectedError(
                f"{file}, {_shown(name)}: dtype {entry.dtype[:20]} is not taken; use F32, F16 or BF16"
            )
        if any(dimension < 1 for dimension in entry.shape):
            raise AdapterRejectedError(f"{file}, {_shown(name)}: shape {list(entry.shape)} is empty")
        expected = math.prod(entry.shape) * dtype.size
        if begin != at or end - begin != expected:
            raise AdapterRejectedError(
                f"{file}, {_shown(name)}: the header lies: bytes {begin} to {end} for {expected} bytes from {at}"
            )
        at = end
    if at != data_size:
        torn = "is torn" if at > data_size else "has bytes that its header does not name"
        raise AdapterRejectedError(f"{file} {torn}: the header names {at} bytes of data, the file holds {data_size}")


def _view(buffer: mmap.mmap, start: int, entry: _Entry) -> Tensor:
    count = math.prod(entry.shape)
    bits = np.frombuffer(buffer, dtype=_DTYPES[entry.dtype].bits, count=count, offset=start + entry.data_offsets[0])
    return Tensor(entry.dtype, bits.reshape(entry.shape))


def _shown(name: str) -> str:
    return name if len(name) <= 120 else name[:117] + "..."
