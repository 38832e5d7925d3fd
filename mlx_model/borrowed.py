"""Language models that mlx-vlm has and mlx-lm does not, run as those of mlx-lm are.

mlx-vlm loads the checkpoint. Of what it makes, the language side alone is kept, with mlx-lm's caches in the place of
its own, so that rows share a batch. What a model sees or hears with is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from shared.errors import SetupError

FAMILIES = frozenset({"k2_horizon", "mimo_v2", "step3p7"})
# The others that mlx-lm lacks keep their KV in forms of which neither library has a batch that is like ours.
REFUSED = {
    "deepseek_v4": "pooled KV next to a window",
    "glm5_next": "pooled KV of an index next to its own",
    "hy_v4": "KV of an index next to its own",
    "inkling": "a state of convolutions in each layer's KV",
    "qwen4_exp": "sparse KV of its own",
}


class Borrowed(nn.Module):  # type: ignore[misc]
    """The language side of a model of mlx-vlm, called as mlx-lm's models are."""

    def __init__(self, language: Any) -> None:
        super().__init__()
        self.language_model = language
        self.args = language.args

    def __call__(self, tokens_BL: mx.array, cache: Any = None) -> mx.array:
        """Logits [B, L, V] of the next tokens."""
        logits_BLV: mx.array = self.language_model(tokens_BL, cache=cache).logits
        return logits_BLV

    @property
    def layers(self) -> Any:
        """The model's layers, in order."""
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        """One cache of mlx-lm for each layer."""
        return [_ours(cache) for cache in self.language_model.make_cache()]


def is_borrowed(config: dict[str, Any]) -> bool:
    """True if mlx-vlm loads a model with this config.json; SetupError for one that only it has, and we refuse."""
    kind = str(config.get("model_type"))
    if (kv := REFUSED.get(kind)) is not None:
        raise SetupError(f"models of family {kind!r} keep {kv}, which cannot be in a batch: they are not supported")
    return kind in FAMILIES


def load_borrowed(path: Path) -> Borrowed:
    """Load the language side; SetupError without mlx-vlm."""
    try:
        from mlx_vlm.utils import load_model
    except ImportError:
        raise SetupError("only mlx-vlm has this model: pip install 'mlx-parallm[vision]'") from None
    return Borrowed(load_model(path, lazy=True).language_model)


def _ours(cache: Any) -> KVCache | RotatingKVCache:
    """mlx-lm's cache for one of mlx-vlm, which has classes of the same names."""
    if type(cache).__name__ == "RotatingKVCache":
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    assert type(cache).__name__ == "KVCache", f"{type(cache).__name__} of a borrowed model"
    return KVCache()
