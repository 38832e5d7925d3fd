"""Fused kernels for rows on different adapters, for CUDA and Metal: base output plus x A[slot] B[slot], in one.

A decode step on a GPU is bound by the number of operations, not by their arithmetic, so the projections that
read the same input (q, k, v; gate, up) share one operation, which computes the r inner products again in every output
tile (few rows) and accumulates in fp32.

Outputs lie apart, one array a projection, or side by side in one, as a joined product makes them. So do the sums, and
the columns of other projections are copied. On CUDA two of these operations also do what follows them in a layer of a
decode step: SwiGLU of gate and up, and, where a block has all outputs of a row, the residual and the next norm.

Shapes are written into the source, one kernel object per shape, because MLX works template arguments out again in every
call, and a decode step of a large model is bound by what the host does.

Layouts, with J projections of one input and rank r: A [S, in, J*r] in T, B_j [S, r, out_j] in T (scale folded in),
y_j [M, out_j] or y [M, all out] in T, or in fp32 where y is the sum of parts, slots [M] uint32; slot 0 is the base,
whose rows read no A and no B. T is bf16, fp16 or fp32; r is a power of two from 8 to 256, widths are multiples of 8.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_model.cuda import is_on, is_right, number
from mlx_model.device import on_metal
from mlx_model.metal import FEW

Call = Callable[[list[mx.array], list[tuple[int, ...]]], list[mx.array]]

LARGEST_RANK = 256  # a thread adds up one of the inner products
UNROLLED = 16  # ranks: with 128 of them a kernel takes 255 registers, and three times as long to compile
METAL_SWITCH = "PARALLM_METAL_LORA"  # 0: MLX's operations on a Mac
ENDINGS_SWITCH = "PARALLM_CUDA_LORA_ENDINGS"  # 0: what follows deltas in a layer stays with operations of its own
_are_left = False
ENDINGS_CLOSE = 0.02  # of the largest number, in bfloat16
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
#define EXP __expf
#define RSQRT rsqrtf
"""
_METAL_WORDS = """
#define DEVICE device
#define LOCAL thread
#define SHARED threadgroup
#define INLINE inline
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(value, lane) simd_shuffle_xor(value, ushort(lane))
#define EXP exp
#define RSQRT(value) (1.0f / sqrt(value))
"""
_CUDA_PLACE = "  const int tid = threadIdx.x, block = blockIdx.x, m = blockIdx.y;\n"
_METAL_PLACE = (
    "  const int tid = thread_position_in_threadgroup.x, block = threadgroup_position_in_grid.x;\n"
    "  const int m = threadgroup_position_in_grid.y;\n"
)
_CUDA_ROWS, _METAL_ROWS = "  const int rows = gridDim.y;\n", "  const int rows = threadgroups_per_grid.y;\n"

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
// Of PARTS > 1, each `apart` numbers after the one before it, the sum as T rounds it.
template <typename T, int PARTS, typename P> INLINE void read8(const DEVICE P* p, size_t apart, LOCAL float* out) {
  load8(p, out);
  if (PARTS > 1) {
    #pragma unroll
    for (int part = 1; part < PARTS; ++part) {
      float more[8];
      load8(p + part * apart, more);
      #pragma unroll
      for (int c = 0; c < 8; ++c) out[c] += more[c];
    }
    #pragma unroll
    for (int c = 0; c < 8; ++c) out[c] = static_cast<float>(static_cast<T>(out[c]));
  }
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
  if (slot != 0) {
    #pragma unroll AHEAD
    for (int i = first; i < IN; i += STRIDE) {
      float a8[8];
      load8(a_row + size_t(i) * JR, a8);
      const float xi = static_cast<float>(x_row[i]);
      #pragma unroll
      for (int c = 0; c < 8; ++c) acc[c] += xi * a8[c];
    }
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
  const DEVICE P* y = nullptr;
  const DEVICE T* B = nullptr;
  DEVICE T* o = nullptr;
"""

_COPY = """
  const int slot = j < 0 ? 0 : slots[m];
  const int column = (tile * NT + tid) * 8;
  const size_t place = size_t(m) * WIDTH + column, apart = size_t(rows) * WIDTH;
  if (slot == 0) {
    if (column < OUT) {
      float alone[8];
      read8<T, PARTS>(y + place, apart, alone);
      store8(o + place, alone);
    }
    return;
  }
"""

# What a thread's eight columns of y become, of the inner products from h[FIRST] on.
_ADDED = """
    float SUM[8];
    read8<T, PARTS>(y + FROM, apart, SUM);
    if (slot != 0) {
      const DEVICE T* b = B + (size_t(slot) * RANK) * OUT + column;
      float delta[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      #pragma unroll UNROLLED
      for (int r = 0; r < RANK; ++r) {
        float b8[8];
        load8(b + size_t(r) * OUT, b8);
        const float hr = h[FIRST + r];
        #pragma unroll
        for (int c = 0; c < 8; ++c) delta[c] += hr * b8[c];
      }
      #pragma unroll
      for (int c = 0; c < 8; ++c) SUM[c] += static_cast<float>(static_cast<T>(delta[c]));
    }
"""


def _added(total: str, of: str = "B", place: str = "place", first: str = "0") -> str:
    words = {"SUM": total, "B +": f"{of} +", "FROM": place, "FIRST": first, "UNROLLED": str(UNROLLED)}
    text = _ADDED
    for word, by in words.items():
        text = text.replace(word, by)
    return text


_EXPAND = f"""
  if (column < OUT) {{
{_added("sum")}
    store8(o + place, sum);
  }}
"""

# Rounded where MLX's separate operations round.
_GATED = f"""
  const int slot = slots[m], j = 0, column = (block * NT + tid) * 8;
INNER
  if (column < OUT) {{
    const size_t place = size_t(m) * 2 * OUT + column, apart = size_t(rows) * 2 * OUT;
{_added("gate", "B0")}
{_added("up", "B1", "place + OUT", "RANK")}
    #pragma unroll
    for (int c = 0; c < 8; ++c) {{
      const float opened = static_cast<float>(static_cast<T>(gate[c]));
      const float open = static_cast<float>(static_cast<T>(1.0f / (1.0f + EXP(-opened))));
      const float part = static_cast<float>(static_cast<T>(opened * open));
      gate[c] = part * static_cast<float>(static_cast<T>(up[c]));
    }}
    store8(o + size_t(m) * OUT + column, gate);
  }}
"""

_NORMED = f"""
  const int slot = slots[m], j = 0, column = tid * 8;
  const size_t place = size_t(m) * OUT + column, apart = size_t(rows) * OUT;
INNER
  float squares = 0;
  float made[8] = {{0, 0, 0, 0, 0, 0, 0, 0}};
  if (column < OUT) {{
{_added("sum", "B0")}
    load8(fed + place, made);
    #pragma unroll
    for (int c = 0; c < 8; ++c) {{
      made[c] = static_cast<float>(static_cast<T>(made[c] + static_cast<float>(static_cast<T>(sum[c]))));
      squares += made[c] * made[c];
    }}
    store8(o + place, made);
  }}
  SHARED float by_warp[NT / 32];
  for (int d = 16; d > 0; d >>= 1) squares += SHUFFLE_XOR(squares, d);
  if (tid % 32 == 0) by_warp[tid / 32] = squares;
  BARRIER;
  if (column < OUT) {{
    squares = 0;
    for (int w = 0; w < NT / 32; ++w) squares += by_warp[w];
    const float by = RSQRT(squares / OUT + EPS);
    float weights[8];
    load8(norm + column, weights);
    #pragma unroll
    for (int c = 0; c < 8; ++c) made[c] = static_cast<float>(static_cast<T>(made[c] * by)) * weights[c];
    store8(normed + place, made);
  }}
"""

_C_TYPES = {int: "int", float: "float"}
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
    parts: int = 1,
) -> Call:
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
    return _kernel(
        "one_pass",
        dtype,
        [inputs, rank, *widths, *([] if joined is None else ["of", *joined]), *(["few"] if are_few else [])],
        {"IN": inputs, "R": rank, "RANK": rank, "JR": rank * projections},
        ["x", "A", "slots", *_names("B", projections), *_names("y", outputs)],
        _names("o", outputs),
        f"{_BEGIN}{_select(columns, _block())}{_COPY}INNER{_EXPAND}",
        sum(each.tiles(_block()) for each in columns),
        parts,
    )


def _block() -> Block:
    return METAL_BLOCK if on_metal() else CUDA_BLOCK


def _kernel(
    name: str,
    dtype: mx.Dtype,
    shapes: Sequence[Any],
    constants: dict[str, Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    blocks: int,
    parts: int,
) -> Call:
    """A kernel for such shapes, called with its inputs and the shapes of its outputs.

    `INNER` in its body stands for the inner products. `blocks`: of a row; `parts`: of y.
    """
    is_metal, block = on_metal(), _block()
    of = (_METAL_TYPES if is_metal else _CUDA_TYPES)[dtype]
    constants = {**constants, "NT": block.threads, "PARTS": parts}
    defines = "".join(f"  constexpr {_C_TYPES[type(value)]} {name} = {value};\n" for name, value in constants.items())
    place = _METAL_PLACE if is_metal else _CUDA_PLACE
    if parts == 1:
        place += "  using P = T;\n  constexpr int rows = 0;\n"
    else:
        place += "  using P = float;\n" + (_METAL_ROWS if is_metal else _CUDA_ROWS)
        shapes = [*shapes, f"parts{parts}"]
    body = body.replace("INNER", _INNER.replace("AHEAD", str(block.ahead)))
    kernel: Any = (mx.fast.metal_kernel if is_metal else mx.fast.cuda_kernel)(
        name=f"lora_{name}_{'_'.join(map(str, (of.strip('_'), *shapes)))}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=f"  using T = {of};\n{defines}{place}{body}",
        header=(_METAL_WORDS if is_metal else _CUDA_WORDS) + _EIGHT,
    )
    across, dtypes = blocks * block.threads, [dtype] * len(outputs)

    def call(inputs: list[mx.array], shapes: list[tuple[int, ...]]) -> list[mx.array]:
        _, _, slots_M, *_ = inputs
        out: list[mx.array] = kernel(
            inputs=inputs,
            grid=(across, slots_M.size, 1),
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
    """The same where y has the outputs of linears of these widths side by side, each B's projection at its place.

    y may also come in parts, which are added up: [parts, M, all out] in float32.
    """
    few = _are_few(slots_M)
    call = _call(a_SIJ.dtype, a_SIJ.shape[1], bs[0].shape[1], widths, places, few, _parts(y))
    return call([x, a_SIJ, slots_M, *bs, y], [y.shape[-2:]])[0]


def _parts(y: mx.array) -> int:
    return 1 if y.ndim == 2 else y.shape[0]


def are_gate_and_up(widths: tuple[int, ...], places: tuple[int, ...]) -> bool:
    """True if of two joined linears of one width both have adapters: so it is with gate and up, whichever they are."""
    return len(widths) == 2 and widths[0] == widths[1] and places == (0, 1)


def gates(width: int, rank: int) -> bool:
    """True if `one_pass_gated` is for gate and up of this width."""
    return width % COLUMNS == 0 and 2 * rank <= LARGEST_RANK and may_end()


def norms(width: int) -> bool:
    """True if `one_pass_normed` is for outputs of this width: a block has a row."""
    return width % COLUMNS == 0 and width <= _block().threads * COLUMNS and may_end()


def may_end() -> bool:
    """True if kernels may also compute what follows in a layer; on Metal that was not measured."""
    return not _are_left and is_on(ENDINGS_SWITCH) and is_right("lora_endings", ENDINGS_SWITCH, _trials)


def leave_endings() -> None:
    """From now on what follows deltas stays with operations of its own in this process: a kernel for it has failed."""
    global _are_left
    _are_left = True


def one_pass_gated(x: mx.array, a_SIJ: mx.array, bs: Sequence[mx.array], y: mx.array, slots_M: mx.array) -> mx.array:
    """SwiGLU [M, out] of gate and up, which lie side by side in y [M, 2 out] or its parts, with their deltas."""
    rank, width = bs[0].shape[1:]
    call = _gated(a_SIJ.dtype, a_SIJ.shape[1], rank, width, _are_few(slots_M), _parts(y))
    return call([x, a_SIJ, slots_M, *bs, y], [(slots_M.size, width)])[0]


@lru_cache
def _gated(dtype: mx.Dtype, inputs: int, rank: int, width: int, are_few: bool, parts: int) -> Call:
    names, shapes = ["x", "A", "slots", "B0", "B1", "y"], [inputs, rank, width, are_few]
    constants = {"IN": inputs, "R": 2 * rank, "RANK": rank, "JR": 2 * rank, "OUT": width}
    blocks = _Columns(0, 0, width, width, 0).tiles(_block())
    return _kernel("gated", dtype, shapes, constants, names, ["o"], _GATED, blocks, parts)


def one_pass_normed(
    x: mx.array,
    a_SIJ: mx.array,
    b: mx.array,
    y: mx.array,
    slots_M: mx.array,
    fed: mx.array,
    norm: mx.array,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """y [M, out] or its parts, with its deltas and what the layer was fed [M, out]; and the weighted RMS norm of it."""
    call = _normed(a_SIJ.dtype, a_SIJ.shape[1], b.shape[1], b.shape[2], eps, _are_few(slots_M), _parts(y))
    added, normed = call([x, a_SIJ, slots_M, b, y, fed, norm], [fed.shape] * 2)
    return added, normed


@lru_cache
def _normed(dtype: mx.Dtype, inputs: int, rank: int, width: int, eps: float, are_few: bool, parts: int) -> Call:
    names, shapes = ["x", "A", "slots", "B0", "y", "fed", "norm"], [inputs, rank, width, number(eps), are_few]
    constants = {"IN": inputs, "R": rank, "RANK": rank, "JR": rank, "OUT": width, "EPS": eps}
    return _kernel("normed", dtype, shapes, constants, names, ["o", "normed"], _NORMED, 1, parts)


def _trials() -> Iterator[tuple[str, bool]]:
    """Against MLX's operations in fp32."""
    rows, inputs, rank, width = 3, 96, 8, 136

    def draw(seed: int, *shape: int) -> mx.array:
        return (mx.random.normal(shape, key=mx.random.key(seed)) * 0.3).astype(mx.bfloat16).astype(mx.float32)

    x, fed, norm, y = draw(0, rows, inputs), draw(1, rows, width), draw(2, width), draw(3, rows, 2 * width)
    a, bs, slots = draw(4, 3, inputs, 2 * rank), [draw(5, 3, rank, width), draw(6, 3, rank, width)], [2, 0, 1]
    a[0] = 0
    halves = [
        part + (x[:, None] @ a[mx.array(slots)][..., at * rank : (at + 1) * rank] @ b[mx.array(slots)])[:, 0]
        for at, (part, b) in enumerate(zip(mx.split(y, 2, axis=-1), bs, strict=True))
    ]
    slots_M, of = mx.array(slots, mx.uint32), partial(mx.array.astype, dtype=mx.bfloat16)
    own, small = mx.contiguous(of(a[..., :rank])), [of(b) for b in bs]
    whole = halves[0] + fed
    wanted = {
        "joined": mx.concatenate(halves, axis=-1),
        "gated": mx.sigmoid(halves[0]) * halves[0] * halves[1],
        "added": whole,
        "normed": mx.fast.rms_norm(whole, norm, 1e-5),
    }
    for form, made in {"": of(y), " of parts": mx.stack([y / 4, y * 3 / 4])}.items():
        first = mx.contiguous(made[..., :width])
        joined = one_pass_joined(of(x), of(a), small, made, slots_M, (width, width), (0, 1))
        gated = one_pass_gated(of(x), of(a), small, made, slots_M)
        found = joined, gated, *one_pass_normed(of(x), own, small[0], first, slots_M, of(fed), of(norm), 1e-5)
        for (name, exact), each in zip(wanted.items(), found, strict=True):
            apart = mx.max(mx.abs(each.astype(mx.float32) - exact))
            yield name + form, bool((apart <= ENDINGS_CLOSE * mx.max(mx.abs(exact))).item())
