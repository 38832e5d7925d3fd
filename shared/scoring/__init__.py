"""The rewards themselves. Those without a model are pure functions (completion, reference, options) -> Score.

Each of them has a file under its name that imports what it needs, so a pool process loads only what its jobs ask for.
A function raises ValueError when the reference is not what it needs; that marks the sample, not the job. Names and
options stand in shared/rewards.py; what served models say is in served.py, and rewards.py takes either.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from shared.model_rewards import ModelOptions
from shared.rewards import REWARDS


class Score(NamedTuple):
    """What a reward says of one completion."""

    value: float
    components: dict[str, float] = {}  # noqa: RUF012 - a NamedTuple's default, never written


Scorer = Callable[[str, Any, Any], Score]  # completion, reference, the reward's options struct


def load(name: str) -> Scorer:
    """The function of a reward; importing math-verify takes a second, so this is apart from calling it."""
    if name not in REWARDS or issubclass(REWARDS[name].options, ModelOptions):
        raise ValueError(f"no function computes a reward {name!r}")
    scorer: Scorer = importlib.import_module(f"shared.scoring.{name}").score
    return scorer
