"""Memory as MLX sees it: how much the GPU may hold, what this process has taken of it, and how much it may keep."""

from __future__ import annotations

import os

import mlx.core as mx

from mlx_model.device import gpu_bytes, on_cpu, on_cuda
from shared.errors import SetupError
from shared.fit.model_fit import Device
from shared.fit.plan import gb
from shared.machine.memory import GpuMemory, footprint, machine_memory
from shared.machine.status import MachineStatus

_SMALLEST_CACHE = 256 << 20  # bytes of freed memory that MLX may keep in any case
_most_kept = _SMALLEST_CACHE  # bytes of it, by what was free when this process had loaded its model


def free_bytes() -> int:
    """Memory that arrays could take: what the GPU may hold and does not, else what the machine has available."""
    size = gpu_bytes()
    return max(0, size - int(mx.get_active_memory())) if size else machine_memory().available


def gpu_memory() -> GpuMemory:
    """The GPU's memory, where it is not the machine's; zeros where it is. What MLX has freed and keeps is available."""
    if not on_cuda():
        return GpuMemory()
    kept = int(mx.get_cache_memory())
    return GpuMemory(gpu_bytes(), int(mx.device_info()["free_memory"]) + kept, int(mx.get_active_memory()) + kept)


def memory_status(limit_bytes: int = 0) -> MachineStatus:
    """The memory of this process's machine now; `limit_bytes`: that it may take, 0: what there is."""
    return MachineStatus.of(machine_memory(), footprint(), gpu_memory(), limit_bytes)


def plan_device(dtype: str | None) -> Device:
    """This process's device as the plan of memory knows it."""
    if on_cpu():
        size = 4 if dtype in (None, "float32") else 2
        return Device(float_bytes=size, kv_number_bytes=size)
    apart = on_cuda()
    pool = f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}" if apart else "machine"
    size = 0 if dtype is None else 4 if dtype == "float32" else 2
    return Device(gpu_bytes(), apart, pool, size, size or 2)


def check_wired(wired_bytes: int) -> None:
    """SetupError where so much memory cannot stay resident."""
    if not mx.metal.is_available():
        raise SetupError("--wired-limit is a setting of Metal, which this machine does not have: leave it out")
    most = gpu_bytes()
    if wired_bytes > most:
        raise SetupError(f"--wired-limit {wired_bytes / 1e9:g}: this GPU may hold {gb(most)} at most")


def bound_freed_memory(usable_bytes: int) -> None:
    """Say how much freed memory MLX may keep: all that it may is kept, for prompts come in ever other lengths.

    `usable_bytes`: what a worker's KV may take, or what a trainer may.

    On a GPU what is not found there takes long to get; a CPU gets memory about as fast as it finds it.
    """
    global _most_kept
    _most_kept = _SMALLEST_CACHE if on_cpu() else max(_SMALLEST_CACHE, usable_bytes // 4)
    mx.set_cache_limit(_most_kept)


def watched_memory(limit_bytes: int = 0) -> MachineStatus:
    """`memory_status`; and MLX keeps no more freed memory than a quarter of what is available on a GPU of its own.

    That memory is none of the system's pressure, and other processes on the GPU cannot have it: four that keep what
    each was allowed when it started leave nothing, and an allocation fails in whichever asks next.
    """
    status = memory_status(limit_bytes)
    if status.gpu_total:
        mx.set_cache_limit(max(_SMALLEST_CACHE, min(_most_kept, status.gpu_available // 4)))
    return status
