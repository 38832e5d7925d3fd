"""Random adapters made by mlx-lm's own tuner, as files and as models to compare with."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from shared.adapters import AdapterManifest

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LINEARS = ATTENTION + MLP
EVERYWHERE = (*LINEARS, "lm_head", "model.embed_tokens")


@dataclass(frozen=True)
class MadeAdapter:
    """One adapter version: its file, what the store would say of it, and mlx-lm's model with it."""

    path: Path
    manifest: AdapterManifest
    reference: Any


def make_adapter(
    model: Any,
    folder: Path,
    *,
    name: str = "a",
    version: int = 1,
    rank: int = 8,
    scale: float = 2.0,
    dora: bool = False,
    keys: tuple[str, ...] = LINEARS,
    dtype: mx.Dtype = mx.float32,
    strength: float = 0.3,
) -> MadeAdapter:
    """A random adapter strong enough to change greedy tokens; `model` stays as it is."""
    reference = twin(model)
    reference.freeze()
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": set(keys)}
    linear_to_lora_layers(reference, len(reference.layers), parameters, use_dora=dora)
    seed = sum(map(ord, name)) * 1000 + version
    weights = _random(dict(tree_flatten(reference.trainable_parameters())), seed, strength / scale, dtype)
    reference.load_weights(list(weights.items()), strict=False)
    reference.eval()
    mx.eval(reference.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}.safetensors"
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    modules = tuple(sorted({key.rpartition(".")[0] for key in weights}))
    manifest = AdapterManifest(
        name=name,
        version=version,
        kind="dora" if dora else "lora",
        rank=rank,
        scale=scale,
        modules=modules,
        base_sha256="",
        parent=0,
        sha256=f"{name}{version}",
        size=path.stat().st_size,
        chunk_size=1 << 20,
        created_ms=0,
    )
    return MadeAdapter(path, manifest, reference)


def twin(module: Any) -> Any:
    """A second tree over the same arrays."""
    if isinstance(module, nn.Module):
        other = copy.copy(module)
        other._no_grad = set(module._no_grad)
        for key, child in module.items():
            other[key] = twin(child)
        return other
    if isinstance(module, list):
        return [twin(item) for item in module]
    return module


def _random(shapes: dict[str, mx.array], seed: int, strength: float, dtype: mx.Dtype) -> dict[str, mx.array]:
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights: dict[str, mx.array] = {}
    for key, (path, old) in zip(keys, sorted(shapes.items()), strict=True):
        noise = mx.random.normal(old.shape, key=key)
        if path.endswith(".m"):
            weights[path] = (old * (1 + 0.1 * noise)).astype(dtype)
        elif path.endswith("lora_a"):
            weights[path] = (noise / old.shape[0] ** 0.5).astype(dtype)
        else:
            weights[path] = (noise * strength).astype(dtype)
    mx.eval(weights)
    return weights
