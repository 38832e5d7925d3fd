"""`--start-from`: the adapter that a run begins with, out of the store or a folder, whoever trained it."""

import asyncio
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE
from shared.errors import ParallmError, SetupError
from trainer.ring.ring import Stored
from trainer.state import Arrays, RunState
from trainer.versions.checkpoint import write_adapter
from trainer.versions.publish import Publisher

_KEPT = "start"  # a folder of the run: a version may be deleted, and what a run is held against must stay


async def starting_weights(named: str, state: RunState, publisher: Publisher, *, resumed: bool) -> Arrays | None:
    """What the run began with, also when it is resumed; None: the base. It goes into the run's state and folder.

    SetupError when a resumed run began with something else, or when there are no weights that fit.
    """
    kept = publisher.folder / _KEPT
    if resumed:
        if named and named != state.started_from:
            began = state.started_from or "the base"
            raise SetupError(f"--start-from {named}: this run began with {began}; give another --run, or --resume no")
        return publisher.fitting(await asyncio.to_thread(_read, kept), str(kept)) if state.started_from else None
    if not named:
        return None
    try:
        weights = publisher.fitting(await _stored(named, publisher), named)
    except ParallmError as error:
        raise SetupError(f"--start-from {named}: {error}") from error
    await publisher.disk.run(_keep, kept, weights, publisher.config)
    state.started_from = named
    return weights


async def _stored(named: str, publisher: Publisher) -> Stored:
    if "/" in named:
        return await asyncio.to_thread(_read, Path(named))
    name, _, version = named.rpartition("@")
    if not name or not version.isdecimal():
        raise SetupError("it is NAME@VERSION, such as taught@3, or a folder with a '/' in its path")
    return await publisher.sink.fetch(int(version), name)


def _read(folder: Path) -> Stored:
    try:
        return Stored(load_file(folder / MLX_FILE), (folder / CONFIG_FILE).read_bytes(), "")
    except (OSError, SafetensorError) as error:
        raise SetupError(f"{folder} holds no {MLX_FILE} and {CONFIG_FILE} that can be read: {error}") from error


def _keep(folder: Path, weights: Arrays, config: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_adapter(folder, weights, config)
