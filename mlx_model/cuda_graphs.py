"""MLX's CUDA back end, set up for many shapes: `prepare()` before the first operation.

There MLX records some operations at a time as a CUDA graph and keeps the graphs it has built, 400 of them. A train step
of 28 layers alone needs several hundred, so a decode step and a microbatch in turns, or microbatches of different
widths, build theirs over and over. Smaller graphs are alike more often, and more of them are kept. On one NVIDIA H200,
Qwen3-0.6B's shape, microbatches of 4,608 positions in varying widths take 200 to 260 ms in place of 310 to 660.

Sums over ranks are captured into these graphs, each as a graph of its own. NCCL readies itself there for graphs that
run at the same time, registers its buffers with every capture and launches clusters of blocks. None of it is of use to
sums of a decode step, which come one after another and are small, and it made them slow: two H100s, Qwen3 8B's shape,
one row, 73 sums: 6.2 ms of a step as NCCL has it, 3.2 without the first two, 1.9 without the third, too.
"""

import os

import mlx.core as mx

_SETTINGS = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "5000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "2048",  # plans of cuDNN, of 256: kv/cuda/few_shapes.py
    "MLX_MAX_OPS_PER_BUFFER": "30",  # cuts by count ...
    "MLX_MAX_MB_PER_BUFFER": "100000",  # ... and not by size, or each KV length would have graphs of its own
}
_SUMS = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "0", "NCCL_CGA_CLUSTER_SIZE": "0"}


def prepare(*, sums: bool = False) -> None:
    """Set what is not set already; without CUDA nothing happens. `sums`: over ranks, before these connect."""
    if mx.cuda.is_available():
        for name, value in (_SETTINGS | (_SUMS if sums else {})).items():
            os.environ.setdefault(name, value)
