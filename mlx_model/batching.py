"""Assumptions about a model, and which models of mlx-lm do not hold to them. All were tried, small and random.

A model is called with token ids [B, L] and its caches, and gives logits [B, L, V] of the next ids. Of it we assume:

- *Caches.* `make_cache`, or mlx-lm in its place, gives one cache a layer, or fewer where layers share one. Its leaves
  are of the kinds in `kv/kinds.py`; of others rows are copied and left out, and nothing is stored or taken back.
- *Positions* come from the caches alone. So a prompt in pieces is the prompt as a whole, a row may begin with stored
  KV, and rows of a batch stand at different ones. Images move them (`vision/positions.py`).
- *Padding* stands after a row's piece of a prompt, of which the caches know the lengths (`prepare`, `finalize`), and
  before its first position afterwards. Masks come from the caches and leave it out; recurrent layers stop before it.
- *Rows* do not see each other, but for experts that are drawn by capacity, which no model of mlx-lm does.
- *Hidden states*, for embeddings and heads, are what the part named `model` gives (`pooling.py`); not all have it.
- *Text*: a tokenizer in `tokenizer.json`, and a chat template in Jinja that takes messages; how it writes reasoning
  and calls is `shared/text/languages/families.py`.

tests/engine/test_assumptions.py holds a model of each kind to this. What of mlx-lm does not hold to it is mended
(`mended.py`, `padded.py`), or refused at start, for it would be wrong in silence.
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
