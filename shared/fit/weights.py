"""Sizes of a model's tensors, from the headers of its safetensors files: nothing of the weights is read.

Format: https://huggingface.co/docs/safetensors, a length of 8 bytes, then so many bytes of JSON.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shared.errors import SetupError

MOST_HEADER = 100 << 20  # bytes; the format allows no more
SIXTEEN_BITS = ("F16", "BF16")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_VISION = ("vision", "visual", "multi_modal_projector", "mm_projector")


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    nbytes: int

    @property
    def is_vision(self) -> bool:
        """True for a tower that sees, or what joins it to the text."""
        return any(part in self.name for part in _VISION)

    def in_memory(self, float_bytes: int = 0) -> int:
        """Bytes once loaded; floats are cast to `float_bytes` each, 0 leaves them. Packed integers stay."""
        if float_bytes and self.dtype in _FLOATS:
            return prod(self.shape) * float_bytes
        return self.nbytes


def tensors_in(folder: Path) -> tuple[TensorHeader, ...]:
    """The tensors of a model's folder; SetupError for a file that is cut or no safetensors file."""
    return tuple(tensor for file in sorted(folder.glob("*.safetensors")) for tensor in _tensors_of(file))


def _tensors_of(file: Path) -> Iterable[TensorHeader]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MOST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        size, end = file.stat().st_size, 8 + length
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, past = entry["data_offsets"]
            if end + past > size:
                raise ValueError(f"{size} bytes, and tensor {name!r} ends at {end + past}: the download is incomplete")
            yield TensorHeader(name, entry["dtype"], tuple(entry["shape"]), past - begin)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise SetupError(f"{file} is no whole safetensors file: {error}") from error
