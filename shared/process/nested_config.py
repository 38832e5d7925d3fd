"""Settings files in sections, one file for server and trainer: `server:`, `model:`, `rl_training:`, `checkpointing:`.

Each process takes what is its own, under our names or under those of RENAMED; what nobody has is refused by name. A
file without these sections is a flat one, and is left as it is.
"""

import difflib
import sys
from collections.abc import Collection, Mapping, Set
from typing import Any

from shared.errors import SetupError

SECTIONS = ("server", "model", "rl_training", "checkpointing")
OF_TRAINING = frozenset({"model", "rl_training", "checkpointing"})
RENAMED = {
    "model.base_model_path": "model",
    "model.lora_target_modules": "lora_targets",
    "rl_training.enabled": "enable_rl_training",
    "rl_training.update_frequency": "live_trajectories",
    "rl_training.environment": "task",
    "checkpointing.interval": "checkpoint_every",
    "checkpointing.keep_n_checkpoints": "keep_checkpoints",
    "checkpointing.checkpoint_dir": "run_dir",
}
WITHOUT_EFFECT = {"rl_training.scoring_batch_size": "a job runner scores each sample when it is finished"}
_ATROPOS = "rl_training.environment"  # beside atropos_url: its environments are processes of their own
_ALPHA = "model.lora_alpha"  # lora_scale is alpha / rank
_TRAINING_MODES = ("inference_and_training", "training_only")


def is_nested(given: Mapping[str, Any]) -> bool:
    """True if a configuration file has sections."""
    return any(section in given and (section != "model" or isinstance(given[section], dict)) for section in SECTIONS)


def names_in(given: Mapping[str, Any]) -> set[str]:
    """Our names of all settings in a file, of any process."""
    return {name for _, name, _ in _entries(given)}


def has_training(given: Mapping[str, Any]) -> bool:
    """True if a configuration file has sections that belong to the trainer alone."""
    return any(given.get(section) for section in OF_TRAINING - {"model"})


def flat(
    given: Mapping[str, Any], own: Set[str], *, server: Set[str], trains: bool, default_rank: int = 0
) -> dict[str, Any]:
    """The part of a file that a process takes; `own` are the names of its settings, `server` those of the server.

    `trains`: the process is the trainer, to which nobody's names are wrong ones; else the trainer will tell them. Lines
    beside the sections are the server's.
    """
    if not is_nested(given):
        return dict(given)
    _check_modes(given)
    settings: dict[str, Any] = {}
    for path, name, value in _entries(given):
        section = path.partition(".")[0] if "." in path else ""
        if path == _ALPHA:
            name, value = "lora_scale", _scale(given, value, default_rank)
        if path in WITHOUT_EFFECT or (path == _ATROPOS and "atropos_url" in names_in(given)):
            if trains:
                why = WITHOUT_EFFECT.get(path, "Atropos' environments are processes of their own")
                print(f"{path} has no effect: {why}", file=sys.stderr)
        elif name in own and not (trains and (section == "server" or path == "mode")):
            if name in settings:
                raise SetupError(f"{path}: {name} is given twice")
            settings[name] = value
        elif name not in server and (trains or section not in OF_TRAINING):
            known = own | server if section != "server" else server
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise SetupError(f"{path}: there is no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    return settings


def _entries(given: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(path, our name, value) of each setting."""
    entries: list[tuple[str, str, Any]] = []
    for key, value in given.items():
        if key not in SECTIONS or (key == "model" and not isinstance(value, dict | None)):
            entries.append((str(key), str(key), value))
        elif isinstance(value, dict | None):
            inner = ((f"{key}.{name}", str(name), each) for name, each in (value or {}).items())
            entries += [(path, RENAMED.get(path, name), each) for path, name, each in inner]
        else:
            raise SetupError(f"{key}: a section has lines of `name: value`, not {value!r:.80}")
    return entries


def _scale(given: Mapping[str, Any], alpha: Any, default_rank: int) -> float:
    rank = given["model"].get("lora_rank", given.get("lora_rank", default_rank or 1))
    numbers = (each for each in (alpha, rank))
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and each > 0 for each in numbers):
        raise SetupError(f"{_ALPHA}: {alpha!r:.80} with lora_rank {rank!r:.80}: both are numbers above 0")
    return float(alpha / rank)


def _check_modes(given: Mapping[str, Any]) -> None:
    """`enabled` and `mode` say the same thing, where both are given."""
    mode, enabled = ((given.get(section) or {}) for section in ("server", "rl_training"))
    said = (mode.get("mode"), enabled.get("enabled"))
    if None not in said and (said[0] in _TRAINING_MODES) != bool(said[1]):
        raise SetupError(f"rl_training.enabled: {said[1]} contradicts server.mode: {said[0]}")


def snake(flags: Collection[str]) -> frozenset[str]:
    """Names of settings, from those of flags."""
    return frozenset(name.replace("-", "_") for name in flags if name.islower())
