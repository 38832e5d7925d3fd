r"""Policy-gradient losses, each a small pure function chosen by name.

Letters, as in the papers: theta the policy that learns, mu the sampler's policy at the time of the token, v the policy
at the start of the train step ("old"), A the advantage, m the loss mask (0 on padding and on tokens that the model did
not write), rho = exp(logpi_theta - log of the denominator's policy).

Invariants.
- The mask goes inside `exp`: a masked position contributes exp(0), never infinity, so its gradient is 0 and not NaN.
- A loss is a sum divided by constants of the *whole* train step (`StepTotals`). Losses of microbatches therefore add up
  to the loss of the batch, however it was cut.
- One ratio, one correction: either rho is taken against mu, or against v with the truncated weight of v against mu.
- No token weighs without bound: PPO's clip leaves rho free where A < 0, and there the dual clip holds it
  (Ye et al., "Mastering complex control in MOBA games with deep reinforcement learning", arXiv 1912.09729, 2020).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from trainer.learn.options import ImportanceLevel, LossName, LossOptions


@dataclass(frozen=True)
class StepTotals:
    """Constants of the accumulated train step; the same for each of its microbatches."""

    sequences: int  # B: sequences with at least one token in the loss
    tokens: int  # tokens in the loss
    max_tokens: int  # L_max: the longest completion that sampling allows


@dataclass(frozen=True)
class LossInputs:
    """One microbatch. `logp` carries the gradient; everything else is constant."""

    logp_BT: mx.array  # log pi_theta
    old_BT: mx.array  # log-probability in the ratio's denominator: log mu, or log pi_v
    mask_BT: mx.array  # bool
    advantage_B: mx.array
    weight_BT: mx.array | None = None  # truncated importance weights pi_v / mu; None: 1
    advantage_BT: mx.array | None = None  # of each token; None: all of a row have the row's


@dataclass(frozen=True)
class LossParts:
    """Value of a loss, and where its clip was active."""

    loss: mx.array
    clipped_BT: mx.array  # bool, masked


LossFunction = Callable[[LossInputs, LossOptions, StepTotals], LossParts]


def grpo(x: LossInputs, options: LossOptions, totals: StepTotals) -> LossParts:
    r"""GRPO, arXiv 2402.03300 eq. 3: every sequence weighs the same, whatever its length.

    L = -(1/B) \sum_i (1/|o_i|) \sum_t m min(rho A, clip(rho, 1 - el, 1 + eh) A)
    """
    terms_BT, clipped_BT = _clipped_surrogate(x, options)
    lengths_B = mx.maximum(x.mask_BT.sum(axis=1), 1)
    return LossParts(-(terms_BT.sum(axis=1) / lengths_B).sum() / totals.sequences, clipped_BT)


def dr_grpo(x: LossInputs, options: LossOptions, totals: StepTotals) -> LossParts:
    r"""Dr.GRPO, arXiv 2503.20783 section 3.2: a constant length, so that long wrong answers are not favoured.

    L = -(1/(B L_max)) \sum_i \sum_t m min(rho A, clip(rho, 1 - el, 1 + eh) A)
    """
    terms_BT, clipped_BT = _clipped_surrogate(x, options)
    return LossParts(-terms_BT.sum() / (totals.sequences * totals.max_tokens), clipped_BT)


def dapo(x: LossInputs, options: LossOptions, totals: StepTotals) -> LossParts:
    r"""DAPO, arXiv 2503.14476 eq. 8: every token weighs the same; eh above el leaves room for rare tokens.

    L = -(1/\sum_i |o_i|) \sum_i \sum_t m min(rho A, clip(rho, 1 - el, 1 + eh) A)
    """
    terms_BT, clipped_BT = _clipped_surrogate(x, options)
    return LossParts(-terms_BT.sum() / totals.tokens, clipped_BT)


def ppo(x: LossInputs, options: LossOptions, totals: StepTotals) -> LossParts:
    r"""PPO, arXiv 1707.06347 eq. 7, of tokens with an advantage each (GAE); every token weighs the same.

    L = -(1/\sum_i |o_i|) \sum_i \sum_t m min(rho A_t, clip(rho, 1 - el, 1 + eh) A_t)
    """
    return dapo(x, options, totals)


def value_errors(values: mx.array, old: mx.array, returns: mx.array, clip: float) -> mx.array:
    """Squared errors; with a clip, the larger error of the value and of the value clipped around the old one."""
    errors = mx.square(values - returns)
    if clip:
        near = old + mx.clip(values - old, -clip, clip)
        errors = mx.maximum(errors, mx.square(near - returns))
    return errors


def gspo(x: LossInputs, options: LossOptions, totals: StepTotals) -> LossParts:
    r"""GSPO, arXiv 2507.18071 eq. 5-7: one ratio per sequence, the geometric mean of its tokens' ratios.

    s_i = exp((1/|o_i|) \sum_t m (logpi_theta - logpi_old)); L = -(1/B) \sum_i w_i min(s_i A, clip(s_i, 1-el, 1+eh) A)

    The paper's clip range is a thousand times smaller than GRPO's (3e-4, 4e-4). w_i is the mean truncated weight.
    """
    lengths_B = mx.maximum(x.mask_BT.sum(axis=1), 1)
    present_B = x.mask_BT.any(axis=1)
    ratio_B = mx.exp(mx.where(x.mask_BT, x.logp_BT - x.old_BT, 0.0).sum(axis=1) / lengths_B)
    terms_B, clipped_B = _clip(ratio_B, x.advantage_B, options)
    if x.weight_BT is not None:
        terms_B = terms_B * mx.where(x.mask_BT, x.weight_BT, 0.0).sum(axis=1) / lengths_B
    loss = -mx.where(present_B, terms_B, 0.0).sum() / totals.sequences
    return LossParts(loss, clipped_B[:, None] & x.mask_BT)


def cispo(x: LossInputs, options: LossOptions, totals: StepTotals) -> LossParts:
    r"""CISPO, MiniMax-M1, arXiv 2506.13585 eq. 4-5: the clip bounds the weight, so no token loses its gradient.

    L = -(1/\sum_i |o_i|) \sum_i \sum_t m sg[clip(rho, 1 - el, 1 + eh)] A logpi_theta
    """
    ratio_BT = _ratio(x)
    bounded_BT = mx.clip(ratio_BT, 1 - options.clip_low, 1 + options.clip_high)
    terms_BT = mx.stop_gradient(bounded_BT) * _advantages(x) * x.logp_BT
    clipped_BT = (ratio_BT != bounded_BT) & x.mask_BT
    return LossParts(-_weighted(x, terms_BT).sum() / totals.tokens, clipped_BT)


LOSSES: Mapping[LossName, LossFunction] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "ppo": ppo,
}


def token_average(values_BT: mx.array, mask_BT: mx.array, name: LossName, totals: StepTotals) -> mx.array:
    """Average of a per-token term (KL, entropy) with the normaliser N of the loss `name`; sums over microbatches."""
    masked_BT = mx.where(mask_BT, values_BT, 0.0)
    if name in ("grpo", "gspo"):
        return (masked_BT.sum(axis=1) / mx.maximum(mask_BT.sum(axis=1), 1)).sum() / totals.sequences
    if name == "dr_grpo":
        return masked_BT.sum() / (totals.sequences * totals.max_tokens)
    return masked_BT.sum() / totals.tokens


def k3(logp_BT: mx.array, reference_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """The k3 estimate of KL(theta || reference) per token, never negative: exp(d) - d - 1, d = logpi_ref - logpi_theta.

    J. Schulman, "Approximating KL divergence", 2020 (http://joschu.net/blog/kl-approx.html); GRPO eq. 4.
    """
    d_BT = mx.where(mask_BT, reference_BT - logp_BT, 0.0)
    return mx.exp(d_BT) - d_BT - 1


def truncated_weights(
    old_BT: mx.array, sampler_BT: mx.array, mask_BT: mx.array, bound: float, level: ImportanceLevel = "token"
) -> mx.array:
    """Truncated importance sampling: sg[min(exp(logpi_v - logmu), C)], 1 where masked.

    Corrects for a sampler that was older, or that rounds differently. Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025 (https://fengyao.notion.site/off-policy-rl); Ionides 2008.
    With `level` sequence each token has its row's weight, in which logpi_v - logmu is summed over the row: unbiased for
    C to infinity, at a larger variance (Liu et al., "When speed kills stability", 2025).
    """
    log_BT = mx.where(mask_BT, old_BT - sampler_BT, 0.0)
    if level == "sequence":
        log_BT = mx.where(mask_BT, log_BT.sum(axis=1, keepdims=True), 0.0)
    return mx.stop_gradient(mx.exp(mx.minimum(log_BT, math.log(bound))))


# -- tuning: B rows, T completion positions, N pairs; each loss is a part's share of the mean over a batch


def cross_entropy(logp_BT: mx.array, mask_BT: mx.array, tokens: int) -> mx.array:
    """Mean negative log-likelihood of the tokens in the mask; `tokens` counts those of the whole batch."""
    return -mx.where(mask_BT, logp_BT, 0.0).sum() / tokens


def answer_logps(logp_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """Log-probability [B] of each whole answer."""
    return mx.where(mask_BT, logp_BT, 0.0).sum(axis=-1)


def margins(logp_B: mx.array, reference_B: mx.array, beta: float) -> mx.array:
    """Gain [N] of each pair's chosen answer (row 2 n) over its rejected one (row 2 n + 1), times beta."""
    gained_B = logp_B - reference_B
    return beta * (gained_B[0::2] - gained_B[1::2])


def preference_loss(margin_N: mx.array, pairs: int) -> mx.array:
    """DPO, arXiv 2305.18290 equation 7: -log sigmoid(margin); `pairs` of them are in the whole batch."""
    loss: mx.array = nn.softplus(-margin_N).sum() / pairs
    return loss


def _ratio(x: LossInputs) -> mx.array:
    return mx.exp(mx.where(x.mask_BT, x.logp_BT - x.old_BT, 0.0))


def _advantages(x: LossInputs) -> mx.array:
    """Advantages by token, shape [B, T], or by row, shape [B, 1]."""
    return x.advantage_B[:, None] if x.advantage_BT is None else x.advantage_BT


def _clipped_surrogate(x: LossInputs, options: LossOptions) -> tuple[mx.array, mx.array]:
    """PPO's token terms (arXiv 1707.06347 eq. 7), masked and weighted, and where the clip was active."""
    terms_BT, clipped_BT = _clip(_ratio(x), _advantages(x), options)
    return _weighted(x, terms_BT), clipped_BT & x.mask_BT


def _clip(ratio: mx.array, advantage: mx.array, options: LossOptions) -> tuple[mx.array, mx.array]:
    low, high = 1 - options.clip_low, 1 + options.clip_high
    terms = mx.minimum(ratio * advantage, mx.clip(ratio, low, high) * advantage)
    clipped = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
    if options.dual_clip:
        held = (ratio > options.dual_clip) & (advantage < 0)
        terms = mx.where(held, options.dual_clip * advantage, terms)
        clipped = clipped | held
    return terms, clipped


def _weighted(x: LossInputs, terms_BT: mx.array) -> mx.array:
    weighted_BT = terms_BT if x.weight_BT is None else terms_BT * x.weight_BT
    return mx.where(x.mask_BT, weighted_BT, 0.0)
