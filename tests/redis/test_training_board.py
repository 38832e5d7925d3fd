"""The board of a policy's training: who owns it, totals, curves, alerts."""

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from api.ops.dashboard.curves import training_charts
from shared.errors import ConflictError
from shared.redis import keys
from shared.redis.training.board import TrainingBoard, trained_policies
from shared.training import ALERT_KINDS, Alert, BoardSample, TrainerState, TrainerStatus, TrainingPoint, TrajectoryStats
from tests.waiting import HANG_S, wait_until
from trainer.ring import board as board_module
from trainer.ring.board import RingBoard

STATUS = TrainerStatus(
    policy="policy", run="run", owner="a", heartbeat_ms=5, loss=0.25, version=3, checkpoints=("step-1", "mine"),
    eta_s=90.0, samples=(BoardSample(0.5, "prompt", "reply", components={"form": 1.0}), BoardSample(None, "", "")),
)  # fmt: skip


def point(step: int, **fields: float) -> TrainingPoint:
    return TrainingPoint(train_step=step, policy_step=step, version=step, at_ms=step, **fields)  # type: ignore[arg-type]


async def test_a_status_is_read_as_it_was_written(redis: Redis) -> None:
    board = TrainingBoard(redis, "policy")
    assert await board.status() is None
    await board.write(STATUS)
    assert await board.status() == STATUS
    assert await trained_policies(redis) == ["policy"]
    await board.write(msgspec.structs.replace(STATUS, loss=None))
    status = await board.status()
    assert status is not None and status.loss is None, "a loss that is no number takes the old one away"
    assert await board.trajectories() == TrajectoryStats()


async def test_curves_hold_each_train_step_once_also_after_a_resume(redis: Redis) -> None:
    board = TrainingBoard(redis, "policy")
    for step, reward in ((0, 0.0), (1, 0.1), (2, 0.2), (1, 0.5), (2, 0.6), (3, 0.7)):
        await board.add(point(step, reward=reward))
    assert [(p.train_step, p.reward) for p in await board.points()] == [(0, 0.0), (1, 0.5), (2, 0.6), (3, 0.7)]


async def test_both_rewards_of_held_out_tasks_are_drawn(redis: Redis) -> None:
    """A learned reward that goes on rising while the true one falls is seen in one chart."""
    board = TrainingBoard(redis, "policy")
    await board.add(point(0, reward=0.1, held_out=0.2, held_out_true=0.5))
    await board.add(point(1, reward=0.3))
    await board.add(point(2, reward=0.5, held_out=0.6, held_out_true=0.1))
    assert training_charts("rl", await board.points())["reward"] == {
        "x": [0, 1, 2],
        "series": [[0.1, 0.3, 0.5], [0.2, None, 0.6], [0.5, None, 0.1]],
    }


@pytest.mark.cluster
async def test_an_alert_is_an_event_a_count_and_an_entry(redis: Redis) -> None:
    board = TrainingBoard(redis, "policy")
    async with redis.pubsub() as channel:
        await channel.subscribe(keys.alert_channel())
        await board.alert("gate_failed", "update_norm: 3")
        await board.write(STATUS)
        heard = [m async for m in _messages(channel)]
    assert [(a.kind, a.message) for a in await board.alerts()] == [("gate_failed", "update_norm: 3")]
    assert heard == await board.alerts()
    assert await board.alert_counts() == {kind: int(kind == "gate_failed") for kind in ALERT_KINDS}


async def _messages(channel: Any) -> AsyncIterator[Alert]:
    async with asyncio.timeout(HANG_S):
        async for message in channel.listen():
            if message["type"] == "message":
                yield msgspec.json.decode(message["data"], type=Alert)
                return


@pytest.mark.cluster
async def test_a_policy_has_one_trainer(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "WAIT_FOR_OWNER_S", 0.1)
    async with RingBoard(TrainingBoard(redis, "policy")) as first:
        assert await TrainingBoard(redis, "policy").alive() == first.owner
        with capture_logs() as lines, pytest.raises(ConflictError, match=f"has a trainer already: {first.owner}"):
            async with RingBoard(TrainingBoard(redis, "policy")):
                pass
        (line,) = lines  # before it waits
        assert (line["event"], line["trainer"], line["waits_s"]) == ("train.policy_taken", first.owner, 0.1)
    assert await TrainingBoard(redis, "policy").alive() == ""


async def test_a_dead_trainer_of_this_host_is_not_waited_for(redis: Redis) -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    board = TrainingBoard(redis, "policy")
    host = (await _owner(redis)).partition(":")[0]
    await board.hold(f"{host}:{gone.pid}:dead")
    async with RingBoard(TrainingBoard(redis, "policy")) as mine:
        assert await board.alive() == mine.owner


async def test_what_keeps_a_run_from_learning_is_shown_with_the_next_heartbeat(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "BEAT_S", 0.01)
    board = TrainingBoard(redis, "policy")

    async def shown(problem: str) -> bool:
        status = await board.status()
        return status is not None and status.problem == problem

    async with RingBoard(board) as mine:
        mine.begin(lambda state: msgspec.structs.replace(STATUS, state=state), lambda: None)
        for problem in ("cannot reach Atropos", ""):
            mine.note(problem)
            await wait_until(partial(shown, problem))


async def _owner(redis: Redis) -> str:
    async with RingBoard(TrainingBoard(redis, "other")) as other:
        return other.owner


async def test_a_trainer_whose_policy_was_taken_stops(redis: Redis) -> None:
    stopped = []

    def status(state: TrainerState) -> TrainerStatus:
        return msgspec.structs.replace(STATUS, state=state)

    async with RingBoard(TrainingBoard(redis, "policy")) as mine:
        mine.begin(status, lambda: stopped.append(True))
        await mine.show("training")
        found = await TrainingBoard(redis, "policy").status()
        assert found is not None and (found.state, found.owner) == ("training", mine.owner)
        assert found.heartbeat_ms > 5
        await TrainingBoard(redis, "policy").hold("another", instead_of=mine.owner)
        await wait_until(lambda: bool(stopped))
