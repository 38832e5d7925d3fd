"""The machine's memory: how much there is, how much is left, how hard the system is pressed for it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.machine import darwin, linux
from shared.machine.commands import output_of
from shared.machine.linux import NO_STALLS, Stalls

Pressure = Literal["normal", "warning", "critical"]
LEVELS: tuple[Pressure, ...] = ("normal", "warning", "critical")

_DARWIN_LEVELS: dict[int, Pressure] = {1: "normal", 2: "warning", 4: "critical"}
WARNING_LEFT, CRITICAL_LEFT = 0.10, 0.04  # of the memory there is; what is left below that is pressure
WARNING_STALLED, CRITICAL_STALLED = 20.0, 10.0  # percent of ten seconds: of some tasks, of all tasks
NEAR_LIMIT = 0.92  # of --memory-limit


@dataclass(frozen=True)
class MachineMemory:
    """Memory that processes on this machine share, in bytes; on Linux that of the tightest control group around us."""

    total: int  # 0: unknown
    available: int  # without swapping others out
    pressure: Pressure = "normal"
    limit: str = ""  # where the total comes from, if not from the machine: a control group's folder
    outside: int = 0  # left on the machine, and not for processes in that control group

    def shared_with(self, pid: int) -> bool:
        """True if what a process takes is taken from this memory: there is no limit, or it is within it, too."""
        return not self.limit or linux.is_in_group(pid, Path(self.limit))


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU that has its own, in bytes; zeros: it computes in the machine's."""

    total: int = 0
    available: int = 0
    held: int = 0  # by this process


def machine_memory() -> MachineMemory:
    """Memory as the system reports it now. On macOS this starts `vm_stat`, which takes a few milliseconds."""
    return _of_darwin() if sys.platform == "darwin" else _of_linux()


def footprint(pid: int = 0) -> int:
    """Memory that a process holds, in bytes: what Activity Monitor shows on macOS. 0: there is no such process.

    Without a pid that of this process.
    """
    of = darwin.physical_footprint if sys.platform == "darwin" else linux.physical_footprint
    return of(pid or os.getpid()) or 0


def worst(*pressures: Pressure) -> Pressure:
    """The highest of some levels."""
    return max(pressures, key=LEVELS.index)


def pressure_on(memory: MachineMemory, footprint: int, gpu: GpuMemory, limit: int) -> Pressure:
    """The level for one process: the machine's, the GPU's, and how near it has come to its `limit`; 0: it has none."""
    held = max(footprint, gpu.held)
    near: Pressure = "normal" if not limit or held < NEAR_LIMIT * limit else "critical" if held >= limit else "warning"
    return worst(memory.pressure, pressure_by(gpu.total, gpu.available), near)


def pressure_by(total: int, available: int, stalls: Stalls = NO_STALLS) -> Pressure:
    """Level on a system that has none of its own, by what is left and by how long tasks have waited for memory."""
    if not total:
        return "normal"
    left = available / total
    if left < CRITICAL_LEFT or stalls.full >= CRITICAL_STALLED:
        return "critical"
    return "warning" if left < WARNING_LEFT or stalls.some >= WARNING_STALLED else "normal"


def _of_darwin() -> MachineMemory:
    total = darwin.sysctl_int("hw.memsize") or 0
    level = darwin.sysctl_int("kern.memorystatus_vm_pressure_level")
    available = darwin.available_in(output_of("/usr/bin/vm_stat"), total)
    if available is None:  # percent, as memory_pressure(1) prints it
        available = total * (darwin.sysctl_int("kern.memorystatus_level") or 100) // 100
    return MachineMemory(total, available, _DARWIN_LEVELS.get(level or 1, "normal"))


def _of_linux() -> MachineMemory:
    figures = linux.kilobytes_in(_read("/proc/meminfo"))
    total, available = figures.get("MemTotal", 0), figures.get("MemAvailable", 0)
    machine = MachineMemory(
        total, available, pressure_by(total, available, linux.stalls_in(_read("/proc/pressure/memory")))
    )
    group = linux.tightest_group()
    if group is None or (total and group.limit >= total and group.available >= available):
        return machine
    left = min(available, group.available) if total else group.available
    level = worst(machine.pressure, pressure_by(group.limit, group.available, group.stalls))
    return MachineMemory(min(total or group.limit, group.limit), left, level, str(group.path), max(0, available - left))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # read every second
            return file.read()
    except OSError:
        return ""
