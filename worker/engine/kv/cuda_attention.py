"""Attention of decode steps on CUDA: one query a row over all that the row's KV holds, plain or packed.

MLX's fused attention there is made for prompts. With the mask that rows of different lengths need, 32 rows of 2,048
positions (32 heads of 128 over 8, bfloat16) cost it 0.81 ms a layer on an H200, where reading the KV once takes 0.06.
Packed KV (quantised.py) would have to be unpacked in memory first. The two kernels here read KV once, as it is stored:

- `_READ`: a block reads a stretch of one row's positions for up to four query heads that share a KV head. A group of
  threads reads four positions at a time, eight numbers a thread, and keeps a running maximum, sum and weighted values
  (online softmax: Milakov and Gimelshein, arXiv 1805.02867); in the end the block adds up what its groups have.
- `_JOIN`: adds up a row's stretches (flash decoding: Dao et al., 2023), and the attention sink if the model has one.

A third one, `_PACK`, packs what a step adds, in one operation in place of nine: with 36 layers these took 1.4 ms.

`install()` puts the first two before `mx.fast.scaled_dot_product_attention`; quantised.py puts them before mlx-lm's
quantised attention. What they are not made for goes on to MLX's own: several queries a row, additive masks, other head
sizes, few positions.
"""

from __future__ import annotations

import os
from functools import cache
from math import e, log2
from typing import Any, cast

import mlx.core as mx

SWITCH = "PARALLM_CUDA_ATTENTION"  # 0: MLX's own
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_SHORTEST = 64  # positions
_THREADS = 128  # of a block of `_READ`
_BLOCKS = 1056  # eight for each of an H200's 132 multiprocessors
_STRETCH = 128  # positions that a block reads, at least

_HEADER = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Eight numbers as they are stored, then as floats. `at`: which eight of the head's.
template <typename T, int D, int BITS, int GROUP>
struct Eight {
  static constexpr int words = BITS ? BITS / 4 : sizeof(T) * 2;
  unsigned raw[words];
  T scale, bias;

  __device__ void load(const char* position, int at) {
    if constexpr (BITS == 0) {
      const uint4* from = reinterpret_cast<const uint4*>(position + at * 8 * sizeof(T));
#pragma unroll
      for (int i = 0; i < words / 4; i++) {
        uint4 four = from[i];
        raw[4 * i] = four.x; raw[4 * i + 1] = four.y; raw[4 * i + 2] = four.z; raw[4 * i + 3] = four.w;
      }
    } else {
      const unsigned* codes = reinterpret_cast<const unsigned*>(position);
#pragma unroll
      for (int i = 0; i < words; i++) raw[i] = codes[at * words + i];
      const T* scales = reinterpret_cast<const T*>(codes + D * BITS / 32);
      scale = scales[at * 8 / GROUP];
      bias = scales[D / GROUP + at * 8 / GROUP];
    }
  }

  // Numbers, or codes where they are packed. A code is a float's last bits with 2^23 in front: no slow conversion.
  __device__ void codes(float* out) const {
    if constexpr (BITS == 0) {
      const T* numbers = reinterpret_cast<const T*>(raw);
#pragma unroll
      for (int i = 0; i < 8; i++) out[i] = static_cast<float>(numbers[i]);
    } else if constexpr (BITS == 8) {
#pragma unroll
      for (int i = 0; i < 8; i++)
        out[i] = __uint_as_float(__byte_perm(raw[i / 4], 0x4B000000u, 0x7540 | (i % 4))) - 8388608.0f;
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) out[i] = __uint_as_float(0x4B000000u | (raw[0] >> (4 * i) & 15u)) - 8388608.0f;
    }
  }
};

// Sums of N numbers over WIDTH threads that lie side by side: N / WIDTH of them for each thread, at least one.
template <int N, int WIDTH>
__device__ void sums_over(float* numbers, int lane) {
  if constexpr (WIDTH > 1 && N > 1) {
    const bool upper = lane & (WIDTH / 2);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      float mine = upper ? numbers[i + N / 2] : numbers[i], others = upper ? numbers[i] : numbers[i + N / 2];
      numbers[i] = mine + __shfl_xor_sync(0xffffffffu, others, WIDTH / 2);
    }
    sums_over<N / 2, WIDTH / 2>(numbers, lane);
  } else if constexpr (WIDTH > 1) {
    numbers[0] += __shfl_xor_sync(0xffffffffu, numbers[0], WIDTH / 2);
    sums_over<1, WIDTH / 2>(numbers, lane);
  }
}
"""

# A group's scores of `AHEAD` positions and `HEADS` heads lie spread over its threads, so each power is computed once; a
# thread has those of the same heads each time, and keeps its share of their maxima and sums.
_READ = r"""
  constexpr int LANES = D / 8, ABREAST = 32 / LANES, WARPS = THREADS / 32, AHEAD = 4;
  constexpr int SLOTS = WARPS * ABREAST, STEP = ABREAST * AHEAD, SCORES = AHEAD * HEADS;
  constexpr int OWN = SCORES > LANES ? SCORES / LANES : 1, ALIKE = SCORES > LANES ? 1 : LANES / SCORES;
  __shared__ float best_of[SLOTS][HEADS], sum_of[SLOTS][HEADS], values_of[SLOTS][HEADS][D];
  __shared__ float weight_of[SLOTS][AHEAD][HEADS], less_of[SLOTS][HEADS];

  const int kv_heads = keys_shape[1], positions = keys_shape[2];
  const int query_heads = queries_shape[1], shared_by = query_heads / kv_heads;
  const int per_head = (shared_by + HEADS - 1) / HEADS;
  const int row = blockIdx.z, kv_head = blockIdx.y / per_head;
  const int first_head = kv_head * shared_by + (blockIdx.y % per_head) * HEADS;
  const int heads = min(HEADS, (kv_head + 1) * shared_by - first_head);
  const int stretches = gridDim.x, length = (positions + stretches - 1) / stretches;
  const int begin = blockIdx.x * length, end = min(positions, begin + length);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane % LANES, side = lane / LANES;
  const int slot = warp * ABREAST + side;
  const int own = at / ALIKE * OWN, own_ahead = own / HEADS, own_head = own % HEADS;

  const long size = BITS ? 4 : sizeof(T);
  const char* key_row =
      reinterpret_cast<const char*>(keys) + (row * keys_strides[0] + kv_head * keys_strides[1]) * size;
  const char* value_row =
      reinterpret_cast<const char*>(values) + (row * values_strides[0] + kv_head * values_strides[1]) * size;
  const long key_step = keys_strides[2] * size, value_step = values_strides[2] * size;
  const bool* seen = MASKED ? reinterpret_cast<const bool*>(mask) + row * mask_strides[0] : nullptr;

  float query[HEADS][8], query_sum[HEADS], weighted[HEADS][8], best[OWN], sums[OWN];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const T* from = queries + row * queries_strides[0] + min(first_head + h, query_heads - 1) * queries_strides[1];
    query_sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      query[h][i] = static_cast<float>(from[(at * 8 + i) * queries_strides[3]]) * scale[0];
      query_sum[h] += query[h][i];
      weighted[h][i] = 0.0f;
    }
  }
#pragma unroll
  for (int o = 0; o < OWN; o++) {
    best[o] = -1e30f;
    sums[o] = 0.0f;
  }

  for (int base = begin + warp * STEP; base < end; base += WARPS * STEP) {
    const int own_position = base + own_ahead * ABREAST + side;
    const bool is_seen = own_position < end && (!MASKED || seen[own_position * mask_strides[3]]);
    if (!__any_sync(0xffffffffu, is_seen)) continue;
    Eight<T, D, BITS, GROUP> key[AHEAD], value[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      long position = min(base + u * ABREAST + side, end - 1);
      key[u].load(key_row + position * key_step, at);
      value[u].load(value_row + position * value_step, at);
    }
    float score[SCORES];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      float numbers[8];
      key[u].codes(numbers);
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += query[h][i] * numbers[i];
        if (BITS) sum = sum * static_cast<float>(key[u].scale) + query_sum[h] * static_cast<float>(key[u].bias);
        score[u * HEADS + h] = sum;
      }
    }
    sums_over<SCORES, LANES>(score, at);
    bool is_better = false;
    float top[OWN];
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      if (!is_seen) score[o] = -1e30f;
      top[o] = fmaxf(best[o], score[o]);
#pragma unroll
      for (int apart = HEADS * ALIKE / OWN; apart < LANES; apart *= 2)
        top[o] = fmaxf(top[o], __shfl_xor_sync(0xffffffffu, top[o], apart));
      is_better = is_better || top[o] > best[o];
    }
    const bool rescales = __any_sync(0xffffffffu, is_better);
    if (at % ALIKE == 0) {
#pragma unroll
      for (int o = 0; o < OWN; o++) {
        float less = exp2f(best[o] - top[o]), weight = is_seen ? exp2f(score[o] - top[o]) : 0.0f;
        best[o] = top[o];
        sums[o] = sums[o] * less + weight;
        weight_of[slot][own_ahead][own_head + o] = weight;
        if (own_ahead == 0) less_of[slot][own_head + o] = less;
      }
    } else {
#pragma unroll
      for (int o = 0; o < OWN; o++) best[o] = top[o];
    }
    __syncwarp();
    if (rescales) {
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float less = less_of[slot][h];
#pragma unroll
        for (int i = 0; i < 8; i++) weighted[h][i] *= less;
      }
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      float numbers[8];
      value[u].codes(numbers);
      if (BITS) {
#pragma unroll
        for (int i = 0; i < 8; i++)
          numbers[i] = numbers[i] * static_cast<float>(value[u].scale) + static_cast<float>(value[u].bias);
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float weight = weight_of[slot][u][h];
#pragma unroll
        for (int i = 0; i < 8; i++) weighted[h][i] += weight * numbers[i];
      }
    }
    __syncwarp();
  }

#pragma unroll
  for (int o = 0; o < OWN; o++) {
#pragma unroll
    for (int apart = HEADS * ALIKE / OWN; apart < LANES; apart *= 2)
      sums[o] += __shfl_xor_sync(0xffffffffu, sums[o], apart);
    if (own_ahead == 0 && at % ALIKE == 0) {
      best_of[slot][own_head + o] = best[o];
      sum_of[slot][own_head + o] = sums[o];
    }
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
#pragma unroll
    for (int i = 0; i < 8; i++) values_of[slot][h][at * 8 + i] = weighted[h][i];
  }
  __syncthreads();
  for (int each = threadIdx.x; each < heads * D; each += THREADS) {
    int h = each / D, number = each % D;
    float top = -1e30f, sum = 0.0f, total = 0.0f;
    for (int s = 0; s < SLOTS; s++) top = fmaxf(top, best_of[s][h]);
    for (int s = 0; s < SLOTS; s++) {
      float by = exp2f(best_of[s][h] - top);
      sum += sum_of[s][h] * by;
      total += values_of[s][h][number] * by;
    }
    long of = (static_cast<long>(row) * query_heads + first_head + h) * stretches + blockIdx.x;
    part[of * D + number] = total;
    if (number == 0) {
      about[of * 2] = top;
      about[of * 2 + 1] = sum;
    }
  }
"""

_JOIN = r"""
  const int stretches = part_shape[2], heads = part_shape[1], of = blockIdx.x, number = threadIdx.x;
  float top = SINKS ? sinks[of % heads] * 1.44269504f : -1e30f;
  float sum = 0.0f, total = 0.0f;
  for (int s = 0; s < stretches; s++) top = fmaxf(top, about[(of * stretches + s) * 2]);
  if (SINKS) sum = exp2f(sinks[of % heads] * 1.44269504f - top);
  for (int s = 0; s < stretches; s++) {
    float by = exp2f(about[(of * stretches + s) * 2] - top);
    sum += about[(of * stretches + s) * 2 + 1] * by;
    total += part[(static_cast<long>(of) * stretches + s) * D + number] * by;
  }
  out[static_cast<long>(of) * D + number] = static_cast<T>(sum > 0.0f ? total / sum : 0.0f);
"""


# As `mx.quantize` does it: the end of a group's range that lies farther from 0 is a whole number of steps away from it,
# so 0 and that end are kept exactly. A warp packs one head's numbers, some that lie side by side a thread.
_PACK = r"""
  constexpr int OWN = D / 32, LANES = GROUP / OWN, WORDS = D * BITS / 32, LAST = (1 << BITS) - 1;
  const bool of_keys = blockIdx.x == 0;
  const int head = blockIdx.y, row = blockIdx.z, heads = keys_shape[1], lane = threadIdx.x;
  const T* from = of_keys ? keys + row * keys_strides[0] + head * keys_strides[1]
                          : values + row * values_strides[0] + head * values_strides[1];
  const long apart = of_keys ? keys_strides[3] : values_strides[3];
  unsigned* to = (of_keys ? packed_keys : packed_values)
      + (static_cast<long>(row) * heads + head) * (WORDS + 2 * (D / GROUP) * sizeof(T) / 4);

  float numbers[OWN], low, high;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    numbers[i] = static_cast<float>(from[(lane * OWN + i) * apart]);
    low = i ? fminf(low, numbers[i]) : numbers[i];
    high = i ? fmaxf(high, numbers[i]) : numbers[i];
  }
#pragma unroll
  for (int away = LANES / 2; away > 0; away /= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, away));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, away));
  }
  const bool is_low = fabsf(low) > fabsf(high);
  float step = fmaxf((high - low) / LAST, 1e-7f);
  step = is_low ? step : -step;
  const float edge = is_low ? low : high, steps = roundf(edge / step);
  step = steps == 0.0f ? step : edge / steps;
  const float bias = steps == 0.0f ? 0.0f : edge;

  unsigned char* bytes = reinterpret_cast<unsigned char*>(to) + lane * OWN * BITS / 8;
#pragma unroll
  for (int i = 0; i < OWN; i += 8 / BITS) {
    unsigned code = 0;
#pragma unroll
    for (int j = 0; j < 8 / BITS; j++)
      code |= static_cast<unsigned>(fminf(fmaxf(roundf((numbers[i + j] - bias) / step), 0.0f), LAST)) << (j * BITS);
    bytes[i * BITS / 8] = code;
  }
  if (lane % LANES == 0) {
    T* scales = reinterpret_cast<T*>(to + WORDS);
    scales[lane / LANES] = static_cast<T>(step);
    scales[D / GROUP + lane / LANES] = static_cast<T>(bias);
  }
"""


@cache
def _kernels() -> tuple[Any, Any, Any]:
    read = mx.fast.cuda_kernel(
        "parallm_decode_read",
        ["queries", "keys", "values", "mask", "scale"],
        ["part", "about"],
        _READ,
        header=_HEADER,
        ensure_row_contiguous=False,
    )
    join = mx.fast.cuda_kernel("parallm_decode_join", ["part", "about", "sinks"], ["out"], _JOIN)
    pack = mx.fast.cuda_kernel(
        "parallm_decode_pack",
        ["keys", "values"],
        ["packed_keys", "packed_values"],
        _PACK,
        header=_HEADER,
        ensure_row_contiguous=False,
    )
    return read, join, pack


@cache
def _scale(scale: float) -> mx.array:
    """As the kernel takes it: its powers are of two."""
    number = mx.array([scale * log2(e)], mx.float32)
    mx.eval(number)
    return number


@cache
def _nothing() -> mx.array:
    nothing = mx.zeros((1, 1, 1, 1), mx.bool_)
    mx.eval(nothing)
    return nothing


def is_for(queries: mx.array, keys: mx.array, values: mx.array, mask: Any, bits: int = 0) -> bool:
    """Whether the kernels are made for these; shapes as `attention` takes them."""
    size = queries.shape[-1]
    return (
        queries.ndim == 4
        and queries.shape[2] == 1
        and size in _HEAD_SIZES
        and queries.dtype in _DTYPES
        and keys.shape == values.shape
        and keys.shape[2] >= _SHORTEST
        and (bits > 0 or (keys.shape[3] == size and keys.dtype == values.dtype == queries.dtype))
        and _is_plain(mask)
    )


def _is_plain(mask: Any) -> bool:
    """None (all is seen), "causal" (the same, for the last position's query), or booleans for each row."""
    if mask is None or isinstance(mask, str):
        return True
    return bool(mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    bits: int = 0,
    group_size: int = 0,
) -> mx.array:
    """[rows, query heads, 1, size] for queries of that shape; keys and values [rows, KV heads, positions, size], or
    packed (quantised.py) if there are `bits`."""
    rows, query_heads, _, size = queries.shape
    kv_heads, positions = keys.shape[1:3]
    shared_by = query_heads // kv_heads
    heads = 1 if shared_by == 1 else 2 if shared_by == 2 else 4
    across = kv_heads * ((shared_by + heads - 1) // heads)
    stretches = 1
    while stretches * rows * across < _BLOCKS and stretches * 2 * _STRETCH <= positions:
        stretches *= 2
    masked = isinstance(mask, mx.array)
    seen = mx.broadcast_to(mask, (rows, 1, 1, positions)) if masked else _nothing()
    template = [("T", queries.dtype), ("D", size), ("HEADS", heads), ("MASKED", masked), ("THREADS", _THREADS)]
    read, join, _ = _kernels()
    part, about = read(
        inputs=[queries, keys, values, seen, _scale(scale)],
        template=[*template, ("BITS", bits), ("GROUP", group_size or size)],
        grid=(stretches * _THREADS, across, rows),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, query_heads, stretches, size), (rows, query_heads, stretches, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = join(
        inputs=[part, about, about if sinks is None else sinks.astype(mx.float32)],
        template=[("T", queries.dtype), ("D", size), ("SINKS", sinks is not None)],
        grid=(rows * query_heads * size, 1, 1),
        threadgroup=(size, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return cast(mx.array, out)


def pack(keys: mx.array, values: mx.array, bits: int, group_size: int) -> tuple[mx.array, mx.array]:
    """Both [rows, KV heads, 1, size], as `Packing.pack` has them."""
    rows, heads, _, size = keys.shape
    words = size * bits // 32 + 2 * size // group_size * keys.dtype.size // 4
    *_, kernel = _kernels()
    packed_keys, packed_values = kernel(
        inputs=[keys, values],
        template=[("T", keys.dtype), ("D", size), ("BITS", bits), ("GROUP", group_size)],
        grid=(2 * 32, heads, rows),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, heads, 1, words)] * 2,
        output_dtypes=[mx.uint32] * 2,
    )
    return packed_keys, packed_values


def packs(keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel is made for these, which a decode step adds."""
    return keys.shape == values.shape and keys.shape[3] in _HEAD_SIZES and keys.dtype == values.dtype


@cache
def install() -> bool:
    """Put the kernels before MLX's attention, in this process; False without CUDA."""
    if os.environ.get(SWITCH, "1") == "0" or not mx.cuda.is_available():
        return False
    fused = mx.fast.scaled_dot_product_attention

    def plain_or_fused(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None, **others: Any
    ) -> mx.array:
        if others or not is_for(q, k, v, mask):
            return fused(q, k, v, scale=scale, mask=mask, sinks=sinks, **others)
        return attention(q, k, v, scale, mask, sinks)

    mx.fast.scaled_dot_product_attention = plain_or_fused
    return True
