"""The whole loop in one process, without a ring: it learns, resumes, refuses bad steps and takes back bad versions."""

import re
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_model.device import on_cpu
from shared.errors import ParallmError, SetupError, UnknownAdapterError
from shared.jobs import Message
from shared.trajectories import Trajectory
from tests.training.in_process import MemorySink
from tests.training.run import train
from trainer.learners.policy import PolicyLearner
from trainer.rollouts.environments import ArithmeticEnvironment, Observation, Outcome
from trainer.rollouts.groups import RolloutRequest
from trainer.rollouts.held_out import Evaluated
from trainer.runs.examine import Examiner
from trainer.runs.metrics import read
from trainer.settings import TrainSettings
from trainer.versions.checkpoint import CheckpointStore

ROUNDING = 1e-3 if on_cpu() else 1e-2  # nats between engine and trainer: on a GPU the weights stay in 16 bits

SMALL: dict[str, Any] = {
    "model": "models/tiny",
    "task_count": 8,
    "steps": 6,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_tokens": 5,
    "learning_rate": 1e-3,
    "min_groups": 4,
    "parity_every": 3,
    "distances_every": 2,
    "checkpoint_every": 2,
    "probe_prompts": 2,  # each costs several forward passes a train step
}


def settings(tmp_path: Path, **changes: Any) -> TrainSettings:
    return TrainSettings.model_construct(**(TrainSettings().model_dump() | SMALL | {"run_dir": tmp_path} | changes))


@pytest.mark.long
async def test_sixteen_tasks_are_learned_by_heart(tmp_path: Path) -> None:
    recipe = settings(
        tmp_path,
        task_count=16,
        prompts_per_step=16,
        steps=10,
        group_size=8,
        learning_rate=2e-3,
        evaluate_every=5,
        evaluate_prompts=16,
    )
    state, sink = await train(recipe)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert len(lines) == 10
    rewards = [line.reward for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    assert lines[-1].held_out is not None and lines[-1].held_out >= 0.75
    assert state.rejected == 0
    assert sink.latest == state.version == 11  # the first version is the base itself


async def test_one_step_off_policy_and_never_more(tmp_path: Path) -> None:
    await train(settings(tmp_path, max_lag=1))
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert [line.lag_max for line in lines] == [0, 1, 1, 1, 1, 1]
    assert all(line.dropped == 0 for line in lines)
    measured = [line for line in lines if line.mismatch is not None]
    assert [line.train_step for line in measured] == [0, 2, 4]
    assert all(line.mismatch is not None and line.mismatch < ROUNDING for line in measured), (
        "same weights, other kernel"
    )
    assert measured[0].staleness == 0 and (measured[1].staleness or 0) > 0


@pytest.mark.long
async def test_on_policy_has_no_lag_and_no_staleness(tmp_path: Path) -> None:
    await train(settings(tmp_path, max_lag=0, distances_every=1))
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert all(line.lag_max == 0 and line.staleness == 0 for line in lines)


@pytest.mark.long
async def test_a_run_in_pieces_gives_the_same_bytes_as_one_run(tmp_path: Path) -> None:
    whole = settings(tmp_path / "whole", max_lag=0, steps=6)
    await train(whole)
    for steps in (2, 4, 6):
        await train(settings(tmp_path / "pieces", max_lag=0, steps=steps))
    name = "policy/checkpoints/step-000006/adapters.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()
    lines = [read(tmp_path / part / "policy" / "metrics.jsonl") for part in ("whole", "pieces")]
    assert [line.indices for line in lines[0]] == [line.indices for line in lines[1]]
    assert [line.loss for line in lines[0]] == [line.loss for line in lines[1]]


@pytest.mark.long
@pytest.mark.parametrize("max_lag", [0, 1])
async def test_after_a_crash_every_group_is_consumed_exactly_once(tmp_path: Path, max_lag: int) -> None:
    """The source dies in the middle of step 4; the checkpoint of step 2 knows what was under way."""
    asked = 0

    class Dying:
        def __init__(self, source: Any) -> None:
            self.source = source

        async def generate(self, request: RolloutRequest) -> list[Trajectory]:
            nonlocal asked
            asked += 1
            if asked == 18:
                raise RuntimeError("killed")
            answer: list[Trajectory] = await self.source.generate(request)
            return answer

    run = settings(tmp_path, max_lag=max_lag, parity_every=0)
    with pytest.raises(RuntimeError, match="killed"):
        await train(run, wrap_source=Dying)
    await train(run)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert [line.train_step for line in lines] == list(range(6))
    consumed = [index for line in lines for index in line.indices]
    assert len(consumed) == len(set(consumed)) == 24
    assert max(consumed) < 24 + max_lag * 4


async def test_a_learning_rate_a_thousand_times_too_high_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParallmError, match=r"2 train steps in a row failed the gate: .*update_norm"):
        await train(settings(tmp_path, learning_rate=1.0, max_rejections=2, checkpoint_every=0))
    rejected = sorted((tmp_path / "policy" / "rejected").iterdir())
    assert [path.name for path in rejected] == ["step-000000", "step-000001"]
    assert "probe_kl" in (rejected[0] / "gate.json").read_text()


@pytest.mark.long
async def test_a_refused_step_leaves_the_served_version_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One poisoned train step in the middle: NaN gradients must not reach a worker, nor the next step."""
    sink = MemorySink()
    original = PolicyLearner.train

    @wraps(PolicyLearner.train)
    def poisoned(self: PolicyLearner, groups: Any, step: int, *rest: Any) -> Any:
        if step == 2:
            groups = [_spoiled(group) for group in groups]
        return original(self, groups, step, *rest)

    monkeypatch.setattr(PolicyLearner, "train", poisoned)
    state, _ = await train(settings(tmp_path), sink)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert "finite_gradients" in lines[2].gate
    assert [bool(line.gate) for line in lines] == [False, False, True, False, False, False]
    assert lines[2].version == lines[1].version
    assert state.rejected == 1 and state.policy_step == 5
    assert [kind for kind, _ in sink.alerts] == ["gate_failed"]
    (checks,) = sink.rejected.values()
    assert [check.name for check in checks if not check.passed] == ["finite_gradients"]
    assert (tmp_path / "policy" / "rejected" / "step-000002" / "gate.json").exists()
    assert all(np.isfinite(value).all() for value in sink.versions[sink.latest].values())


def _spoiled(group: Any) -> Any:
    return replace(group, samples=tuple(replace(sample, advantage=float("nan")) for sample in group.samples))


def _served(sink: MemorySink) -> Any:
    return sink.versions[sink.latest].items()


class Turning:
    """A task whose reward turns against what was learned: the collapse that the watch must see."""

    name = "turning"

    def __init__(self, after: int, until: int = 1 << 30) -> None:
        self._tasks = ArithmeticEnvironment(seed=0, count=8)
        self._steps, self._after, self._until = 0, after, until

    async def reset(self, index: int) -> Observation:
        return await self._tasks.reset(index)

    async def step(self, observation: Observation, action: str) -> Outcome:
        self._steps += 1
        outcome = await self._tasks.step(observation, action)
        assert outcome.reward is not None
        turned = self._after < self._steps <= self._until
        return Outcome(outcome.reward - 5.0 if turned else outcome.reward)


async def test_a_collapse_of_rewards_rolls_back_by_itself(tmp_path: Path) -> None:
    sink = MemorySink()
    run = settings(tmp_path, steps=6, max_lag=0, reward_margin=0.4, parity_every=0)
    with pytest.raises(ParallmError, match=r"3 rollbacks and no better version.*rewards or tasks have changed"):
        await train(run, sink, environment=Turning(after=4 * 16))
    steps = [line.train_step for line in read(tmp_path / "policy" / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3], "nothing is learned from rewards that have turned"
    assert [kind for kind, _ in sink.alerts] == ["reward_collapse"] * 3 + ["gave_up"]
    assert all(np.array_equal(value, sink.versions[sink.rollbacks[0][0]][name]) for name, value in _served(sink))
    version, reason = sink.rollbacks[0]
    assert "earned less than version" in reason
    assert version <= 4
    assert ("reward_collapse", reason) in sink.alerts
    served = np.concatenate([v.ravel() for v in sink.versions[sink.latest].values()])
    assert np.isfinite(served).all()


async def test_a_stopped_run_saves_and_goes_on_later(tmp_path: Path) -> None:
    class Stopping(ArithmeticEnvironment):
        async def reset(self, index: int) -> Observation:
            if index == 9:
                loops[0].stop()
            return await super().reset(index)

    loops: list[Any] = []
    run = settings(tmp_path, max_lag=0, steps=4, checkpoint_every=0, parity_every=0)
    state, _ = await train(run, environment=Stopping(seed=0, count=8), on_loop=loops.append)
    assert 0 < state.train_step < 4
    loops.clear()
    state, _ = await train(run)
    assert state.train_step == 4
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    consumed = [index for line in lines for index in line.indices]
    assert consumed == list(range(16))


@pytest.mark.long
async def test_tool_turns_are_trained_through_the_loop(tmp_path: Path) -> None:
    class Twice:
        """Asks for the sum again after a first reply."""

        name = "twice"
        first = True

        async def reset(self, index: int) -> Observation:
            message: Message = {"role": "user", "content": f"What is {10 + index % 4} + 11?"}
            return Observation((message,), info=(0, str(21 + index % 4)))

        async def step(self, observation: Observation, action: str) -> Outcome:
            turn, answer = observation.info
            again: Message = {"role": "user", "content": "Again?"}
            if turn == 0:
                return Outcome(0.5 * (action == answer), done=False, messages=(again,), info=(1, answer))
            return Outcome(0.5 * (action == answer))

    state, _ = await train(settings(tmp_path, steps=3, max_turns=2), environment=Twice())
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert state.train_step == 3
    assert all(line.completion_tokens > 6 for line in lines), "two replies and what stands between them"
    measured = [line.mismatch for line in lines if line.mismatch is not None]
    assert measured and max(measured) < ROUNDING


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"lora_rank": 8}, r"lora_rank 16 there, 8 here.*--resume no"),
        ({"lora_scale": 4.0}, r"lora_scale 2\.0 there, 4\.0 here"),
        ({"lora_targets": ("nowhere",)}, r"bad settings: no linear layer matches"),
        ({"resume": "best"}, r"no best checkpoint yet, only step-000002"),
    ],
)
async def test_what_does_not_fit_the_earlier_run_is_refused_and_changes_nothing(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    run = settings(tmp_path, steps=2, parity_every=0, min_groups=99)
    await train(run)
    before = (run.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(SetupError, match=complaint):
        await train(run.model_copy(update={"steps": 3, **changes}))
    assert (run.folder / "metrics.jsonl").read_bytes() == before


async def test_a_run_that_begins_anew_sets_the_earlier_one_aside(tmp_path: Path) -> None:
    run = settings(tmp_path, steps=2, parity_every=0)
    await train(run)
    state, _ = await train(run.model_copy(update={"steps": 1, "resume": "no", "lora_rank": 8}))
    assert state.train_step == 1 and len(read(run.folder / "metrics.jsonl")) == 1
    aside = run.folder.with_name("policy.1")
    assert len(read(aside / "metrics.jsonl")) == 2
    earlier = CheckpointStore(aside / "checkpoints").load()
    assert earlier is not None and earlier.state.train_step == 2
    assert CheckpointStore(run.folder / "checkpoints").names() == ["step-000001"]


@pytest.mark.long
async def test_a_version_that_the_store_has_deleted_is_gone_back_to_under_a_new_number(tmp_path: Path) -> None:
    class Forgetful(MemorySink):
        async def roll_back(self, version: int, reason: str) -> None:
            raise UnknownAdapterError(f"there is no adapter policy@{version}")

    sink = Forgetful()
    run = settings(tmp_path, steps=6, max_lag=0, reward_margin=0.4, parity_every=0)
    state, _ = await train(run, sink, environment=Turning(after=4 * 16, until=5 * 16))
    ((kind, reason),) = sink.alerts
    found = re.search(r"version (\d+) earned less than version (\d+)", reason)
    assert kind == "reward_collapse" and found is not None and state.rollbacks == 1
    bad, good = (int(number) for number in found.groups())
    again = sink.versions[bad + 1]
    assert all(np.array_equal(value, again[name]) for name, value in sink.versions[good].items())
    assert sink.latest > bad + 1, "and training went on from it"


async def test_a_slow_decline_on_held_out_tasks_is_measured_from_the_best_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.9, 0.8, 0.7, ...: each is in reach of the one before it, and 0.7 is not in reach of 0.9."""
    evaluations = iter((0.9, 0.8, 0.7, 0.6, 0.5))

    async def evaluate(self: Examiner, adapter: str, step: int) -> Evaluated:
        reward = next(evaluations)
        return Evaluated(reward, 1.0 - reward)

    monkeypatch.setattr(Examiner, "evaluate", evaluate)
    sink = MemorySink()
    run = settings(tmp_path, steps=3, max_lag=0, parity_every=0, evaluate_every=1, reward_margin=0.15, min_groups=99)
    state, _ = await train(run, sink)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert [line.gate for line in lines] == ["", "reward_floor: 0.7, floor 0.75", "reward_floor: 0.6, floor 0.75"]
    assert (state.held_out, state.best_held_out) == (0.8, 0.9)
    assert [line.held_out_true for line in lines] == pytest.approx([0.2, 0.3, 0.4]), "of refused ones, too"
    assert state.held_out_true == pytest.approx(0.2), "no version is judged by the second reward"


async def test_a_base_that_workers_no_longer_serve_refuses_the_version(tmp_path: Path) -> None:
    class Exchanged(MemorySink):
        async def promote(self, version: int, gate: Any, if_latest: int | None = None) -> None:
            await super().promote(version, gate, if_latest)
            self.base = "f" * 64 if version == 2 else ""

    sink = Exchanged()
    await train(settings(tmp_path, steps=2, max_lag=0, parity_every=0), sink)
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert lines[0].gate == "" and lines[1].gate.startswith("base_model: ") and "is not ffffffffffff" in lines[1].gate
    assert sink.latest == 2


async def test_the_best_version_is_the_anchor_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchored: list[Any] = []
    original = PolicyLearner.anchor

    @wraps(PolicyLearner.anchor)
    def noted(self: PolicyLearner, best: Any) -> None:
        anchored.append(best)
        original(self, best)

    monkeypatch.setattr(PolicyLearner, "anchor", noted)
    sink = MemorySink()
    state, _ = await train(settings(tmp_path, steps=2, max_lag=0, parity_every=0), sink)
    assert state.best_version and anchored[0] is None
    best = sink.versions[state.best_version]
    assert all(np.array_equal(anchored[-1][name], value) for name, value in best.items())
    anchored.clear()
    await train(settings(tmp_path, steps=2, max_lag=0, parity_every=0), sink)
    assert all(np.array_equal(anchored[0][name], value) for name, value in best.items())
