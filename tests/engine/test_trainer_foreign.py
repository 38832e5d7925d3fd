"""Somebody else moves `latest` of the policy in training: seen, said, and settled as the settings or a person say."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.adapters import GateCheck
from shared.errors import SetupError
from shared.training import CheckpointAnswer, CheckpointOrder, Order, Refusal, ResumeAnswer, ResumeOrder, UpdateOrder
from tests.engine.test_trainer_loop import settings
from tests.engine.test_trainer_orders import TEACHES, Unstopped
from tests.training.in_process import MemorySink
from tests.training.run import train
from tests.waiting import wait_until
from trainer.ring.ring import Candidate
from trainer.rollouts.groups import RolloutSource
from trainer.runs.loop import TrainLoop
from trainer.runs.metrics import read


class Meddled(MemorySink):
    """Once the third version is served, somebody makes the second one the latest."""

    moved = False

    async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
        await super().promote(version, gate, if_latest)
        if version == 3 and not self.moved:
            self.moved, self.latest = True, 2


class Person(Unstopped):
    """Posts an order when told to."""

    def __init__(self) -> None:
        super().__init__((), "order")

    async def ask(self, order: Order, name: str) -> Any:
        self.waiting.append(self.received(name, order))
        self.arrived.set()
        await wait_until(lambda: name in self.answers)
        return self.answers[name]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.runs.foreign.LOOK_S", 0.01)


async def taken(tmp_path: Path) -> MemorySink:
    """A store that a run in another folder has left: the second version of the policy is the latest."""
    _, sink = await train(settings(tmp_path / "theirs", parity_every=0, steps=1))
    assert sink.latest == sink.reserved == 2
    return sink


async def test_a_new_run_does_not_displace_a_version_that_it_does_not_go_on_from(tmp_path: Path) -> None:
    sink = await taken(tmp_path)
    ours = settings(tmp_path / "ours", parity_every=0, steps=1)
    for start_from in ("", "policy@1"):
        with pytest.raises(SetupError, match=r"policy@2 is served .* \(--start-from policy@2\).*--replace-latest"):
            await train(ours.model_copy(update={"start_from": start_from}), sink)
    assert sink.latest == 2 and sink.reserved == 2, "nothing was published"
    state, _ = await train(ours.model_copy(update={"start_from": "policy@2"}), sink)
    assert sink.latest == state.version == 4 and state.started_from == "policy@2"


async def test_a_new_run_replaces_the_latest_version_when_its_settings_say_so(tmp_path: Path) -> None:
    sink = await taken(tmp_path)
    ours = settings(tmp_path / "ours", parity_every=0, steps=1)
    state, _ = await train(ours.model_copy(update={"replace_latest": True}), sink)
    assert sink.latest == state.version == 4
    anew, _ = await train(ours.model_copy(update={"resume": "no"}), sink)  # over a run of its own it needs no leave
    assert sink.latest == anew.version == 6 and anew.train_step == 1


class Attended:
    """A run with a person beside it."""

    def __init__(self, tmp_path: Path, sink: MemorySink | None = None, **changes: Any) -> None:
        self.person, self.sink = Person(), sink or Meddled()
        self.run = settings(tmp_path, **({"parity_every": 0, "steps": 4} | changes))
        self.loops: list[TrainLoop] = []
        self.training = asyncio.create_task(train(self.run, self.sink, orders=self.person, on_loop=self.loops.append))

    async def paused(self) -> TrainLoop:
        await wait_until(lambda: self.training.done() or bool(self.loops and _held(self.loops[0])))
        assert not self.training.done(), "nobody was asked"
        return self.loops[0]


def _held(loop: TrainLoop) -> bool:
    return hasattr(loop, "_foreign") and bool(loop.held)


async def test_a_rollback_by_hand_pauses_the_run_and_is_left_alone(tmp_path: Path) -> None:
    run = Attended(tmp_path)
    loop = await run.paused()
    assert run.sink.latest == 2 and loop.state.version == 3
    ((kind, message),) = run.sink.alerts
    assert kind == "foreign_version" and "policy@2" in message and "policy@3" in message and "paused" in message
    refused = await run.person.ask(UpdateOrder(TEACHES), "update")
    assert isinstance(refused, Refusal) and refused.code == "conflict" and "training is paused" in refused.message
    assert isinstance(await run.person.ask(CheckpointOrder("meanwhile"), "save"), CheckpointAnswer)
    steps = loop.state.train_step
    run.sink.latest = 3
    state, _ = await run.training
    assert state.train_step == 4 > steps and run.sink.latest == state.version > 3
    lines = read(tmp_path / "policy" / "metrics.jsonl")
    assert sum("version 2 has become the latest" in line.gate for line in lines) <= 1, "what was under way, no more"


async def test_a_person_says_that_the_run_goes_on_from_their_version(tmp_path: Path) -> None:
    run = Attended(tmp_path)
    loop = await run.paused()
    weights = await _weights(run)
    theirs = run.sink.versions[2]
    assert any(not np.array_equal(weights[name], theirs[name]) for name in theirs)
    answer = await run.person.ask(ResumeOrder("adopt"), "resume")
    assert answer == ResumeAnswer("adopt", 2) and not loop.held
    state, sink = await run.training
    assert sink.latest == state.version and state.train_step == 4
    assert sink.candidates[min(v for v in sink.versions if v > 3 and v not in sink.rejected)].parent == 2


async def test_samples_that_were_under_way_when_a_version_was_adopted_are_no_alert(tmp_path: Path) -> None:
    run = Attended(tmp_path, max_lag=3)
    await run.paused()
    assert await run.person.ask(ResumeOrder("adopt"), "resume") == ResumeAnswer("adopt", 2)
    _, sink = await run.training
    assert [kind for kind, _ in sink.alerts] == ["foreign_version"]


async def test_a_person_says_that_the_runs_own_version_is_served_again(tmp_path: Path) -> None:
    run = Attended(tmp_path)
    await run.paused()
    answer = await run.person.ask(ResumeOrder("override"), "resume")
    assert answer == ResumeAnswer("override", 3)
    state, sink = await run.training
    assert sink.rollbacks[0][0] == 3 and "overridden" in sink.rollbacks[0][1]
    assert state.train_step == 4 and sink.latest == state.version
    late = ResumeOrder("adopt")
    again = Attended(tmp_path, sink, steps=5)
    refused = await again.person.ask(late, "late")
    assert isinstance(refused, Refusal) and "not paused" in refused.message
    await again.training


@pytest.mark.long
@pytest.mark.parametrize(("action", "parent"), [("adopt", 2), ("override", 3)])
async def test_the_settings_may_say_it_beforehand(tmp_path: Path, action: str, parent: int) -> None:
    sink = Meddled()
    state, _ = await train(
        settings(tmp_path, on_foreign_version=action, parity_every=0, steps=4, max_rejections=1), sink
    )
    assert [kind for kind, _ in sink.alerts] == ["foreign_version"]
    assert state.train_step == 4 and sink.latest == state.version
    assert sink.candidates[min(v for v in sink.versions if v > 3 and v not in sink.rejected)].parent == parent


async def test_a_version_that_does_not_fit_is_not_trained_on(tmp_path: Path) -> None:
    class Uploaded(Meddled):
        async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
            await super().promote(version, gate, if_latest)
            if self.latest == 2 and self.moved:
                self.latest, self.config = 9, self.config.replace(b"2.0", b"4.0")
                self.versions[9] = self.versions[1]

    run = Attended(tmp_path, Uploaded(), on_foreign_version="adopt")
    await run.paused()
    assert [kind for kind, _ in run.sink.alerts] == ["foreign_version"] * 2
    assert "does not fit this run" in run.sink.alerts[1][1] and "lora_scale" in run.sink.alerts[1][1]
    refused = await run.person.ask(ResumeOrder("adopt"), "resume")
    assert isinstance(refused, Refusal) and "lora_scale" in refused.message
    run.loops[0].stop()
    state, sink = await run.training
    assert sink.latest == 9 and state.version == 3, "a run that is stopped leaves the person's choice alone"


async def test_a_move_right_before_a_publish_is_not_overridden(tmp_path: Path) -> None:
    class Racing(MemorySink):
        async def stage(self, candidate: Candidate) -> int:
            version = await super().stage(candidate)
            if version == 4:
                self.latest = 1  # after the run has looked, and before it promotes
            return version

    run = Attended(tmp_path, Racing())
    loop = await run.paused()
    assert run.sink.latest == 1 and loop.state.version == 3
    assert [check.name for check in run.sink.rejected[4] if not check.passed] == ["latest"]
    assert loop.state.policy_step == 2, "the step is taken back"
    run.sink.latest = 3
    state, _ = await run.training
    assert state.train_step == 4


async def test_a_deleted_policy_is_published_anew_only_when_a_person_says_so(tmp_path: Path) -> None:
    class Deleted(Meddled):
        async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
            await super().promote(version, gate, if_latest)
            if self.latest == 2 and self.moved:
                self.latest = 0
                self.versions.clear()

        async def roll_back(self, version: int, reason: str) -> None:
            await self.fetch(version)
            await super().roll_back(version, reason)

    class Waiting:
        """Versions that are gone cannot be sampled from: as the ring, it says so."""

        def __init__(self, source: RolloutSource) -> None:
            self.source = source

        async def generate(self, request: Any) -> Any:
            await sink.fetch(int(request.adapter.partition("@")[2]))
            return await self.source.generate(request)

    sink = Deleted()
    person, loops = Person(), list[TrainLoop]()
    run = settings(tmp_path, parity_every=0, steps=4)
    training = asyncio.create_task(train(run, sink, orders=person, on_loop=loops.append, wrap_source=Waiting))
    await wait_until(lambda: training.done() or bool(loops and _held(loops[0])))
    assert not training.done() and "deleted" in sink.alerts[0][1]
    assert isinstance(await person.ask(ResumeOrder("adopt"), "adopt"), Refusal)
    assert isinstance(await person.ask(ResumeOrder("override"), "override"), ResumeAnswer)
    state, _ = await training
    assert state.train_step == 4 and sink.latest == state.version


async def test_what_a_person_chose_while_the_run_was_down_is_not_overridden_at_its_start(tmp_path: Path) -> None:
    sink = MemorySink()
    await train(settings(tmp_path, steps=2, parity_every=0), sink)
    served = sink.latest
    sink.latest = 1
    run = Attended(tmp_path, sink, steps=4)
    await run.paused()
    assert sink.latest == 1 and sink.reserved == served, "nothing was published"
    refused = await run.person.ask(UpdateOrder(TEACHES), "update")
    assert isinstance(refused, Refusal) and refused.code == "conflict"
    assert await run.person.ask(ResumeOrder("adopt"), "resume") == ResumeAnswer("adopt", 1)
    state, _ = await run.training
    assert state.train_step == 4 and sink.latest == state.version > served


@pytest.mark.long
async def test_a_killed_run_takes_what_it_has_served_after_its_checkpoint_for_its_own(tmp_path: Path) -> None:
    class Killed(MemorySink):
        async def set_best(self, version: int, value: float) -> None:
            if self.latest == 4:
                raise RuntimeError("killed")

    sink = Killed()
    with pytest.raises(RuntimeError, match="killed"):
        await train(
            settings(tmp_path, steps=6, group_size=8, parity_every=0, evaluate_every=3, evaluate_prompts=2), sink
        )
    assert sink.latest == 4
    state, _ = await train(settings(tmp_path, steps=6, parity_every=0), sink)
    assert state.train_step == 6 and sink.alerts == []


async def test_a_run_that_is_killed_right_before_it_serves_takes_the_version_before_for_its_own(tmp_path: Path) -> None:
    class Killed(MemorySink):
        dies = False

        async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
            if self.dies:
                raise RuntimeError("killed")
            await super().promote(version, gate, if_latest)

    sink = Killed()
    await train(settings(tmp_path, steps=1, parity_every=0), sink)
    sink.dies = True
    with pytest.raises(RuntimeError, match="killed"):
        await train(settings(tmp_path, steps=2, parity_every=0), sink)
    sink.dies = False
    state, _ = await train(settings(tmp_path, steps=2, parity_every=0), sink)
    assert state.train_step == 2 and sink.alerts == []


async def _weights(run: Attended) -> dict[str, Any]:
    return run.sink.versions[run.loops[0].state.version]
