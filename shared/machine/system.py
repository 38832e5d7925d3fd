"""The kind of machine: its system, architecture and chip."""

import platform
import sys
from dataclasses import dataclass

from shared.machine import darwin

METAL_BUILT_FOR = (26, 2)  # mlx-metal's wheel for macOS 26 is tagged 26.0 and needs 26.2 on an M5 (mlx#4525)


@dataclass(frozen=True)
class System:
    """System and hardware under this Python."""

    platform: str  # "darwin", "linux"
    architecture: str  # of this Python: "arm64", "x86_64"
    version: str  # of macOS, such as "26.2", or of the Linux kernel
    chip: str  # such as "Apple M4 Max"; "": unknown
    model: str  # such as "Mac16,5"; "": unknown
    is_apple_silicon: bool
    translated: bool  # this Python is an Intel program that Rosetta translates, so MLX has no Metal


def this_system() -> System:
    """Facts that do not change while a process lives."""
    if sys.platform != "darwin":
        return System(sys.platform, platform.machine(), platform.release(), "", "", False, False)
    return System(
        platform="darwin",
        architecture=platform.machine(),
        # mac_ver says 10.16 in a Python that was built for an old SDK.
        version=darwin.sysctl_text("kern.osproductversion") or platform.mac_ver()[0],
        chip=darwin.sysctl_text("machdep.cpu.brand_string"),
        model=darwin.sysctl_text("hw.model"),
        is_apple_silicon=bool(darwin.sysctl_int("hw.optional.arm64")),
        translated=bool(darwin.sysctl_int("sysctl.proc_translated")),
    )


def trouble_with_mlx(system: System) -> str:
    """Why MLX's wheel does not work on this system, and what to do; "" where it does."""
    if system.translated:
        return "this Python is an Intel program that Rosetta translates, and MLX needs one for Apple silicon: arm64"
    is_m5 = system.platform == "darwin" and "M5" in system.chip
    if is_m5 and (26,) <= version_numbers(system.version) < METAL_BUILT_FOR:
        return f"MLX's build for macOS 26 needs 26.2 on {system.chip}, and this is {system.version}: update macOS"
    return ""


def version_numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version such as "26.1.0", for comparisons."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
