"""The learning policy's distribution as the sampler draws from it: tempered, then filtered by top_k, top_p and min_p.

What a trajectory was drawn from is pi at its temperature, renormalised over the tokens that its filters keep. Processed
log-probabilities are of that distribution, so the policy's own have to be, too, or the ratio of the two is not 1 where
both have the same weights. Tempering is exact. The filters keep what the *present* policy ranks among the likely ones,
without gradient, and the drawn token in any case: with the same weights it is the sampler's own set (but for ties and
rounding at its edge), and as the policy moves the set moves with it, as a sampler's would.

Not corrected: raw log-probabilities of a tempered or filtered sampler (they are of another distribution than the one
that was drawn from), greedy decoding, and edits of the logits (penalties, biases, grammars), which depend on the text.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_model.sampling.draw import SMALLEST, nucleus_threshold
from shared.trajectories import Drawing, Trajectory

COLDEST = 1e-4  # below it a sampler is greedy, and a gradient in proportion to 1 / temperature means nothing
_NEVER = -1e9  # a logit without a chance; infinity would make the entropy not a number

Column = npt.NDArray[np.float32]


class DrawnRows(NamedTuple):
    """Temperature and filters of each row; numpy in a microbatch, one value a position in a forward pass."""

    temperature: Column
    top_k: Column | None  # the vocabulary's size or more: off; None, with the next two: no row is filtered
    top_p: Column | None  # 2: off
    min_p: Column | None


class DrawnPositions(NamedTuple):
    """The same on the device, of the shape of the tokens."""

    temperature: mx.array
    top_k: mx.array | None
    top_p: mx.array | None
    min_p: mx.array | None

    def flat(self) -> "DrawnPositions":
        """All positions in one row."""
        return DrawnPositions(*(None if column is None else column.reshape(-1) for column in self))  # type: ignore[arg-type]

    def part(self, start: int, end: int) -> "DrawnPositions":
        """Some positions of a flat one."""
        return DrawnPositions(*(None if column is None else column[start:end] for column in self))  # type: ignore[arg-type]


def corrected(trajectory: Trajectory) -> Drawing | None:
    """Temperature and filters with which the policy's log-probabilities are computed; None: temperature 1,
    unfiltered.
    """
    drawn = trajectory.drawn
    if trajectory.logprobs_mode != "processed_logprobs" or drawn is None or drawn.temperature < COLDEST:
        return None
    plain = drawn.temperature == 1 and not _filters(drawn)
    return None if plain else drawn


def uncorrected(trajectory: Trajectory) -> str:
    """Why the ratio is not of the distribution that was drawn from; "" when it is."""
    drawn = trajectory.drawn
    if drawn is None:
        return ""
    if drawn.temperature < COLDEST:
        return "decoded greedily"
    if drawn.edited:
        return "drawn with penalties, biases, min_tokens or a grammar"
    if trajectory.logprobs_mode != "processed_logprobs":
        return "drawn tempered or filtered, and reported as raw_logprobs: ask for processed_logprobs"
    return ""


def rows_of(drawings: Sequence[Drawing | None]) -> DrawnRows | None:
    """One row for each; None when all of them are of temperature 1, unfiltered."""
    if not any(drawings):
        return None
    drawn_rows = [drawn or Drawing() for drawn in drawings]
    temperature = _column(drawn.temperature for drawn in drawn_rows)
    if not any(map(_filters, drawn_rows)):
        return DrawnRows(temperature, None, None, None)
    return DrawnRows(
        temperature,
        _column(drawn.top_k or 2**24 for drawn in drawn_rows),
        _column(max(drawn.top_p, 1e-9) if drawn.top_p < 1 else 2.0 for drawn in drawn_rows),
        _column(drawn.min_p for drawn in drawn_rows),
    )


def positions_of(rows: DrawnRows | None, shape: Sequence[int]) -> DrawnPositions | None:
    """Each row's values at all of its positions; `shape` is [B, T]."""
    if rows is None:
        return None
    spread = (None if column is None else mx.broadcast_to(mx.array(column)[:, None], tuple(shape)) for column in rows)
    return DrawnPositions(*spread)  # type: ignore[arg-type]


def as_drawn(logits: mx.array, targets: mx.array, drawn: DrawnPositions) -> mx.array:
    """fp32 logits [..., V] of the distribution that a sampler with this policy would draw from."""
    logits = logits / drawn.temperature[..., None]
    if drawn.top_k is None or drawn.top_p is None or drawn.min_p is None:
        return logits
    vocab = logits.shape[-1]
    chances_NV = mx.stop_gradient(mx.softmax(logits, axis=-1)).reshape(-1, vocab)
    top_k_N1 = mx.minimum(drawn.top_k, vocab).astype(mx.int32).reshape(-1, 1)
    threshold_N1, _ = nucleus_threshold(chances_NV, top_k_N1, drawn.top_p.reshape(-1, 1), vocab)
    least_N1 = drawn.min_p.reshape(-1, 1) * mx.max(chances_NV, axis=-1, keepdims=True)
    smallest_N1 = mx.maximum(mx.maximum(threshold_N1, least_N1), SMALLEST)
    kept = (chances_NV >= smallest_N1).reshape(logits.shape) | (mx.arange(vocab) == targets[..., None])
    return mx.where(kept, logits, _NEVER)


def _filters(drawn: Drawing) -> bool:
    return drawn.top_k > 0 or drawn.top_p < 1 or drawn.min_p > 0


def _column(values: Iterable[float]) -> Column:
    return np.array(list(values), np.float32)
