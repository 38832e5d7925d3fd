"""Products of vectors and weights in true fp32, whatever the machine.

On a CPU numpy multiplies: MLX's own product takes several times as long there. GPUs may round the inputs of such a
product, so there products and sums are computed apart from each other, in parts that fit into memory.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

MOST_AT_ONCE = 1 << 24  # numbers, 64 MiB: of the products that exist before they are summed


def multiply(x_NI: mx.array, weight_OI: mx.array) -> mx.array:
    """x W^T, [N, O]."""
    if mx.default_device() == mx.Device(mx.cpu):
        with np.errstate(over="ignore", invalid="ignore"):  # whoever asks looks whether outputs are finite
            return mx.array(np.asarray(x_NI) @ np.asarray(weight_OI).T)
    rows = max(1, MOST_AT_ONCE // max(1, weight_OI.size))
    parts = [mx.sum(weight_OI * x_NI[at : at + rows, None], axis=-1) for at in range(0, x_NI.shape[0], rows)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
