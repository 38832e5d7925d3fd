"""Advantages of a group: how much better each sample did than its siblings.

Pure numpy. A group is the samples of one prompt; its mean reward is the baseline, so no value network is needed.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
AdvantageScale = Literal["mean", "std", "leave_one_out"]

STD_EPSILON = 1e-4


def group_advantages(rewards_G: npt.ArrayLike, scale: AdvantageScale = "mean") -> FloatArray:
    """Advantages [G] of one group's rewards [G].

    - `mean`: A_i = r_i - mean(r). Dr.GRPO, arXiv 2503.20783: no division, so that prompts which are nearly always or
      nearly never solved do not weigh more than others.
    - `std`: A_i = (r_i - mean(r)) / (std(r) + 1e-4), std over the whole group. GRPO, arXiv 2402.03300.
    - `leave_one_out`: A_i = r_i - mean of the others = (r_i - mean(r)) * G / (G - 1). RLOO, arXiv 2402.14740.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"a group's rewards are a non-empty list, not of shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"a group's rewards must be finite: {rewards.tolist()}")
    centred = rewards - rewards.mean()
    if scale == "std":
        centred = centred / (rewards.std() + STD_EPSILON)
    elif scale == "leave_one_out" and rewards.size > 1:
        centred = centred * (rewards.size / (rewards.size - 1))
    return np.asarray(centred, dtype=np.float32)


def has_signal(rewards_G: npt.ArrayLike) -> bool:
    """Whether the group can teach anything: with equal rewards every advantage is 0."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return rewards.size > 1 and float(rewards.max() - rewards.min()) > 1e-9
