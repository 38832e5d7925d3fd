"""Each loss against arithmetic done by hand, on one batch of two sequences with three and two tokens."""

import math

import mlx.core as mx
import numpy as np
import pytest

from trainer.learn.losses import LOSSES, LossInputs, StepTotals, k3, token_average, truncated_weights
from trainer.learn.options import LossName, LossOptions

# Ratios 1.5, 1.0, 0.5 | 0.7, 1.1 ; advantages 2 and -1 ; the last position of the second row is padding.
RATIOS = np.array([[1.5, 1.0, 0.5], [0.7, 1.1, 1.0]])
OLD = np.array([[-1.0, -2.0, -0.5], [-0.3, -3.0, 0.0]])
MASK = np.array([[True, True, True], [True, True, False]])
TOTALS = StepTotals(sequences=2, tokens=5, max_tokens=4)
OPTIONS = LossOptions(clip_low=0.2, clip_high=0.28)


def inputs(weight: np.ndarray | None = None, old: np.ndarray = OLD) -> LossInputs:
    return LossInputs(
        mx.array((OLD + np.log(RATIOS)).astype(np.float32)),
        mx.array(old.astype(np.float32)),
        mx.array(MASK),
        mx.array([2.0, -1.0]),
        None if weight is None else mx.array(weight.astype(np.float32)),
    )


# min(rho A, clip(rho, 0.8, 1.28) A): A = 2: 1.28 * 2, 1.0 * 2, 0.5 * 2; A = -1: min(-0.7, -0.8), -1.1
TERMS = [[2.56, 2.0, 1.0], [-0.8, -1.1]]


def test_grpo_averages_each_sequence_then_the_sequences() -> None:
    parts = LOSSES["grpo"](inputs(), OPTIONS, TOTALS)
    assert parts.loss.item() == pytest.approx(-(5.56 / 3 + -1.9 / 2) / 2, rel=1e-5)


def test_dr_grpo_divides_by_a_constant_length() -> None:
    parts = LOSSES["dr_grpo"](inputs(), OPTIONS, TOTALS)
    assert parts.loss.item() == pytest.approx(-(5.56 - 1.9) / (2 * 4), rel=1e-5)


def test_dapo_divides_by_all_tokens() -> None:
    parts = LOSSES["dapo"](inputs(), OPTIONS, TOTALS)
    assert parts.loss.item() == pytest.approx(-(5.56 - 1.9) / 5, rel=1e-5)
    # 1.5 with A > 0 is above 1.28; 0.7 with A < 0 is below 0.8; 0.5 with A > 0 is not clipped.
    assert parts.clipped_BT.tolist() == [[True, False, False], [True, False, False]]


def test_gspo_takes_one_ratio_a_sequence() -> None:
    first = (1.5 * 1.0 * 0.5) ** (1 / 3)  # 0.9086: inside the range
    second = (0.7 * 1.1) ** (1 / 2)  # 0.8775: inside
    parts = LOSSES["gspo"](inputs(), OPTIONS, TOTALS)
    assert parts.loss.item() == pytest.approx(-(first * 2 + second * -1) / 2, rel=1e-5)
    narrow = LossOptions(clip_low=0.05, clip_high=0.05)
    parts = LOSSES["gspo"](inputs(), narrow, TOTALS)
    # A = 2: min(0.9086, 0.95) * 2 ; A = -1: min(-0.8775, -0.95)
    assert parts.loss.item() == pytest.approx(-(first * 2 - 0.95) / 2, rel=1e-5)
    assert parts.clipped_BT.tolist() == [[False] * 3, [True, True, False]]


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    weights = [[1.28, 1.0, 0.8], [0.8, 1.1]]
    logp = OLD + np.log(RATIOS)
    expected = -sum(w * a * logp[row][t] for row, a in enumerate((2.0, -1.0)) for t, w in enumerate(weights[row]))
    parts = LOSSES["cispo"](inputs(), OPTIONS, TOTALS)
    assert parts.loss.item() == pytest.approx(expected / 5, rel=1e-5)

    def loss(logp_BT: mx.array) -> mx.array:
        x = LossInputs(logp_BT, inputs().old_BT, inputs().mask_BT, inputs().advantage_B)
        return LOSSES["cispo"](x, OPTIONS, TOTALS).loss

    gradient = mx.grad(loss)(inputs().logp_BT).tolist()
    assert gradient[0] == pytest.approx([-w * 2 / 5 for w in weights[0]], rel=1e-5)
    assert gradient[1] == pytest.approx([w / 5 for w in weights[1]] + [0.0], rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_truncated_weights_multiply_each_token(name: LossName) -> None:
    weight = np.array([[2.0, 0.5, 1.0], [0.5, 1.0, 7.0]])
    one_by_one = []
    for row, t in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        only = np.zeros_like(weight)
        only[row, t] = weight[row, t]
        one_by_one.append(LOSSES[name](inputs(only), OPTIONS, TOTALS).loss.item())
    assert LOSSES[name](inputs(weight), OPTIONS, TOTALS).loss.item() == pytest.approx(sum(one_by_one), rel=1e-4)
    if name == "dapo":
        assert sum(one_by_one) == pytest.approx(-(2 * 2.56 + 0.5 * 2.0 + 1.0 - 0.5 * 0.8 - 1.1) / 5, rel=1e-5)


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_masked_position_cannot_poison_the_gradient(name: LossName) -> None:
    """exp(0 - (-1e9)) at a padded position would be infinite, and infinite times 0 is not a number."""
    x = inputs()

    def loss(logp_BT: mx.array) -> mx.array:
        old_BT = mx.where(x.mask_BT, x.old_BT, -1e9)
        return LOSSES[name](LossInputs(logp_BT, old_BT, x.mask_BT, x.advantage_B), OPTIONS, TOTALS).loss

    value, gradient = mx.value_and_grad(loss)(x.logp_BT)
    assert math.isfinite(value.item())
    assert np.isfinite(np.array(gradient)).all()
    assert gradient[1, 2].item() == 0


@pytest.mark.parametrize("name", list(LOSSES))
def test_microbatches_add_up_to_the_batch(name: LossName) -> None:
    x = inputs()
    rows = [
        LossInputs(x.logp_BT[i : i + 1], x.old_BT[i : i + 1], x.mask_BT[i : i + 1], x.advantage_B[i : i + 1])
        for i in range(2)
    ]
    parts = [LOSSES[name](row, OPTIONS, TOTALS).loss.item() for row in rows]
    assert sum(parts) == pytest.approx(LOSSES[name](x, OPTIONS, TOTALS).loss.item(), rel=1e-5)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    x = inputs(old=OLD + np.log(RATIOS))  # old = theta: every ratio is 1

    def loss(logp_BT: mx.array) -> mx.array:
        return LOSSES["dapo"](LossInputs(logp_BT, x.old_BT, x.mask_BT, x.advantage_B), OPTIONS, TOTALS).loss

    assert mx.grad(loss)(x.logp_BT).tolist() == [
        pytest.approx([-0.4, -0.4, -0.4]),
        pytest.approx([0.2, 0.2, 0.0]),
    ]


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    logp, reference = mx.array([[-1.0, -1.0, -1.0]]), mx.array([[-1.0, -2.0, 90.0]])
    values = k3(logp, reference, mx.array([[True, True, False]])).tolist()[0]
    assert values[0] == 0
    assert values[1] == pytest.approx(math.exp(-1) + 1 - 1)  # d = -1: exp(-1) + 1 - 1
    assert values[2] == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_a_ratio_without_bound_moves_nothing_where_the_advantage_is_negative(name: LossName) -> None:
    """Log-probabilities of -40 that the sampler never had: PPO's clip alone would weigh the token with e^39."""
    wrong = np.array([[-1.0, -2.0, -0.5], [-40.0, -41.0, 0.0]])

    def loss(logp_BT: mx.array, options: LossOptions) -> mx.array:
        x = inputs(old=wrong)
        return LOSSES[name](LossInputs(logp_BT, x.old_BT, x.mask_BT, x.advantage_B), options, TOTALS).loss

    logp_BT = inputs().logp_BT
    free, held = (mx.grad(lambda logp, o=o: loss(logp, o))(logp_BT) for o in (LossOptions(dual_clip=0), OPTIONS))
    assert float(mx.abs(free[1]).max()) > 1e6
    assert float(mx.abs(held[1]).max()) == 0
    assert np.array_equal(np.array(held[0]), np.array(free[0])), "the rest is as it was"
    assert abs(loss(logp_BT, OPTIONS).item()) < 10


def test_the_dual_clip_bounds_a_term_by_c_times_the_advantage() -> None:
    ratios = mx.array([[0.5, 2.5, 3.5, 1000.0]])
    x = LossInputs(mx.log(ratios), mx.zeros((1, 4)), mx.ones((1, 4), mx.bool_), mx.array([-2.0]))
    parts = LOSSES["dapo"](x, LossOptions(dual_clip=3.0), StepTotals(1, 4, 4))
    assert parts.loss.item() == pytest.approx((0.8 * 2 + 2.5 * 2 + 3.0 * 2 + 3.0 * 2) / 4, rel=1e-5)
    assert parts.clipped_BT.tolist() == [[True, False, True, True]]


def test_truncated_importance_weights() -> None:
    old, sampler = mx.array([[-1.0, -1.0, -1.0, 0.0]]), mx.array([[-1.5, -3.0, -0.5, -99.0]])
    weights = truncated_weights(old, sampler, mx.array([[True, True, True, False]]), bound=2.0)
    assert weights.tolist()[0] == pytest.approx([math.exp(0.5), 2.0, math.exp(-0.5), 1.0])


def test_a_sequence_level_weight_is_the_product_of_its_tokens_ratios() -> None:
    old, sampler = (
        mx.array([[-1.0, -2.0, -3.0], [-1.0, -1.0, -9.0]]),
        mx.array([[-1.3, -1.9, -3.0], [-3.0, -2.0, -1.0]]),
    )
    mask = mx.array([[True, True, True], [True, True, False]])
    weights = truncated_weights(old, sampler, mask, bound=2.0, level="sequence")
    assert np.allclose(np.array(weights), [[math.exp(0.2)] * 3, [2.0, 2.0, 1.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", (2.0 + 1.5) / 2), ("dr_grpo", (6.0 + 3.0) / 8), ("dapo", 9 / 5)],
)
def test_a_token_average_has_the_losses_normaliser(name: LossName, expected: float) -> None:
    values = mx.array([[1.0, 2.0, 3.0], [1.0, 2.0, 99.0]])
    assert token_average(values, mx.array(MASK), name, TOTALS).item() == pytest.approx(expected)
