"""What kernels of ours for CUDA share: how they are made, and pieces of their source (`*.cuh`)."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_TYPES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"


def is_used() -> bool:
    """True if this process computes on CUDA."""
    return mx.cuda.is_available() and mx.default_device() != mx.Device(mx.cpu)


def is_on(switch: str) -> bool:
    """True if this process computes on CUDA and the variable `switch` is not "0"."""
    return os.environ.get(switch, "1") != "0" and is_used()


@cache
def is_right(what: str, switch: str, trials: Callable[[], Iterable[tuple[str, bool]]]) -> bool:
    """True if a kernel compiles here and passes each named trial; a failed trial is logged.
    It is tried once in a process.

    `what`: as the log names it; `switch`: the variable that turns it off.
    """
    try:
        for name, is_so in trials():
            if not is_so:
                log.warning("%s_wrong %s: MLX computes them", what, name)
                return False
    except RuntimeError as error:
        log.warning("%s_fail error=%s: MLX computes them (%s=0 says so at once)", what, error, switch)
        return False
    return True


@cache
def kernel(
    source: Path,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    headers: tuple[str, ...] = (),
    *,
    copies: bool = True,
    shared_memory: int = 0,
) -> Any:
    """The kernel in a file, as `mx.fast.cuda_kernel` makes it.

    `headers`: files beside it or here, or definitions ("#define NAME"). `copies`: inputs that do not lie row by row
    come as copies that do; else the kernel reads strides. `shared_memory`: bytes that a block has, but for
    what it names itself.
    """
    header = _TYPES + "".join(_included(each, source.parent) for each in headers)
    switches = [each.split()[-1] for each in headers if each.startswith("#")]
    name = "_".join(("parallm", source.stem, *outputs, *switches))  # what MLX knows it by
    # MLX hashes all of a kernel's source whenever it gives one out: 2 us of 8, where that is 8 KB. So it gets the names
    # of files, and of what it looks for in them: which inputs' shapes and strides are wanted.
    text = source.read_text()
    named = [f"{each}_{what}" for each in inputs for what in ("shape", "strides", "ndim") if f"{each}_{what}" in text]
    body = f"{_include(source)}// {' '.join(named)}\n"
    return mx.fast.cuda_kernel(name, inputs, outputs, body, header, copies, shared_memory)


def _included(header: str, folder: Path) -> str:
    if header.startswith("#"):
        return f"{header}\n"
    return _include(next(each for each in (folder / header, _HERE / header) if each.exists()))


def _include(file: Path) -> str:
    return f'#include "{file.resolve()}"\n'


@cache
def number(value: float) -> int:
    """As a kernel's template takes it: the bits of a float32, which is not negative.

    Not as an array: those of 8 bytes and less lie in the host's memory, and each warp that reads one waits for the bus.
    With three of them the kernel of rotary positions took 30 us on an H200, a layer and step of 32 rows.
    """
    if not value >= 0:
        raise ValueError(f"{value} is negative: a kernel's name holds its number")
    return int.from_bytes(struct.pack("<f", abs(value)), "little")


def fused(of: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Elementwise operations as one kernel, on any GPU.

    On a CPU a compiler would run for seconds while rows wait, and save little.
    """
    compiled = mx.compile(of, shapeless=True)

    def call(*arrays: mx.array) -> mx.array:
        return (of if mx.default_device() == mx.Device(mx.cpu) else compiled)(*arrays)

    return call
