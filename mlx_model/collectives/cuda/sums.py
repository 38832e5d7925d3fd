"""Sums of a decode step over ranks of one machine, each with a GPU: one operation, in place of NCCL's.

NCCL's sum costs the host 19 us to give out, where an operation of MLX costs 3 to 4, and the GPU 20 to 40 for some 8 KB
that NVLink carries in one. A step of a model with 36 layers has 72 of them, and its host is what it waits for. So rows
of a decode step are summed by a kernel of ours (`sum.cu`): each rank writes its part into memory of the others and
waits there until theirs have come (as the one-shot sum of vLLM and of TensorRT-LLM do). What follows a sum in a layer,
the addition to what the layer was fed and the next norm, is the same kernel.

`open_to(group)` is asked by all ranks together when they have met; where a rank cannot reach another's memory, or what
comes of first sums is wrong, sums stay NCCL's on all of them. So do those of many rows, as of prompts.

Invariant. In all that is computed at once, each sum of a process hangs on the one before: two that ran side by side
would take the same turn. Decode steps are such chains, and nothing else calls `all_sum` or `near_sums`.

A rank whose neighbour has died waits in the kernel, as it would in NCCL's, until the group is ended from outside
(docs/internals/groups.md); otherwise the kernel ends with an error, and the rank with it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_model.collectives.cuda.memory import HANDLE_BYTES, CudaError, SharedMemory
from mlx_model.cuda import kernel, number
from mlx_model.device import on_cuda

log = logging.getLogger(__name__)

SWITCH = "PARALLM_CUDA_SUMS"  # 0: NCCL's
MOST_RANKS = 8
_ROWS = 128
_CHUNK = 16_384  # bytes of a row
_VECTOR = 16  # bytes that a thread takes
_PATIENCE_S, _TRIAL_S = 120, 30  # for the other ranks, which may be compiling a kernel; and when it is tried out
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_SOURCE = Path(__file__).with_name("sum.cu")


class NearSums:
    """Sums over a group whose ranks can reach one another's memory."""

    def __init__(self, group: Any, places: list[int], *, tries: bool = False) -> None:
        """`places`: where this process reaches each rank's memory. `tries`: a sum may be wrong, and does not wait."""
        self._patience = {"PATIENCE_S": _TRIAL_S if tries else _PATIENCE_S, "TRIES": int(tries)}
        self.group, self._rank, self._size = group, group.rank(), group.size()
        self._places = mx.array(places, mx.uint64)
        mx.eval(self._places)

    def takes(self, parts: mx.array, *others: mx.array) -> bool:
        """True if the kernel supports sums of these [rows, width], and `others` as further inputs of the same type."""
        width = parts.shape[-1] * parts.dtype.size
        return (
            parts.ndim == 2
            and 0 < parts.shape[0] <= _ROWS
            and parts.dtype in _DTYPES
            and width % _VECTOR == 0
            and width <= _CHUNK
            and all(each.dtype == parts.dtype for each in others)
        )

    def sum(self, parts: mx.array) -> mx.array:
        """[rows, width] of all ranks' parts."""
        return self._called(("out",), parts=parts)[0]

    def added_and_normed(self, parts: mx.array, fed: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        """Sum of `fed` [rows, width] and all ranks' parts; and its weighted RMS norm."""
        out, normed = self._called(("out", "normed"), parts=parts, fed=fed, norm=norm, eps=eps)
        return out, normed

    def _called(
        self, outputs: tuple[str, ...], parts: mx.array, eps: float = 0.0, **others: mx.array
    ) -> list[mx.array]:
        rows, width = parts.shape
        threads = -(-width * parts.dtype.size // _VECTOR // 32) * 32
        settings = self._patience | {
            "WORLD": self._size,
            "RANK": self._rank,
            "ROWS": _ROWS,
            "CHUNK": _CHUNK,
            "THREADS": threads,
            "EPS": number(eps),
        }
        inputs = {"parts": parts, "places": self._places, **others}
        normed = ("#define NORMED", "add_and_norm.cuh") if "normed" in outputs else ()
        made: list[mx.array] = kernel(_SOURCE, tuple(inputs), outputs, normed)(
            inputs=list(inputs.values()),
            template=[("T", parts.dtype), *settings.items()],
            grid=(rows * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[parts.shape] * len(outputs),
            output_dtypes=[parts.dtype] * len(outputs),
        )
        return made


_near: NearSums | None = None  # of this process, which is a rank of one group


def near_sums(group: Any, parts: mx.array, *others: mx.array) -> NearSums | None:
    """The `NearSums` that can sum these parts [rows, width], with `others` in the same kernel, else None."""
    near = _near
    return near if near is not None and near.group is group and near.takes(parts, *others) else None


def all_sum(parts: mx.array, group: Any) -> mx.array:
    """Sum of all ranks' parts, by the kernel where it supports them."""
    near = near_sums(group, parts)
    return mx.distributed.all_sum(parts, group=group) if near is None else near.sum(parts)


def open_to(group: Any) -> bool:
    """Let the ranks of a group sum by the kernel from now on, if all of them can; all call it together."""
    global _near
    _near = None
    if not 1 < group.size() <= MOST_RANKS:
        return False
    own, places, reason = None, [], ""
    try:
        own = _own(group.size())
    except Exception as error:  # whatever it is: the others wait for this rank's word
        reason = str(error)
    gathered = _exchanged(group, b"" if own is None else own.handle + _machine())
    if own is not None and all(each[HANDLE_BYTES:] == _machine() for each in gathered):
        try:
            handles = enumerate(each[:HANDLE_BYTES] for each in gathered)
            places = [own.address if rank == group.rank() else own.opened(each) for rank, each in handles]
        except Exception as error:
            reason = str(error)
    is_right = _agreed(group, bool(places))
    for near in (NearSums(group, places, tries=True), NearSums(group, places)):  # the latter as decode steps use it
        is_right = is_right and _agreed(group, _is_right(near))
    if is_right:
        _near = near
        return True
    log.info("ranks.sums_by_nccl reason=%s", reason or "another rank cannot, is elsewhere, or sums come out wrong")
    if own is not None and not places:
        own.free()
    return False


def _own(size: int) -> SharedMemory:
    if os.environ.get(SWITCH, "1") == "0" or not on_cuda():
        raise CudaError(f"{SWITCH}=0, or no CUDA")
    return SharedMemory((1 + size) * _ROWS * 4 + 2 * size * _ROWS * _CHUNK)


def _machine() -> bytes:
    """Which start of which machine this is, 36 bytes: a handle means nothing elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def _exchanged(group: Any, own: bytes) -> list[bytes]:
    """Each rank's bytes, made up to the same length."""
    length = HANDLE_BYTES + 36
    words = mx.array(list(own.ljust(length, b"\0")), mx.int32)
    mine = mx.arange(group.size())[:, None] == group.rank()
    by_rank = mx.distributed.all_sum(mx.where(mine, words[None], 0), group=group)
    return [bytes(each) for each in by_rank.tolist()]  # type: ignore[union-attr,arg-type]


def _agreed(group: Any, is_so: bool) -> bool:
    return bool(mx.distributed.all_sum(mx.array(int(is_so)), group=group).item() == group.size())


def _is_right(near: NearSums) -> bool:
    """True if sums of the widest rows are correct: a GPU may have memory that another one cannot write."""
    size, rank = near.group.size(), near.group.rank()
    wanted = size * (size + 1) / 2
    ones = mx.ones((4, _CHUNK // 2), mx.bfloat16)
    try:
        for _ in range(3):
            added, normed = near.added_and_normed(ones * (rank + 1), ones, ones[0], 0.0)
            mx.eval(added, normed)
            made = mx.stack([near.sum(ones * (rank + 1)) - wanted, added - wanted - 1, normed - 1])
            if mx.any(mx.abs(made) > 0.01).item():
                return False
    except Exception as error:  # MLX cannot compile it, say; the others wait for this rank's word
        log.warning("ranks.sums_fail error=%s: %s=0 leaves them to NCCL", error, SWITCH)
        return False
    return True
