"""Which back end MLX computes with in this process: every choice that depends on it asks here.

A choice is made by what the back end can do, and named by it where there is a name (`fuses`), else by the back end.

Tests set `PARALLM_PRETEND_METAL=1`: MLX computes on the CPU, and all code takes the branches that it takes on a Mac's
GPU. Kernels are not part of that, since they cannot be called without Metal.
"""

from __future__ import annotations

import os
from typing import Literal

import mlx.core as mx

Backend = Literal["cpu", "cuda", "metal"]
PRETENDS = "PARALLM_PRETEND_METAL"


def backend() -> Backend:
    """The back end of the default device, or "metal" where a test pretends so."""
    if pretends_metal():
        return "metal"
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def pretends_metal() -> bool:
    """True if the process computes on the CPU and takes Metal's branches."""
    return os.environ.get(PRETENDS, "0") == "1"


def on_cpu() -> bool:
    """True if MLX computes on the CPU: it computes while it dispatches, and compiles nothing."""
    return backend() == "cpu"


def on_cuda() -> bool:
    """True if MLX computes on an NVIDIA GPU."""
    return backend() == "cuda"


def on_metal() -> bool:
    """True if MLX computes on a Mac's GPU, or a test pretends so."""
    return backend() == "metal"
