"""Which back end MLX computes with in this process: every choice that depends on it asks here.

A choice is made by what the back end can do, and named by it where there is a name (`fuses`), else by the back end.

Tests set `PARALLM_PRETEND_METAL=1`: MLX computes on the CPU, and all code takes the branches that it takes on a Mac's
GPU. Kernels are not part of that, since they cannot be called without Metal.

`python -m mlx_model.device` prints what it found as JSON: `mlx_parallm doctor` asks so, since it loads no MLX itself.
"""

from __future__ import annotations

import json
import os
from importlib import metadata
from typing import Any, Literal

import mlx.core as mx

Backend = Literal["cpu", "cuda", "metal"]
PRETENDS = "PARALLM_PRETEND_METAL"


def backend() -> Backend:
    """The back end of the default device, or "metal" where a test pretends so."""
    if pretends_metal():
        return "metal"
    if computes_on_cpu():
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def pretends_metal() -> bool:
    """True if the process computes on the CPU and takes Metal's branches."""
    return os.environ.get(PRETENDS, "0") == "1"


def on_cpu() -> bool:
    """True if MLX computes on the CPU: it computes while it dispatches, and compiles nothing."""
    return backend() == "cpu"


def computes_on_cpu() -> bool:
    """True if a CPU does the computing, whichever branches are taken."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def on_cuda() -> bool:
    """True if MLX computes on an NVIDIA GPU."""
    return backend() == "cuda"


def on_metal() -> bool:
    """True if MLX computes on a Mac's GPU, or a test pretends so."""
    return backend() == "metal"


def gpu_bytes() -> int:
    """Memory that the GPU may hold; 0 on a CPU. Metal names what it recommends, CUDA all that there is."""
    info = {} if on_cpu() else mx.device_info()
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or 0)


def gave_out(error: BaseException) -> bool:
    """True if a GPU reports that it failed. What it was computing is undefined then, and so is all that comes after:
    CUDA refuses every later call of the process, and a computation that lacked memory has left arrays without content.
    """
    said = str(error).lower()
    return isinstance(error, RuntimeError) and said.startswith(("cuda", "cudnn", "cublas", "[metal] command buffer"))


def described() -> dict[str, Any]:
    """The back end and its device, as MLX knows them, for people and for files of measurements."""
    info = {str(name): value for name, value in mx.device_info().items()}
    return {"mlx": metadata.version("mlx"), "backend": backend(), "gpu_bytes": gpu_bytes(), "device": info}


if __name__ == "__main__":
    print(json.dumps(described(), default=str))
