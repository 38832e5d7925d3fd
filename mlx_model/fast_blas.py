"""Faster fp32 on Linux CPU: OpenBLAS in front of the reference BLAS that MLX's wheel carries.

MLX's Linux x86-64 wheel bundles the reference BLAS, which is many times slower than OpenBLAS. `install()`
loads a small library (`fast_blas.c`, compiled once per machine into the user's cache folder) that binds MLX's
matrix products to the PyPI package `scipy-openblas32`.

Invariants:
- It is never needed. Without a C compiler or the package, on another platform, or with `PARALLM_FAST_BLAS=0`,
  nothing happens except one debug log.
- It acts only before `mlx.core` is first imported: the dynamic linker binds MLX's symbols then. Hence this
  module imports no mlx.
- The compiled file's name is a hash of the source and of the path it is linked to, and it appears by one rename:
  several processes may build it at once.

`python -m mlx_model.fast_blas` builds it and says whether it is active.
"""

import ctypes
import hashlib
import importlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

SWITCH = "PARALLM_FAST_BLAS"
_SOURCE = Path(__file__).with_name("fast_blas.c")
_COMPILE_TIMEOUT_S = 60


class _UnavailableError(Exception):
    """Why MLX keeps the BLAS it came with."""


@cache
def install() -> bool:
    """Bind MLX's matrix products to OpenBLAS, before mlx is imported; False when that is impossible here."""
    try:
        _install()
    except (_UnavailableError, OSError, RuntimeError, subprocess.SubprocessError) as reason:
        _log.debug("fast_blas.skipped reason=%s", reason)
        return False
    _log.debug("fast_blas.active")
    return True


def _install() -> None:
    if os.environ.get(SWITCH, "1") == "0":
        raise _UnavailableError(f"{SWITCH}=0")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise _UnavailableError(f"{sys.platform} {platform.machine()} does not need it")
    if "mlx.core" in sys.modules:
        raise _UnavailableError("mlx.core is already imported")
    # The engine is one busy thread among others; BLAS threads of its own would only take their cores, and they spin
    # while they wait. Before the import, which loads the library and starts its threads.
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ.get("OPENBLAS_NUM_THREADS") or "1"
    openblas = _find_openblas()
    shim = cache_folder() / f"fast_blas-{_build_key(openblas)}.so"
    if not shim.exists():
        _build(shim, openblas)
    ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)


def cache_folder() -> Path:
    """The per-user folder that holds the compiled library."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-parallm"


def _find_openblas() -> Path:
    try:
        package = importlib.import_module("scipy_openblas32")
    except ImportError as error:
        raise _UnavailableError("scipy-openblas32 is not installed") from error
    library = Path(package.get_lib_dir()) / "libscipy_openblas.so"
    if not library.is_file():
        raise _UnavailableError(f"no {library.name} in scipy-openblas32")
    return library


def _build_key(openblas: Path) -> str:
    return hashlib.sha256(_SOURCE.read_bytes() + b"\0" + os.fsencode(openblas)).hexdigest()[:16]


def _build(shim: Path, openblas: Path) -> None:
    """Compile the shim next to its final place, then move it there in one step."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise _UnavailableError("no C compiler")
    shim.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=shim.parent) as folder:
        built = Path(folder) / shim.name
        rpath = f"-Wl,-rpath,{openblas.parent}"
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(built), str(_SOURCE), str(openblas), rpath]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        built.replace(shim)


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    install()
