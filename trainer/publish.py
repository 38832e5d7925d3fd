"""The seam to the adapter store: a candidate goes up, is checked, and becomes the latest or is rejected."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from safetensors.numpy import load_file

from shared.adapters import GateCheck
from shared.errors import AdapterRejectedError
from shared.training import AlertKind
from trainer import gate
from trainer.checkpoint import ADAPTER_FILE, write_adapter
from trainer.state import Arrays, RunState

__all__ = ["AdapterSink", "AlertKind", "Candidate", "Published", "Publisher"]


@dataclass(frozen=True)
class Candidate:
    """An adapter directory in mlx-lm's format (`adapter_config.json`, `adapters.safetensors`), and what is known."""

    directory: Path
    train_step: int
    parent: int  # the version that it was trained from; 0: none
    base_sha256: str
    metrics: dict[str, float] = field(default_factory=dict)
    gate: tuple[GateCheck, ...] = ()  # checks that it has passed so far


@dataclass(frozen=True)
class Published:
    """What became of a candidate."""

    version: int  # 0: it was rejected
    checks: tuple[GateCheck, ...]


class AdapterSink(Protocol):
    """Where versions go. The store gives out the numbers; they never repeat."""

    async def stage(self, candidate: Candidate) -> int:
        """Store and verify the candidate as the next version, loadable by number; the latest stays what it was.

        AdapterRejectedError when the files are not what they say.
        """

    async def promote(self, version: int, gate: Sequence[GateCheck]) -> None:
        """One atomic flip: following requests get `version` from the next decode step on."""

    async def reject(self, version: int, gate: Sequence[GateCheck]) -> None:
        """Write down that a staged version failed; it stays readable and is never served."""

    async def roll_back(self, version: int, reason: str) -> None:
        """Make an older version the latest again; logged with the reason."""

    async def set_best(self, version: int, value: float) -> None:
        """Point `best` at a version."""

    async def alert(self, kind: AlertKind, message: str) -> None:
        """Tell whoever watches: an event and a counter."""


class Publisher:
    """From an accepted train step to a served version.

    Local checks first (they need no worker). Then the candidate is staged, so that a worker can load it by number, and
    what only a worker can tell is checked: parity of log-probabilities, reward on held-out tasks. Then it is promoted,
    or rejected with all checks written down. Rejected files stay in `<folder>/rejected`.
    """

    def __init__(self, sink: AdapterSink, folder: Path, adapter: str, config: bytes, base_sha256: str) -> None:
        self._sink = sink
        self._folder = folder
        self._adapter = adapter
        self._config = config
        self._base_sha256 = base_sha256

    async def publish(
        self,
        weights: Arrays,
        state: RunState,
        checks: Sequence[GateCheck],
        metrics: dict[str, float],
        remote: Callable[[int], Awaitable[list[GateCheck]]] | None = None,
    ) -> Published:
        """Gate, stage, check in a worker, promote. `remote` gets the staged version's number."""
        directory = await asyncio.to_thread(self._write, weights, state.train_step)
        candidate = Candidate(directory, state.train_step, state.version, self._base_sha256, metrics, tuple(checks))
        all_checks = list(checks)
        version = 0
        try:
            version = await self._sink.stage(candidate)
        except AdapterRejectedError as error:
            all_checks.append(GateCheck("store", False, str(error)))
        if version and remote is not None and gate.passed(all_checks):
            all_checks += await remote(version)
        good = gate.passed(all_checks)
        if good:
            await self._sink.promote(version, all_checks)
            await asyncio.to_thread(self._keep, directory, self.version_folder(version))
        else:
            if version:
                await self._sink.reject(version, all_checks)
            await self._sink.alert("gate_failed", gate.failures(all_checks))
            rejected = self._folder / "rejected" / directory.name
            (directory / "gate.json").write_bytes(msgspec.json.format(msgspec.json.encode(all_checks)))
            await asyncio.to_thread(self._keep, directory, rejected)
        return Published(version if good else 0, tuple(all_checks))

    def version_folder(self, version: int) -> Path:
        """Where a served version's files are kept, for a rollback."""
        return self._folder / "versions" / str(version)

    def weights_of(self, version: int) -> Arrays:
        """The weights of a version that is still kept."""
        return load_file(self.version_folder(version) / ADAPTER_FILE)

    def forget(self, keep: Collection[int]) -> None:
        """Delete the files of all versions but these."""
        versions = self._folder / "versions"
        for path in versions.iterdir() if versions.exists() else ():
            if path.name.isdigit() and int(path.name) not in keep:
                shutil.rmtree(path)

    def _write(self, weights: Arrays, train_step: int) -> Path:
        directory = self._folder / "candidates" / f"step-{train_step:06d}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_adapter(directory, weights, self._config)
        return directory

    def _keep(self, directory: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(target)
