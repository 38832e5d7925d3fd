"""A checkpoint as files: an adapter of PEFT and, of a training checkpoint, AdamW's moments. Plain files, no network.

`adapter_config.json`, `adapter_model.safetensors`, `optimizer.safetensors` (m and v by the adapter's own names, and the
number of updates), and last `checkpoint_complete`, which is empty: what has it is whole, as Tinker's own client asks.
"""

import tarfile
from pathlib import Path
from typing import IO

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from shared.adapter_files.export import export
from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE, PEFT_FILE
from shared.adapter_files.tensors import Tensor, write_tensors
from shared.adapters import AdapterManifest, PreparedAdapter
from shared.learners import LearnerSpec

OPTIMIZER_FILE = "optimizer.safetensors"
COMPLETE_FILE = "checkpoint_complete"
ARCHIVE = "checkpoint.tar"
EXTERNAL_FILES = (CONFIG_FILE, PEFT_FILE, COMPLETE_FILE)
FILES = (*EXTERNAL_FILES, ARCHIVE)
_WEIGHTS, _MOMENTS = "weights/", "adam/"  # of a state's names (trainer/service/learner.py)


def write_state(spec: LearnerSpec, state: Path, folder: Path) -> None:
    """The files of a learner's stored state; AdapterRejectedError when PEFT has no place for a part of it."""
    with safe_open(state, framework="numpy") as file:
        names = list(file.keys())
        weights = {
            name.removeprefix(_WEIGHTS): Tensor("F32", file.get_tensor(name).view("<u4"))
            for name in names
            if name.startswith(_WEIGHTS)
        }
        tensors = folder.with_name(MLX_FILE)
        write_tensors(tensors, weights, {"format": "mlx"})
        modules = tuple(sorted({name.rpartition(".")[0] for name in weights}))
        size = tensors.stat().st_size
        adapter = PreparedAdapter(tensors, spec.kind, spec.rank, spec.scale, modules, "", size)
        weights.clear()
        export(adapter, tensors, folder, "peft", spec.model)
        moments = {
            name.removeprefix(_MOMENTS): np.ascontiguousarray(file.get_tensor(name))
            for name in names
            if name.startswith(_MOMENTS)
        }
    if moments:
        save_file(moments, folder / OPTIMIZER_FILE)
    (folder / COMPLETE_FILE).touch()


def write_version(spec: LearnerSpec, manifest: AdapterManifest, tensors: Path, folder: Path) -> None:
    """The files of a published version, whose bytes are `tensors`; errors as of `write_state`."""
    export(manifest, tensors, folder, "peft", spec.model)
    (folder / COMPLETE_FILE).touch()


def opened(folder: Path, name: str, created_ms: int) -> IO[bytes]:
    """One of FILES, read from the start; the archive is made here, its times are those of the checkpoint."""
    path = folder / name
    if name == ARCHIVE:
        path = folder.with_name(ARCHIVE)
        last = (COMPLETE_FILE,)
        files = sorted(each.name for each in folder.iterdir() if each.name not in last)
        with tarfile.open(path, "w") as tar:
            for each in (*files, *last):
                about = tarfile.TarInfo(each)
                about.size, about.mtime = (folder / each).stat().st_size, created_ms // 1000
                with (folder / each).open("rb") as file:
                    tar.addfile(about, file)
    return path.open("rb")
