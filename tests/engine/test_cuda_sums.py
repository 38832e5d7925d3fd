"""Sums over ranks by memory that their GPUs share: as MLX's own, and MLX's own where there is none."""

import subprocess

import mlx.core as mx
import pytest

from tests.engine import cuda_sums
from worker.engine.ranks.cuda import sums


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    return len(listed.splitlines()) if mx.cuda.is_available() else 0


@pytest.mark.skipif(_gpus() < 2, reason="needs two CUDA devices")
def test_sums_are_those_of_nccl() -> None:
    assert cuda_sums.start() == [0, 0]


def test_other_back_ends_keep_their_sums() -> None:
    alone = mx.distributed.init(backend="ring")
    assert not sums.open_to(alone), "one rank"
    parts = mx.ones((2, 64))
    assert sums.near_sums(alone, parts) is None
    assert mx.array_equal(sums.all_sum(parts, alone), parts)
