"""The losses of tuning, of log-probabilities that a model gives; each is a part's share of the mean over a batch.

Shape suffixes: B rows, T completion positions, N pairs.
"""

import mlx.core as mx
import mlx.nn as nn


def cross_entropy(logp_BT: mx.array, mask_BT: mx.array, tokens: int) -> mx.array:
    """Of the tokens that count; `tokens` of them are in the whole batch."""
    return -mx.where(mask_BT, logp_BT, 0.0).sum() / tokens


def answer_logps(logp_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """Log-probability [B] of each whole answer."""
    return mx.where(mask_BT, logp_BT, 0.0).sum(axis=-1)


def margins(logp_B: mx.array, reference_B: mx.array, beta: float) -> mx.array:
    """By how much each pair's chosen answer, row 2 n, has gained on its rejected one, row 2 n + 1: [N], times beta."""
    gained_B = logp_B - reference_B
    return beta * (gained_B[0::2] - gained_B[1::2])


def preference(margin_N: mx.array, pairs: int) -> mx.array:
    """DPO, arXiv 2305.18290 equation 7: -log sigmoid(margin); `pairs` of them are in the whole batch."""
    loss: mx.array = nn.softplus(-margin_N).sum() / pairs
    return loss
