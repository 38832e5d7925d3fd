"""Reward `weighted`: a sum of other rewards."""

from typing import Any

from shared.jobs import RewardSpec
from shared.rewards.functions import Score, load
from shared.rewards.kinds import WeightedOptions, check


def score(completion: str, reference: Any, options: WeightedOptions) -> Score:
    """Each part's value times its weight; a part that raises fails the whole, under its name."""
    total = 0.0
    components: dict[str, float] = {}
    for part in options.parts:
        try:
            value = load(part.name)(completion, reference, check(RewardSpec(part.name, part.options)).options).value
        except ValueError as error:
            raise ValueError(f"{part.name}: {error}") from error
        components[part.name] = value
        total += part.weight * value
    return Score(total, components)
