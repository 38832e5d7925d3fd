"""Orders to a running trainer, carried out between train steps, in one process without a ring."""

import asyncio
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from shared.errors import ParallmError
from shared.frames import VersionSpan
from shared.redis.training.orders import Received
from shared.training import Answer, CheckpointAnswer, CheckpointOrder, Order, Refusal, UpdateAnswer, UpdateOrder
from shared.trajectories import LiveTrajectory, Reward, Trajectory
from tests.engine.test_trainer_loop import settings
from tests.training.in_process import MemorySink
from tests.training.run import train
from trainer.learners.policy import PolicyLearner
from trainer.rollouts.environments import ArithmeticEnvironment, Observation, Outcome
from trainer.runs.loop import TrainLoop
from trainer.runs.metrics import read
from trainer.versions.checkpoint import CheckpointStore

MADE_UP = {"max_logprob_gap": 1e38}  # log-probabilities that no version has


class Desk:
    """Orders that are there from the start; the run is stopped when all have been answered."""

    def __init__(self, orders: Sequence[Order], name: str) -> None:
        self.waiting = [self.received(f"{name}-{i}", order) for i, order in enumerate(orders)]
        self.open = {each.id for each in self.waiting}
        self.arrived = asyncio.Event()
        self.answers: dict[str, Answer] = {}
        self.loops: list[Any] = []

    @staticmethod
    def received(order_id: str, order: Order) -> Received[bytes]:
        return Received("0-0", order_id, msgspec.json.encode(order), 0, again=True)

    async def take(self, consumer: str, count: int = 1) -> list[Received[bytes]]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    async def wait(self, timeout_s: float) -> None:
        self.arrived.clear()
        await self.arrived.wait()

    async def reply(self, order_id: str, answer: bytes) -> None:
        self.answers[order_id] = msgspec.json.decode(answer, type=Answer)
        self.settled(order_id)

    async def finish(self, received: Received[Any]) -> None:
        self.settled(received.id)

    def settled(self, order_id: str) -> None:
        self.open.discard(order_id)
        if not self.open:
            self.loops[0].stop()


class Unstopped(Desk):
    """The run ends by itself."""

    def settled(self, order_id: str) -> None:
        """Nothing."""


async def carried_out(
    tmp_path: Path, *orders: Order, name: str = "order", **changes: Any
) -> tuple[list[Any], MemorySink, Any]:
    desk, sink = Desk(orders, name), MemorySink()
    run = settings(tmp_path, **({"source": "posted", "checkpoint_every": 0} | MADE_UP | changes))
    state, _ = await train(run, sink, orders=desk, on_loop=desk.loops.append)
    return [desk.answers[each] for each in sorted(desk.answers)], sink, state


def posted(reward: float, logprob: float = -1.0, completion: Sequence[int] = (40, 41)) -> LiveTrajectory:
    sampled = Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=(5, 6, 7),
        completion_ids=tuple(completion),
        text="",
        logprobs=(logprob,) * len(completion),
        finish_reason="stop",
        spans=(VersionSpan("policy@1", 0, len(completion)),),
        reward=Reward("mine", reward),
    )
    return LiveTrajectory(f"t{reward}", "policy", "tiny", sampled)


GOOD, BAD = posted(1.0), posted(0.0, completion=(50, 51))
TEACHES = (GOOD, BAD)


async def test_a_posted_update_is_one_train_step_that_is_served(tmp_path: Path) -> None:
    (answer,), sink, state = await carried_out(tmp_path, UpdateOrder(TEACHES, checkpoint_name="mine"))
    assert isinstance(answer, UpdateAnswer)
    assert (answer.status, answer.served, answer.version, answer.checkpoint) == ("updated", True, 2, "mine")
    assert answer.trajectories == 2 and answer.reward == 0.5 and answer.dropped == {}
    assert sink.latest == 2
    changed = [n for n, v in sink.versions[2].items() if not np.array_equal(v, sink.versions[1][n])]
    assert changed
    assert (state.train_step, state.posted_steps, state.own_steps) == (1, 1, 0)
    (line,) = read(tmp_path / "policy" / "metrics.jsonl")
    assert line.source == "posted" and line.indices == ()
    assert "mine" in CheckpointStore(tmp_path / "policy" / "checkpoints").names()


async def test_an_update_without_inference_is_learned_and_served_with_the_next(tmp_path: Path) -> None:
    quiet = UpdateOrder(TEACHES, update_inference=False)
    answers, sink, state = await carried_out(tmp_path, quiet, UpdateOrder(TEACHES))
    assert [(a.status, a.served, a.version, a.policy_step) for a in answers] == [
        ("updated", False, 1, 1),
        ("updated", True, 2, 2),
    ]
    assert sorted(sink.versions) == [1, 2] and state.unpublished == 0


async def test_unserved_updates_survive_a_restart_unserved(tmp_path: Path) -> None:
    await carried_out(tmp_path, UpdateOrder(TEACHES, update_inference=False))
    (answer,), sink, state = await carried_out(tmp_path, CheckpointOrder("again"), name="second")
    assert answer == CheckpointAnswer("again", 1)
    assert sink.versions == {}, "nothing was served anew"
    assert state.policy_step == 1 and state.unpublished == 1


async def test_a_nan_update_is_rejected_and_all_is_as_before(tmp_path: Path) -> None:
    poison = (posted(1.0, logprob=-1e30), posted(0.0, logprob=-1e30, completion=(50, 51)))
    answers, sink, state = await carried_out(
        tmp_path, UpdateOrder(TEACHES), UpdateOrder(poison), UpdateOrder(TEACHES), max_rejections=1, dual_clip=0.0
    )
    assert [a.status for a in answers] == ["updated", "rejected", "updated"]
    assert "finite_gradients" in answers[1].gate and answers[1].loss is None
    assert answers[1].version == 2 and sink.latest == state.version
    assert [kind for kind, _ in sink.alerts] == ["gate_failed"]
    assert sink.rejected.keys() == {3}
    assert (tmp_path / "policy" / "rejected" / "step-000001" / "gate.json").exists()
    again, _, _ = await carried_out(tmp_path / "clean", UpdateOrder(TEACHES), UpdateOrder(TEACHES))
    twice = CheckpointStore(tmp_path / "clean" / "policy" / "checkpoints").load()
    thrice = CheckpointStore(tmp_path / "policy" / "checkpoints").load()
    assert twice is not None and thrice is not None and again
    for name, moment in twice.optimizer.items():
        assert np.array_equal(moment, thrice.optimizer[name]), f"{name}: a refused step leaves the moments alone"


async def test_equal_rewards_teach_nothing_and_one_sample_neither(tmp_path: Path) -> None:
    answers, sink, _ = await carried_out(tmp_path, UpdateOrder((GOOD, posted(1.0))), UpdateOrder((GOOD,)))
    assert [a.status for a in answers] == ["no_signal", "no_signal"]
    assert [a.dropped for a in answers] == [{"equal_rewards": 1}, {"nothing_to_compare_with": 1}]
    assert sink.latest == 1 and sink.alerts == []


async def test_posted_rewards_teach_a_value_head_and_advantages_are_refused(tmp_path: Path) -> None:
    single, wild = UpdateOrder((posted(1.0),)), UpdateOrder((posted(1e38), posted(-1e38)))
    given = UpdateOrder((replace(posted(1.0), advantage=2.0),))
    answers, sink, _ = await carried_out(tmp_path, given, wild, single, loss="ppo")
    assert isinstance(answers[0], Refusal) and "give rewards" in answers[0].message
    assert (answers[1].status, answers[1].version) == ("rejected", 1) and "finite" in answers[1].gate
    assert (answers[2].status, answers[2].version, answers[2].trajectories) == ("updated", 3, 1)
    assert all(np.isfinite(value).all() for value in sink.versions[3].values())
    assert sink.versions[3]["heads.value.bias"][0] > 0


async def test_too_many_unserved_updates_are_refused_beside_own_prompts(tmp_path: Path) -> None:
    quiet = UpdateOrder(TEACHES, update_inference=False)
    answers, _, _ = await carried_out(tmp_path, quiet, quiet, source="prompts", steps=50, max_lag=1)
    assert answers[0].status == "updated"
    assert isinstance(answers[1], Refusal | UpdateAnswer)
    if isinstance(answers[1], Refusal):  # unless a step of our own has served in between
        assert answers[1].code == "conflict" and "max_lag" in answers[1].message


async def test_a_checkpoint_knows_the_orders_that_its_weights_know(tmp_path: Path) -> None:
    await carried_out(tmp_path, UpdateOrder(TEACHES))
    answers, sink, state = await carried_out(tmp_path, UpdateOrder(TEACHES))
    assert answers == [], "order-0 comes again after a kill, and is in the weights already"
    assert state.policy_step == 1 and sink.latest == 1


class Silent(ArithmeticEnvironment):
    """Nothing is ever right."""

    async def step(self, observation: Observation, action: str) -> Outcome:
        return Outcome(0.0)


async def test_a_run_without_signal_says_so_once(tmp_path: Path) -> None:
    sink = MemorySink()
    state, _ = await train(settings(tmp_path, steps=4, no_signal_after=2), sink, environment=Silent(count=8))
    assert [kind for kind, _ in sink.alerts] == ["no_signal"]
    assert "the last one: 4 groups of 16 samples: 4 groups with equal rewards" in sink.alerts[0][1]
    assert state.train_step == 4 and state.policy_step == 0


class Broken(ArithmeticEnvironment):
    """Every sample fails."""

    async def step(self, observation: Observation, action: str) -> Outcome:
        raise KeyError("answer")


async def test_a_run_whose_samples_all_fail_ends_and_says_why(tmp_path: Path) -> None:
    sink, loops = MemorySink(), list[TrainLoop]()
    run = settings(tmp_path, steps=9, no_signal_after=2)
    with pytest.raises(ParallmError, match=r"every sample of 2 train steps in a row failed: .* KeyError: 'answer'"):
        await train(run, sink, environment=Broken(count=8), on_loop=loops.append)
    assert [kind for kind, _ in sink.alerts] == ["no_signal", "gave_up"]
    assert all("16 samples failed, the first one: KeyError: 'answer' (test_" in message for _, message in sink.alerts)
    assert (loops[0].state.trajectories, loops[0].state.failed) == (32, 32)


async def test_a_short_run_whose_samples_all_failed_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(ParallmError, match="every sample failed, the first one: KeyError: 'answer'"):
        await train(settings(tmp_path, steps=1), environment=Broken(count=8))
    state, _ = await train(settings(tmp_path, steps=2))
    assert (state.train_step, state.trajectories, state.failed) == (2, 32, 16), "mended, it goes on"


async def test_a_posted_update_that_breaks_is_refused_and_all_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = PolicyLearner.train
    left = [1]

    @wraps(PolicyLearner.train)
    def short_of_memory(self: PolicyLearner, *arguments: Any) -> Any:
        trained = yield from whole(self, *arguments)
        if left:
            left.clear()
            raise RuntimeError("[malloc] Unable to allocate 99 bytes")
        return trained

    await carried_out(tmp_path / "clean", UpdateOrder(TEACHES))
    monkeypatch.setattr(PolicyLearner, "train", short_of_memory)
    answers, _, state = await carried_out(tmp_path, UpdateOrder(TEACHES), UpdateOrder(TEACHES))
    assert isinstance(answers[0], Refusal) and answers[0].code == "engine_error"
    assert "RuntimeError: [malloc]" in answers[0].message
    assert isinstance(answers[1], UpdateAnswer) and (answers[1].status, state.train_step) == ("updated", 1)
    names = ("adapters.safetensors", "optimizer.safetensors")
    saved = [tmp_path / part / "policy/checkpoints/step-000001" for part in ("clean", ".")]
    assert [(saved[0] / name).read_bytes() for name in names] == [(saved[1] / name).read_bytes() for name in names]


async def test_posted_updates_take_nothing_of_the_schedule(tmp_path: Path) -> None:
    teaches = UpdateOrder(TEACHES)
    desk = Unstopped([teaches, teaches, teaches], "order")
    run = settings(
        tmp_path, steps=2, schedule="linear", warmup_steps=1, final_rate_fraction=0.0, parity_every=0, **MADE_UP
    )
    await train(run, orders=desk)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert [line.learning_rate for line in lines if line.source == "prompts"] == [1e-3, 1e-3]
    assert {line.learning_rate for line in lines if line.source == "posted"} == {1e-3}


async def test_posted_updates_that_the_gate_refuses_do_not_end_the_run(tmp_path: Path) -> None:
    poison = UpdateOrder((posted(1.0, logprob=-1e30), posted(0.0, logprob=-1e30, completion=(50, 51))))
    desk = Unstopped([poison, poison], "order")
    run = settings(tmp_path, steps=1, max_rejections=2, **MADE_UP)
    state, _ = await train(run, orders=desk, environment=Silent(count=8))
    assert (state.rejected, state.own_steps) == (2, 1)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_marks_its_sample_alone(tmp_path: Path, reward: float) -> None:
    class Odd(ArithmeticEnvironment):
        async def step(self, observation: Observation, action: str) -> Outcome:
            return Outcome(reward) if len(action) % 2 else await super().step(observation, action)

    state, sink = await train(settings(tmp_path, steps=2), environment=Odd(count=8))
    assert state.train_step == 2
    assert all(np.isfinite(value).all() for value in sink.versions[sink.latest].values())
    assert all(np.isfinite(line.reward) for line in read(tmp_path / "policy" / "metrics.jsonl"))


async def _true(tmp_path: Path) -> tuple[MemorySink, list[LiveTrajectory]]:
    """What a worker sampled with the first version, as it would be posted: log-probabilities are its own."""
    sampled: list[Trajectory] = []

    class Noting:
        def __init__(self, source: Any) -> None:
            self.source = source

        async def generate(self, request: Any) -> list[Trajectory]:
            found: list[Trajectory] = await self.source.generate(request)
            sampled.extend(found)
            return found

    sink = MemorySink()
    run = settings(tmp_path / "sampled", steps=1, prompts_per_step=2, group_size=4, parity_every=0)
    await train(run, sink, wrap_source=Noting)
    rewarded = [replace(t, reward=Reward("mine", float(i % 2))) for i, t in enumerate(sampled[:8])]
    return sink, [LiveTrajectory(f"t{i}", "policy", "tiny", each) for i, each in enumerate(rewarded)]


async def test_posted_log_probabilities_are_those_of_the_version_that_they_name(tmp_path: Path) -> None:
    _, good = await _true(tmp_path)
    third = good[3].trajectory
    wrong = [*good[:3], replace(good[3], trajectory=replace(third, logprobs=(-9.0,) * len(third.logprobs))), *good[4:]]
    nan = [
        replace(good[0], trajectory=replace(good[0].trajectory, logprobs=(-1e38,) * len(good[0].trajectory.logprobs)))
    ]
    answers, sink, state = await carried_out(
        tmp_path, *(UpdateOrder(tuple(each)) for each in (wrong, nan, good)), max_logprob_gap=0.5
    )
    assert [type(answer) for answer in answers] == [Refusal, Refusal, UpdateAnswer]
    assert answers[0].code == "logprobs_mismatch" and "trajectories[3].logprobs" in answers[0].message
    assert "policy@1" in answers[0].message and "trajectories[0].logprobs: 1e+38" in answers[1].message
    assert (answers[2].status, answers[2].unchecked, state.train_step) == ("updated", 0, 1)
    assert sink.latest == 2, "what was refused has changed nothing"


async def test_a_version_that_is_gone_is_not_compared_and_told(tmp_path: Path) -> None:
    _, good = await _true(tmp_path)

    def named(live: LiveTrajectory, version: str) -> LiveTrajectory:
        span = VersionSpan(version, 0, len(live.trajectory.completion_ids))
        return replace(live, trajectory=replace(live.trajectory, spans=(span,)))

    unnamed = tuple(named(each, "") for each in good)  # the first version is the base: it is near enough
    gone = tuple(named(each, "policy@77" if i < 2 else "other@1") for i, each in enumerate(good[:3]))
    answers, _, _ = await carried_out(
        tmp_path, UpdateOrder(unnamed), UpdateOrder((*gone, *good[3:])), max_logprob_gap=0.5
    )
    assert [(answer.status, answer.unchecked) for answer in answers] == [("updated", 0), ("updated", 3)]
