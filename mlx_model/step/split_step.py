"""The decode step of families that mlx-lm's own layers compute, each of them compiled in two parts (`split_layer.py`).

The model around its layers is mlx-lm's: embeddings, masks, the last norm and the head. On a GPU a decode step takes as
long as the host needs to make its operations and to give them out. Compiled, these are made without Python, and those
that work number by number are one kernel. Rows with adapters have mlx-lm's forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import (
    gemma3_text,
    gemma4_text,
    glm4,
    glm4_moe,
    gpt_oss,
    lfm2,
    lfm2_moe,
    ministral3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from mlx_lm.models.cache import make_prompt_cache

from mlx_model.step.layer import bare
from mlx_model.step.split_layer import Forms, SplitLayer

log = logging.getLogger(__name__)

LAYERS = (
    gemma3_text.TransformerBlock,
    gemma4_text.DecoderLayer,
    glm4.Glm4DecoderLayer,
    glm4_moe.DecoderLayer,
    gpt_oss.TransformerBlock,
    lfm2.Lfm2DecoderLayer,
    lfm2_moe.Lfm2DecoderLayer,
    ministral3.TransformerBlock,
    qwen3_5.DecoderLayer,
    qwen3_moe.Qwen3MoeDecoderLayer,
    qwen3_next.Qwen3NextDecoderLayer,
)


_TRIAL = [1, 2, 3]  # token ids
_CLOSE = 0.05  # of the largest logit: fused operations may round otherwise


class SplitStep:
    """The decode step of one model, with the weights it has when this is created."""

    reads_beginnings = False  # in place

    def __init__(self, model: Any, *, compiles: bool) -> None:
        """`compiles`: False computes the same operations one by one."""
        self.model = model
        compiled: Callable[..., Any] = mx.compile if compiles else lambda of: of
        forms = Forms(compiled)
        self._quick = _with_layers(model, [SplitLayer(layer, forms) for layer in model.layers])

    def agrees(self) -> bool:
        """True if logits of a short batch of the base are those of mlx-lm's forward; what is wrong is logged."""
        try:
            caches = make_prompt_cache(self.model)
            self.model(mx.array([_TRIAL]), cache=caches)
            tokens_B1 = mx.array(_TRIAL)[:, None]
            theirs, ours = (
                step(tokens_B1, cache=[each.merge([each] * len(_TRIAL)) for each in caches]).astype(mx.float32)
                for step in (self.model, self._quick)
            )
            off = cast(float, (mx.max(mx.abs(ours - theirs)) / mx.max(mx.abs(theirs))).item())
        except Exception:
            log.exception("model.compiled_step_failed")
            return False
        if off > _CLOSE:
            log.warning("model.compiled_step_is_wrong off=%.3f", off)
        return off <= _CLOSE

    def takes(self, caches: Sequence[Any]) -> bool:
        """True: a layer that cannot compute with its cache leaves it to mlx-lm's."""
        return True

    def may_be_in_place(self, caches: Sequence[Any], count: int) -> bool:
        """False: KV is written as its caches do it."""
        return False

    def __call__(
        self, tokens_BL: mx.array, caches: Sequence[Any], *, in_place: bool = False, whole: bool = False
    ) -> mx.array:
        """Logits [B, L, V] of rows of the base."""
        return cast(mx.array, self._quick(tokens_BL, cache=list(caches)))

    def adapted(
        self, tokens_BL: mx.array, caches: Sequence[Any], *, in_place: bool = False, whole: bool = False
    ) -> mx.array:
        """The same of rows with adapters, in the slots that are selected."""
        return cast(mx.array, self.model(tokens_BL, cache=list(caches)))


def splits(model: Any) -> bool:
    """True if all layers are known here, and a model of one rank has them."""
    layers = getattr(model, "layers", [])
    return bool(layers) and all(type(layer) in LAYERS and _is_mlx_lm_s(layer) for layer in layers)


def _is_mlx_lm_s(layer: Any) -> bool:
    """True if nothing else computes in this layer but adapters, which rows of the base do without."""
    return all(
        type(module).__module__.startswith(("mlx.nn.", "mlx_lm.models.", "mlx_model.lora."))
        and not type(module).__module__.startswith("mlx.nn.layers.distributed")
        and getattr(module, "sharding_group", None) is None
        for _, module in layer.named_modules()
    )


def _with_layers(module: Any, layers: list[SplitLayer]) -> Any:
    """A copy of the model with these layers, and otherwise the same modules."""
    twin = copy(module)
    if "layers" in twin:
        twin["layers"] = layers
        twin["embed_tokens"] = bare(twin.embed_tokens)
        return twin
    for name, part in module.items():
        if name in ("model", "language_model"):
            twin[name] = _with_layers(part, layers)
        elif isinstance(part, nn.Module):
            twin[name] = bare(part)
    return twin
