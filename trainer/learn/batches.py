"""From scored groups to advantages and padded arrays, in plain numpy.

An advantage is how much better a sample did than its siblings: the group's mean reward is the baseline, so no value
network is needed. With one (PPO), samples are compared with what it says, later: here each has its reward.

Shape suffixes: P prompts, S prompt positions (padded left), B rows, T completion positions (padded right).

Invariants.
- A row is one sample: everything after the prompt that its group shares. In a multi-turn sample that includes tool
  results; `mask_BT` is true only where the model itself wrote the token.
- Prompts are never in the loss.
- A group whose rewards are all equal is dropped: its advantages are 0. A single sample is compared with its pool.
  Where a teacher has scored the samples, all groups are learned from.
- A truncated sample counts in its group's baseline, and with `mask_overlong` stays out of the loss (DAPO, arXiv
  2503.14476 section 3.4: the length limit says nothing about the answer).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.images.refs import ImageRef
from shared.trajectories import Drawing, Trajectory
from trainer.learn.drawing import DrawnRows, corrected, rows_of
from trainer.learn.options import AdvantageScale
from trainer.learn.routes import Routes, padded_routes
from trainer.rollouts.groups import RolloutGroup, problem, usable

STD_EPSILON = 1e-4
_JUDGED = "it comes with an advantage, and a value head learns from rewards"


@dataclass(frozen=True)
class Sample:
    """One completion, ready for a loss."""

    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]  # log mu
    mask: tuple[bool, ...]  # in the loss
    policy_steps: tuple[int, ...]  # of each token: the policy step whose weights sampled it
    advantage: float  # its reward, where a value head predicts it
    drawn: Drawing | None = None  # what the policy's log-probabilities are computed with; None: temperature 1
    teacher_logprobs: tuple[float, ...] = ()  # a teacher's, of each token; (): there is none
    routes: bytes = b""  # experts that the tokens were computed with; b"": not known


@dataclass(frozen=True)
class SampleGroup:
    """Samples that share a prompt."""

    id: str
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    images: tuple[ImageRef, ...] = ()  # of the prompt
    image_token: int = 0  # that stands for each vector of them

    @property
    def tokens(self) -> int:
        """Positions that a forward pass over this group computes when the prompt is shared."""
        return len(self.prompt_ids) + sum(len(sample.completion_ids) for sample in self.samples)


@dataclass(frozen=True)
class DroppedCounts:
    """Why groups and samples taught nothing."""

    zero_variance: int = 0  # groups
    too_few: int = 0  # groups with fewer than two usable samples
    failed: int = 0  # samples without a completion or a reward
    overlong: int = 0  # samples that hit the length limit
    cut_off: int = 0  # groups whose samples all did, and stay out of the loss
    problem: str = field(default="", compare=False)  # of the first sample that failed


@dataclass(frozen=True)
class Microbatch:
    """Padded arrays for one forward and backward pass."""

    prompt_PS: npt.NDArray[np.int32]  # left-padded
    padding_P: npt.NDArray[np.int32]  # how many pads stand before each prompt
    prompt_of_B: npt.NDArray[np.int32]  # the row's prompt
    completion_BT: npt.NDArray[np.int32]  # right-padded
    mask_BT: npt.NDArray[np.bool_]
    sampler_BT: npt.NDArray[np.float32]
    policy_step_BT: npt.NDArray[np.int32]  # -1 where masked
    advantage_B: npt.NDArray[np.float32]
    positions: int  # padding left out
    tokens: int  # of completions
    drawn: DrawnRows | None = None  # None: all at temperature 1, unfiltered
    routes_BTN: Routes | None = None  # experts that the tokens were computed with
    teacher_BT: npt.NDArray[np.float32] | None = None  # a teacher's; of samples without one, the sampler's
    images: tuple[bytes, ...] = ()  # keys of those of all prompts, one prompt after another
    image_token: int = 0

    @property
    def layout(self) -> tuple[int, ...]:
        """Shapes, and whether all prompts have as many rows: where it is equal, the same operations compute it.

        Their keys and values are repeated in another way then (`prompt_kv.py:copied`).
        """
        counts = np.bincount(self.prompt_of_B)
        return *self.prompt_PS.shape, *self.completion_BT.shape, int(counts.min() == counts.max())


def group_advantages(rewards_G: npt.ArrayLike, scale: AdvantageScale = "mean") -> npt.NDArray[np.float32]:
    """Advantages [G] of one group's rewards [G].

    - `mean`: A_i = r_i - mean(r). Dr.GRPO, arXiv 2503.20783: no division, so that prompts which are nearly always or
      nearly never solved do not weigh more than others.
    - `std`: A_i = (r_i - mean(r)) / (std(r) + 1e-4), std over the whole group. GRPO, arXiv 2402.03300.
    - `leave_one_out`: A_i = r_i - mean of the others = (r_i - mean(r)) * G / (G - 1). RLOO, arXiv 2402.14740.
    - `maximum_likelihood`: A_i = (r_i - mean(r)) / mean(r), of rewards that say how right a sample is; those below 0
      count as 0. MaxRL, arXiv 2602.02710: the gradient of log p(right) in place of p(right), so that prompts which are
      seldom solved weigh more.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"a group's rewards are a non-empty list, not of shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"a group's rewards must be finite: {rewards.tolist()}")
    if scale == "maximum_likelihood":
        rewards = np.maximum(rewards, 0)
    centred = rewards - rewards.mean()
    if scale == "maximum_likelihood" and rewards.any():
        centred = centred / rewards.mean()
    elif scale == "std":
        centred = centred / (rewards.std() + STD_EPSILON)
    elif scale == "leave_one_out" and rewards.size > 1:
        centred = centred * (rewards.size / (rewards.size - 1))
    return np.asarray(centred, dtype=np.float32)


def has_signal(rewards_G: npt.ArrayLike) -> bool:
    """True if the rewards differ; with equal rewards every advantage is 0."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return rewards.size > 1 and float(rewards.max() - rewards.min()) > 1e-9


def sample_groups(
    groups: Iterable[RolloutGroup],
    policy_steps: dict[str, int],
    *,
    scale: AdvantageScale | None = "mean",
    mask_overlong: bool = True,
) -> tuple[list[SampleGroup], DroppedCounts]:
    """Advantages and masks of each group; groups without signal are left out.

    `scale`: None: samples are not compared with each other, so each has its reward, and no group is left out for it;
    those whose advantages somebody else has given count as failed.
    `policy_steps` says which policy step made each adapter version (`name@k`); "" and unknown ones are step 0.
    """
    kept: list[SampleGroup] = []
    zero = few = failed = overlong = cut_off = 0
    first_problem = ""
    given = list(groups)
    baselines = _pooled(given, scale)
    for group in given:
        problems = [problem(t) for t in group.trajectories]
        members = [i for i, why in enumerate(problems) if not why]
        if group.advantages and scale is None:
            members, problems = [], [_JUDGED] * len(problems)
        failed += len(problems) - len(members)
        first_problem = first_problem or next(filter(None, problems), "")
        advantages = _advantages(group, members, baselines.get(group.id), scale)
        chosen = [group.trajectories[i] for i in members]
        is_taught = any(t.teacher_logprobs for t in chosen)
        if advantages is None and is_taught:
            advantages = [0.0] * len(chosen)
        if advantages is None:
            few += 1
            continue
        overlong += sum(t.finish_reason == "length" for t in chosen)
        if scale is not None and not any(advantages) and not is_taught:
            zero += 1
            continue
        samples = [_sample(t, a, policy_steps, mask_overlong) for t, a in zip(chosen, advantages, strict=True)]
        taught = tuple(sample for sample in samples if any(sample.mask))
        if taught:
            first = chosen[0]
            kept.append(SampleGroup(group.id, first.prompt_ids, taught, first.images, first.image_token))
        else:
            cut_off += 1
    return kept, DroppedCounts(zero, few, failed, overlong, cut_off, first_problem)


def _pooled(groups: Sequence[RolloutGroup], scale: AdvantageScale | None) -> dict[str, float]:
    """Advantages of single samples, by group id: against the mean of their pool."""
    if scale is None:
        return {}
    pools: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        if group.pool and not group.advantages and usable(group.trajectories[0]):
            pools.setdefault(group.pool, []).append(group)
    pooled: dict[str, float] = {}
    for members in pools.values():
        rewards = [_reward(group.trajectories[0]) for group in members]
        if len(members) > 1:
            even = not has_signal(rewards)
            advantages = [0.0] * len(members) if even else group_advantages(rewards, scale).tolist()
            pooled |= {group.id: float(a) for group, a in zip(members, advantages, strict=True)}
    return pooled


def _advantages(
    group: RolloutGroup, members: Sequence[int], pooled: float | None, scale: AdvantageScale | None
) -> list[float] | None:
    """Advantages of the usable samples; None when there is nothing to compare them with."""
    if scale is None:
        return [_reward(group.trajectories[i]) for i in members] or None
    if group.advantages and members:
        return [float(group.advantages[i] or 0.0) for i in members]
    if group.pool:
        return None if pooled is None or not members else [pooled]
    if len(members) < 2:
        return None
    rewards = [_reward(group.trajectories[i]) for i in members]
    if not has_signal(rewards):
        return [0.0] * len(members)
    return [float(a) for a in group_advantages(rewards, scale)]


_FILLS = 4  # times as many positions as its prompt has: a part of a group that fills up a microbatch
_PADDED = 1.5  # times what groups take alone: what they may take together, padded to the longest of all


def microbatches(groups: Sequence[SampleGroup], size: Callable[[], int]) -> Iterator[list[SampleGroup]]:
    """Cut groups into microbatches of at most this many positions; a sample is never cut.

    `size` is asked anew for each microbatch, right before it is cut. Groups of similar prompt length go together, and
    groups of very different completions do not, so that little is padding. A group that does not fit is divided, and
    its prompt is computed once in each part: if it is too large for one microbatch, or if a part with little prompt
    fits behind other groups. On a GPU a small microbatch takes as long as one that is several times as large.
    """
    waiting = deque(sorted(groups, key=lambda group: (len(group.prompt_ids), group.id)))
    while waiting:
        left = size()
        batch, area = list[SampleGroup](), _Area()
        while waiting and waiting[0].tokens <= left and (wider := area.plus(waiting[0])).is_little_padding:
            batch.append(waiting.popleft())
            left, area = left - batch[-1].tokens, wider
        if waiting:
            part, rest = _divide(waiting[0], left)
            fills = _FILLS * len(part.prompt_ids) <= part.tokens <= left and area.plus(part).is_little_padding
            if fills or not batch:
                batch.append(part)
                waiting.popleft()
                if rest.samples:
                    waiting.appendleft(rest)
        yield batch


class _Area(NamedTuple):
    """Positions that groups take, padded to the longest of all and each by itself."""

    prompts: int = 0
    longest_prompt: int = 0
    rows: int = 0
    longest: int = 0  # completion
    alone: int = 0

    def plus(self, group: SampleGroup) -> "_Area":
        prompt, lengths = len(group.prompt_ids), [len(sample.completion_ids) for sample in group.samples]
        longest = max(lengths, default=0)
        return _Area(
            self.prompts + 1,
            max(self.longest_prompt, prompt),
            self.rows + len(lengths),
            max(self.longest, longest),
            self.alone + prompt + len(lengths) * longest,
        )

    @property
    def is_little_padding(self) -> bool:
        return self.prompts * self.longest_prompt + self.rows * self.longest <= _PADDED * self.alone


class Padding(NamedTuple):
    """Sizes that microbatches are filled up to, so that few shapes occur."""

    prompt: int = 8  # widths are multiples of these
    completion: int = 4
    rows: bool = False  # numbers of prompts and of rows, too, are rounded up, by less than a quarter
    last: int = 0  # 1: a completion has one position more, which is not fed


PADDING = Padding()


def pad(groups: Sequence[SampleGroup], padding: Padding = PADDING) -> Microbatch:
    """Arrays of one microbatch. Rows that fill it up continue its last prompt, and nothing of them is in the loss."""
    rows = [(index, sample) for index, group in enumerate(groups) for sample in group.samples]
    prompt_width = _round_up(max(len(group.prompt_ids) for group in groups), padding.prompt)
    longest = max(len(sample.completion_ids) for _, sample in rows)
    width = _round_up(longest - padding.last, padding.completion) + padding.last
    prompts = _round_up_count(len(groups)) if padding.rows else len(groups)
    more = _round_up_count(len(rows)) - len(rows) if padding.rows else 0
    shape = (len(rows) + more, width)
    prompt_PS = np.zeros((prompts, prompt_width), np.int32)
    padding_P = np.full(prompts, prompt_width - 1, np.int32)
    completion_BT = np.zeros(shape, np.int32)
    mask_BT = np.zeros(shape, np.bool_)
    sampler_BT = np.zeros(shape, np.float32)
    policy_step_BT = np.full(shape, -1, np.int32)
    for index, group in enumerate(groups):
        padding_P[index] = prompt_width - len(group.prompt_ids)
        prompt_PS[index, padding_P[index] :] = group.prompt_ids
    for row, (_, sample) in enumerate(rows):
        end = len(sample.completion_ids)
        completion_BT[row, :end] = sample.completion_ids
        mask_BT[row, :end] = sample.mask
        sampler_BT[row, :end] = sample.sampler_logprobs
        policy_step_BT[row, :end] = np.where(sample.mask, sample.policy_steps, -1)
    sampler_BT = np.where(mask_BT, sampler_BT, 0.0).astype(np.float32)
    teacher_BT = None
    if any(sample.teacher_logprobs for _, sample in rows):
        teacher_BT = sampler_BT.copy()
        for row, (_, sample) in enumerate(rows):
            if sample.teacher_logprobs:
                teacher_BT[row, : len(sample.mask)] = np.where(sample.mask, sample.teacher_logprobs, 0.0)
    return Microbatch(
        prompt_PS=prompt_PS,
        padding_P=padding_P,
        prompt_of_B=np.array([*(index for index, _ in rows), *[len(groups) - 1] * more], np.int32),
        completion_BT=completion_BT,
        mask_BT=mask_BT,
        sampler_BT=sampler_BT,
        policy_step_BT=policy_step_BT,
        advantage_B=np.array([*(sample.advantage for _, sample in rows), *[0.0] * more], np.float32),
        positions=sum(group.tokens for group in groups),
        tokens=sum(len(sample.completion_ids) for _, sample in rows),
        routes_BTN=padded_routes(
            [*(sample.routes for _, sample in rows), *[b""] * more],
            [*(len(sample.completion_ids) for _, sample in rows), *[0] * more],
            width,
        ),
        teacher_BT=teacher_BT,
        drawn=rows_of([*(sample.drawn for _, sample in rows), *[None] * more]),
        images=tuple(image.key for group in groups for image in group.images),
        image_token=max(group.image_token for group in groups),
    )


def loss_mask(trajectory: Trajectory) -> tuple[bool, ...]:
    """Mask of the completion tokens that the model wrote; all of them unless the trajectory marks others.

    Raises ValueError when lengths disagree.
    """
    length = len(trajectory.completion_ids)
    mask = trajectory.loss_mask or (1,) * length
    if len(mask) != length or len(trajectory.logprobs) != length:
        raise ValueError(
            f"prompt {trajectory.prompt_index}, sample {trajectory.sample_index}: {length} completion tokens, "
            f"{len(trajectory.logprobs)} logprobs, {len(mask)} mask values"
        )
    return tuple(bool(value) for value in mask)


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None and trajectory.reward.value is not None
    return trajectory.reward.value


def _sample(trajectory: Trajectory, advantage: float, policy_steps: dict[str, int], mask_overlong: bool) -> Sample:
    mask = loss_mask(trajectory)
    if mask_overlong and trajectory.finish_reason == "length":
        mask = (False,) * len(mask)
    steps = [0] * len(mask)
    for span in trajectory.spans:
        steps[span.start : span.end] = [policy_steps.get(span.version, 0)] * (span.end - span.start)
    return Sample(
        trajectory.completion_ids,
        trajectory.logprobs,
        mask,
        tuple(steps[: len(mask)]),
        advantage,
        corrected(trajectory),
        trajectory.teacher_logprobs,
        trajectory.routes,
    )


def _divide(group: SampleGroup, max_tokens: int) -> tuple[SampleGroup, SampleGroup]:
    """Divide samples into as many as fit, at least one, and the rest."""
    used, count = len(group.prompt_ids), 0
    for sample in group.samples:
        used += len(sample.completion_ids)
        if count and used > max_tokens:
            break
        count += 1
    return replace(group, samples=group.samples[:count]), replace(group, samples=group.samples[count:])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_up_count(count: int) -> int:
    """To one of four numbers between two powers of two: 8, 10, 12, 14, 16, 20, ..."""
    return _round_up(count, max(1, 1 << (count - 1).bit_length() >> 3))
