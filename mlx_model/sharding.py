"""A rank's part of a model: mlx-lm's own way to shard it, where it has one, or ours.

Weights are cut before they are read: arrays of a safetensors file are lazy, so a rank reads a tensor, keeps its part
and lets the rest go, layer by layer. What is not cut (embeddings, norms, routers, most output layers) is on every rank.

What cannot be cut is refused with the reason: mlx-lm divides the numbers of heads without asking.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    shard_linear,
    sum_gradients,
)
from mlx.utils import tree_flatten

from mlx_model.batching import family
from mlx_model.collectives.ranks import Ranks
from mlx_model.joined import JoinedLinears, join
from mlx_model.sites import find_sites, shared_inputs
from shared.errors import SetupError

log = logging.getLogger(__name__)

PLAIN = frozenset({"gemma", "gemma3", "gemma3_text"})
"""Families without a `shard` of mlx-lm's, whose layers are cut like Llama's: every head is normalised by itself."""
REPEATS_KV = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Families whose KV heads mlx-lm gives to several ranks where there are fewer than ranks."""
WRONG: dict[str, str] = {}
"""Families whose `shard` is wrong, and why."""
_HEADS = ("n_heads", "num_attention_heads", "num_heads", "num_v_heads", "num_k_heads")
_KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")


def shard(model: Any, ranks: Ranks) -> None:
    """Cut a model whose weights are lazy; SetupError if it cannot be."""
    name = family(model)
    text = getattr(model, "language_model", model)
    if name in WRONG:
        raise SetupError(f"mlx-lm's {name} cannot be divided among ranks: {WRONG[name]}")
    if not hasattr(model, "shard") and not hasattr(text, "shard") and name not in PLAIN:
        raise SetupError(f"mlx-lm's {name} cannot be divided among ranks: it has no way to shard this family")
    _check_heads(model, ranks.size, repeats_kv=name in REPEATS_KV)
    try:
        if hasattr(model, "shard"):
            model.shard(ranks.group)
        elif hasattr(text, "shard"):
            text.shard(ranks.group)
        else:
            _shard_plain(text, ranks)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise SetupError(f"mlx-lm's {name} cannot be divided among {ranks.size} ranks: {reason}") from error
    for _, module in model.named_modules():
        if kind := _PARTS.get(type(module)):
            module.__class__ = kind


class _OutputPart:
    """A linear of which a rank has some outputs.

    mlx-lm's own has an operation in its forward whose gradient is summed over ranks; five of them a layer made the
    graph of a decode step 7% larger. Here it is there when it is asked for.
    """

    sums_gradients = False
    joined: JoinedLinears | None = None  # with others that read the same input
    place = 0  # among these
    group: Any

    def __call__(self, x: mx.array) -> mx.array:
        """This rank's outputs for x [..., in]."""
        if self.joined is not None and self.joined.is_for(x):
            return self.joined.output(self.place, x)
        if self.sums_gradients:
            x = sum_gradients(self.group)(x)
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        return y


class _LinearPart(_OutputPart, nn.Linear):  # type: ignore[misc]
    pass


class _QuantizedPart(_OutputPart, nn.QuantizedLinear):  # type: ignore[misc]
    pass


_PARTS: dict[type, type] = {AllToShardedLinear: _LinearPart, QuantizedAllToShardedLinear: _QuantizedPart}


def _join(model: Any) -> None:
    sites = {path: site for path, site in find_sites(model).items() if isinstance(site.module, _OutputPart)}
    if not sites:
        return
    for paths in shared_inputs(model, sites):
        join([sites[path].module for path in paths])


def sum_gradients_of(model: Any) -> None:
    """Let a model that is divided among ranks sum its gradients, from now on: it is to be trained on."""
    for _, module in model.named_modules():
        if isinstance(module, _OutputPart):
            object.__setattr__(module, "sums_gradients", True)
            object.__setattr__(module, "joined", None)


def read_weights(model: Any, *, joins: bool = True) -> None:
    """Evaluate the parameters layer by layer: in addition to a rank's part, little more than a layer is in memory.

    `joins`: products of the same input become one where it pays.
    """
    if joins:
        _join(model)
    layers = getattr(model, "layers", None) or ()
    for layer in layers:
        mx.eval(layer.parameters() if isinstance(layer, nn.Module) else [])
    mx.eval(model.parameters())
    log.info("model.sharded bytes=%d", sum(each.nbytes for _, each in tree_flatten(model.parameters())))


def _check_heads(model: Any, size: int, *, repeats_kv: bool) -> None:
    for path, module in model.named_modules():
        for names in (_HEADS, _KV_HEADS):
            for name in names:
                count = getattr(module, name, None)
                if not isinstance(count, int) or count % size == 0 or not _has_weights(module):
                    continue
                if names is _KV_HEADS and ((repeats_kv and size % count == 0) or "k_proj" not in module):
                    continue
                raise SetupError(f"{size} ranks cannot divide the {count} heads ({name}) of {path or 'this model'}")


def _has_weights(module: Any) -> bool:
    return any(isinstance(each, nn.Module) and "weight" in each for each in module.values())


def _shard_plain(model: Any, ranks: Ranks) -> None:
    """Attention by heads, the rest by the width between its two products."""
    for layer in model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in _OUTPUTS:
                if name in part:
                    part[name] = shard_linear(part[name], "all-to-sharded", group=ranks.group)
            for name in _INPUTS:
                if name in part:
                    part[name] = shard_linear(part[name], "sharded-to-all", group=ranks.group)
        layer.self_attn.n_heads //= ranks.size
        layer.self_attn.n_kv_heads //= ranks.size
