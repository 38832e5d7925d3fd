"""Tasks that a run is measured on, and a second reward that only measures: it shows when the first one is
over-optimised.

A reward model, a judge, or any reward that is cheaper than what is meant may go on rising while answers get worse. The
second reward scores the same answers to held-out tasks; nothing is learned from it, and no version is judged by it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from pydantic import BaseModel, Field

from shared.errors import SetupError
from shared.jobs import Message
from shared.rewards.kinds import wrong_with
from trainer.rollouts.environments import Scored, Scorer
from trainer.rollouts.groups import RolloutGroup, mean_reward

log = structlog.get_logger()

TRUE = "held_out_true"  # the component under which an answer carries its second reward


class HeldOutSettings(BaseModel):
    """Tasks that nothing is learned from."""

    held_out_dataset: Path | None = Field(default=None, description="JSON lines for evaluation")
    held_out_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the environment's class for held-out tasks"
    )
    held_out_reward: str = Field(
        default="",
        description="a second reward, or package.module:function, that measures answers to the held-out data set "
        "in addition to the one that is learned from; default: none",
    )
    held_out_reward_options: dict[str, Any] = Field(default_factory=dict, description="options of the second reward")
    evaluate_every: int = Field(default=0, ge=0, description="train steps between evaluations; 0: none")
    evaluate_prompts: int = Field(default=64, ge=1, description="held-out tasks in one evaluation")

    def check_held_out(self) -> None:
        """SetupError when the second reward would measure nothing."""
        if self.held_out_reward_options and not self.held_out_reward:
            raise SetupError("--held-out-reward-options has no use without --held-out-reward")
        if self.held_out_reward and (self.held_out_dataset is None or not self.evaluate_every):
            need = "--evaluate-every" if self.held_out_dataset else "--held-out-dataset"
            raise SetupError(f"--held-out-reward measures answers to a held-out data set: it goes with {need}")


class Evaluated(NamedTuple):
    """Result of a version on held-out tasks."""

    reward: float  # mean of the reward that is learned from
    true: float | None = None  # mean of the second reward; None: there is none, or it scored no answer


def evaluated(groups: Iterable[RolloutGroup]) -> Evaluated:
    """The means over what has been scored."""
    groups = list(groups)
    rewards = [t.reward for group in groups for t in group.trajectories if t.reward is not None]
    true = [reward.components[TRUE] for reward in rewards if TRUE in reward.components]
    return Evaluated(mean_reward(groups), sum(true) / len(true) if true else None)


class BothScorers:
    """A scorer whose answers carry the second reward, too; where that one fails, the answer is without it."""

    def __init__(self, learned_from: Scorer, second: Scorer) -> None:
        self._learned_from, self._second = learned_from, second
        self._failed = False  # lately: reported once, not for each answer

    async def __call__(self, completion: str, reference: Any, prompt: str | Sequence[Message] = "") -> Scored:
        """The first one's value and components, and the second's value among them."""
        value, components = await self._learned_from(completion, reference, prompt)
        components = {name: each for name, each in components.items() if name != TRUE}
        try:
            true, _ = await self._second(completion, reference, prompt)
            if wrong := wrong_with(true):
                raise ValueError(wrong)
        except SetupError:
            raise
        except Exception as error:  # the user's code, at what a model wrote: it costs this figure alone
            if not self._failed:
                log.warning("train.held_out_reward_failed", reason=str(error)[:500])
            self._failed = True
            return value, components
        self._failed = False
        return value, {**components, TRUE: true}
