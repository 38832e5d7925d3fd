"""Kernels of ours for Metal: how they are made of files (`*.metal`), each the body of a function whose head MLX writes.

They use what scalar kernels need of the language and nothing else, so that the tests run them on a CPU (tests/msl).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_model.device import on_metal


def is_on(switch: str) -> bool:
    """True if this process computes on Metal and the variable `switch` is not "0"."""
    return on_metal() and os.environ.get(switch, "1") != "0"


def kernel(source: Path, inputs: tuple[str, ...], outputs: tuple[str, ...], headers: tuple[str, ...] = ()) -> Any:
    """The kernel in a file, which reads its inputs by their strides. `headers`: files beside it, or definitions."""
    texts = (f"{each}\n" if each.startswith("#") else (source.parent / each).read_text() for each in headers)
    switches = [each.split()[-1] for each in headers if each.startswith("#")]
    name = "_".join(("parallm", source.stem, *outputs, *switches))
    return mx.fast.metal_kernel(
        name=name,
        input_names=inputs,
        output_names=outputs,
        source=source.read_text(),
        header="".join(texts),
        ensure_row_contiguous=False,
    )
