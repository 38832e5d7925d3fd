"""Which models of mlx-lm run in a batch, and how. Nearly all were tried with mlx-lm 0.32.2, small and random.

Prompts of different lengths are padded to share a forward; what of mlx-lm cannot take that is mended (`mended.py`,
`padded.py`). A model that is wrong beyond that is refused at start, for it would be wrong in silence.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from shared.errors import SetupError

WRONG = {
    "phi3small": "its blocks of attention count a row's padding as positions",
    "afm7": "layers that reuse keys count a row's padding as positions",
    "longcat_flash_ngram": "a row of fewer tokens than its n-grams cannot join others",
}
_ROWS_TO_TRY = 3  # few models have three KV heads, so a mask that is laid out wrongly does not fit by chance


def check_batch(model: Any, max_rows: int) -> None:
    """SetupError if the model's sequences cannot share a forward."""
    if max_rows > 1 and (reason := WRONG.get(family(model))):
        raise SetupError(
            f"mlx-lm's {family(model)} cannot be trusted in a batch: {reason}; with --max-batch-size 1 it runs"
        )
    rows = _ROWS_TO_TRY if max_rows > 1 else 1
    each: list[Any] = make_prompt_cache(model)
    if odd := sorted({type(cache).__name__ for cache in each if not hasattr(cache, "merge")}):
        raise SetupError(f"this model keeps its KV in mlx-lm's {', '.join(odd)}, of which there is no batched form")
    try:
        caches = [cache.merge([cache] * rows) for cache in each]
        mx.eval(model(mx.zeros((rows, 2), mx.int32), cache=caches))
    except Exception as error:
        alone = "; with --max-batch-size 1 it may run" if rows > 1 else ""
        raise SetupError(
            f"mlx-lm cannot run sequences of this model in a batch ({type(error).__name__}: {error}){alone}"
        ) from error


def family(model: Any) -> str:
    """The file of mlx-lm that the model is in, which is what its config's model_type leads to."""
    return type(model).__module__.rpartition(".")[2]
