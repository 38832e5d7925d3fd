"""How large an adapter's numbers get: what overflows where it is served is refused before it is published.

A worker holds A, and B times the scale, in the dtype of its base, and adds x A B to what the base computes. So each
number of both must be finite in that dtype, and so must x A and x A B for inputs of 1 with the worst signs. Trained
adapters are far below: these sums are 10 to 1,000, and float16, the smallest, goes to 65,504.
"""

import numpy as np
import numpy.typing as npt

from shared.adapter_files.tensors import Tensor
from shared.errors import AdapterRejectedError

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
SCALE_LARGEST = LARGEST["float32"]  # B is scaled in it

Sums = npt.NDArray[np.float32]


def check_lora(module: str, a: Tensor, b: Tensor, m: Tensor | None, scale: float, dtype: str) -> None:
    """AdapterRejectedError when one module's LoRA or DoRA overflows the base's dtype ("": float32)."""
    if len(a.shape) == 3:  # of experts: A [experts, r, in], B [experts, out, r]
        for expert in range(a.shape[0]):
            _check_product(f"{module}, expert {expert}", _swapped(a, expert), _swapped(b, expert), scale, dtype)
    else:
        _check_product(module, a, b, scale, dtype)
    if m is not None:  # the norm of a row of all inputs' weights
        _refuse_beyond(f"{module}.m for inputs of 1", _largest(m) * a.shape[0] ** 0.5, dtype)


def check_rows(where: str, weight: Tensor) -> None:
    """AdapterRejectedError when a row of a head's or network's weights overflows float32 for inputs of 1."""
    with _overflowing():
        largest = max((float(block.sum(axis=-1).max(initial=0)) for block in weight.magnitudes()), default=0.0)
    _refuse_beyond(f"{where} for inputs of 1", largest, "float32")


def _check_product(where: str, a: Tensor, b: Tensor, scale: float, dtype: str) -> None:
    """Refuse A [in, r] and B [r, out] if either, or their product, overflows the base's dtype for inputs of 1."""
    with _overflowing():
        sums: Sums = np.zeros(a.shape[1], np.float32)
        for block in a.magnitudes():
            sums += np.ones(len(block), np.float32) @ block
        largest, at = 0.0, 0
        reach: Sums = np.zeros(b.shape[1], np.float32)
        for block in b.magnitudes():
            largest = max(largest, float(block.max(initial=0)))
            reach += (sums[at : at + len(block)] * np.float32(abs(scale))) @ block
            at += len(block)
    _refuse_beyond(f"{where}.lora_a for inputs of 1", sums.max(), dtype)
    _refuse_beyond(f"{where}.lora_b times the scale {scale:g}", largest * abs(scale), dtype)
    _refuse_beyond(f"{where}: A B times the scale {scale:g}, for inputs of 1,", reach.max(), dtype)


def _swapped(tensor: Tensor, at: int) -> Tensor:
    return Tensor(tensor.dtype, tensor.bits[at].T)


def _largest(tensor: Tensor) -> float:
    return max((float(block.max(initial=0)) for block in tensor.magnitudes()), default=0.0)


def _overflowing() -> np.errstate:
    """Let values that are too large for float32 become infinite without a warning; the caller refuses them."""
    return np.errstate(over="ignore", invalid="ignore")


def _refuse_beyond(what: str, reached: float, dtype: str) -> None:
    dtype = dtype if dtype in LARGEST else "float32"
    if not reached <= LARGEST[dtype]:
        raise AdapterRejectedError(
            f"{what} comes to {reached:.3g}, which is not finite in {dtype}, in which the base computes"
        )
