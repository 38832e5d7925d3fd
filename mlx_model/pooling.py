"""One vector for a whole prompt, out of the hidden states that come chunk by chunk.

Hidden states are those after the model's last norm, in fp32: what its head would turn into logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from shared.sequences import Pooling

log = logging.getLogger(__name__)


def hidden_states(model: Any) -> Callable[..., mx.array] | None:
    """The part of an mlx-lm model that ends before the head; None when it has no such part."""
    model = getattr(model, "language_model", model)
    inner = getattr(model, "model", None)
    return inner if callable(inner) else None


def hidden_size(model: Any) -> int:
    """Numbers in a hidden state; 0 when the model shows none, or not in the way that others do."""
    states = hidden_states(model)
    if states is None:
        return 0
    try:
        return int(states(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model)).shape[-1])
    except Exception as error:
        log.warning("model.shows_no_hidden_states reason=%s: %s", type(error).__name__, error)
        return 0


class Pool:
    """Mean over all positions, the last position, or the first (`cls`)."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._vector_H: mx.array | None = None
        self._count = 0

    def take(self, hidden_LH: mx.array) -> None:
        """The hidden states of the next positions, at least one."""
        hidden_LH = hidden_LH.astype(mx.float32)
        self._count += hidden_LH.shape[0]
        if self.pooling == "mean":
            sum_H = mx.sum(hidden_LH, axis=0)
            self._vector_H = sum_H if self._vector_H is None else self._vector_H + sum_H
        elif self.pooling == "last":
            self._vector_H = hidden_LH[-1]
        elif self._vector_H is None:
            self._vector_H = hidden_LH[0]
        mx.eval(self._vector_H)

    @property
    def vector_H(self) -> mx.array:
        """The vector, fp32, not normalised."""
        assert self._vector_H is not None, "a prompt has at least one token"
        return self._vector_H / self._count if self.pooling == "mean" else self._vector_H

    def result(self) -> bytes:
        """The vector as little-endian float32 bytes."""
        return np.array(self.vector_H).astype("<f4").tobytes()
