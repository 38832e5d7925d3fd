"""From hidden states to log-probabilities without all logits at once.

A head's logits are the largest arrays of a train step: 8,192 positions of a vocabulary of 152,000 are 5 GB in fp32, and
a backward pass holds about ten such arrays. So the head runs over some positions at a time, and its logits are computed
again in the backward pass (gradient checkpointing of Chen et al., arXiv 1604.06174, as fused cross-entropy kernels do).
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from trainer.drawing import DrawnPositions, as_drawn

CHUNK_LOGITS = 1 << 26  # at most as many logits at once: 256 MB in fp32


class TokenScores(NamedTuple):
    """Per completion position, fp32."""

    logp_BT: mx.array
    entropy_BT: mx.array  # of the whole next-token distribution, tempered and filtered where the target was


class Halves(NamedTuple):
    """A model in two: `head(body(tokens, cache=...))` are its logits."""

    body: Callable[..., mx.array]
    head: Callable[[mx.array], mx.array]


def head_chunk(model: Any) -> int:
    """Positions that the head may take at once; 0 when this model cannot be cut in two, and its logits come whole."""
    halves = cut(model)
    if halves is None:
        return 0
    tokens_BL = mx.array([[1, 0, 1]])
    try:
        whole_BLV, again_BLV = model(tokens_BL), halves.head(halves.body(tokens_BL))
        same = whole_BLV.shape == again_BLV.shape and bool(mx.allclose(whole_BLV, again_BLV, rtol=1e-2, atol=1e-2))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return 0
    return max(1, CHUNK_LOGITS // whole_BLV.shape[-1]) if same else 0


def cut(model: Any) -> Halves | None:
    """Body and head of an mlx-lm model, as it stands now; None when it has no body that can be called.

    The head is the model's own forward pass around a body that hands through what it is given: scales and soft caps
    that stand there are part of it.
    """
    whole = getattr(model, "language_model", model)
    body = getattr(whole, "model", None)
    if not callable(body):
        return None
    head = copy.copy(whole)
    head.model = _HandingThrough(body)
    return Halves(body, head)


def token_scores(
    head: Callable[[mx.array], mx.array],
    hidden_BTH: mx.array,
    targets_BT: mx.array,
    chunk: int,
    *,
    entropy: bool = True,
    drawn: DrawnPositions | None = None,
) -> TokenScores:
    """Log-probability of each target and the entropy there; `chunk` positions at a time, 0: all at once.

    With `drawn` they are of the distribution that a sampler draws from.
    """

    if not chunk or targets_BT.size <= chunk:
        return TokenScores(*from_logits(head(hidden_BTH), targets_BT, entropy=entropy, drawn=drawn))
    hidden_NH, targets_N = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]), targets_BT.reshape(-1)
    drawn_N = None if drawn is None else drawn.flat()
    count = len(targets_N)
    each = math.ceil(count / math.ceil(count / chunk))

    def scores_from(at: int) -> tuple[mx.array, mx.array]:
        # Targets come by the closure: a checkpoint differentiates all of its inputs.
        def scores(part_NH: mx.array) -> tuple[mx.array, mx.array]:
            part = None if drawn_N is None else drawn_N.part(at, at + each)
            return from_logits(head(part_NH[None])[0], targets_N[at : at + each], entropy=entropy, drawn=part)

        again: Callable[[mx.array], tuple[mx.array, mx.array]] = mx.checkpoint(scores)
        return again(hidden_NH[at : at + each])

    parts = [scores_from(at) for at in range(0, count, each)]
    logp_BT, entropy_BT = (
        mx.concatenate(list(values)).reshape(targets_BT.shape) for values in zip(*parts, strict=True)
    )
    return TokenScores(logp_BT, entropy_BT)


def from_logits(
    logits: mx.array, targets: mx.array, *, entropy: bool = True, drawn: DrawnPositions | None = None
) -> tuple[mx.array, mx.array]:
    """Log-probabilities of targets [...] and entropies (zeros unless asked for) out of logits [..., V], in fp32."""
    logits = logits.astype(mx.float32)
    if drawn is not None:
        logits = as_drawn(logits, targets, drawn)
    total = mx.logsumexp(logits, axis=-1)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if not entropy:
        return chosen - total, mx.zeros_like(total)
    p = mx.exp(logits - total[..., None])
    return chosen - total, total - (p * logits).sum(axis=-1)


class _HandingThrough:
    """Stands for a model's body: gives back its input, and is the body in everything else."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)
