"""Trajectories and groups for tests of the trainer."""

from collections.abc import Sequence

from shared.frames import FinishReason, VersionSpan
from shared.trajectories import Reward, Trajectory
from trainer.rollouts.groups import RolloutGroup


def trajectory(
    reward: float | None = 1.0,
    completion: Sequence[int] = (5, 6),
    *,
    prompt: Sequence[int] = (1, 2, 3),
    logprobs: Sequence[float] | None = None,
    finish: FinishReason = "stop",
    spans: Sequence[tuple[str, int, int]] = (),
    sample: int = 0,
    loss_mask: Sequence[int] = (),
) -> Trajectory:
    return Trajectory(
        prompt_index=0,
        sample_index=sample,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        text="",
        logprobs=tuple(logprobs) if logprobs is not None else (-1.0,) * len(completion),
        finish_reason=finish,
        spans=tuple(VersionSpan(*span) for span in spans),
        reward=Reward("test", reward),
        loss_mask=tuple(loss_mask),
    )


def group(*trajectories: Trajectory, index: int = 0) -> RolloutGroup:
    return RolloutGroup(f"run-{index}", index, trajectories)
