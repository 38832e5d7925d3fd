"""Whose a run's folder is: an earlier run's is set aside or gone on with, one from elsewhere is refused."""

import hashlib
import itertools
import json
import time
from collections import Counter
from pathlib import Path

import structlog

from shared.errors import SetupError
from trainer.ring.ring import TrainerRing
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.checkpoint import CheckpointStore

log = structlog.get_logger()

WAYS = "give another --run or --run-dir, or --resume no to begin anew"
_INTERRUPTIONS = "interruptions.jsonl"
LEARNED = ("task", "task_count", "task_options", "dataset", "reward", "reward_options", "system_prompt")


def begin_anew(settings: TrainSettings, checkpoints: CheckpointStore) -> CheckpointStore:
    """Begin under a name that may have checkpoints: the earlier run's folder gets a number, nothing is lost."""
    folder = settings.folder
    if not checkpoints.names():
        return checkpoints
    number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.rename(folder.with_name(f"{folder.name}.{number}"))
    log.warning("run.set_aside", earlier_run=str(aside))
    return CheckpointStore(folder / "checkpoints", settings.keep_checkpoints)


def check_home(settings: TrainSettings, saved: RunState, ring: TrainerRing) -> None:
    """SetupError when the checkpoint belongs elsewhere: what another ring has spoilt would be learned on here."""
    folder = settings.folder
    if saved.base_sha256 and saved.base_sha256 != ring.base_sha256:
        raise SetupError(f"{folder} holds a run of another base model than {settings.model}: {WAYS}")
    if (mode := run_mode(saved) or settings.mode) != settings.mode:
        raise SetupError(
            f"{folder} holds a run of --mode {mode}: {WAYS}; to begin with what it has learned, give --start-from"
        )
    if saved.ring and ring.id and saved.ring != ring.id and not settings.move_run:
        raise SetupError(
            f"{folder} holds a run that was trained on another ring (train step {saved.train_step}): {WAYS}; "
            "to go on with it here, give --move-run"
        )


def learns_from(settings: TrainSettings) -> dict[str, str]:
    """Setting -> digest, of those that decide what is learned: options may hold texts, which no checkpoint repeats."""
    values = settings.model_dump(mode="json", include=set(LEARNED))
    return {name: hashlib.sha256(json.dumps(values[name]).encode()).hexdigest()[:16] for name in LEARNED}


def warn_of_changes(settings: TrainSettings, saved: RunState) -> None:
    """Say that a run goes on with other tasks or another reward, and so that its curve has a break here."""
    now = learns_from(settings)
    if changed := [name for name, digest in saved.learns_from.items() if now.get(name) != digest]:
        log.warning(
            "run.changed", settings=changed, train_step=saved.train_step, anew="--resume no, or another --adapter"
        )


def run_mode(saved: RunState) -> str:
    """How the run has learned; "" when that is not known."""
    return saved.mode or ("rl" if saved.trajectories else "")


def note_interruption(folder: Path, why: str) -> None:
    """Write down that a run was held or ended before its end; not in the checkpoint, which a kill sets back."""
    if folder.is_dir():
        with (folder / _INTERRUPTIONS).open("a") as file:
            file.write(json.dumps({"at_ms": time.time_ns() // 1_000_000, "why": why}) + "\n")


def interruptions(folder: Path) -> dict[str, int]:
    """How often the run was interrupted, by the reason."""
    try:
        lines = (folder / _INTERRUPTIONS).read_text().splitlines()
    except OSError:
        return {}
    counts: Counter[str] = Counter()
    for line in lines:
        try:
            counts[str(json.loads(line)["why"])] += 1
        except (ValueError, KeyError, TypeError):  # a kill cut it off
            counts["?"] += 1
    return dict(counts)
