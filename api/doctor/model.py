"""Checks of a model: its folder is whole, and it fits into this machine's memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api.doctor.finding import Finding, note, ok, wrong
from shared.errors import ParallmError, SetupError
from shared.fit.model_fit import Asked, Device, fit_model
from shared.fit.weights import tensors_in
from shared.process.model_aliases import hub_folder, is_hub_name

ADAPTER_SLOTS = 8  # a worker's default


def model_checks(name: str, device: dict[str, Any] | None) -> Iterator[Finding]:
    """All checks of a model that a folder or a hub's name names."""
    folder = Path(name).expanduser()
    if not folder.exists():
        yield _absent(name)
        return
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        yield wrong("model", f"{folder}/config.json: {error}", "give a folder that mlx_lm can load, or a hub's name")
        return
    yield files_check(folder)
    yield fit_check(folder, config, device)


def _absent(name: str) -> Finding:
    if not is_hub_name(name):
        return wrong("model", f"no folder {name!r}", "give a folder or a name such as mlx-community/Qwen3-4B-4bit")
    cached = hub_folder(name) / "snapshots"
    found = sorted(cached.iterdir()) if cached.is_dir() else []
    if found:
        return ok("model", f"{name} is in the hub's cache: give --model {found[-1]} to check whether it fits")
    return note("model", f"{name} is not on this machine yet", "the first start downloads it")


def files_check(folder: Path) -> Finding:
    """Weights whose headers can be read, and a tokenizer."""
    if not (folder / "tokenizer.json").exists():
        return wrong("model", f"{folder} has no tokenizer.json", "convert the model: mlx_lm.convert --hf-path MODEL")
    try:
        tensors = tensors_in(folder)
    except SetupError as error:
        return wrong("model", str(error), "download the model again: a file of weights is not whole")
    size = sum(tensor.nbytes for tensor in tensors)
    return ok("model", f"{folder}: {len(tensors)} tensors, {size / 1e9:.2f} GB")


def fit_check(folder: Path, config: dict[str, Any], device: dict[str, Any] | None) -> Finding:
    """Checks that a worker of this model has room beside what runs already."""
    try:
        planned = fit_model(folder, config, Asked(f"worker of {folder.name}", adapter_slots=ADAPTER_SLOTS), _of(device))
    except ParallmError as error:
        return wrong("fit", "this model does not fit into the memory that other processes leave", str(error))
    return ok("fit", str(planned))


def _of(device: dict[str, Any] | None) -> Device:
    if device is None or device["backend"] == "cpu":
        return Device(float_bytes=4, kv_number_bytes=4)
    on_cuda = device["backend"] == "cuda"
    return Device(device["gpu_bytes"], on_cuda, "GPU 0" if on_cuda else "machine")
