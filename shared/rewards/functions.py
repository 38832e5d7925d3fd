"""What a reward says of one completion, and how the function of a reward is found.

Each function stands in a file under its name, so that a pool process imports only what its jobs ask for.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from shared.rewards.kinds import REWARDS
from shared.rewards.model_kinds import ModelOptions


class Score(NamedTuple):
    """What a reward says of one completion."""

    value: float
    components: dict[str, float] = {}  # noqa: RUF012 - a NamedTuple's default, never written


Scorer = Callable[[str, Any, Any], Score]  # completion, reference, the reward's options struct


def load(name: str) -> Scorer:
    """The function of a reward; importing math-verify takes a second, so this is apart from calling it."""
    if name not in REWARDS or issubclass(REWARDS[name].options, ModelOptions):
        raise ValueError(f"no function computes a reward {name!r}")
    scorer: Scorer = importlib.import_module(f"shared.rewards.{name}").score
    return scorer
