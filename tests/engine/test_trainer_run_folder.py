"""A run's folder: full disks, other rings, other trainers."""

import errno
import os
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SetupError
from tests.engine.test_trainer_loop import settings
from tests.training.in_process import MemorySink
from tests.training.run import train
from trainer.learners.policy import PolicyLearner
from trainer.runs import run
from trainer.runs.loop import TrainLoop
from trainer.runs.metrics import read
from trainer.versions import publish
from trainer.versions.checkpoint import Checkpoint, CheckpointStore
from trainer.versions.disk import Disk


def full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class FullDisk:
    """No room for the first `tries` of the writes that it stands before."""

    def __init__(self, tries: int) -> None:
        self.left = tries
        self.seen = 0

    def check(self, path: Path) -> None:
        if self.left > self.seen:
            self.seen += 1
            raise full(path)


async def test_a_full_disk_holds_the_run_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with a traceback, at whichever file came first: a candidate, a line of metrics, a checkpoint."""
    save, write, disks = CheckpointStore.save, publish.write_adapter, [FullDisk(3), FullDisk(2)]

    def saving(store: CheckpointStore, checkpoint: Checkpoint, name: str = "") -> str:
        disks[0].check(store.root)
        return save(store, checkpoint, name)

    def writing(folder: Path, *args: Any) -> None:
        disks[1].check(folder)
        write(folder, *args)

    monkeypatch.setattr(CheckpointStore, "save", saving)
    monkeypatch.setattr(publish, "write_adapter", writing)
    monkeypatch.setattr(run, "Disk", partial(Disk, look_s=0.0))
    short = settings(tmp_path, steps=2, max_lag=0, checkpoint_every=1)
    state, sink = await train(short)
    assert [disk.seen for disk in disks] == [3, 2]
    assert state.train_step == 2 and CheckpointStore(tmp_path / "policy" / "checkpoints").names()[-1] == "step-000002"
    assert len(read(tmp_path / "policy" / "metrics.jsonl")) == 2
    assert [kind for kind, _ in sink.alerts] == ["disk_full", "disk_full"], "once for each time that it holds"
    assert str(tmp_path) in sink.alerts[0][1]


async def test_a_run_that_is_stopped_on_a_full_disk_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[TrainLoop] = []

    def saving(store: CheckpointStore, *_: Any) -> str:
        loops[0].stop()
        raise full(store.root)

    monkeypatch.setattr(CheckpointStore, "save", saving)
    with pytest.raises(SetupError, match=r"no room for the run's files in .*the last checkpoint counts"):
        await train(settings(tmp_path, steps=2), on_loop=loops.append)


async def test_a_run_of_another_ring_is_not_gone_on_with_unless_asked(tmp_path: Path) -> None:
    """A new ring resumed what an earlier one in the same working directory had spoilt."""
    await train(settings(tmp_path, steps=1), id="first")
    with pytest.raises(SetupError, match=r"another ring.*--resume no.*--move-run"):
        await train(settings(tmp_path, steps=2), id="second")
    state, _ = await train(settings(tmp_path, steps=2, move_run=True), id="second")
    assert (state.train_step, state.ring) == (2, "second")
    state, _ = await train(settings(tmp_path, steps=3), id="second")
    assert state.train_step == 3
    state, _ = await train(settings(tmp_path, steps=1, resume="no"), id="third")
    assert (state.train_step, (tmp_path / "policy.1").is_dir()) == (1, True)


async def test_a_run_of_another_base_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    await train(settings(tmp_path, steps=1), MemorySink(), base_sha256="one")
    with pytest.raises(SetupError, match="another base model"):
        await train(settings(tmp_path, steps=2, move_run=True), MemorySink(), base_sha256="other")


async def test_what_the_gate_has_not_passed_is_taken_back_when_the_run_is_stopped_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint that finds room after all would hold weights that no check has seen."""
    loops: list[TrainLoop] = []
    write, reverted, revert = publish.write_adapter, [], PolicyLearner.revert

    def writing(folder: Path, *args: Any) -> None:
        if loops[0].state.version:
            loops[0].stop()
            raise full(folder)
        write(folder, *args)

    @wraps(PolicyLearner.revert)
    def reverting(learner: PolicyLearner) -> None:
        before = learner.weights()
        revert(learner)
        reverted.append(any((before[name] != value).any() for name, value in learner.weights().items()))

    monkeypatch.setattr(publish, "write_adapter", writing)
    monkeypatch.setattr(PolicyLearner, "revert", reverting)
    with pytest.raises(SetupError, match="no room"):
        await train(settings(tmp_path, steps=2), on_loop=loops.append)
    assert reverted == [True]
