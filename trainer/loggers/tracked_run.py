"""A run as packages that track runs see it, its figures by name, and the protocol of such a package.

The run's id there is stored in a file of the run's folder, so that a run that is started again goes on in the same one.
"""

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, SecretStr

from shared.training import BoardSample

Ending = Literal["finished", "stopped", "failed"]  # stopped: by a person or SIGTERM, with a checkpoint to go on from
Plain = str | int | float | bool
Samples = Sequence[BoardSample]  # of a train step; (): the run does not publish them
COLUMNS = ("train_step", "reward", "prompt", "reply", "version", "finish_reason", "error")
GROUPS = {
    "rollout": (
        "reward", "reward_std", "held_out", "held_out_true", "completion_tokens", "groups", "taught", "failed",
        "overlong", "zero_variance",
    ),
    "policy": (
        "loss", "kl", "entropy", "clip_fraction", "grad_norm", "update_rms", "learning_rate", "value_loss", "explained",
    ),
    "staleness": ("lag_mean", "lag_max", "dropped", "mismatch", "mismatch_max", "staleness", "staleness_max"),
    "curriculum": ("tasks_solved", "tasks_hopeless", "tasks_unseen", "difficulty", "wanted_difficulty"),
    "speed": ("tokens", "tokens_per_s", "wait_s", "train_s", "publish_s"),
    "run": ("policy_step", "version"),
}  # fmt: skip


@dataclass(frozen=True)
class TrackedRun:
    """A run as others see it."""

    project: str
    name: str
    config: Mapping[str, Plain | list[Plain]]
    id_file: Path

    @property
    def known_id(self) -> str:
        """Id from an earlier start of the run; "": there was none."""
        with contextlib.suppress(FileNotFoundError):
            return self.id_file.read_text().strip()
        return ""

    def keep_id(self, run_id: str) -> None:
        """Store the id for the next start."""
        self.id_file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.id_file.with_suffix(".tmp")
        temporary.write_text(f"{run_id}\n")
        temporary.replace(self.id_file)


class Tracker(Protocol):
    """A run that is open in a package. Its calls may take as long as they like, and may raise anything."""

    def write(self, train_step: int, figures: Mapping[str, float], samples: Samples) -> None:
        """The figures of a train step and samples of it; may be called again with the same ones after an error."""

    def end(self, ending: Ending) -> None:
        """Close the run with this state, once all that was written has been handed on."""


class TrackerKind(Protocol):
    """Opens a run in a package: a new one, or the one of an earlier start."""

    def __call__(self, run: TrackedRun) -> Tracker: ...


def by_name(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Figures of a line of metrics.jsonl as `group/figure`; those that were not measured are left out."""
    for group, names in GROUPS.items():
        for name in names:
            if values[name] is not None:
                yield f"{group}/{name}", values[name]


def rows(train_step: int, samples: Samples) -> list[list[Plain | None]]:
    """Samples as the rows of a table with COLUMNS."""
    return [[train_step, s.reward, s.prompt, s.completion, s.version, s.finish_reason, s.error] for s in samples]


def config_of(settings: BaseModel, without: Container[str]) -> dict[str, Plain | list[Plain]]:
    """The settings that others may see: no secrets, no URLs, no texts that users have put into options."""
    config: dict[str, Plain | list[Plain]] = {}
    for name, value in settings:
        if name in without or isinstance(value, SecretStr):
            continue
        for part, shown in _parts(name, value):
            if not (isinstance(shown, str) and "://" in shown):
                config[part] = shown
    return config


def _parts(name: str, value: Any) -> list[tuple[str, Plain | list[Plain]]]:
    if isinstance(value, dict):  # of an environment or a reward, say, where any text may be a key
        return [(f"{name}.{key}", item) for key, item in value.items() if isinstance(item, bool | int | float)]
    if isinstance(value, list | tuple):
        return [(name, [item for item in value if isinstance(item, Plain) and "://" not in str(item)])]
    if isinstance(value, Path):
        return [(name, str(value))]
    return [(name, value)] if isinstance(value, Plain) else []
