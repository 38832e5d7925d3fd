import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from shared.errors import SetupError
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.checkpoint import Checkpoint, CheckpointStore, differences
from trainer.versions.run_folder import learns_from, warn_of_changes

CONFIG = b'{"fine_tune_type":"lora","num_layers":-1,"lora_parameters":{"rank":2,"scale":2.0,"dropout":0.0}}'

# Saves checkpoints without end, as fast as it can, and says so. Run in a process of its own, to be killed.
SAVER = """
import sys
from pathlib import Path
from tests.unit.test_trainer_checkpoint import checkpoint
from trainer.versions.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep_n=2)
step = int(sys.argv[2])
while True:
    step += 1
    store.save(checkpoint(step))
    print(step, flush=True)
"""


def checkpoint(step: int) -> Checkpoint:
    weights = {"model.layers.0.q.lora_a": np.full((64, 2), step, np.float32)}
    moments = {"m": np.full(300_000, step, np.float32), "step": np.array(step, np.uint64)}
    state = RunState("run", train_step=step, cursor=step * 4, pending=[step], policy_steps={1: 0, 3: 1})
    return Checkpoint(weights, CONFIG, moments, state)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.load() is None
    saved = checkpoint(3)
    assert store.save(saved) == "step-000003"
    loaded = CheckpointStore(tmp_path).load()
    assert loaded is not None
    assert loaded.state == saved.state
    for mine, its in ((saved.adapter, loaded.adapter), (saved.optimizer, loaded.optimizer)):
        assert mine.keys() == its.keys()
        assert all(np.array_equal(mine[name], its[name]) and mine[name].dtype == its[name].dtype for name in mine)
    assert json.loads(loaded.adapter_config)["lora_parameters"]["rank"] == 2


def test_old_ones_go_but_latest_best_and_named_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_n=2)
    store.save(checkpoint(1))
    store.set_best("step-000001")
    store.save(checkpoint(2), "before-the-change")
    for step in (3, 4, 5):
        store.save(checkpoint(step))
    assert store.names() == ["step-000001", "before-the-change", "step-000004", "step-000005"]
    best, latest = store.load("best"), store.load("latest")
    assert best is not None and best.state.train_step == 1
    assert latest is not None and latest.state.train_step == 5


def test_saving_under_the_same_name_replaces(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1), "mine")
    store.save(checkpoint(2), "mine")
    loaded = store.load("mine")
    assert loaded is not None and loaded.state.train_step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "mine"]


def test_a_damaged_checkpoint_is_refused_by_name_and_skipped_as_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))
    store.save(checkpoint(2))
    torn = tmp_path / "step-000002" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:-7])
    with pytest.raises(SetupError, match="no whole checkpoint"):
        store.load("step-000002")
    latest = store.load()
    assert latest is not None and latest.state.train_step == 1
    flipped = tmp_path / "step-000001" / "adapters.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    with pytest.raises(SetupError, match=r"damaged: adapters\.safetensors"):
        store.load("step-000001")


@pytest.mark.parametrize("name", ["../up", "latest", "best", "", "a/b", ".hidden", "x" * 65])
def test_names_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    if name:
        with pytest.raises(SetupError, match="no checkpoint name"):
            store.save(checkpoint(1), name)


def test_killed_at_any_moment_of_a_save_the_latest_is_whole(tmp_path: Path) -> None:
    """SIGKILL between two bytes must never leave a checkpoint that loads and is not one."""
    step = 0
    for delay in range(4):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout is not None
        said = [int(saver.stdout.readline()) for _ in range(2 + delay)][-1]
        os.kill(saver.pid, signal.SIGKILL)
        said = max([said, *map(int, saver.stdout.read().split())])
        saver.wait()
        saver.stdout.close()
        loaded = CheckpointStore(tmp_path, keep_n=2).load()
        assert loaded is not None
        step = loaded.state.train_step
        assert step >= said, "a save that was acknowledged is lost"
        assert set(loaded.optimizer["m"].tolist()) == {float(step)}
        assert loaded.adapter["model.layers.0.q.lora_a"][0, 0] == step
    CheckpointStore(tmp_path, keep_n=2).save(checkpoint(step + 1))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "leftovers of the killed saves"


def test_to_resume_the_best_of_a_run_that_has_none_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.load("best") is None, "a new run"
    store.save(checkpoint(4))
    for name in ("best", "step-000003"):
        with pytest.raises(SetupError, match="only step-000004"):
            store.load(name)


def test_what_differs_between_two_adapters_is_said_in_the_settings_words() -> None:
    assert differences(CONFIG, CONFIG) == ""
    other = CONFIG.replace(b'"rank":2', b'"rank":8').replace(b'"lora"', b'"dora"')
    assert differences(CONFIG, other) == "lora_kind lora there, dora here, lora_rank 2 there, 8 here"


def test_a_run_that_goes_on_with_another_reward_says_which_settings_have_changed(tmp_path: Path) -> None:
    before = TrainSettings(task="jsonl", dataset=tmp_path / "a", reward="exact", steps=2)
    saved = RunState("run", train_step=2, learns_from=learns_from(before))
    nearer = {"reward": "m:f", "reward_options": {"tolerance": 3}}
    for settings, changed in (({"steps": 9, "learning_rate": 0.1}, []), (nearer, [["reward", "reward_options"]])):
        with capture_logs() as lines:
            warn_of_changes(before.model_copy(update=settings), saved)
        assert [line["settings"] for line in lines] == changed
