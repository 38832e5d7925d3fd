"""Compiles a kernel for Metal as C++ and runs it on the CPU, called as `mx.fast.metal_kernel` makes it callable.

MLX writes the kernel's signature from the arrays' dtypes and ranks; so does this. Around each buffer lie bytes that are
no numbers: what reads past an end computes nonsense, and what writes past it is found.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_model.fast_blas import cache_folder

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
    mx.uint8: "uint8_t",
    mx.bool_: "bool",
}
_PLACES = {
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_threadgroup": "uint3",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_threadgroup": "uint",
}
_VALUES = {
    "thread_position_in_grid": "shim::thread_in_grid()",
    "thread_position_in_threadgroup": "shim::thread_in_group()",
    "threadgroup_position_in_grid": "shim::at_group",
    "threadgroups_per_grid": "shim::groups",
    "threads_per_threadgroup": "shim::threads_per_group",
    "thread_index_in_simdgroup": "uint(shim::group->running % shim::SIMD)",
    "simdgroup_index_in_threadgroup": "uint(shim::group->running / shim::SIMD)",
    "thread_index_in_threadgroup": "uint(shim::group->running)",
}
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
_GUARD = 4096  # bytes before and after each buffer
_NO_NUMBER = 0xFF


class StuckError(Exception):
    """Threads of a kernel wait for others that never come."""


class OutsideError(Exception):
    """A kernel has written outside its outputs."""


class ShimKernel:
    """A kernel, called as one of `mx.fast.metal_kernel`."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
    ) -> None:
        assert not atomic_outputs, "no kernel of ours has these"
        self._inputs, self._outputs = list(input_names), list(output_names)
        self._source, self._header, self._copies = source, header, ensure_row_contiguous

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
        **_: Any,
    ) -> list[mx.array]:
        assert threadgroup[0] * threadgroup[1] * threadgroup[2] <= 1024, "Metal has no larger threadgroup"
        taken = [mx.contiguous(each) if self._copies else each for each in inputs]
        mx.eval(taken)
        held = [_Buffer.of(each) for each in taken]
        results = []
        for backwards in (False, True):
            out = [_Buffer.empty(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            code = self._code(taken, output_dtypes, tuple(template))
            strides = [[*each.shape, *_strides(each)] for each in taken]
            about = [(ctypes.c_int64 * max(1, len(each)))(*each) for each in strides]
            call = _compiled(code)
            failed = call(
                (ctypes.c_void_p * len(held))(*(each.address for each in held)),
                (ctypes.c_void_p * len(out))(*(each.address for each in out)),
                (ctypes.c_void_p * len(about))(*(ctypes.addressof(each) for each in about)),
                *grid,
                *threadgroup,
                int(backwards),
            )
            if failed:
                raise StuckError("a barrier or a simdgroup's operation is not reached by all threads")
            if not all(each.is_whole() for each in [*held, *out]):
                raise OutsideError("written before or after a buffer")
            results.append([each.array() for each in out])
        for one, other in zip(*results, strict=True):
            same = mx.array_equal(mx.view(one, mx.uint8), mx.view(other, mx.uint8))
            assert same.item(), "the result depends on the order of threads: a barrier is missing"
        return results[0]

    def _code(
        self, inputs: Sequence[mx.array], dtypes: Sequence[mx.Dtype], template: tuple[tuple[str, Any], ...]
    ) -> str:
        named = [place for place in _PLACES if place in self._source]
        parameters, arguments, begin = [], [], []
        for at, (name, array) in enumerate(zip(self._inputs, inputs, strict=True)):
            kind, ref = TYPES[array.dtype], "*" if array.ndim else "&"
            parameters.append(f"const {kind}{ref} {name}")
            arguments.append(f"{'' if array.ndim else '*'}static_cast<const {kind}*>(inputs[{at}])")
            if array.ndim and f"{name}_shape" in self._source:
                sizes = ", ".join(f"int(about[{at}][{axis}])" for axis in range(array.ndim))
                begin.append(f"  const int all_{name}_shape[] = {{{sizes}}};")
                parameters.append(f"const int* {name}_shape")
                arguments.append(f"all_{name}_shape")
            if array.ndim and f"{name}_strides" in self._source:
                parameters.append(f"const int64_t* {name}_strides")
                arguments.append(f"about[{at}] + {array.ndim}")
            if array.ndim and f"{name}_ndim" in self._source:
                parameters.append(f"const int& {name}_ndim")
                arguments.append(str(array.ndim))
        for at, (name, dtype) in enumerate(zip(self._outputs, dtypes, strict=True)):
            parameters.append(f"{TYPES[dtype]}* {name}")
            arguments.append(f"static_cast<{TYPES[dtype]}*>(outputs[{at}])")
        parameters += [f"{_PLACES[place]} {place}" for place in named]
        arguments += [_VALUES[place] for place in named]
        kinds, values = [], []
        for name, value in template:
            is_type = isinstance(value, mx.Dtype)
            kinds.append(f"{'typename' if is_type else 'bool' if isinstance(value, bool) else 'int'} {name}")
            values.append(TYPES[value] if is_type else str(value).lower())
        of, chosen = (f"template <{', '.join(kinds)}>\n", f"<{', '.join(values)}>") if template else ("", "")
        lines = "\n".join(begin)
        return (
            f'#include "shim.h"\n{self._header}\n{of}void kernel_body({", ".join(parameters)}) {{\n{self._source}\n}}\n'
            "static void *const *inputs, *const *outputs; static const int64_t* const* about;\n"
            f"static void body() {{\n{lines}\n  kernel_body{chosen}({', '.join(arguments)});\n}}\n"
            'extern "C" int run(void** in, void** out, int64_t** shapes, uint x, uint y, uint z, uint a, uint b, '
            "uint c, int backwards) {\n  inputs = in; outputs = out; about = shapes;\n"
            "  return shim::run(body, {x, y, z}, {a, b, c}, backwards);\n}\n"
        )


class _Buffer:
    """An array's memory, with a guard on both sides."""

    def __init__(self, content: bytes, shape: Sequence[int], dtype: mx.Dtype) -> None:
        self._size, self._shape, self._dtype = len(content), tuple(shape), dtype
        self._bytes = np.full(self._size + 2 * _GUARD, _NO_NUMBER, np.uint8)
        self._bytes[_GUARD : _GUARD + self._size] = np.frombuffer(content, np.uint8)

    @classmethod
    def of(cls, array: mx.array) -> _Buffer:
        """The memory in which an array lies: of a view, of all that it is a view of, in its order."""
        numbers = _as_numpy(array)
        length = 1 + sum((size - 1) * stride for size, stride in zip(numbers.shape, _strides(array), strict=True))
        flat = np.lib.stride_tricks.as_strided(numbers, (length,), (numbers.itemsize,))
        return cls(flat.tobytes(), array.shape, array.dtype)

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: mx.Dtype) -> _Buffer:
        return cls(bytes([_NO_NUMBER]) * (int(np.prod(shape)) * dtype.size), shape, dtype)

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data) + _GUARD

    def is_whole(self) -> bool:
        """True if the guards are as they were."""
        ends = self._bytes[:_GUARD], self._bytes[_GUARD + self._size :]
        return all(bool((each == _NO_NUMBER).all()) for each in ends)

    def array(self) -> mx.array:
        content = mx.array(self._bytes[_GUARD : _GUARD + self._size])
        return mx.view(content, self._dtype).reshape(self._shape)


def _as_numpy(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's bits, where they lie in memory."""
    return np.asarray(memoryview(mx.view(array, _BITS[array.dtype.size])))


def _strides(array: mx.array) -> list[int]:
    """Strides as a kernel gets them, in elements."""
    numbers = _as_numpy(array)
    return [each // numbers.itemsize for each in numbers.strides]


@cache
def _compiled(code: str) -> Callable[..., int]:
    """The kernel as a function; what was compiled once is found in the user's cache."""
    assert COMPILER is not None
    text = (HERE / "shim.h").read_text()
    name = hashlib.sha256(f"{COMPILER}{text}{code}".encode()).hexdigest()[:24]
    folder = cache_folder() / "msl"
    built = folder / f"{name}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source, new = folder / f"{name}.{next(_NUMBERS)}.cpp", folder / f"{name}.{next(_NUMBERS)}.new"
        source.write_text(code)
        options = ["-std=c++14", "-O1", "-shared", "-fPIC", "-w", "-D_XOPEN_SOURCE=700", f"-I{HERE}", f"-I{HERE}/metal"]
        done = subprocess.run([COMPILER, *options, "-o", str(new), str(source)], capture_output=True, text=True)
        source.unlink()
        assert done.returncode == 0, done.stderr[:4000]
        new.replace(built)
    run = ctypes.CDLL(str(built)).run
    run.restype = ctypes.c_int
    return run  # type: ignore[no-any-return]


_NUMBERS = itertools.count(np.random.default_rng().integers(1 << 40))
