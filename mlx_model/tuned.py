"""Measurements that were taken on this machine once, so that no start has to measure it again: a file that `mlx_parallm
doctor --tune` writes, and that a worker reads when it has loaded its model.

It counts only on the machine and with the MLX that it was measured on. It holds no paths, names or prompts, so a person
may send it to somebody.
"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

import msgspec

from mlx_model.device import described
from mlx_model.fast_blas import cache_folder
from shared.machine.memory import machine_memory
from shared.machine.system import this_system

log = logging.getLogger(__name__)

FILE = "PARALLM_TUNED"  # names the file; "0": none is read
_GIB = 1 << 30


Times = dict[str, float]
"""Seconds by the way to compute the same."""


class ModelTuning(msgspec.Struct, frozen=True):
    """Measurements of one model, in seconds, and the choices that follow from them: no other code makes these.

    A way that is not among its times is switched off, not made for the model, or wrong.
    """

    name: str
    chunk: int  # most prompt tokens whose forward keeps its bound
    width: int = 0  # most tokens of one prompt, where attention keeps its scores; 0: not measured
    pieces: dict[int, float] = {}  # by prompt tokens
    products: dict[int, float] = {}  # a linear, by rows
    padding: dict[int, int] = {}  # rows -> more rows, of which a quantised linear takes less time
    joined: Times = {}  # linears of one input: "apart" or "joined"
    lora: Times = {}  # a layer's first linears with adapters: "take", "gather" or "fused"
    kv: dict[int, Times] = {}  # by bits, a layer's attention over packed KV: "plain", "unpacked" or "packed"
    nucleus: Times = {}  # thresholds of top_p: "sorted" or "halved"

    @property
    def joins(self) -> bool | None:
        """True if linears that read one input should be one product; None: not measured."""
        return None if not self.joined else min(self.joined, key=self.joined.__getitem__) == "joined"

    @property
    def halves(self) -> bool | None:
        """True if thresholds of top_p should be found by halving; None: not measured."""
        return None if not self.nucleus else min(self.nucleus, key=self.nucleus.__getitem__) == "halved"

    def lora_way(self, *ways: str) -> str | None:
        """The fastest of these ways to compute adapters; None: one of them was not measured."""
        return None if self.lora.keys() != set(ways) else min(ways, key=self.lora.__getitem__)


class Tuned(msgspec.Struct, frozen=True):
    """Measurements of a machine, by the hash of each model's weights."""

    machine: str
    mlx: str
    backend: str
    models: dict[str, ModelTuning] = {}


def this_machine() -> Tuned:
    """A record of this machine without measurements."""
    of, system = described(), this_system()
    name = of["device"].get("device_name") or system.chip or platform.processor() or system.architecture
    memory = round(machine_memory().total / _GIB)
    cores = os.cpu_count()
    return Tuned(f"{name}, {system.model or system.platform}, {cores} cores, {memory} GiB", of["mlx"], of["backend"])


def tuned_file() -> Path | None:
    """Where measurements are; None if none are to be read."""
    named = os.environ.get(FILE, "")
    if named == "0":
        return None
    return Path(named) if named else cache_folder() / "tuned.json"


def read_tuned(file: Path | None) -> Tuned | None:
    """Measurements of this machine in a file; None where there are none, or those of another machine or MLX."""
    if file is None or not file.is_file():
        return None
    try:
        tuned = msgspec.json.decode(file.read_bytes(), type=Tuned)
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("tuned.unreadable file=%s error=%s: run mlx_parallm doctor --tune again", file, error)
        return None
    here = this_machine()
    if (tuned.machine, tuned.mlx, tuned.backend) != (here.machine, here.mlx, here.backend):
        log.warning("tuned.of_another file=%s: run mlx_parallm doctor --tune again", file)
        return None
    return tuned


def tuning_of(base_sha256: str) -> ModelTuning | None:
    """Measurements of a model on this machine."""
    tuned = read_tuned(tuned_file())
    return None if tuned is None else tuned.models.get(base_sha256)


def write_tuned(base_sha256: str, tuning: ModelTuning, file: Path) -> None:
    """Add a model's measurements to a file, or begin it anew where it is of another machine."""
    before, here = read_tuned(file), this_machine()
    models = {**(before.models if before else {}), base_sha256: tuning}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(here, models=models))) + b"\n")
    new.replace(file)
