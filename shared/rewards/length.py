"""Reward `length`: the completion is as long as wanted."""

from typing import Any

from shared.rewards.functions import Score
from shared.rewards.kinds import LengthOptions


def score(completion: str, reference: Any, options: LengthOptions) -> Score:
    """1 within the target, falling linearly beyond it."""
    length = len(completion.split()) if options.unit == "words" else len(completion)
    beyond = abs(length - options.target) if options.shape == "near" else max(0, length - options.target)
    slack = options.slack or options.target
    return Score(max(options.floor, 1.0 - beyond / slack), {"length": float(length)})
