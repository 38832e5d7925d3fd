"""The seam to the adapter store: a candidate goes up, is checked, and becomes the latest or is rejected."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors.numpy import load_file

from shared.adapter_files.formats import MLX_FILE
from shared.adapters import GateCheck
from shared.errors import AdapterRejectedError, ConflictError
from shared.telemetry import tracing
from trainer.learn import gate
from trainer.ring.ring import AdapterSink, Candidate, Stored
from trainer.state import Arrays, RunState
from trainer.versions.checkpoint import differences, write_adapter
from trainer.versions.disk import Disk

_SERVED = "served.json"
GATE = "gate.json"  # all checks of a rejected version, and of a candidate
_LATEST = "latest"  # the check that no other process has moved it


@dataclass(frozen=True)
class Published:
    """Result of publishing a candidate."""

    version: int  # 0: it was rejected
    checks: tuple[GateCheck, ...]

    @property
    def forestalled(self) -> bool:
        """True if the version was good, but another process moved `latest` meanwhile."""
        return any(check.name == _LATEST and not check.passed for check in self.checks)


@dataclass(frozen=True)
class Publisher:
    """From an accepted train step to a served version.

    Local checks first (they need no worker). Then the candidate is staged, so that a worker can load it by number, and
    what only a worker can tell is checked: parity of log-probabilities, reward on held-out tasks. Then it is promoted,
    or rejected with all checks written down. Rejected files stay in `<folder>/rejected`.

    Every move of `latest` that is ours stands in `<folder>/served.json` before it is made, so that after a kill ours
    can be distinguished from somebody else's.
    """

    sink: AdapterSink
    folder: Path
    adapter: str
    config: bytes
    base_sha256: str
    disk: Disk

    async def publish(
        self,
        weights: Arrays,
        state: RunState,
        checks: Sequence[GateCheck],
        metrics: dict[str, float],
        remote: Callable[[int], Awaitable[list[GateCheck]]] | None = None,
        if_latest: int | None = None,
        *,
        promote: bool = True,
    ) -> Published:
        """Gate, stage, check in a worker, promote. `remote` gets the staged version's number.

        `promote` False: a version that passes stays a candidate. `if_latest`: refused (the check `latest`) when another
        version than this has become the latest.
        """
        same_base = gate.same_base(self.base_sha256, await self.sink.served_base())
        with tracing.span("stage"):
            directory = await self.disk.run(self._write, weights, state.train_step)
            version, all_checks = await self._stage(directory, state, [*checks, same_base], metrics)
        if version and remote is not None and gate.passed(all_checks):
            with tracing.span("gate", {"parallm.version": version}):
                all_checks += await remote(version)
        good = gate.passed(all_checks)
        with tracing.span("publish" if good else "reject", {"parallm.version": version}):
            good = await self._settle(directory, version, all_checks, if_latest, promote=promote)
        return Published(version if good else 0, tuple(all_checks))

    async def _stage(
        self, directory: Path, state: RunState, checks: Sequence[GateCheck], metrics: dict[str, float]
    ) -> tuple[int, list[GateCheck]]:
        """The number that the store gives, 0 when it refuses; the checks with its own."""
        candidate = Candidate(directory, state.train_step, state.version, self.base_sha256, metrics, tuple(checks))
        try:
            # Beside the run's folder it takes room for a copy, which is made before the store hears of it.
            return await self.disk.write(lambda: self.sink.stage(candidate)), list(checks)
        except AdapterRejectedError as error:
            return 0, [*checks, GateCheck("store", False, str(error))]

    async def _settle(
        self, directory: Path, version: int, checks: list[GateCheck], if_latest: int | None, *, promote: bool
    ) -> bool:
        """Serve the staged version, or put it away with what was wrong."""
        foreign: GateCheck | None = None
        if gate.passed(checks):
            foreign = await self._promote(version, checks, if_latest) if promote else None
            if not promote:  # a promotion writes them into the manifest
                await self._write_checks(directory, checks)
            if foreign is None:
                await self.disk.run(self._keep, directory, self.version_folder(version))
                return True
            checks.append(foreign)
        if version:
            await self.sink.reject(version, checks)
        if foreign is None:  # who moved `latest` is another alert's subject
            await self.sink.alert("gate_failed", gate.failures(checks))
        await self._put_away(directory, checks)
        return False

    async def _promote(self, version: int, checks: list[GateCheck], if_latest: int | None) -> GateCheck | None:
        """Make the version the latest; returns the obstacle when another process has moved `latest` meanwhile."""
        await self.note(version, await self.sink.latest_version() if if_latest is None else if_latest)
        try:
            await self.sink.promote(version, checks, if_latest)
        except ConflictError:
            latest = await self.sink.latest_version()
            if if_latest is None or latest == version:  # an answer was lost, and the request repeated
                if latest == version:
                    return None
                raise
            return GateCheck(_LATEST, False, f"version {latest} has become the latest meanwhile, it was {if_latest}")
        return None

    async def _write_checks(self, directory: Path, checks: Sequence[GateCheck]) -> None:
        report = msgspec.json.format(msgspec.json.encode(checks))
        await self.disk.run((directory / GATE).write_bytes, report)

    async def _put_away(self, directory: Path, checks: Sequence[GateCheck]) -> None:
        rejected = self.folder / "rejected" / directory.name
        await self._write_checks(directory, checks)
        await self.disk.run(self._keep, directory, rejected)

    async def note(self, version: int, before: int | None = None) -> None:
        """Write down that `version` becomes the latest by our hand, after `before`."""
        mine = msgspec.json.encode([version] if before is None else [before, version])

        def write() -> None:
            temporary = self.folder / "served.tmp"
            temporary.write_bytes(mine)
            temporary.replace(self.folder / _SERVED)

        await self.disk.run(write)

    def moved_by_us(self, latest: int, *, unknown: bool = True) -> bool:
        """True if this run, in this life or an earlier one, made this version the latest.

        `unknown`: the answer for a folder in which nothing is written down.
        """
        try:
            return latest in msgspec.json.decode((self.folder / _SERVED).read_bytes(), type=list[int])
        except (OSError, msgspec.DecodeError):
            return unknown

    async def take_over(self, version: int) -> Arrays:
        """Weights of a version that another process has made the latest; stored from now on, as our own are.

        ConflictError when they are no weights that this run can go on from.
        """
        weights = await self.any_weights_of(version)
        if version not in self.on_disk():
            folder = self.version_folder(version)
            await self.disk.run(self._write_to, weights, folder)
        return weights

    async def any_weights_of(self, version: int) -> Arrays:
        """Weights of a version from the run's folder, else out of the store.

        ConflictError when they are no weights of this run's shape and base; ParallmError when they are gone.
        """
        if version in self.on_disk():
            return await asyncio.to_thread(self.weights_of, version)
        return self.fitting(await self.sink.fetch(version), f"{self.adapter}@{version}")

    def fitting(self, stored: Stored, name: str) -> Arrays:
        """Weights of a stored version; ConflictError when they are not of this run's shape and base."""
        checks = [gate.same_base(self.base_sha256, stored.base_sha256), gate.finite_weights(stored.weights)]
        differs = differences(stored.config, self.config) or gate.failures(checks)
        if differs:
            raise ConflictError(f"{name} does not fit this run: {differs}")
        return stored.weights

    def version_folder(self, version: int) -> Path:
        """Folder of a served version's files, for a rollback."""
        return self.folder / "versions" / str(version)

    def weights_of(self, version: int) -> Arrays:
        """Weights of a version that is still in the run's folder."""
        return load_file(self.version_folder(version) / MLX_FILE)

    def on_disk(self) -> set[int]:
        """Versions whose files are in the run's folder."""
        versions = self.folder / "versions"
        folders = versions.iterdir() if versions.exists() else ()
        return {int(path.name) for path in folders if path.name.isdigit()}

    def forget(self, keep: Collection[int]) -> None:
        """Delete the files of all versions but these."""
        for version in self.on_disk() - set(keep):
            shutil.rmtree(self.version_folder(version))

    def _write(self, weights: Arrays, train_step: int) -> Path:
        return self._write_to(weights, self.folder / "candidates" / f"step-{train_step:06d}")

    def _write_to(self, weights: Arrays, directory: Path) -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_adapter(directory, weights, self.config)
        return directory

    def _keep(self, directory: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(target)
