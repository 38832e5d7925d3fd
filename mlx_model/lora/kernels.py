"""Fused kernels for rows on different adapters, for CUDA and Metal: base output plus x A[slot] B[slot], in one.

A decode step on a GPU is bound by the number of operations, not by their arithmetic, so the projections that
read the same input (q, k, v; gate, up) share one operation, which computes the r inner products again in every output
tile (few rows) and accumulates in fp32.

Outputs lie apart, one array a projection, or side by side in one, as a joined product makes them. So do the sums, and
the columns of other projections are copied.

Shapes are written into the source, one kernel object per shape, because MLX works template arguments out again in every
call, and a decode step of a large model is bound by what the host does.

Layouts, with J projections of one input and rank r: A [S, in, J*r] in T, B_j [S, r, out_j] in T (scale folded in),
y_j [M, out_j] or y [M, all out] in T, slots [M] uint32; slot 0 is the base and costs one comparison. T is bf16, fp16 or
fp32; r is a power of two from 8 to 256, widths are multiples of 8.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_model.device import on_metal
from mlx_model.metal import FEW

Kernel = Any  # what mx.fast.cuda_kernel and metal_kernel return: called with inputs, grid, output shapes, gives arrays

LARGEST_RANK = 256  # a thread adds up one of the inner products
METAL_SWITCH = "PARALLM_METAL_LORA"  # 0: MLX's operations on a Mac
COLUMNS = 8  # columns that one thread computes: 16 bytes of bf16


class Block(NamedTuple):
    """How a block reads A, whose latency bounds it."""

    threads: int
    ahead: int  # inputs that a thread reads at once


# On an H200, 32 rows on 8 adapters of rank 16 in a chain of a 4B model's products: with 256 threads and 4 inputs these
# kernels add 1.0 ms to a step, with 512 and 8 they add 0.6. A Mac's were not measured.
CUDA_BLOCK, METAL_BLOCK = Block(512, 8), Block(256, 4)

# The arithmetic is written once; these are the words in which CUDA and Metal differ.
_CUDA_WORDS = """
#include <cooperative_groups.h>
#define DEVICE
#define LOCAL
#define SHARED __shared__
#define INLINE __device__ inline
#define BARRIER __syncthreads()
#define SHUFFLE_XOR(value, lane) __shfl_xor_sync(0xffffffff, value, lane)
"""
_METAL_WORDS = """
#define DEVICE device
#define LOCAL thread
#define SHARED threadgroup
#define INLINE inline
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(value, lane) simd_shuffle_xor(value, ushort(lane))
"""
_CUDA_PLACE = "  const int tid = threadIdx.x, block = blockIdx.x, m = blockIdx.y;\n"
_METAL_PLACE = (
    "  const int tid = thread_position_in_threadgroup.x, block = threadgroup_position_in_grid.x;\n"
    "  const int m = threadgroup_position_in_grid.y;\n"
)

_EIGHT = """
template <typename T> struct alignas(sizeof(T) * 8) Eight { T v[8]; };
template <typename T> INLINE void load8(const DEVICE T* p, LOCAL float* out) {
  Eight<T> e = *reinterpret_cast<const DEVICE Eight<T>*>(p);
  #pragma unroll
  for (int c = 0; c < 8; ++c) out[c] = static_cast<float>(e.v[c]);
}
template <typename T> INLINE void store8(DEVICE T* p, const LOCAL float* in) {
  Eight<T> e;
  #pragma unroll
  for (int c = 0; c < 8; ++c) e.v[c] = static_cast<T>(in[c]);
  *reinterpret_cast<DEVICE Eight<T>*>(p) = e;
}
"""

# Inner products h[0..R) of row m for one projection, by all threads of the block, into shared memory.
_INNER = """
  constexpr int LANES = R / 8;             // threads that cover the r columns of one input position
  constexpr int STRIDE = NT / LANES;       // input positions per turn
  const int lane = tid % LANES, first = tid / LANES;
  float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  const DEVICE T* a_row = A + (size_t(slot) * IN) * JR + j * R + lane * 8;
  const DEVICE T* x_row = x + size_t(m) * IN;
  #pragma unroll AHEAD
  for (int i = first; i < IN; i += STRIDE) {
    float a8[8];
    load8(a_row + size_t(i) * JR, a8);
    const float xi = static_cast<float>(x_row[i]);
    #pragma unroll
    for (int c = 0; c < 8; ++c) acc[c] += xi * a8[c];
  }
  #pragma unroll
  for (int c = 0; c < 8; ++c)
    for (int d = 16; d >= LANES; d >>= 1) acc[c] += SHUFFLE_XOR(acc[c], d);
  SHARED float part[NT / 32][R];
  SHARED float h[R];
  if (tid % 32 < LANES)
    for (int c = 0; c < 8; ++c) part[tid / 32][lane * 8 + c] = acc[c];
  BARRIER;
  if (tid < R) {
    float sum = 0;
    for (int w = 0; w < NT / 32; ++w) sum += part[w][tid];
    h[tid] = sum;
  }
  BARRIER;
"""


class _Columns(NamedTuple):
    """Some of an output, side by side."""

    output: int  # which
    begin: int
    across: int
    width: int  # of the whole output
    projection: int | None  # that makes them; None: it has no adapters

    def tiles(self, block: Block) -> int:
        """Blocks that a row of them needs."""
        return -(-self.across // (block.threads * COLUMNS))


def _select(columns: Sequence[_Columns], block: Block) -> str:
    """Those of this block: tiles of all are laid end to end."""
    text, begin = "", 0
    for each in columns:
        base = f"{each.output} + {each.begin}"
        chosen = "j = -1;" if each.projection is None else f"j = {each.projection}; B = B{each.projection};"
        text += f"  if (block >= {begin}) {{\n"
        text += f"    tile = block - {begin}; OUT = {each.across}; WIDTH = {each.width};\n"
        text += f"    y = y{base}; o = o{base}; {chosen}\n  }}\n"
        begin += each.tiles(block)
    return text


_BEGIN = """
  int tile = 0, OUT = 0, WIDTH = 0, j = 0;
  const DEVICE T *y = nullptr, *B = nullptr;
  DEVICE T* o = nullptr;
"""

_COPY = """
  const int slot = j < 0 ? 0 : slots[m];
  const int column = (tile * NT + tid) * 8;
  const size_t place = size_t(m) * WIDTH + column;
  if (slot == 0) {
    if (column < OUT)
      *reinterpret_cast<DEVICE Eight<T>*>(o + place) = *reinterpret_cast<const DEVICE Eight<T>*>(y + place);
    return;
  }
"""

_EXPAND = """
  if (column < OUT) {
    float sum[8];
    load8(y + place, sum);
    const DEVICE T* b = B + (size_t(slot) * R) * OUT + column;
    float delta[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    #pragma unroll
    for (int r = 0; r < R; ++r) {
      float b8[8];
      load8(b + size_t(r) * OUT, b8);
      const float hr = h[r];
      #pragma unroll
      for (int c = 0; c < 8; ++c) delta[c] += hr * b8[c];
    }
    #pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] += static_cast<float>(static_cast<T>(delta[c]));
    store8(o + place, sum);
  }
"""

_CUDA_TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float"}
_METAL_TYPES = {mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.float32: "float"}


def fits_metal(rank: int, widths: Sequence[int]) -> bool:
    """True if this process may compute on Metal with the kernel for such a rank and such inputs and outputs."""
    is_on = on_metal() and os.environ.get(METAL_SWITCH, "1") != "0"
    return is_on and rank <= LARGEST_RANK and not any(width % COLUMNS for width in widths)


@lru_cache
def _call(
    dtype: mx.Dtype,
    inputs: int,
    rank: int,
    widths: tuple[int, ...],
    joined: tuple[int, ...] | None,
    are_few: bool,
) -> Callable[..., list[mx.array]]:
    """The kernel, with all that does not depend on the rows: a step asks for it in each layer.

    `are_few`: rows, on Metal, where MLX writes another head then, and compiles anew what has the same name.

    `joined`: of all linears whose outputs lie in one, of these widths, those that have adapters.
    """
    if joined is None:
        columns = [_Columns(at, 0, width, width, at) for at, width in enumerate(widths)]
    else:
        begins, whole = [0, *accumulate(widths)], sum(widths)
        places = {at: projection for projection, at in enumerate(joined)}
        columns = [_Columns(0, begins[at], width, whole, places.get(at)) for at, width in enumerate(widths)]
    outputs, projections = (len(widths), len(widths)) if joined is None else (1, len(joined))
    is_metal = on_metal()
    of = (_METAL_TYPES if is_metal else _CUDA_TYPES)[dtype]
    block = METAL_BLOCK if is_metal else CUDA_BLOCK
    constants = {"IN": inputs, "R": rank, "JR": rank * projections, "NT": block.threads}
    defines = "".join(f"  constexpr int {name} = {value};\n" for name, value in constants.items())
    names = [
        of.strip("_"),
        inputs,
        rank,
        *widths,
        *([] if joined is None else ["of", *joined]),
        *(["few"] if are_few else []),
    ]
    place = _METAL_PLACE if is_metal else _CUDA_PLACE
    inner = _INNER.replace("AHEAD", str(block.ahead))
    kernel: Kernel = (mx.fast.metal_kernel if is_metal else mx.fast.cuda_kernel)(
        name=f"lora_one_pass_{'_'.join(map(str, names))}",
        input_names=["x", "A", "slots", *_names("B", projections), *_names("y", outputs)],
        output_names=_names("o", outputs),
        source=f"  using T = {of};\n{defines}{place}{_BEGIN}{_select(columns, block)}{_COPY}{inner}{_EXPAND}",
        header=(_METAL_WORDS if is_metal else _CUDA_WORDS) + _EIGHT,
    )
    across, dtypes = sum(each.tiles(block) for each in columns) * block.threads, [dtype] * outputs

    def call(inputs: list[mx.array], shapes: list[tuple[int, ...]]) -> list[mx.array]:
        out: list[mx.array] = kernel(
            inputs=inputs,
            grid=(across, inputs[2].size, 1),
            threadgroup=(block.threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
        return out

    return call


def _are_few(slots_M: mx.array) -> bool:
    return on_metal() and slots_M.size < FEW


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{k}" for k in range(count)]


def one_pass(
    x: mx.array, a_SIJ: mx.array, bs: Sequence[mx.array], ys: Sequence[mx.array], slots_M: mx.array
) -> list[mx.array]:
    """y_j + x A[slot] B_j[slot] for every projection j, in one operation; x [M, in] or its like in memory."""
    call = _call(a_SIJ.dtype, a_SIJ.shape[1], bs[0].shape[1], tuple(b.shape[2] for b in bs), None, _are_few(slots_M))
    return call([x, a_SIJ, slots_M, *bs, *ys], [y.shape for y in ys])


def one_pass_joined(
    x: mx.array,
    a_SIJ: mx.array,
    bs: Sequence[mx.array],
    y: mx.array,
    slots_M: mx.array,
    widths: tuple[int, ...],
    places: tuple[int, ...],
) -> mx.array:
    """The same where y has the outputs of linears of these widths side by side, each B's projection at its place."""
    call = _call(a_SIJ.dtype, a_SIJ.shape[1], bs[0].shape[1], widths, places, _are_few(slots_M))
    return call([x, a_SIJ, slots_M, *bs, y], [y.shape])[0]
