"""The language side of a model that sees: mlx-lm's model, which the batch can run, with the modules of mlx-vlm's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models import qwen2, qwen3

from worker.engine.vision.positions import PlacedRope, Placement


def with_modules(ours: Any, theirs: Any) -> Any:
    """Our model with those modules of mlx-vlm's that hold weights."""
    leaves = {path: module for path, module in theirs.named_modules() if not module.children() and module.parameters()}
    named = {path if path.startswith(("lm_head", "model.")) else f"model.{path}": leaves[path] for path in leaves}
    ours.update_modules(tree_unflatten(list(named.items())))
    return ours


def qwen(theirs: Any, deep: int) -> Any:
    """mlx-lm's Qwen2 or Qwen3 whose positions have three axes; `deep` layers at its beginning are told of images."""
    of = qwen3 if hasattr(theirs.layers[0].self_attn, "q_norm") else qwen2
    known = {name: value for name, value in asdict(theirs.args).items() if name in of.ModelArgs.__dataclass_fields__}
    own = {"model_type": of.__name__.rpartition(".")[2], "rope_scaling": None}
    args = of.ModelArgs.from_dict({**known, **own, "tie_word_embeddings": "lm_head" not in theirs})
    ours = of.Model(args)
    turning = theirs.layers[0].self_attn.rotary_emb
    ours.placement = Placement(turning.inv_freq, turning.position_selector)
    for at in range(deep):
        ours.layers[at] = _DeepBlock(args, ours.placement, at)
    for layer in ours.layers:
        layer.self_attn.rope = PlacedRope(ours.placement, turning.dim, turning.base)
    return with_modules(ours, theirs)


def placement_of(model: Any) -> Placement | None:
    """Of a model whose positions have three axes."""
    placement = getattr(model, "placement", None)
    return placement if isinstance(placement, Placement) else None


class _DeepBlock(qwen3.TransformerBlock):  # type: ignore[misc]
    """A layer behind which vectors of the images are added (DeepStack, arXiv 2406.04334)."""

    def __init__(self, args: Any, placement: Placement, at: int) -> None:
        super().__init__(args)
        self.placement = placement
        self.at = at

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h_BLH: mx.array = super().__call__(x, mask, cache)
        deep = self.placement.deep
        return h_BLH + deep[self.at] if deep else h_BLH
