"""Sums over ranks by memory that their GPUs share: as MLX's own, and MLX's own where there is none."""

import os
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.distributed import shard_linear
from mlx_lm.models.cache import BatchKVCache

from mlx_model.collectives.cuda import sums
from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from mlx_model.step.decode_step import DecodeStep
from tests.engine import cuda_sums
from tests.engine.adapter_models import make_adapter, twin
from tests.engine.small_models import LLAMA, QWEN3, write_model
from tests.engine.test_decode_step import BIASES, decoded
from tests.engine.test_multi_lora import adapted_with


def _gpus() -> int:
    """That this process may use."""
    if not mx.cuda.is_available():
        return 0
    if shown := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(shown.split(","))
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())


@pytest.mark.skipif(_gpus() < 2, reason="needs two CUDA devices")
def test_sums_are_those_of_nccl() -> None:
    assert cuda_sums.start() == [0, 0]


def test_other_back_ends_keep_their_sums() -> None:
    alone = mx.distributed.init(backend="ring")
    assert not sums.open_to(alone), "one rank"
    parts = mx.ones((2, 64))
    assert sums.near_sums(alone, parts) is None
    assert mx.array_equal(sums.all_sum(parts, alone), parts)


class OfOne(sums.NearSums):
    """Of a group of one rank, by MLX's operations: what decode steps ask of the kernel."""

    def __init__(self, group: Any) -> None:
        self.group, self.asked = group, 0

    def sum(self, parts: mx.array) -> mx.array:
        """Of one rank."""
        return parts

    def added_and_normed(self, parts: mx.array, fed: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        """As the kernel does it, which reads all of them as one type."""
        assert parts.dtype == fed.dtype == norm.dtype
        self.asked += 1
        return fed + parts, mx.fast.rms_norm(fed + parts, norm, eps)


@pytest.mark.parametrize("norms", [mx.bfloat16, mx.float32])
def test_a_decode_step_asks_for_sums_of_one_type_alone(
    norms: mx.Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(EngineConfig(str(write_model(tmp_path, QWEN3)), dtype="bfloat16")).model
    for layer in model.layers:
        layer.post_attention_layernorm.weight = layer.post_attention_layernorm.weight.astype(norms)
    near = OfOne(mx.distributed.init(backend="ring"))
    for layer in model.layers:
        layer.self_attn.o_proj = shard_linear(layer.self_attn.o_proj, "sharded-to-all", group=near.group)
        layer.mlp.down_proj = shard_linear(layer.mlp.down_proj, "sharded-to-all", group=near.group)
    wanted = decoded(model, DecodeStep(model, compiles=False))
    monkeypatch.setattr(sums, "_near", near)
    for one, other in zip(wanted, decoded(model, DecodeStep(model, compiles=False)), strict=True):
        assert mx.array_equal(one, other)
    steps, layers = len(wanted), len(model.layers)
    assert near.asked == 2 * steps * layers if norms == mx.bfloat16 else near.asked < 2 * steps * layers


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("config", [QWEN3, LLAMA | BIASES])
def test_sums_behind_adapted_linears_take_the_addition_and_the_norm_along(
    config: dict[str, Any], dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing but the sum follows; with biases and gains the numbers are right, too."""
    model = load_model(EngineConfig(str(write_model(tmp_path / "model", config)))).model
    base = twin(model)
    made, near = make_adapter(base, tmp_path / "a", dora=dora), OfOne(mx.distributed.init(backend="ring"))
    for layer in model.layers:
        layer.self_attn.o_proj = shard_linear(layer.self_attn.o_proj, "sharded-to-all", group=near.group)
        layer.mlp.down_proj = shard_linear(layer.mlp.down_proj, "sharded-to-all", group=near.group)
    adapted = adapted_with(model, [made])
    monkeypatch.setattr(sums, "_near", near)
    adapted.select([1, 0], dora)
    tokens = mx.array([[7], [9]])
    told = DecodeStep(model, compiles=False).adapted(tokens, [BatchKVCache([0, 0]) for _ in model.layers])
    for at, reference in enumerate((made.reference, base)):
        assert mx.allclose(told[at], reference(tokens[at : at + 1])[0], rtol=1e-3, atol=1e-3)
    assert near.asked == (0 if dora or config is not QWEN3 else 2 * len(model.layers))
