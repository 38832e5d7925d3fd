"""Live traffic as batches: what is grouped, what is compared with what, what is dropped, what is taken once."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from shared.redis.training.trajectory_queue import Delivered
from shared.trajectories import LiveTrajectory
from tests.unit.trainer_samples import trajectory
from tests.waiting import HANG_S
from trainer.learn.batches import DroppedCounts, sample_groups
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.live import LiveCollector, group_of, posted_groups
from trainer.state import LiveBooks


class Queue:
    """Delivers what it was given, then blocks."""

    def __init__(self, lives: Sequence[LiveTrajectory]) -> None:
        self.waiting = [Delivered(f"{i}-0", live) for i, live in enumerate(lives, 1)]
        self.acknowledged: list[str] = []
        self.added = asyncio.Event()

    def add(self, entries: Sequence[Delivered]) -> None:
        self.waiting += entries
        self.added.set()

    async def take(self, consumer: str, count: int) -> list[Delivered]:
        found, self.waiting = self.waiting[:count], self.waiting[count:]
        return found

    async def wait(self, timeout_s: float) -> None:
        await self.added.wait()
        self.added.clear()

    async def done(self, entries: list[str]) -> None:
        self.acknowledged += entries


def live(name: str, reward: float | None = 1.0, group: str = "", size: int = 1, version: int = 1) -> LiveTrajectory:
    sampled = trajectory(reward, spans=[(f"policy@{version}", 0, 2)], prompt=(1, len(name)))
    return LiveTrajectory(name, "policy", "m", sampled, group=group, group_size=size)


def age(group: RolloutGroup) -> int:
    return 5 - min(int(t.spans[0].version.partition("@")[2]) for t in group.trajectories)


async def batch_of(queue: Queue, per_step: int, **options: object) -> tuple[list[RolloutGroup], LiveCollector]:
    collector = LiveCollector(queue, per_step, 9, 60.0, **options)  # type: ignore[arg-type]
    async with collector, asyncio.timeout(HANG_S):
        return await collector.next_batch(age), collector


async def test_a_group_waits_for_all_its_samples() -> None:
    queue = Queue([live("a0", group="a", size=2), live("b"), live("a1", 0.0, group="a", size=2)])
    batch, collector = await batch_of(queue, 3)
    assert [[t.reward.value for t in g.trajectories if t.reward] for g in batch] == [[1.0], [1.0, 0.0]]
    assert collector.taken == ["2-0", "1-0", "3-0"]
    await collector.saved()
    assert queue.acknowledged == ["2-0", "1-0", "3-0"] and collector.taken == []


async def test_single_samples_are_compared_with_their_pool() -> None:
    batch, _ = await batch_of(Queue([live("a", 1.0), live("bb", 0.0), live("ccc", 0.5)]), 3)
    groups, dropped = sample_groups(batch, {})
    assert [s.advantage for g in groups for s in g.samples] == pytest.approx([0.5, -0.5])
    assert [g.prompt_ids for g in groups] == [(1, 1), (1, 2)], "the one at the baseline teaches nothing"
    assert dropped.too_few == 0
    alone, dropped = sample_groups(batch[:1], {})
    assert alone == [] and dropped.too_few == 1, "one sample has nothing to be compared with"


async def test_pools_of_other_rewards_and_environments_are_not_mixed() -> None:
    sampled = msgspec.structs.replace(trajectory(0.0), metadata={"environment": "hard"})
    hard = LiveTrajectory("h", "policy", "m", sampled)
    pools = {group_of([each]).pool for each in (live("a"), hard)}
    assert pools == {"test/", "test/hard"}


async def test_agents_of_a_team_are_each_compared_with_their_own_statistics() -> None:
    """Equal to Dr. MAS (arXiv 2602.08847): A = (R - mean of the agent's) / std of the agent's, in fp64."""
    draw = np.random.default_rng(3)
    rewards = {"planner": draw.normal(10, 5, 6), "searcher": draw.normal(0, 0.1, 4)}
    said = [
        LiveTrajectory(
            f"{agent}-{at}",
            "policy",
            "m",
            msgspec.structs.replace(trajectory(float(reward)), metadata={"environment": agent}),
        )
        for agent, earned in rewards.items()
        for at, reward in enumerate(earned)
    ]
    groups, dropped = sample_groups([group_of([each]) for each in said], {}, scale="std")
    expected = [(r - earned.mean()) / (earned.std() + 1e-4) for earned in rewards.values() for r in earned]
    assert [s.advantage for g in groups for s in g.samples] == pytest.approx(expected, abs=1e-5)
    assert len(groups) == len(said) and dropped == DroppedCounts()


async def test_what_has_no_reward_or_is_too_old_is_dropped_and_counted() -> None:
    queue = Queue([live("none", None), live("old", version=-7), live("a"), live("b", 0.0)])
    batch, collector = await batch_of(queue, 2)
    assert [g.id for g in batch] == ["live-a", "live-b"]
    assert collector.dropped == {"unscored": 1, "stale": 1}
    assert sorted(collector.taken) == ["1-0", "2-0", "3-0", "4-0"]


async def test_what_the_checkpoint_has_learned_from_is_not_learned_again() -> None:
    queue = Queue([live("a"), live("b"), live("c", 0.0)])
    batch, _ = await batch_of(queue, 2, taken=["1-0"])
    assert [g.id for g in batch] == ["live-b", "live-c"]
    assert queue.acknowledged == ["1-0"]


async def test_what_was_taken_and_stands_in_the_queue_again_is_not_learned_again() -> None:
    """As when Redis was set back: entries return that were acknowledged before any that a checkpoint names."""
    lives = [live("g0", group="g", size=2), live("a"), live("b", 0.0), live("c")]
    before = Queue(lives)
    collector = LiveCollector(before, 2, 9, 60.0)  # type: ignore[arg-type]
    async with collector, asyncio.timeout(HANG_S):
        await collector.next_batch(age)
        await collector.saved()
        assert collector.books == LiveBooks("4-0", ["1-0", "4-0"])
        before.add([*Queue(lives).waiting, Delivered("5-0", live("d"))])
        collector.give_back(await collector.next_batch(age))
        assert collector.books == LiveBooks("5-0", ["1-0", "4-0", "5-0"])
    assert before.acknowledged == ["2-0", "3-0"] * 2 and collector.dropped == {"taken before": 2}
    again = Queue([*lives, live("d"), live("e"), live("g1", group="g", size=2)])
    resumed = LiveCollector(again, 5, 9, 60.0, books=LiveBooks("4-0", ["1-0", "4-0"]))  # type: ignore[arg-type]
    async with resumed, asyncio.timeout(HANG_S):
        batch = await resumed.next_batch(age)
    assert [group.id for group in batch] == ["live-c", "live-d", "live-e", "live-g"]
    assert again.acknowledged == ["2-0", "3-0"]


async def test_a_batch_that_was_not_used_comes_again() -> None:
    queue = Queue([live("a"), live("b"), live("c"), live("d")])
    collector = LiveCollector(queue, 2, 9, 60.0)
    async with collector, asyncio.timeout(HANG_S):
        first = await collector.next_batch(age)
        collector.give_back(first)
        assert collector.taken == []
        assert await collector.next_batch(age) == first


def test_posted_trajectories_group_by_name_then_by_prompt_and_keep_their_advantages() -> None:
    a, b = live("a", group="g"), live("bb", group="g")
    same = [live("c"), live("d", 0.0)]
    groups = posted_groups([a, same[0], b, same[1]])
    assert [len(g.trajectories) for g in groups] == [2, 2]
    given = [LiveTrajectory("x", "policy", "m", trajectory(1.0), advantage=v) for v in (-2.0, 3.0)]
    ((group,), _) = sample_groups(posted_groups(given), {})
    assert [sample.advantage for sample in group.samples] == [-2.0, 3.0]


def test_posted_groups_are_told_apart_though_their_ids_are_the_same() -> None:
    single = [LiveTrajectory("same", "policy", "m", trajectory(r, prompt=(1, i))) for i, r in enumerate((1.0, 0.0))]
    groups, _ = sample_groups(posted_groups(single), {})
    assert [sample.advantage for group in groups for sample in group.samples] == [0.5, -0.5]
