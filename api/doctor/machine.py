"""Checks of the machine: Python, architecture, macOS, MLX, memory, sleep, power, room on disk."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from api.doctor.finding import Finding, note, ok, wrong
from shared.machine.commands import output_of
from shared.machine.memory import MachineMemory, machine_memory
from shared.machine.power import Power, machine_power
from shared.machine.system import METAL_BUILT_FOR, System, this_system, version_numbers

OLDEST_PYTHON = (3, 11)
OLDEST_MACOS = (14,)
MLX_WAIT_S = 120.0  # the first import of MLX on a cold disk
_SLEEP = re.compile(r"^\s*sleep\s+(\d+)", re.MULTILINE)


def machine_checks(device: dict[str, Any] | None) -> Iterator[Finding]:
    """All checks of this machine; `device`: as `mlx_device` returns it."""
    system = this_system()
    yield python_check(sys.version_info[:3], sys.executable)
    yield architecture_check(system)
    if system.platform == "darwin":
        yield macos_check(system, _wheel_tag("mlx-metal"))
    yield mlx_check(system, device)
    yield memory_check(machine_memory())
    if system.platform == "darwin":
        yield sleep_check(output_of("/usr/bin/pmset", "-g"))
    yield power_check(machine_power())


def mlx_device() -> dict[str, Any] | None:
    """MLX's version, back end and device, asked in a process of its own; None where it cannot be loaded."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mlx_model.device"], capture_output=True, text=True, timeout=MLX_WAIT_S, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return found


def python_check(version: tuple[int, ...], executable: str) -> Finding:
    """Checks that this version of Python will do."""
    text = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return wrong("python", f"{text} at {executable}", "install Python 3.11 or newer: uv python install 3.13")
    return ok("python", f"{text} at {executable}")


def architecture_check(system: System) -> Finding:
    """A Python for this processor."""
    if system.translated:
        return wrong(
            "architecture",
            "this Python is an Intel program that Rosetta translates, and has no Metal",
            "install one for Apple silicon (uv python install 3.13, or Homebrew in /opt/homebrew), and make a new "
            "environment with it",
        )
    if system.platform == "darwin" and not system.is_apple_silicon:
        return wrong("architecture", "a Mac with an Intel processor", "use a Mac with Apple silicon: MLX needs one")
    if system.platform not in ("darwin", "linux"):
        return wrong("architecture", f"{system.platform} {system.architecture}", "use macOS or Linux")
    return ok("architecture", " ".join(filter(None, (system.platform, system.architecture, system.chip, system.model))))


def macos_check(system: System, metal_tag: str) -> Finding:
    """A macOS that MLX's wheel runs on. `metal_tag`: of mlx-metal's wheel, such as macosx_26_0_arm64."""
    version = version_numbers(system.version)
    if version < OLDEST_MACOS:
        return wrong("macos", system.version, "update to macOS 14 or newer: MLX has no wheel for this one")
    if "macosx_26" in metal_tag and (26,) <= version < METAL_BUILT_FOR:
        return wrong(
            "macos",
            f"{system.version}, with MLX's wheel for 26, which needs 26.2",
            "update to macOS 26.2 or newer, above all on an M5",
        )
    return ok("macos", " ".join(filter(None, (system.version, metal_tag))))


def _wheel_tag(package: str) -> str:
    try:
        text = metadata.distribution(package).read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        return ""
    return next((line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: ")), "")


def mlx_check(system: System, device: dict[str, Any] | None) -> Finding:
    """MLX can be loaded, and computes on the GPU where there is one."""
    if device is None:
        extra = "" if system.platform == "darwin" else ' with the extra of its back end, "mlx-parallm[cpu]" or "[cuda]"'
        return wrong("mlx", "it cannot be imported", f"install this package again{extra}")
    told = f"{device['mlx']} on {device['backend']}"
    if system.platform == "darwin" and device["backend"] != "metal":
        return wrong("mlx", f"{told}, and not on Metal", "leave MLX's default device as it is")
    return ok("mlx", told)


def memory_check(memory: MachineMemory) -> Finding:
    """Memory that is left, and how hard the system is pressed."""
    told = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB are available, pressure {memory.pressure}"
    told += f" (limit of {memory.limit})" if memory.limit else ""
    if memory.pressure == "critical":
        return wrong("memory", told, "close other programs before you start a worker")
    if memory.pressure == "warning":
        return note("memory", told, "close other programs, or take a smaller model")
    return ok("memory", told)


def sleep_check(pmset: str) -> Finding:
    """Idle sleep, from the text of `pmset -g`."""
    found = _SLEEP.search(pmset)
    if found is None:
        return note("sleep", "pmset says nothing of it")
    if int(found[1]):
        return note(
            "sleep",
            f"this Mac sleeps after {found[1]} idle minutes",
            "nothing while a worker runs, which keeps it awake; for a lid that is shut: sudo pmset -c sleep 0",
        )
    return ok("sleep", "this Mac does not sleep by itself")


def power_check(power: Power) -> Finding:
    """Reports whether the machine is on mains or battery."""
    if power.source == "battery":
        return note("power", f"on battery, {power.charge} percent", "plug it in: a Mac on battery computes slower")
    return ok("power", power.source)


def disk_check(folder: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Finding:
    """Room where models and caches go."""
    free = usage(folder).free / 1e9
    if free < 5:
        return note("disk", f"{free:.1f} GB are free in {folder}", "make room: models and KV on disk go there")
    return ok("disk", f"{free:.0f} GB are free in {folder}")
