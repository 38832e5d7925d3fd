"""A pole on a cart, many at once: A. Barto, R. Sutton and C. Anderson, "Neuronlike adaptive elements that can solve
difficult learning control problems", 1983, with the masses, lengths, friction and time step given there.

An episode ends when the pole leans more than 12 degrees or the cart is more than 2.4 m away, which is a failure, or
after 500 steps, which is not: what would have come after is then worth as much as before.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

GRAVITY = 9.8
CART, POLE = 1.0, 0.1  # kg
HALF_LENGTH = 0.5  # m, of the pole
PUSH = 10.0  # N
CART_FRICTION, POLE_FRICTION = 0.0005, 0.000002  # of the track; of the joint
STEP_S = 0.02
LONGEST = 500  # steps
FARTHEST = 2.4  # m
STEEPEST = math.radians(12)
_BEGINNING = 0.05  # positions, angles and speeds begin within it


@dataclass(frozen=True)
class CopiesStep:
    """Result of one step, for each cart."""

    rewards: Floats
    failed: Flags
    timed_out: Flags  # after the last step, without failure
    observations: Floats  # after the step, before carts that have ended begin anew


class CartPole:
    """Carts with a pole each. Observations: position, speed, angle, angular speed; `masked`: position and angle alone.

    An action is 0 (push to the left) or 1; with `by_force` a vector of one number, -1 to 1, a share of the push.
    """

    def __init__(
        self,
        carts: int,
        seed: int | list[int],
        *,
        by_force: bool = False,
        masked: bool = False,
        longest: int = LONGEST,
    ) -> None:
        self._draw = np.random.default_rng(seed)
        self._by_force, self._shown = by_force, slice(None, None, 2 if masked else 1)
        self._longest = longest
        self._steps = np.zeros(carts, np.int64)
        self._state = self._begun(carts)

    @property
    def copies(self) -> int:
        """Number of carts that are simulated."""
        return len(self._steps)

    @property
    def observations(self) -> Floats:
        """Observations [N, I] of the carts in their present states."""
        return self._state[:, self._shown].astype(np.float32)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Number of steps in each cart's present episode."""
        return self._steps.copy()

    async def act(self, actions: npt.NDArray[Any]) -> CopiesStep:
        """A step, as of environments that are not in this process."""
        return self.step(actions)

    def step(self, actions: npt.NDArray[Any]) -> CopiesStep:
        """Act on each cart; carts whose episode has ended begin anew."""
        shares = np.clip(actions[:, 0].astype(np.float64), -1, 1) if self._by_force else np.where(actions == 1, 1.0, -1)
        speeds, accelerations = self._state[:, 1::2], accelerations_of(self._state, PUSH * shares)
        positions = self._state[:, 0::2] + STEP_S * speeds
        self._state = np.stack([positions, speeds + STEP_S * accelerations], axis=-1).reshape(len(positions), 4)
        self._steps += 1
        failed: Flags = np.any(np.abs(positions) > (FARTHEST, STEEPEST), axis=-1)
        timed_out = (self._steps >= self._longest) & ~failed
        stepped = CopiesStep(np.ones(len(failed), np.float32), failed, timed_out, self.observations)
        ended = failed | timed_out
        self._state[ended] = self._begun(int(ended.sum()))
        self._steps[ended] = 0
        return stepped

    def _begun(self, carts: int) -> Doubles:
        return self._draw.uniform(-_BEGINNING, _BEGINNING, (carts, 4))


def accelerations_of(state: Doubles, force: Doubles) -> Doubles:
    """Acceleration of each cart in m/s2 and of its pole in rad/s2, [N, 2]."""
    speed, angle, turning = state[:, 1], state[:, 2], state[:, 3]
    mass, moment = CART + POLE, POLE * HALF_LENGTH
    sine, cosine = np.sin(angle), np.cos(angle)
    pushed = (force + moment * turning**2 * sine - CART_FRICTION * np.sign(speed)) / mass
    of_pole = (GRAVITY * sine - cosine * pushed - POLE_FRICTION * turning / moment) / (
        HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass)
    )
    return np.stack([pushed - moment * of_pole * cosine / mass, of_pole], axis=-1)
