"""Writes a GGUF file as a folder that mlx-lm loads: config.json, model.safetensors, tokenizer.json and its settings.

The same file gives the same bytes on each machine, so that workers which converted it themselves serve equal weights.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from shared.errors import SetupError
from shared.gguf import blocks
from shared.gguf.families import Config, config_of, family_of, minus, row_order, target_of
from shared.gguf.file import GgufFile, GgufTensor
from shared.gguf.tokenizer import build_tokenizer
from shared.process.whole_folder import whole_folder


@dataclass(frozen=True)
class _Array:
    """One array of the safetensors file; its bytes are made when they are written."""

    name: str
    kind: str  # safetensors' name of the dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterable[bytes]]

    @property
    def size(self) -> int:
        """Number of bytes of the array."""
        return prod(self.shape) * (4 if self.kind == "U32" else 2)


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, in words for people."""

    folder: Path
    family: str
    quantised: int  # tensors that stay as they are
    others: int
    dtype: str
    chat_template: bool


class Conversion:
    """A file that can be converted; `SetupError` says why another one cannot."""

    def __init__(self, path: Path, *, dequantize: bool = False) -> None:
        """Converts one file; with `dequantize` nothing stays quantised."""
        self._file = file = GgufFile(path)
        self._bits = {} if dequantize else blocks.BITS
        self._family = family_of(file)
        self.config = config_of(file) | self._quantization()
        self._tokenizer = build_tokenizer(file)
        self._brain = self._in_bfloat16()
        if self._tokenizer.eos_token_ids:
            self.config["eos_token_id"] = self._tokenizer.eos_token_ids
        self.config["torch_dtype"] = "bfloat16" if self._brain else "float16"
        for tensor in file.tensors.values():
            if not blocks.is_readable(tensor.form):
                raise SetupError(
                    f"{path}: tensor {tensor.name} is of the form {tensor.form.name}, which cannot be read"
                )
            target_of(file, self._family, tensor)

    def write(self, folder: Path) -> Converted:
        """Make the folder, whole or not at all."""
        built = self._tokenizer
        with whole_folder(folder) as begun:
            _write_json(begun / "config.json", self.config)
            if built.eos_token_ids:
                _write_json(begun / "generation_config.json", {"eos_token_id": built.eos_token_ids})
            built.tokenizer.save(str(begun / "tokenizer.json"))
            _write_json(begun / "tokenizer_config.json", built.settings)
            tensors = self._file.tensors.values()
            _write_weights(begun / "model.safetensors", [array for each in tensors for array in self._arrays(each)])
        quantised = sum(tensor.form in self._bits for tensor in tensors)
        return Converted(
            folder=folder,
            family=self._file.architecture,
            quantised=quantised,
            others=len(tensors) - quantised,
            dtype=self.config["torch_dtype"],
            chat_template="chat_template" in built.settings,
        )

    def _arrays(self, tensor: GgufTensor) -> Iterator[_Array]:
        """Arrays that a tensor becomes: three arrays where it stays quantised, else one."""
        target = target_of(self._file, self._family, tensor)
        if target is None:
            return
        rows = partial(self._rows, tensor)
        if tensor.form not in self._bits:
            added = minus(self._family, tensor)
            kind = "BF16" if self._brain else "F16"
            yield _Array(target, kind, tensor.shape, lambda: blocks.in_16_bits(tensor.form, rows(), self._brain, added))
            return
        packed = (*tensor.shape[:-1], tensor.shape[-1] * self._bits[tensor.form] // 32)
        scales = (*tensor.shape[:-1], tensor.shape[-1] // blocks.GROUP)
        module = target.removesuffix(".weight")
        yield _Array(target, "U32", packed, lambda: [blocks.weights(tensor.form, rows()).tobytes()])
        yield _Array(f"{module}.scales", "F16", scales, lambda: [blocks.scales(tensor.form, rows()).tobytes()])
        yield _Array(f"{module}.biases", "F16", scales, lambda: [blocks.biases(tensor.form, rows()).tobytes()])

    def _rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The blocks of a tensor, row by row as mlx-lm has them."""
        rows, order = self._file.blocks(tensor), row_order(self.config, self._family, tensor)
        if order is None:
            return rows
        if len(tensor.shape) > 1:
            return rows[order]
        return rows.reshape(len(order), -1)[order].reshape(rows.shape)  # a bias: a number for each row

    def _in_bfloat16(self) -> bool:
        """True if numbers become bfloat16: of models that were published so, where no scales in float16 stay."""
        forms = {tensor.form for tensor in self._file.tensors.values()}
        published = GGMLQuantizationType.BF16 in forms or self._file.architecture.startswith("gemma")
        return published and not forms & self._bits.keys()

    def _quantization(self) -> Config:
        """How mlx-lm finds the bits of each module: those of most modules, and the others by name."""
        bits = {
            target.removesuffix(".weight"): self._bits[tensor.form]
            for tensor in self._file.tensors.values()
            if tensor.form in self._bits and (target := target_of(self._file, self._family, tensor)) is not None
        }
        if not bits:
            return {}
        most = max(set(bits.values()), key=list(bits.values()).count)
        others = {name: {"group_size": blocks.GROUP, "bits": its} for name, its in bits.items() if its != most}
        return {"quantization": {"group_size": blocks.GROUP, "bits": most, **others}}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(path: Path, arrays: list[_Array]) -> None:
    """One safetensors file, an array after the other, so that memory holds no more than one."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for array in arrays:
        header[array.name] = {"dtype": array.kind, "shape": array.shape, "data_offsets": (at, at + array.size)}
        at += array.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for array in arrays:
            for data in array.make():
                out.write(data)
        assert out.tell() == 8 + len(text) + at, "each array has as many bytes as the header says"
