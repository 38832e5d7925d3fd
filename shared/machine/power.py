"""Where the machine's power comes from. pmset(1) on macOS, /sys/class/power_supply on Linux."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.machine.commands import output_of

Source = Literal["mains", "battery", "unknown"]
SUPPLIES = Path("/sys/class/power_supply")
_DRAWING = re.compile(r"Now drawing from '([^']+)'")
_CHARGE = re.compile(r"\t(\d+)%;")


@dataclass(frozen=True)
class Power:
    """Source of power, and the battery's charge where there is one."""

    source: Source = "unknown"
    charge: int | None = None  # percent


def machine_power(supplies: Path = SUPPLIES) -> Power:
    """The machine's power now; `unknown` on machines that say nothing of it, such as virtual ones."""
    if sys.platform == "darwin":
        return power_in(output_of("/usr/bin/pmset", "-g", "batt"))
    return _of_linux(supplies)


def power_in(pmset: str) -> Power:
    """Power by the text of `pmset -g batt`. A UPS that feeds the machine counts as a battery."""
    drawing, charge = _DRAWING.search(pmset), _CHARGE.search(pmset)
    percent = None if charge is None else int(charge[1])
    if drawing is None:
        return Power()
    return Power("mains" if drawing[1] == "AC Power" else "battery", percent)


def _of_linux(supplies: Path) -> Power:
    """A supply of the scope Device feeds a mouse or a keyboard."""
    try:
        folders = sorted(supplies.iterdir())
    except OSError:
        return Power()
    kinds = {folder: _said(folder, "type") for folder in folders if _said(folder, "scope") != "Device"}
    stores = [folder for folder, kind in kinds.items() if kind in ("Battery", "UPS")]
    charges = [int(said) for folder in stores if (said := _said(folder, "capacity")).isdigit()]
    charge = min(charges, default=None)
    if any(_said(folder, "online") == "1" for folder, kind in kinds.items() if kind in ("Mains", "USB")):
        return Power("mains", charge)
    if any(_said(folder, "status") == "Discharging" for folder in stores):
        return Power("battery", charge)
    return Power("mains" if kinds else "unknown", charge)


def _said(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return ""
