"""Figures that only Linux has: /proc/meminfo, pressure stall information, limits of control groups.

Formats: proc_meminfo(5), Documentation/accounting/psi.rst, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 writes the largest number of pages where there is none
_KIB = re.compile(r"^(\w+(?:\(\w+\))?):\s+(\d+) kB", re.MULTILINE)
_STALL = re.compile(r"^(some|full) avg10=([\d.]+)", re.MULTILINE)
_COUNT = re.compile(r"^(\w+) (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Stalls:
    """Share of the last ten seconds in which some, or all, tasks waited for memory, in percent."""

    some: float = 0.0
    full: float = 0.0


NO_STALLS = Stalls()


@dataclass(frozen=True)
class GroupMemory:
    """A control group's memory limit, and what of it is in use and cannot be reclaimed."""

    path: Path
    limit: int
    used: int
    stalls: Stalls = NO_STALLS

    @property
    def available(self) -> int:
        """Bytes that are left until the limit."""
        return max(0, self.limit - self.used)


def kilobytes_in(text: str) -> dict[str, int]:
    """Figures of /proc/meminfo or /proc/PID/status by name, in bytes."""
    return {name: int(count) << 10 for name, count in _KIB.findall(text)}


def stalls_in(text: str) -> Stalls:
    """Pressure stall information; zeros where there is none."""
    found = {kind: float(share) for kind, share in _STALL.findall(text)}
    return Stalls(found.get("some", 0.0), found.get("full", 0.0))


def group_folders(text: str, root: Path = GROUPS) -> Iterator[Path]:
    """Folders of a process's memory control group and of the groups around it, from the text of /proc/PID/cgroup.

    Inside a container the path may be the host's, of which only the innermost folder is mounted, as the root.
    """
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        at = base / path.lstrip("/")
        while at != base:
            yield at
            at = at.parent
        yield base


def group_memory(folder: Path) -> GroupMemory | None:
    """Limit and use of a control group of either version; None where it has no limit or no memory controller."""
    if (limit := _number(folder / "memory.max")) is not None:
        used = _number(folder / "memory.current")
    else:
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= NO_LIMIT:
        return None
    counts = {name: int(count) for name, count in _COUNT.findall(_text(folder / "memory.stat"))}
    files = sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in ("inactive_file", "active_file"))
    return GroupMemory(folder, limit, max(0, used - files), stalls_in(_text(folder / "memory.pressure")))


def tightest_group(pid: int | str = "self", proc: Path = PROC, root: Path = GROUPS) -> GroupMemory | None:
    """The control group around a process that has the least memory left; None if none has a limit."""
    groups = map(group_memory, group_folders(_text(proc / str(pid) / "cgroup"), root))
    return min((group for group in groups if group is not None), key=lambda group: group.available, default=None)


def is_in_group(pid: int, folder: Path, proc: Path = PROC, root: Path = GROUPS) -> bool:
    """True if the memory of a process counts for a control group."""
    return folder in group_folders(_text(proc / str(pid) / "cgroup"), root)


def physical_footprint(pid: int, proc: Path = PROC) -> int | None:
    """Memory of a process that cannot be dropped and read again from its file; None if there is no such process."""
    figures = kilobytes_in(_text(proc / str(pid) / "status"))
    if "VmRSS" not in figures:
        return None
    if "RssAnon" not in figures:  # some kernels do not split it
        return figures["VmRSS"] + figures.get("VmSwap", 0)
    return figures["RssAnon"] + figures.get("RssShmem", 0) + figures.get("VmSwap", 0)


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    if text == "max":
        return NO_LIMIT
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
