"""Live traffic through the whole loop, in one process without a ring."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from shared.frames import VersionSpan
from shared.redis.training.trajectory_queue import Delivered
from shared.trajectories import LiveTrajectory, Reward, Trajectory
from tests.engine.test_trainer_loop import settings
from tests.training.in_process import MemorySink
from tests.training.run import train
from tests.unit.test_trainer_live import Queue
from trainer.runs.loop import TrainLoop
from trainer.runs.metrics import read
from trainer.state import RunState


def live(number: int, reward: float, version: int | None = 1) -> LiveTrajectory:
    """One of two samples of a group, right or wrong; version None: nobody says what has sampled it."""
    completion = (40, 41) if number % 2 else (50, 51)
    sampled = Trajectory(
        prompt_index=0,
        sample_index=number % 2,
        prompt_ids=(5, 6, 7 + number // 2),
        completion_ids=completion,
        text="",
        logprobs=(-1.0, -1.0),
        finish_reason="stop",
        spans=() if version is None else (VersionSpan(f"policy@{version}", 0, 2),),
        reward=Reward("exact", reward),
    )
    return LiveTrajectory(f"t{number}", "policy", "tiny", sampled, group=f"g{number // 2}", group_size=2)


async def test_live_batches_train_serve_and_are_acknowledged_with_the_checkpoint(tmp_path: Path) -> None:
    queue = Queue([live(i, float(i % 2)) for i in range(12)])
    run = settings(tmp_path, source="live", live_trajectories=4, steps=3, checkpoint_every=2, parity_every=0)
    state, sink = await train(run, live=queue)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert [(line.source, line.groups, line.reward) for line in lines] == [("live", 2, 0.5)] * 3
    assert [line.lag_max for line in lines] == [0, 1, 2]
    assert (state.live_steps, state.own_steps, state.trajectories) == (3, 0, 12)
    assert sink.latest == 4 and queue.acknowledged == [f"{i}-0" for i in range(1, 13)]


async def test_poor_live_traffic_does_not_roll_back_what_own_prompts_have_judged(tmp_path: Path) -> None:
    """Two sets of tasks: a mean of 0 on one is no collapse from 0.5 on the other."""
    queue = Queue([live(i, -9.0 if i % 2 else -9.5) for i in range(64)])
    run = settings(
        tmp_path, source="both", live_trajectories=8, steps=8, max_lag=0, live_max_lag=99, parity_every=0,
        reward_margin=0.4, min_groups=4,
    )  # fmt: skip
    state, _ = await train(run, live=queue)
    sources = [line.source for line in read(tmp_path / "policy" / "metrics.jsonl")]
    assert sources.count("live") >= 1
    assert state.rollbacks == 0


async def test_live_traffic_that_collapses_rolls_back_on_its_own(tmp_path: Path) -> None:
    good = [live(i, 1.0 - 0.1 * (i % 2)) for i in range(8)]
    bad = [live(8 + i, -9.0 - 0.1 * (i % 2), version=2) for i in range(8)]
    again = [live(16 + i, 1.0 - 0.1 * (i % 2)) for i in range(8)]
    run = settings(
        tmp_path, source="live", live_trajectories=8, steps=2, live_max_lag=99, parity_every=0, reward_margin=0.4,
        min_groups=4,
    )  # fmt: skip
    sink = MemorySink()

    class Traffic(Queue):
        """What version 2 sampled comes after version 2."""

        async def wait(self, timeout_s: float) -> None:
            await asyncio.sleep(0.01)
            if sink.latest >= 2 and bad:
                self.waiting += [Delivered(f"{100 + i}-0", each) for i, each in enumerate([*bad, *again])]
                bad.clear()

    state, _ = await train(run, sink, live=Traffic(good))
    assert state.rollbacks == 1 and sink.rollbacks[0][0] == 1
    assert sink.best == 1


def traffic(first: int, rewards: float, version: int | None, environment: str = "") -> list[LiveTrajectory]:
    """Four groups of two samples."""
    lives = [live(first + i, rewards + 0.1 * (i % 2), version) for i in range(8)]
    return [replace(each, trajectory=replace(each.trajectory, metadata={"environment": environment})) for each in lives]


class InTurn(Queue):
    """Each batch comes after the version that the one before has made; the run is stopped behind the last."""

    def __init__(self, sink: MemorySink, batches: Sequence[list[LiveTrajectory]]) -> None:
        super().__init__([])
        self.sink, self.batches, self.given = sink, batches, 0
        self.loops: list[TrainLoop] = []

    async def wait(self, timeout_s: float) -> None:
        await asyncio.sleep(0.005)
        state, given = self.loops[0].state, self.given
        if given == len(self.batches) == state.train_step + state.rollbacks:
            self.loops[0].stop()
        elif self.sink.latest > given < len(self.batches):
            self.waiting += [Delivered(f"{given}-{i}", each) for i, each in enumerate(self.batches[given])]
            self.given += 1


async def trained_on(tmp_path: Path, *batches: list[LiveTrajectory]) -> tuple[RunState, MemorySink]:
    """A train step on each batch, unless it rolls back."""
    sink = MemorySink()
    queue = InTurn(sink, batches)
    run = settings(
        tmp_path, source="live", live_trajectories=8, steps=99, live_max_lag=99, min_groups=4, parity_every=0,
        reward_margin=0.4,
    )  # fmt: skip
    return await train(run, sink, live=queue, on_loop=queue.loops.append)


async def test_traffic_on_the_base_is_no_measure_of_a_version(tmp_path: Path) -> None:
    """There is no version 0 to go back to."""
    state, sink = await trained_on(tmp_path, traffic(0, 1.0, version=0), traffic(8, -9.0, version=2))
    assert (state.rollbacks, sink.latest, sink.best) == (0, 3, 2)


async def test_a_version_that_is_judged_late_can_still_be_gone_back_to(tmp_path: Path) -> None:
    unjudged = [traffic(8 * i, 1.0, version=0) for i in range(4)]
    state, sink = await trained_on(tmp_path, *unjudged, traffic(32, 1.0, version=1), traffic(40, -9.0, version=5))
    assert state.rollbacks == 1 and sink.rollbacks[0][0] == 1


async def test_what_does_not_say_its_version_judges_the_one_that_is_served(tmp_path: Path) -> None:
    """As groups of Atropos do not."""
    state, sink = await trained_on(tmp_path, traffic(0, 1.0, None), traffic(8, -9.0, None))
    assert state.rollbacks == 1 and sink.rollbacks[0][0] == 1


async def test_traffic_that_turns_to_harder_tasks_is_no_collapse(tmp_path: Path) -> None:
    easy, hard = traffic(0, 1.0, 1, "easy"), traffic(8, -9.0, 2, "hard")
    state, _ = await trained_on(tmp_path, easy, hard)
    assert state.rollbacks == 0
    state, _ = await trained_on(tmp_path / "again", easy, hard, traffic(16, -19.0, 3, "hard"))
    assert state.rollbacks == 1, "worse on the same tasks"
