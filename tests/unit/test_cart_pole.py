"""The cart and its pole held against mechanics solved another way, and advantages against their sums."""

import math

import numpy as np
import pytest

from trainer.learn.advantages import advantages, explained
from trainer.rollouts.cart_pole import LONGEST, CartPole, accelerations_of


def lagrange(state: np.ndarray, force: float) -> np.ndarray:
    """Both equations of motion as one linear system: a rod of 1 m and 0.1 kg that stands on a cart of 1 kg."""
    _, speed, angle, turning = state
    mass, arm = 1.1, 0.1 * 0.5
    inertia = 4 / 3 * 0.1 * 0.5**2
    left = np.array([[mass, arm * math.cos(angle)], [arm * math.cos(angle), inertia]])
    right = [
        force + arm * turning**2 * math.sin(angle) - 0.0005 * np.sign(speed),
        arm * 9.8 * math.sin(angle) - 0.000002 * turning,
    ]
    return np.linalg.solve(left, right)


def test_accelerations_are_those_of_mechanics() -> None:
    draw = np.random.default_rng(0)
    states, forces = draw.normal(0, 2, (200, 4)), draw.uniform(-10, 10, 200)
    wanted = [lagrange(state, force) for state, force in zip(states, forces, strict=True)]
    np.testing.assert_allclose(accelerations_of(states, forces), wanted, rtol=1e-9)


@pytest.mark.parametrize("by_force", [False, True])
def test_a_step_follows_them_until_the_pole_or_the_cart_is_too_far(by_force: bool) -> None:
    carts = CartPole(50, 3, by_force=by_force)
    draw, state = np.random.default_rng(1), carts.observations.astype(float)
    ended = 0
    for _ in range(100):
        shares = draw.uniform(-2, 2, 50) if by_force else draw.choice([-1.0, 1.0], 50)
        forces = 10 * np.clip(shares, -1, 1)
        moved = np.array([lagrange(each, force) for each, force in zip(state, forces, strict=True)])
        wanted = state + 0.02 * np.stack([state[:, 1], moved[:, 0], state[:, 3], moved[:, 1]], axis=1)
        stepped = carts.step(shares[:, None] if by_force else (shares > 0).astype(int))
        np.testing.assert_allclose(stepped.observations, wanted, atol=1e-4)
        too_far = (np.abs(stepped.observations[:, 0]) > 2.4) | (np.abs(stepped.observations[:, 2]) > math.pi / 15)
        assert (stepped.failed == too_far).all() and not stepped.timed_out.any() and (stepped.rewards == 1).all()
        state = carts.observations.astype(float)
        assert (np.abs(state[too_far]) <= 0.05).all() and (carts.steps[too_far] == 0).all()
        ended += int(too_far.sum())
    assert ended > 50


def test_an_episode_of_500_steps_is_cut_off_and_has_not_failed() -> None:
    carts = CartPole(20, 0)
    for at in range(1, LONGEST + 1):
        seen = carts.observations
        stepped = carts.step((seen @ [0.1, 0.5, 10, 2] > 0).astype(int))  # a controller that holds every pole
        assert not stepped.failed.any() and (stepped.timed_out == (at == LONGEST)).all(), at
    assert (carts.steps == 0).all() and (np.abs(carts.observations) <= 0.05).all()
    assert np.abs(stepped.observations).max() > 0.05, "what the episode ended with is still told"


def test_a_masked_cart_moves_as_any_other_and_shows_no_speeds() -> None:
    whole, masked = CartPole(8, 3), CartPole(8, 3, masked=True)
    for _ in range(30):
        assert (masked.observations == whole.observations[:, [0, 2]]).all()
        pushes = (whole.observations[:, 2] > 0).astype(int)
        (one, other) = (carts.step(pushes) for carts in (whole, masked))
        assert (other.observations == one.observations[:, [0, 2]]).all() and (one.failed == other.failed).all()


def test_a_seed_decides_where_episodes_begin() -> None:
    first, same, other = (CartPole(8, seed).observations for seed in (1, 1, 2))
    assert (first == same).all() and (first != other).all()


def test_advantages_are_sums_of_discounted_errors() -> None:
    draw, steps, copies, discount, decay = np.random.default_rng(0), 12, 5, 0.9, 0.8
    rewards, values = draw.normal(size=(2, steps, copies)).astype(np.float32)
    ended, last = draw.random((steps, copies)) < 0.2, draw.normal(size=copies).astype(np.float32)
    found = advantages(rewards, values, ended, last, discount, decay)
    following = np.concatenate([values, last[None]]).astype(np.float64)
    for n in range(copies):
        for t in range(steps):
            wanted, factor = 0.0, 1.0
            for k in range(t, steps):
                after = 0 if ended[k, n] else discount * following[k + 1, n]
                wanted += factor * (rewards[k, n] + after - values[k, n])
                factor *= discount * decay
                if ended[k, n]:
                    break
            assert abs(found[t, n] - wanted) < 1e-5, (t, n)


def test_values_explain_all_none_or_less_than_a_constant() -> None:
    returns = np.array([1, 2, 3, 4], np.float32)
    assert explained(returns, returns) == 1 and explained(np.zeros(4, np.float32), returns) == 0
    assert explained(-returns, returns) < 0 and explained(returns, np.ones(4, np.float32)) == 0
