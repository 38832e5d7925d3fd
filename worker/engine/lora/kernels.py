"""Fused kernels for rows on different adapters: base output plus x A[slot] B[slot], in one GPU operation.

A decode step on a GPU is bound by the number of operations, not by their arithmetic, so the projections that
read the same input (q, k, v; gate, up) share one operation, which computes the r inner products again in every output
tile (few rows) and accumulates in fp32.

Shapes are written into the source, one kernel object per shape, because MLX works template arguments out again in every
call, and a decode step of a large model is bound by what the host does.

Layouts, with J projections of one input and rank r: A [S, in, J*r] in T, B_j [S, r, out_j] in T (scale folded in),
y_j [M, out_j] in T, slots [M] uint32; slot 0 is the base and costs one comparison. T is bf16, fp16 or fp32; r is a
multiple of 8, in and out_j are multiples of 8.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

Kernel = Any  # what mx.fast.cuda_kernel returns: called with inputs, grid and output shapes, gives arrays

THREADS = 256
COLUMNS = 8  # columns that one thread computes: 16 bytes of bf16

_CUDA_HEADER = """
#include <cooperative_groups.h>
template <typename T> struct alignas(sizeof(T) * 8) Eight { T v[8]; };
template <typename T> __device__ inline void load8(const T* p, float* out) {
  Eight<T> e = *reinterpret_cast<const Eight<T>*>(p);
  #pragma unroll
  for (int c = 0; c < 8; ++c) out[c] = static_cast<float>(e.v[c]);
}
template <typename T> __device__ inline void store8(T* p, const float* in) {
  Eight<T> e;
  #pragma unroll
  for (int c = 0; c < 8; ++c) e.v[c] = static_cast<T>(in[c]);
  *reinterpret_cast<Eight<T>*>(p) = e;
}
"""

# Inner products h[0..R) of row m for one projection, by all threads of the block, into shared memory.
_CUDA_INNER = """
  constexpr int LANES = R / 8;             // threads that cover the r columns of one input position
  constexpr int STRIDE = NT / LANES;       // input positions per turn
  const int lane = tid % LANES, first = tid / LANES;
  float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  const T* a_row = A + (size_t(slot) * IN) * JR + j * R + lane * 8;
  const T* x_row = x + size_t(m) * IN;
  #pragma unroll 4
  for (int i = first; i < IN; i += STRIDE) {
    float a8[8];
    load8(a_row + size_t(i) * JR, a8);
    const float xi = static_cast<float>(x_row[i]);
    #pragma unroll
    for (int c = 0; c < 8; ++c) acc[c] += xi * a8[c];
  }
  #pragma unroll
  for (int c = 0; c < 8; ++c)
    for (int d = 16; d >= LANES; d >>= 1) acc[c] += __shfl_xor_sync(0xffffffff, acc[c], d);
  __shared__ float part[NT / 32][R];
  __shared__ float h[R];
  if (tid % 32 < LANES)
    for (int c = 0; c < 8; ++c) part[tid / 32][lane * 8 + c] = acc[c];
  __syncthreads();
  if (tid < R) {
    float sum = 0;
    for (int w = 0; w < NT / 32; ++w) sum += part[w][tid];
    h[tid] = sum;
  }
  __syncthreads();
"""


def _select(count: int) -> str:
    """Pick projection j's pointers and width by the block's tile number; tiles are laid end to end."""
    text = "  int j = 0; int tile = blockIdx.x; const T* B = B0; const T* y = y0; T* o = o0; int OUT = OUT0;\n"
    for k in range(1, count):
        text += (
            f"  if (j == {k - 1} && tile >= TILES{k - 1}) "
            f"{{ tile -= TILES{k - 1}; j = {k}; B = B{k}; y = y{k}; o = o{k}; OUT = OUT{k}; }}\n"
        )
    return text


_CUDA_COPY = """
  const int column = (tile * NT + tid) * 8;
  if (slot == 0) {
    if (column < OUT)
      *reinterpret_cast<Eight<T>*>(o + size_t(m) * OUT + column) =
          *reinterpret_cast<const Eight<T>*>(y + size_t(m) * OUT + column);
    return;
  }
"""

_CUDA_EXPAND = """
  if (column < OUT) {
    float sum[8];
    load8(y + size_t(m) * OUT + column, sum);
    const T* b = B + (size_t(slot) * R) * OUT + column;
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
    store8(o + size_t(m) * OUT + column, sum);
  }
"""

_CUDA_BEGIN = "  const int tid = threadIdx.x, m = blockIdx.y; const int slot = slots[m];\n"


class _Shape(NamedTuple):
    """What a kernel is compiled for."""

    dtype: mx.Dtype
    inputs: int
    rank: int
    outs: tuple[int, ...]

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuple(-(-out // (THREADS * COLUMNS)) for out in self.outs)

    @property
    def name(self) -> str:
        return "_".join(map(str, (_CUDA_TYPES[self.dtype].strip("_"), self.inputs, self.rank, *self.outs)))

    def constants(self, threads: int) -> str:
        values = {"IN": self.inputs, "R": self.rank, "JR": self.rank * len(self.outs), "NT": threads}
        for k, (out, tiles) in enumerate(zip(self.outs, self.tiles, strict=True)):
            values |= {f"OUT{k}": out, f"TILES{k}": tiles}
        lines = "".join(f"  constexpr int {name} = {value};\n" for name, value in values.items())
        return f"  using T = {_CUDA_TYPES[self.dtype]};\n{lines}"


_CUDA_TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float"}


@lru_cache
def _one_pass_call(dtype: mx.Dtype, inputs: int, rank: int, outs: tuple[int, ...]) -> Callable[..., list[mx.array]]:
    """The kernel, with all that does not depend on the rows: a step asks for it in each layer."""
    shape, count = _Shape(dtype, inputs, rank, outs), len(outs)
    source = _CUDA_BEGIN + _select(count) + _CUDA_COPY + _CUDA_INNER + _CUDA_EXPAND
    kernel: Kernel = mx.fast.cuda_kernel(
        name=f"lora_one_pass_{shape.name}",
        input_names=["x", "A", "slots", *_names("B", count), *_names("y", count)],
        output_names=_names("o", count),
        source=shape.constants(THREADS) + source,
        header=_CUDA_HEADER,
    )
    across, dtypes = sum(shape.tiles) * THREADS, [dtype] * count

    def call(inputs: list[mx.array], shapes: list[tuple[int, ...]]) -> list[mx.array]:
        out: list[mx.array] = kernel(
            inputs=inputs,
            grid=(across, inputs[0].shape[0], 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
        return out

    return call


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{k}" for k in range(count)]


def one_pass(
    x: mx.array, a_SIJ: mx.array, bs: Sequence[mx.array], ys: Sequence[mx.array], slots_M: mx.array
) -> list[mx.array]:
    """y_j + x A[slot] B_j[slot] for every projection j, in one operation; x [M, 1, in] or [M, in]."""
    call = _one_pass_call(a_SIJ.dtype, a_SIJ.shape[1], bs[0].shape[1], tuple(b.shape[2] for b in bs))
    return call([x, a_SIJ, slots_M, *bs, *ys], [y.shape for y in ys])
