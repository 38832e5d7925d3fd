"""A GGUF file's header: its metadata, and where each tensor's bytes are.

Invariants. Nothing that the header claims is believed before it is compared with the bytes that are there: a count, a
length or an offset that leads beyond the file ends in `SetupError`, and no claim decides how much memory is taken.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from shared.errors import SetupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # as `struct` says
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 13, 24  # bytes of a metadata entry and of a tensor's description, at least
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: rows of blocks, each block some numbers in one of ggml's forms."""

    name: str
    shape: tuple[int, ...]  # the last one is a row
    form: GGMLQuantizationType
    offset: int  # in the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of numbers."""
        numbers, size = GGML_QUANT_SIZES[self.form]
        return self.shape[-1] // numbers * size

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_bytes

    @property
    def rows(self) -> int:
        """Rows of all leading dimensions together."""
        return prod(self.shape[:-1])


class GgufFile:
    """A file that is open for reading; `SetupError` says what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:  # numpy maps no empty file
            raise SetupError(f"cannot read {path}: {error}") from error
        cursor = _Cursor(path, self._bytes)
        if cursor.take(4) != MAGIC:
            raise SetupError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
        version = cursor.number()
        if version not in VERSIONS:
            raise SetupError(f"{path} is a GGUF file of version {version}; versions 2 and 3 can be read")
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        cursor.expect(entries, _SMALLEST_ENTRY, "entries of metadata")
        self.metadata: dict[str, Any] = dict(cursor.entry() for _ in range(entries))
        cursor.expect(tensors, _SMALLEST_TENSOR, "tensors")
        described = [cursor.tensor() for _ in range(tensors)]
        step = self.metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise SetupError(f"{path}: general.alignment is {step!r}, not a power of two")
        start = -(-cursor.at // step) * step
        self.tensors = {tensor.name: tensor for tensor in (self._placed(*each, start) for each in described)}
        if len(self.tensors) < len(described):
            raise SetupError(f"{path}: two tensors have the same name")

    @cached_property
    def architecture(self) -> str:
        """The family of models, as llama.cpp calls it."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata, with the architecture's name before it."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def blocks(self, tensor: GgufTensor, begin: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Some of a tensor's rows, all by default, as they are in the file: [rows, bytes of a row]."""
        rows = self._bytes[tensor.offset : tensor.offset + tensor.size].reshape(tensor.rows, tensor.row_bytes)
        return rows[begin:end]

    def _placed(self, name: str, shape: tuple[int, ...], form: int, offset: int, start: int) -> GgufTensor:
        try:
            known = GGMLQuantizationType(form)
        except ValueError as error:
            raise SetupError(f"{self.path}: tensor {name} has numbers of the unknown form {form}") from error
        if not shape or min(shape) < 1 or shape[-1] % GGML_QUANT_SIZES[known][0]:
            raise SetupError(f"{self.path}: tensor {name} of form {known.name} cannot have the shape {list(shape)}")
        tensor = GgufTensor(name, shape, known, start + offset)
        if (end := tensor.offset + tensor.size) > self._bytes.size:
            raise SetupError(
                f"{self.path} is cut: tensor {name} ends at byte {end}, the file at byte {self._bytes.size}"
            )
        return tensor


class _Cursor:
    """Reads a header from its beginning to its end."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self._path = path
        self._data = memoryview(data.data)
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise SetupError(f"{self._path} is cut: its header goes on after the file's {len(self._data)} bytes")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def expect(self, count: int, smallest: int, what: str) -> None:
        """SetupError if so many of these cannot be in the rest of the file."""
        if count * smallest > (there := len(self._data) - self.at):
            raise SetupError(
                f"{self._path} is cut or damaged: its header claims {count} {what}, and {there} bytes are left"
            )

    def number(self, kind: str = "I") -> Any:
        return self._numbers(1, kind)[0]

    def text(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise SetupError(f"{self._path} is damaged: a text before byte {self.at} is no UTF-8") from error

    def entry(self) -> tuple[str, Any]:
        """A key of the metadata and its value."""
        return self.text(), self._value(self.number())

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, form and offset."""
        name, dimensions = self.text(), self.number()
        if dimensions > _MOST_DIMENSIONS:
            raise SetupError(f"{self._path} is damaged: tensor {name!r} has {dimensions} dimensions")
        return name, self._numbers(dimensions, "Q")[::-1], self.number(), self.number("Q")

    def _numbers(self, count: int, kind: str) -> tuple[Any, ...]:
        self.expect(count, struct.calcsize(kind), "numbers")
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(kind)))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.number(), self.number("Q")
            if kind == _STRING:
                self.expect(count, 8, "texts")
                return [self.text() for _ in range(count)]
            if kind in _NUMBERS:
                return list(self._numbers(count, _NUMBERS[kind]))
        if kind not in _NUMBERS:
            raise SetupError(f"{self._path} is damaged: its metadata has a value of the unknown kind {kind}")
        return self.number(_NUMBERS[kind])
