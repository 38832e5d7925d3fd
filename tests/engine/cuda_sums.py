"""A rank that checks sums by the kernel against MLX's; `python -m tests.engine.cuda_sums` starts two, a GPU each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_model.collectives.cuda import sums
from tests.waiting import HANG_S

SHAPES = ((1, 4096, mx.bfloat16), (32, 4096, mx.bfloat16), (3, 1000, mx.float16), (128, 5120, mx.bfloat16))
SHAPES += ((1, 4096, mx.float32), (7, 64, mx.float32), (32, 8192, mx.bfloat16))


def start(ranks: int = 2) -> list[int]:
    """The exit codes of so many ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")
    group = {"MLX_WORLD_SIZE": str(ranks), "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    processes = []
    for rank in range(ranks):
        own = group | {"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": shown[rank]}
        processes.append(
            subprocess.Popen([sys.executable, "-m", "tests.engine.cuda_sums", "rank"], env=os.environ | own)
        )
    try:
        return [process.wait(HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check(group: Any) -> None:
    """Every shape and type, one turn after another with other numbers of rows, then a long chain."""
    for turn in range(40):
        for rows, width, dtype in SHAPES:
            mx.random.seed(1000 * turn + group.rank())
            parts = mx.random.normal((rows, width)).astype(dtype)
            mx.random.seed(1000 * turn + 500)  # the same on all ranks
            fed, norm = (mx.random.normal(shape).astype(dtype) for shape in ((rows, width), (width,)))
            near = sums.near_sums(group, parts)
            assert near is not None, (rows, width, dtype)
            wanted, told = mx.distributed.all_sum(parts, group=group), near.sum(parts)
            assert mx.array_equal(told, wanted), (turn, rows, width, dtype, mx.abs(told - wanted).max())
            added, normed = near.added_and_normed(parts, fed, norm, 1e-6)
            assert mx.array_equal(added, fed + wanted), (turn, rows, width, dtype)
            rtol = 1e-5 if dtype == mx.float32 else 2e-2
            close = mx.allclose(normed, mx.fast.rms_norm(fed + wanted, norm, 1e-6), rtol=rtol, atol=1e-5)
            assert close, (turn, rows, width, dtype)
            same_on_all(group, normed)
    x = mx.ones((8, 4096), mx.bfloat16)
    for _ in range(2000):
        x = sums.all_sum(x / group.size(), group)
    assert mx.all(x == 1), x
    assert sums.near_sums(group, mx.ones((129, 64))) is None, "many rows"
    assert sums.near_sums(group, mx.ones((1, 63), mx.bfloat16)) is None, "no whole vectors"
    assert sums.near_sums(group, x, x, mx.ones(4096)) is None, "a norm of another type"


def same_on_all(group: Any, x: mx.array) -> None:
    """Bit by bit."""
    total = int(np.array(x.astype(mx.float32)).view(np.uint32).astype(np.uint64).sum() % 65_521)
    assert mx.distributed.all_sum(mx.array(total), group=group).item() == total * group.size()


def main() -> None:
    """As a rank, or all of them."""
    if sys.argv[1:] != ["rank"]:
        sys.exit(max(start()))
    group = mx.distributed.init(strict=True, backend="nccl")
    assert sums.open_to(group), "ranks of one machine"
    check(group)
    print("rank", group.rank(), "is right", flush=True)
    os._exit(0)  # NCCL may wait for the other one


if __name__ == "__main__":
    main()
