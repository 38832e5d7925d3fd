"""Seeds that follow from other seeds: the same on every machine and in every later version, so none may change."""

import hashlib

_STRIDE = 0x9E3779B97F4A7C15
_JOB_SEED_BITS = 53  # exact in JSON everywhere


def seed_in_request(seed: int, sample: int) -> int:
    """Samples of one prompt draw differently; sample 0 draws with the request's own seed."""
    return (seed + sample * _STRIDE) % 2**63


def seed_in_job(job_seed: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample: the first 53 bits of BLAKE2b-64 of "<job seed>:<prompt>:<sample>" (big endian)."""
    name = f"{job_seed}:{prompt_index}:{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> (64 - _JOB_SEED_BITS)


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
