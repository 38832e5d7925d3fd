"""Checkpoints: everything that a killed run needs to go on as if nothing had happened.

`<root>/<name>/` holds adapters.safetensors and adapter_config.json (an mlx-lm adapter directory), optimizer.safetensors
(Adam's moments and step), state.json (progress) and manifest.json (sha256 and size of each).
`<root>/latest` and `<root>/best` are files with a name in them.

Invariants.
- A checkpoint is there whole or not at all: files are written and synced under a temporary name, the manifest last,
  then one rename. Whatever a crash leaves under a temporary name is removed by the next save.
- `latest` moves after the rename. When it names nothing valid, the newest valid checkpoint is the latest.
- There is no random state to save: every draw of a run follows from its seed and a counter in the progress.
- A checkpoint that was given a name by the user, `best` and `latest` are never pruned.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shared.adapter_files.config import read_config
from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE
from shared.errors import SetupError
from shared.process.whole_folder import sync
from shared.training import is_checkpoint_name
from trainer.state import Arrays, LearnerSnapshot, RunState

T = TypeVar("T")

_OPTIMIZER, _STATE, _MANIFEST = "optimizer.safetensors", "state.json", "manifest.json"
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"


@dataclass(frozen=True)
class Checkpoint(LearnerSnapshot):
    """A learner's state with the run's state of the same moment."""

    state: RunState


class _File(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class _Manifest(msgspec.Struct, frozen=True):
    name: str
    train_step: int
    files: dict[str, _File]
    schema: int = 1


class CheckpointStore:
    """The checkpoints of one run, in one folder."""

    def __init__(self, root: Path, keep_n: int = 3) -> None:
        self.root = root
        self.keep_n = keep_n
        root.mkdir(parents=True, exist_ok=True)

    def save(self, checkpoint: Checkpoint, name: str = "") -> str:
        """Write a checkpoint, make it `latest`, prune old ones; its name (`step-<train step>` by default)."""
        name = name or f"step-{checkpoint.state.train_step:06d}"
        if not is_checkpoint_name(name):
            raise SetupError(f"{name[:80]!r} is no checkpoint name: letters, digits, '.', '_', '-', at most 64")
        self._clean()
        folder = self.root / f"{_TEMPORARY}{name}"
        folder.mkdir()
        write_adapter(folder, checkpoint.adapter, checkpoint.adapter_config)
        save_file(dict(checkpoint.optimizer), folder / _OPTIMIZER)
        (folder / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(checkpoint.state)))
        files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
        manifest = _Manifest(name, checkpoint.state.train_step, files)
        for path in folder.iterdir():
            sync(path)
        (folder / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        sync(folder / _MANIFEST)
        sync(folder)
        self._put(folder, self.root / name)
        self._point("latest", name)
        self._prune()
        return name

    def load(self, name: str = "latest") -> Checkpoint | None:
        """A checkpoint by name or pointer; None when there is none yet. SetupError when the named one is damaged."""
        if name in ("latest", "best"):
            pointed = self.pointer(name)
            if pointed is None or self._manifest(pointed) is None:
                names = self.names()
                if not names:
                    return None
                if name == "best":
                    raise SetupError(f"{self.root} has no best checkpoint yet, only {self._shown()}; resume latest")
                pointed = names[-1]
            name = pointed
        manifest = self._manifest(name)
        if manifest is None:
            raise SetupError(f"there is no whole checkpoint {name!r} in {self.root}, only {self._shown()}")
        folder = self.root / name
        try:
            damaged = [file for file, entry in manifest.files.items() if _digest(folder / file) != entry]
            if damaged:
                raise SetupError(f"checkpoint {name!r} in {self.root} is damaged: {', '.join(damaged)}")
            return Checkpoint(
                adapter=load_file(folder / MLX_FILE),
                adapter_config=(folder / CONFIG_FILE).read_bytes(),
                optimizer=load_file(folder / _OPTIMIZER),
                state=msgspec.json.decode((folder / _STATE).read_bytes(), type=RunState),
            )
        except (OSError, SafetensorError, msgspec.DecodeError) as error:
            raise SetupError(f"checkpoint {name!r} in {self.root} cannot be read: {error}") from error

    def names(self) -> list[str]:
        """Whole checkpoints, by train step."""
        manifests = [(m.train_step, m.name) for path in self.root.iterdir() if (m := self._manifest(path.name))]
        return [name for _, name in sorted(manifests)]

    def _shown(self) -> str:
        """The newest names, for a person."""
        return ", ".join(self.names()[-8:]) or "none at all"

    def set_best(self, name: str) -> None:
        """Point `best` at a checkpoint."""
        self._point("best", name)

    def pointer(self, pointer: str) -> str | None:
        """The name that `latest` or `best` holds."""
        try:
            return (self.root / pointer).read_text()
        except OSError:
            return None

    def _manifest(self, name: str) -> _Manifest | None:
        """The manifest of a whole checkpoint; only sizes are checked here, hashes when it is loaded."""
        if not is_checkpoint_name(name):
            return None
        folder = self.root / name
        try:
            manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=_Manifest)
            sizes = {file: (folder / file).stat().st_size for file in manifest.files}
        except (OSError, msgspec.DecodeError):
            return None
        whole = all(sizes[file] == entry.size for file, entry in manifest.files.items())
        return manifest if whole else None

    def _put(self, folder: Path, target: Path) -> None:
        """Rename into place. An older one of that name goes aside first; `_clean` brings it back if need be."""
        old = self.root / f"{_REPLACED}{target.name}"
        if target.exists():
            target.rename(old)
        folder.rename(target)
        sync(self.root)
        if old.exists():
            shutil.rmtree(old)

    def _clean(self) -> None:
        for path in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for old in self.root.glob(f"{_REPLACED}*"):
            target = self.root / old.name.removeprefix(_REPLACED)
            shutil.rmtree(old) if target.exists() else old.rename(target)

    def _point(self, pointer: str, name: str) -> None:
        temporary = self.root / f"{_TEMPORARY}{pointer}"
        temporary.write_text(name)
        sync(temporary)
        temporary.replace(self.root / pointer)
        sync(self.root)

    def _prune(self) -> None:
        numbered = [name for name in self.names() if re.fullmatch(r"step-\d+", name)]
        kept = {self.pointer("latest"), self.pointer("best")}
        for name in numbered[: -self.keep_n] if self.keep_n else ():
            if name not in kept:
                shutil.rmtree(self.root / name)


def differences(saved: bytes, present: bytes) -> str:
    """How two adapter configurations differ, in the words of the settings; "" when they do not."""
    there, here = read_config(saved), read_config(present)
    lora = {"lora_kind": "kind", "lora_rank": "rank", "lora_scale": "scale", "lora_targets": "targets"}
    fields = {**lora, "head": "heads"}
    pairs = ((setting, getattr(there, field), getattr(here, field)) for setting, field in fields.items())
    return ", ".join(f"{setting} {old} there, {new} here" for setting, old, new in pairs if old != new)


def write_adapter(folder: Path, weights: Arrays, config: bytes) -> None:
    """An adapter directory as mlx-lm reads it."""
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / MLX_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(json.loads(config), indent=1) + "\n")


def _digest(path: Path) -> _File:
    with path.open("rb") as stream:
        return _File(hashlib.file_digest(stream, "sha256").hexdigest(), path.stat().st_size)


def read_whole(file: Path, kind: type[T]) -> T | None:
    """The message in a file that `write_whole` wrote; None when it is not there, or no such message."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    sync(partial)
    partial.replace(file)
