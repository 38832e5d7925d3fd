"""Seeds that follow from other seeds: the same on every machine and in every later version, so none may change."""

import hashlib
from typing import Any

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_JOB_SEED_BITS = 53  # exact in JSON everywhere


def seed_in_request(seed: int, sample: int) -> int:
    """Samples of one prompt draw differently; sample 0 draws with the request's own seed."""
    return (seed + sample * GOLDEN) % 2**63


def seed_in_job(job_seed: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample: the first 53 bits of BLAKE2b-64 of "<job seed>:<prompt>:<sample>" (big endian)."""
    name = f"{job_seed}:{prompt_index}:{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> (64 - _JOB_SEED_BITS)


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def mix(bits: Any, first: Any, second: Any) -> Any:
    """Mix 64-bit numbers with two factors (splitmix64's finalizer): NumPy's or a device's uint64, which wrap around."""
    bits = (bits ^ (bits >> 30)) * first
    bits = (bits ^ (bits >> 27)) * second
    return bits ^ (bits >> 31)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) by which completion token `position` of a sequence with this seed is drawn.

    splitmix64 (doi 10.1145/2714064.2660195) of plain integers; mlx_model/sampling/draw.py:uniforms is the same of rows.
    """
    mixed = _mixed((seed & MASK_64) + GOLDEN)
    return (_mixed(mixed + (position + 1) * GOLDEN) >> 40) * 2.0**-24


def _mixed(number: int) -> int:
    bits = number & MASK_64
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        bits = (bits ^ (bits >> shift)) * factor & MASK_64
    return bits ^ (bits >> 31)
