"""The weights that a run begins with: `--start-from`, an adapter out of the store or a folder, from any trainer.

Invariant. No run begins by replacing a version that somebody else has made the latest, unless it goes on from it, or
its settings say that it may.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shared.adapter_files.config import read_config
from shared.adapter_files.formats import inherit_config, prepared
from shared.adapter_files.tensors import read_tensors
from shared.adapters import version_id
from shared.errors import ParallmError, SetupError
from trainer.learn import gate
from trainer.ring.ring import Stored
from trainer.settings import TrainSettings
from trainer.state import Arrays, RunState
from trainer.versions.checkpoint import write_adapter
from trainer.versions.publish import Publisher

_KEPT = "start"  # a folder of the run: a version may be deleted, and what a run is held against must stay
_MAX_BYTES = 2**40  # the file is the user's own
_DIGITS = 18  # of a version's number


async def check_latest(settings: TrainSettings, state: RunState, publisher: Publisher) -> None:
    """SetupError when a run that has served nothing yet would replace a version that it does not go on from.

    Called before the run's folder is set aside, which says what an earlier start of the run has served.
    """
    latest = await publisher.sink.latest_version()
    named = version_id(settings.adapter, latest)
    ours = state.version or publisher.moved_by_us(latest, unknown=False)
    if not latest or ours or settings.replace_latest or settings.start_from == named:
        return
    train_on = "" if settings.mode == "ppo" else f"train on from it (--start-from {named}), "
    raise SetupError(
        f"{named} is served to everybody who asks for {settings.adapter}, and this run, which does not go on from it, "
        f"would replace it: {train_on}publish under another name (--adapter NAME), or replace it (--replace-latest)"
    )


async def starting_weights(
    named: str,
    state: RunState,
    publisher: Publisher,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    resumed: bool,
    fresh: Arrays,
) -> Arrays | None:
    """Weights that the run begins with, or began with where it is resumed; None: the base. Nothing is written.

    `fresh`: the run's weights without a start: a LoRA or a head that the named version does not have is of these.

    SetupError when a resumed run began with something else, or when there are no weights that fit.
    """
    if resumed:
        if named and named != state.started_from:
            began = state.started_from or "the base"
            raise SetupError(f"--start-from {named}: this run began with {began}; give another --run, or --resume no")
        if not state.started_from:
            return None
        named = str(publisher.folder / _KEPT)
    if not named:
        return None
    try:
        stored = await _stored(named, publisher)
        weights = publisher.fitting(_completed(stored, fresh, publisher.config), named)
        if wrong := gate.failures([gate.fits(weights, shapes)]):
            raise SetupError(f"{named} does not fit {state.run}'s model: {wrong}")
    except ParallmError as error:
        raise SetupError(f"--start-from {named}: {error}") from error
    return weights


async def keep_start(named: str, weights: Arrays, state: RunState, publisher: Publisher) -> None:
    """Write down what the run begins with, in its state and in its folder."""
    await publisher.disk.run(_keep, publisher.folder / _KEPT, weights, publisher.config)
    state.started_from = named


async def _stored(named: str, publisher: Publisher) -> Stored:
    if "/" in named:
        return await asyncio.to_thread(_read, Path(named))
    name, _, version = named.rpartition("@")
    if not name or not version.isdecimal() or len(version) > _DIGITS:
        raise SetupError("it is NAME@VERSION, such as taught@3, or a folder with a '/' in its path")
    return await publisher.sink.fetch(int(version), name)


def _read(folder: Path) -> Stored:
    """An adapter of mlx-lm's or PEFT's layout; whatever its dtype, learning goes on in fp32."""
    try:
        with prepared(folder, max_bytes=_MAX_BYTES) as made:
            tensors = read_tensors(made.path, max_bytes=_MAX_BYTES)
            weights = {name: np.array(tensor.floats()) for name, tensor in tensors.items()}
    except OSError as error:
        raise SetupError(f"{folder} cannot be read: {error}") from error
    return Stored(weights, inherit_config(made), "")


def _completed(stored: Stored, fresh: Arrays, config: bytes) -> Stored:
    there, here = read_config(stored.config), read_config(config)
    described, weights = json.loads(stored.config), dict(stored.weights)
    if there.kind == "head" and here.kind != "head":
        described = {**json.loads(config), "heads": described["heads"]}
        weights |= {name: value for name, value in fresh.items() if not name.startswith("heads.")}
    if here.heads and not there.heads:
        described["heads"] = json.loads(config)["heads"]
        weights |= {name: value for name, value in fresh.items() if name.startswith("heads.")}
    return Stored(weights, json.dumps(described).encode(), stored.base_sha256)


def _keep(folder: Path, weights: Arrays, config: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_adapter(folder, weights, config)
