"""wandb (offline), mlflow (sqlite) and trackio (local files) get each train step of a run, and of its continuation.

Per package: a run of two train steps, then the same command for a third one. What the package has on disk is read back
with the package: each train step once, in one run that has finished, with the settings and without any password.
"""

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

URL, MODEL_DIR = os.environ["PARALLM_URL"], os.environ["PARALLM_MODEL_DIR"]
SECRET = "k3y-that-nobody-may-see"
STEPS = 3
BLOCK, FULL, LAST = 32768, 1, 4


def train(name: str, folder: Path, steps: int) -> None:
    sizes = ("--steps", str(steps), "--prompts-per-step", "4", "--group-size", "2", "--max-tokens", "8")
    options = ("--task-count", "8", "--parity-every", "0", "--probe-prompts", "2", "--logger-samples")
    command = (sys.executable, "-m", "trainer", "--connect-to", URL, "--connect-key", SECRET, "--model", MODEL_DIR)
    done = subprocess.run(
        [*command, *sizes, *options, "--adapter", f"by-{name}", "--run-dir", str(folder / "train"), "--logger", name],
        cwd=folder, env=os.environ, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "train.logger_closed" in said, said[-2000:]
    for word in ("logger_failed", "logger_dropped", "logger_late", "logger_lost"):
        assert word not in said, said[-2000:]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a run's file: LevelDB's log, in blocks of 32 KiB, behind seven bytes of W&B's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield Record.FromString(whole)
            whole = b""


def wandb_steps(folder: Path) -> list[int]:
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len({path.name for path in files}) == 1 and len(files) == 2, "one run, in two parts that `wandb sync` joins"
    steps: list[int] = []
    for path in files:
        ended = []
        for record in wandb_records(path):
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train_step" in row:
                assert "policy/loss" in row and "rollout/reward" in row, row
                steps.append(int(row["train_step"]))
            if record.WhichOneof("record_type") == "exit":
                ended.append(record.exit.exit_code)
        assert ended == [0], ended
    return steps


def mlflow_steps(folder: Path) -> list[int]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("mlx-parallm")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "by-mlflow", run.info
    assert run.data.params["group_size"] == "2", run.data.params
    assert "policy/loss" in run.data.metrics, run.data.metrics
    return [metric.step for metric in client.get_metric_history(run.info.run_id, "rollout/reward")]


def trackio_steps(folder: Path) -> list[int]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("mlx-parallm")
    assert run.name == "by-trackio" and run.config["group_size"] == 2, run.config
    rows = SQLiteStorage.get_logs("mlx-parallm", run=run.name, run_id=run.id)
    assert [row["ended"] for row in rows if row.get("ended") in ("finished", "stopped")][-1:] == ["finished"], rows
    return [row["step"] for row in rows if row.get("rollout/reward") is not None]


with tempfile.TemporaryDirectory() as name:
    place = Path(name)
    os.environ |= {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db",
        "TRACKIO_DIR": str(place / "trackio"),
    }
    found = {}
    for package, read in (("wandb", wandb_steps), ("mlflow", mlflow_steps), ("trackio", trackio_steps)):
        for steps in (STEPS - 1, STEPS):
            train(package, place, steps)
        found[package] = read(place)
        assert found[package] == list(range(STEPS)), (package, found[package])
    holders = [path for path in place.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not holders, holders
print(", ".join(f"{package}: {len(steps)} train steps in one run" for package, steps in found.items()))
