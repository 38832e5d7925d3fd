"""The language side of a model that sees: mlx-lm's model, which the batch can run, with the modules of mlx-vlm's."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models import gemma3 as gemma3_lm
from mlx_lm.models import qwen2_vl, qwen3, qwen3_moe, qwen3_vl, qwen3_vl_moe

from mlx_model.vision.positions import PlacedRope, RowPositions
from shared.errors import SetupError


def with_modules(ours: Any, theirs: Any) -> Any:
    """Our model with those modules of mlx-vlm's that hold weights."""
    leaves = {path: module for path, module in theirs.named_modules() if not module.children() and module.parameters()}
    named = {path if path.startswith(("lm_head", "model.")) else f"model.{path}": leaves[path] for path in leaves}
    ours.update_modules(tree_unflatten(list(named.items())))
    return ours


def qwen(theirs: Any, family: str, deep: int) -> Any:
    """mlx-lm's model, with positions on three axes; `deep` layers at its beginning receive image vectors."""
    of, block = _QWEN[family]
    text = {**asdict(theirs.args), "rope_scaling": None, "tie_word_embeddings": "lm_head" not in theirs}
    ours = of.Model(of.ModelArgs(model_type=family, text_config=text))
    turning, layers = theirs.layers[0].self_attn.rotary_emb, ours.layers
    ours.row_positions = RowPositions(turning.inv_freq, turning.position_selector)
    for at in range(deep):
        layers[at] = block(ours.language_model.args, at)
        layers[at].at = at
    for layer in layers:
        layer.row_positions = ours.row_positions
        layer.self_attn.rope = PlacedRope(ours.row_positions, turning.dim, turning.base)
    with_modules(ours.language_model, theirs)
    return ours


def lfm2(theirs: Any) -> Any:
    """mlx-lm's model; SetupError for one with a head of its own, of which mlx-lm has none."""
    if "lm_head" in theirs:
        raise SetupError("an LFM2 whose head is not its embeddings is not supported")
    of = import_module("mlx_lm.models.lfm2-vl")
    ours = of.Model(of.ModelArgs(model_type="lfm2-vl", text_config=asdict(theirs.args)))
    with_modules(ours.language_model, theirs)
    return ours


def gemma3(theirs: Any, text: dict[str, Any]) -> Any:
    """mlx-lm's model; `text`: `text_config` as the checkpoint has it."""
    known = asdict(theirs.config) | {"rope_theta": text.get("rope_theta", theirs.config.rope_global_base_freq)}
    vocab = theirs.config.vocab_size
    ours = gemma3_lm.Model(gemma3_lm.ModelArgs(model_type="gemma3", text_config=known, vocab_size=vocab))
    theirs.pop("lm_head")  # which has the weights of the embeddings, whatever the checkpoint says
    ours.language_model.sanitize({})
    with_modules(ours.language_model, theirs)
    return ours


def row_positions_of(module: Any) -> RowPositions | None:
    """The `RowPositions` of a model, or of one of its layers, whose positions have three axes; None for others."""
    row_positions = getattr(module, "row_positions", None)
    return row_positions if isinstance(row_positions, RowPositions) else None


class _Deep:
    """A layer after which vectors of the images are added (DeepStack, arXiv 2406.04334)."""

    row_positions: RowPositions
    at: int

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h_BLH: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
        deep = self.row_positions.deep
        return h_BLH + deep[self.at] if deep else h_BLH


class _DeepBlock(_Deep, qwen3.TransformerBlock):  # type: ignore[misc]
    def __init__(self, args: Any, at: int) -> None:
        super().__init__(args)


class _DeepMoeBlock(_Deep, qwen3_moe.Qwen3MoeDecoderLayer):  # type: ignore[misc]
    pass


_QWEN: dict[str, tuple[Any, Any]] = {
    "qwen2_5_vl": (qwen2_vl, None),
    "qwen3_vl": (qwen3_vl, _DeepBlock),
    "qwen3_vl_moe": (qwen3_vl_moe, _DeepMoeBlock),
}
