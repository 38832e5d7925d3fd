"""Blocks of a tensor become MLX's affine quantisation where it says the same, 16-bit numbers elsewhere.

MLX's numbers are `scale * q + bias`, a scale and a bias for each 32 of a row, in 16 bits. Q4_0 (`d * (q - 8)`), Q4_1
(`d * q + m`) and Q8_0 (`d * q`, q from -128) are of that form with the file's own scales: nothing is rounded anew.
"""

from collections.abc import Iterator

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

GROUP = 32  # numbers of a row with one scale, in each of these forms
BITS = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}
_HEADS = {GGMLQuantizationType.Q4_0: 2, GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 2}  # bytes
_VALUES = {
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F64: np.float64,
}
_UNREADABLE = {GGMLQuantizationType[name] for name in ("Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64")}
AT_ONCE = 1 << 25  # numbers that are in memory in 32 bits


def weights(form: GGMLQuantizationType, rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """MLX's packed weights of whole rows of blocks that stay quantised."""
    numbers = _blocks(form, rows)[..., _HEADS[form] :]
    if form == GGMLQuantizationType.Q8_0:
        packed = np.ascontiguousarray(numbers) ^ 0x80  # from -128..127 to 0..255
    else:
        each = np.concatenate([numbers & 15, numbers >> 4], axis=-1)  # low bits: a block's first half
        packed = each[..., 0::2] | each[..., 1::2] << 4
    return packed.reshape(len(rows), -1).view(np.uint32)


def scales(form: GGMLQuantizationType, rows: NDArray[np.uint8]) -> NDArray[np.float16]:
    """MLX's scales, one for each block."""
    return np.ascontiguousarray(_blocks(form, rows)[..., :2]).view(np.float16)[..., 0]


def biases(form: GGMLQuantizationType, rows: NDArray[np.uint8]) -> NDArray[np.float16]:
    """MLX's biases: what a packed zero means."""
    if form == GGMLQuantizationType.Q4_1:
        return np.ascontiguousarray(_blocks(form, rows)[..., 2:4]).view(np.float16)[..., 0]
    return scales(form, rows) * np.float16(-8 if form == GGMLQuantizationType.Q4_0 else -128)


def in_16_bits(form: GGMLQuantizationType, rows: NDArray[np.uint8], brain: bool, minus: float = 0) -> Iterator[bytes]:
    """The numbers of rows, less `minus`, as float16 or, with `brain`, as bfloat16, in pieces."""
    at_once = max(1, AT_ONCE // max(1, rows.shape[-1]))
    for begin in range(0, len(rows), at_once):
        piece = np.ascontiguousarray(rows[begin : begin + at_once])
        if form == GGMLQuantizationType.BF16 and brain and not minus:
            yield piece.tobytes()
            continue
        numbers = piece.view(_VALUES[form]) if form in _VALUES else dequantize(piece, form)
        numbers = numbers.astype(np.float32) - np.float32(minus)
        yield quantize(numbers, GGMLQuantizationType.BF16).tobytes() if brain else _half(numbers).tobytes()


def is_readable(form: GGMLQuantizationType) -> bool:
    """True if numbers of that form can be read; the others are whole numbers, or occur in computations only."""
    return form not in _UNREADABLE


def _half(numbers: NDArray[np.float32]) -> NDArray[np.float16]:
    most = np.finfo(np.float16).max
    return np.clip(numbers, -most, most).astype(np.float16)


def _blocks(form: GGMLQuantizationType, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return rows.reshape(len(rows), -1, GGML_QUANT_SIZES[form][1])
