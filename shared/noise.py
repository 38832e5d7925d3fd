"""The number in [0, 1) by which a completion token is drawn: of the sequence's seed and the token's position alone.

splitmix64 (doi 10.1145/2714064.2660195). It may never change, or nothing that was drawn could be drawn again. A batch
draws with it (mlx_model/sampling/draw.py), and a replay without MLX (shared/replay.py).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix(bits: Any, first: Any, second: Any) -> Any:
    """Mix 64-bit numbers with two factors: NumPy's or a device's uint64, which wrap around."""
    bits = (bits ^ (bits >> 30)) * first
    bits = (bits ^ (bits >> 27)) * second
    return bits ^ (bits >> 31)


def mix_seeds(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """Seeds [B] of any size as well mixed 64-bit numbers; once per change of a batch."""
    mixed: npt.NDArray[np.uint64] = mix(np.array([seed & _MASK for seed in seeds], np.uint64) + GOLDEN, *FACTORS)
    return mixed


def uniforms(mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Numbers [B] in [0, 1 - 2^-24] for seeds [B] from `mix_seeds` and positions [B]."""
    bits = mix(mixed_seeds + (positions.astype(np.uint64) + 1) * GOLDEN, *FACTORS)
    numbers: npt.NDArray[np.float32] = (bits >> 40).astype(np.float32) * np.float32(2**-24)
    return numbers
