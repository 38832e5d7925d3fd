"""The models that a host could load: where their files are, what was found in them, and what is wrong with them.

Invariant. Folders are looked at in a thread, since one on a drive that sleeps holds whoever looks at it; the event loop
knows of them what the last look has found, LOOK_S ago at most.
"""

import asyncio
import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from shared.catalogue import DRAFT, CatalogueEntry, RingModels
from shared.fit.model_fit import Device
from shared.process.model_aliases import hub_folder, is_hub_name, short_name
from shared.process.worker_settings import WorkerSettings
from worker.host.describe import Described
from worker.host.weights.exchange import WeightExchange

log = structlog.get_logger()

LOOK_S = 2.0  # between two looks at the files of all models


@dataclass(frozen=True)
class Files:
    """A model's files on this machine, at the last look."""

    place: str = ""  # as a worker's --model takes it; "": they are not here, or not open to the catalogue
    changed_ns: int = 0  # Unix time of the last change of the folder or a file in it; 0: nothing is there
    hub: str = ""  # their name on the hub, whether they are here by now or not; "": they are not from there

    @property
    def source(self) -> str:
        """Source for a worker's --model; "" where this host cannot get them by itself."""
        return self.place or self.hub


@dataclass(frozen=True)
class Looked:
    """Findings of a process that has looked at a model's files."""

    entry: CatalogueEntry  # as it was then
    described: Described | None
    why: str  # it cannot be loaded
    files: Files


class Offers:
    """Knowledge of one host about the models that it was given, and those of the catalogue."""

    def __init__(self, settings: WorkerSettings, weights: WeightExchange) -> None:
        self._settings, self._weights = settings, weights
        self.given = [CatalogueEntry(short_name(source), source) for source in settings.given_models]
        self._looked: dict[str, Looked] = {}  # by name
        self._files: dict[str, Files] = {}  # by name
        self._asked: dict[str, tuple[str, str]] = {}  # source and hash of each model at the last look at files
        self._look_at = 0.0  # monotonic

    # -- files

    async def look(self, entries: Collection[CatalogueEntry]) -> None:
        """Look where models' files are; not again within LOOK_S while the models are the same."""
        asked = {entry.name: (entry.source, entry.sha256) for entry in entries}
        if asked == self._asked and time.monotonic() < self._look_at:
            return
        files = await asyncio.to_thread(lambda: {entry.name: self._find(entry) for entry in entries})
        self._files, self._asked, self._look_at = files, asked, time.monotonic() + LOOK_S

    async def find(self, entry: CatalogueEntry) -> str:
        """Where a model's files are now."""
        self._files[entry.name] = files = await asyncio.to_thread(self._find, entry)
        return files.place

    def files(self, name: str) -> Files:
        """A model's files at the last look."""
        return self._files.get(name, Files())

    def _find(self, entry: CatalogueEntry) -> Files:
        """As the catalogue says, or where those of another host are stored."""
        hub = entry.source if is_hub_name(entry.source) and not Path(entry.source).expanduser().exists() else ""
        place = entry.source if (hub or self._may_open(entry)) and _is_here(entry.source) else ""
        place = place or str(self._weights.stored(entry.sha256) or "")
        return Files(place, _last_change(place or entry.source), hub)

    def _may_open(self, entry: CatalogueEntry) -> bool:
        """True unless a catalogue's entry names a file of this machine that its operator has not opened to it."""
        if any(given.source == entry.source for given in self.given):
            return True
        path = Path(entry.source).expanduser().resolve()
        return any(path.is_relative_to(each.expanduser().resolve()) for each in self._settings.catalogue_folders)

    # -- what was found in them

    def known(self, name: str) -> Described | None:
        """The model as it was described; None for one that was not, or cannot be."""
        looked = self._looked.get(name)
        return None if looked is None else looked.described

    def current(self, name: str) -> Described | None:
        """The model as it was described, unless its files have changed since."""
        looked = self._looked.get(name)
        if looked is None or looked.files.changed_ns != self.files(name).changed_ns:
            return None
        return looked.described

    @property
    def looked(self) -> list[Looked]:
        return list(self._looked.values())

    @property
    def device(self) -> Device:
        """Device of a known model; plain memory until one is known."""
        return next((each.described.device for each in self._looked.values() if each.described), Device())

    def note(self, entry: CatalogueEntry, described: Described | None, why: str = "") -> None:
        """Keep what a process has found, or why a model cannot be loaded."""
        self._looked[entry.name] = Looked(entry, described, why, self.files(entry.name))
        if why:
            log.error("host.cannot_offer", model=entry.name, reason=why)

    def forget_all_but(self, names: Collection[str]) -> None:
        """Forget models that have left the catalogue."""
        for name in set(self._looked).difference(names):
            del self._looked[name]

    def new(self, models: RingModels, held: Collection[str]) -> list[CatalogueEntry]:
        """Models to be described: the catalogue has got them or has them otherwise than before, or their files have
        changed. One that is elsewhere is noted as refused."""
        found = []
        for entry in self.meant(models):
            waits = entry.name not in self._files or self._lacks_draft(entry)
            if entry.name in held or waits or self._is_known(entry):
                continue
            files = self.files(entry.name)
            if files.place:
                found.append(entry)
            elif not files.hub and not self._weights.address:  # else another host may give it
                self.note(entry, None, "its folder is in none of this host's --catalogue-folders")
        return found

    def _is_known(self, entry: CatalogueEntry) -> bool:
        looked = self._looked.get(entry.name)
        if looked is None or (looked.entry.source, looked.entry.options) != (entry.source, entry.options):
            return False
        return self.current(entry.name) is not None or looked.files == self._files[entry.name]

    # -- what the ring is told

    def meant(self, models: RingModels) -> list[CatalogueEntry]:
        """Models of the catalogue that this host is to load if it can."""
        given = {entry.name for entry in self.given}
        each = models.entries.values()
        return [one for one in each if one.ranks == 1 and (one.name in given or self._settings.from_catalogue)]

    def of(self, models: RingModels) -> tuple[dict[str, int], dict[str, str], list[str]]:
        """Models that this host could load, and the memory that each takes here, 0: not known; models whose files it
        has and cannot load, and why; and those whose files it is about to look at."""
        needs, refuses, unseen = dict[str, int](), dict[str, str](), list[str]()
        for entry in self.meant(models):
            described, files = self.known(entry.name), self.files(entry.name)
            comes = bool(files.hub) or bool(self._weights.givers(entry, models))
            if why := self.refusal(entry):
                refuses[entry.name] = why
            elif comes or (described is not None and files.place):
                needs[entry.name] = 0 if described is None else described.need_bytes
            elif described is not None:
                refuses[entry.name] = f"'{entry.source}' is there no longer"
            elif files.place or entry.name not in self._files:
                unseen.append(entry.name)
        return needs, refuses, unseen

    def refusal(self, entry: CatalogueEntry) -> str:
        """Say what is wrong with the files that this host has of a model; "" if nothing is, or if it has none."""
        if self._lacks_draft(entry):
            return f"this host has no model '{entry.options[DRAFT]}' of the catalogue, which is to draft for it"
        looked = self._looked.get(entry.name)
        if looked is None or looked.described is None:
            return "" if looked is None else looked.why
        found = looked.described.card.base_sha256
        if entry.sha256 not in ("", found):
            return f"its files have the hash {found}, and the catalogue asks for {entry.sha256}"
        return ""

    def _lacks_draft(self, entry: CatalogueEntry) -> bool:
        return DRAFT in entry.options and not self.files(entry.options[DRAFT]).source


def _is_here(source: str) -> bool:
    if Path(source).expanduser().exists() or not is_hub_name(source):
        return Path(source).expanduser().exists()
    try:
        folder = hub_folder(source)
        folder = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        index = folder / "model.safetensors.index.json"
        parts = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"*.safetensors"}
        return (folder / "config.json").exists() and all(any(folder.glob(part)) for part in parts)
    except (OSError, ValueError, LookupError, AttributeError):
        return False


def _last_change(source: str) -> int:
    path = Path(source).expanduser()
    try:
        return max(each.stat().st_mtime_ns for each in (path, *path.glob("*")))
    except OSError:
        return 0
