"""Any reward of the registry: a function in a process of its own, a served model, or a weighted sum of both."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from shared.jobs import RewardSpec
from shared.rewards.kinds import CheckedReward, WeightedOptions, wrong_with
from shared.rewards.model_kinds import ModelOptions
from shared.scoring.pool import RewardSample
from shared.scoring.served import WITHIN_S
from shared.scoring.shares import Share
from shared.sequences import SequenceClass
from shared.trajectories import Reward


class Functions(Protocol):
    """Computes rewards without a model (`shared.scoring.pool.RewardPool`)."""

    async def score(
        self, spec: RewardSpec, samples: Sequence[RewardSample], share: Share | None = None
    ) -> list[Reward]:
        """One reward a sample, in order."""


class Models(Protocol):
    """Asks served models for rewards (`shared.scoring.served.ServedRewards`)."""

    async def score(
        self,
        name: str,
        options: ModelOptions,
        samples: Sequence[RewardSample],
        *,
        within_s: float = ...,
        sequence_class: SequenceClass = ...,
    ) -> list[Reward]:
        """One reward a sample, in order."""


class SampleScorer:
    """Scores samples by whatever their reward needs."""

    def __init__(self, functions: Functions, served: Models) -> None:
        self._functions = functions
        self._served = served

    async def score(
        self,
        reward: CheckedReward,
        samples: Sequence[RewardSample],
        *,
        within_s: float = WITHIN_S,
        sequence_class: SequenceClass = "batch",
        share: Share | None = None,
    ) -> list[Reward]:
        """One reward a sample, in order; `within_s` bounds what is asked of models, `sequence_class` is theirs.

        `share` says whose processes' time the functions take.
        """
        options = reward.options
        if isinstance(options, ModelOptions):
            return await self._served.score(
                reward.spec.name, options, samples, within_s=within_s, sequence_class=sequence_class
            )
        if not isinstance(options, WeightedOptions) or not reward.served_models:
            return await self._functions.score(reward.spec, samples, share)
        parts = [
            self.score(part, samples, within_s=within_s, sequence_class=sequence_class, share=share)
            for part in reward.parts
        ]
        scored = await asyncio.gather(*parts)
        return [_sum(options, rewards) for rewards in zip(*scored, strict=True)]


def _sum(options: WeightedOptions, rewards: Sequence[Reward]) -> Reward:
    """Each part's value times its weight; a part that failed fails the whole, under its name."""
    total = 0.0
    components: dict[str, float] = {}
    for part, reward in zip(options.parts, rewards, strict=True):
        if reward.value is None:
            return Reward("weighted", None, error=f"{part.name}: {reward.error}")
        components[part.name] = reward.value
        total += part.weight * reward.value
    if wrong := wrong_with(total):
        return Reward("weighted", None, error=wrong)
    return Reward("weighted", total, components)
