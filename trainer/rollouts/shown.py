"""Samples of a train step for people: exploitation of a reward is visible in texts, not in figures.

They are of the run's own tasks. What users have written in live traffic, or have posted, is not shown.
"""

import math
import time
from collections.abc import Iterable, Sequence

import structlog

from shared.text.codec import TextCodec
from shared.training import BoardSample
from shared.trajectories import Trajectory
from trainer.rollouts.groups import RolloutGroup, problem

PROMPT = 400  # characters, of the prompt's end
COMPLETION = 800  # of the completion's beginning
SHOW_EVERY_S = 10.0  # between two train steps whose samples are logged
_LINE = 240  # characters of a sample in the log
_TOKENS = 400  # that are made into text, of either

log = structlog.get_logger()


def shown_samples(groups: Iterable[RolloutGroup], count: int, codec: TextCodec) -> tuple[BoardSample, ...]:
    """Samples of the highest rewards, of the lowest, and as many between; and the first one that failed."""
    samples = [t for group in groups for t in group.trajectories]
    scored = [t for t in samples if not problem(t)]
    failed = [t for t in samples if problem(t)][:1] if count else []
    ranked = sorted(scored, key=_reward, reverse=True)
    return tuple(_shown(t, codec) for t in [*_spread(ranked, count), *failed])


class SampleLog:
    """The samples of the last train step; logs them now and then, the replies alone: prompts stay out of logs."""

    def __init__(self) -> None:
        self.last: tuple[BoardSample, ...] = ()
        self._logged = -math.inf

    def show(self) -> None:
        """Log them, unless a train step's have been logged just now."""
        if not self.last or time.monotonic() - self._logged < SHOW_EVERY_S:
            return
        self._logged = time.monotonic()
        for sample in self.last:
            if sample.reward is None:
                log.info("train.sample", failed=sample.error[:_LINE], reply=sample.completion[:_LINE])
            else:
                reward = float(f"{sample.reward:.4g}")
                log.info("train.sample", reward=reward, reply=sample.completion[:_LINE], tokens=sample.tokens)


def _spread(ranked: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """This many items in even steps, the first and the last one among them."""
    if count < 2 or len(ranked) <= count:
        return list(ranked[:count])
    return [ranked[round(at * (len(ranked) - 1) / (count - 1))] for at in range(count)]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None and trajectory.reward.value is not None
    return trajectory.reward.value


def _shown(trajectory: Trajectory, codec: TextCodec) -> BoardSample:
    reward, spans = trajectory.reward, trajectory.spans
    prompt = codec.decode(trajectory.prompt_ids[-_TOKENS:])
    completion = codec.decode(trajectory.completion_ids[:_TOKENS])
    cut_before = len(trajectory.prompt_ids) > _TOKENS or len(prompt) > PROMPT
    cut_after = len(trajectory.completion_ids) > _TOKENS or len(completion) > COMPLETION
    why = problem(trajectory)
    return BoardSample(
        reward=None if why or reward is None else reward.value,
        prompt=("…" if cut_before else "") + prompt[-PROMPT:],
        completion=completion[:COMPLETION] + ("…" if cut_after else ""),
        tokens=len(trajectory.completion_ids),
        finish_reason=trajectory.finish_reason,
        version=spans[-1].version if spans else "",
        components={} if reward is None else dict(list(reward.components.items())[:8]),
        error=why[:500],
    )
