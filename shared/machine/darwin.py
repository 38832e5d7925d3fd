"""Figures that only macOS has: sysctl by name, the memory of a process, the pages of `vm_stat`.

Interfaces: sysctlbyname(3), proc_pid_rusage in <libproc.h> with struct rusage_info_v0 of <sys/resource.h>, vm_stat(1).
"""

import ctypes
import re
import struct
import sys

_RUSAGE_INFO_V0 = 0
_RUSAGE_BYTES = 96  # uuid[16] and ten numbers of 64 bits
_FOOTPRINT_AT = 72  # ri_phys_footprint is the eighth of them
_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_PAGES = re.compile(r'^"?([A-Za-z -]+)"?:\s+(\d+)\.', re.MULTILINE)


def sysctl_int(name: str) -> int | None:
    """A number of the kernel's; None where it has no such name."""
    value = _sysctl(name)
    if value is None or len(value) not in (4, 8):
        return None
    return int.from_bytes(value, sys.byteorder, signed=True)


def sysctl_text(name: str) -> str:
    """A text of the kernel's; "" where it has no such name."""
    value = _sysctl(name)
    return "" if value is None else value.rstrip(b"\0").decode(errors="replace")


def _sysctl(name: str) -> bytes | None:
    if sys.platform != "darwin":
        return None
    library = ctypes.CDLL(None)
    size = ctypes.c_size_t(0)
    if library.sysctlbyname(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    room = ctypes.create_string_buffer(max(1, size.value))
    if library.sysctlbyname(name.encode(), room, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    return room.raw[: size.value]


def physical_footprint(pid: int) -> int | None:
    """Memory that the system charges to a process, GPU and compressed memory included; None for a foreign process."""
    if sys.platform != "darwin":
        return None
    usage = ctypes.create_string_buffer(_RUSAGE_BYTES)
    if ctypes.CDLL(None).proc_pid_rusage(ctypes.c_int(pid), ctypes.c_int(_RUSAGE_INFO_V0), usage):
        return None
    return footprint_in(usage.raw)


def footprint_in(usage: bytes) -> int:
    """`ri_phys_footprint` in the bytes of a struct rusage_info_v0."""
    return int(struct.unpack_from("=Q", usage, _FOOTPRINT_AT)[0])


def available_in(vm_stat: str, total: int) -> int | None:
    """Memory that is neither an application's, wired, nor compressed, in bytes: Activity Monitor's total less "used".

    None if the text is not that of `vm_stat`.
    """
    size = _PAGE_SIZE.search(vm_stat)
    pages = {name: int(count) for name, count in _PAGES.findall(vm_stat)}
    needed = ("Anonymous pages", "Pages purgeable", "Pages wired down", "Pages occupied by compressor")
    if size is None or any(name not in pages for name in needed):
        return None
    anonymous, purgeable, wired, compressor = (pages[name] for name in needed)
    used = (max(0, anonymous - purgeable) + wired + compressor) * int(size[1])
    return max(0, total - used)
