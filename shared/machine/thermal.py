"""How hot the machine is, in the four states of macOS. Other systems have no such summary: there it is unknown."""

import re
import sys
from typing import Literal

from shared.machine.commands import output_of

Thermal = Literal["nominal", "fair", "serious", "critical", "unknown"]
STATES: tuple[Thermal, ...] = ("nominal", "fair", "serious", "critical")
# <libkern/OSThermalNotification.h>: nominal, moderate, heavy, trapping, sleeping.
PRESSURE_KEY = "com.apple.system.thermalpressurelevel"
_BY_LEVEL: tuple[Thermal, ...] = (*STATES, "critical")
_LEVEL = re.compile(rf"{re.escape(PRESSURE_KEY)} (\d+)")
_SPEED_LIMIT = re.compile(r"CPU_Speed_Limit\s*=\s*(\d+)")
_NO_WARNING = "No thermal warning level has been recorded"


def machine_thermal() -> Thermal:
    """The machine's thermal state now."""
    if sys.platform != "darwin":
        return "unknown"
    state = thermal_by_level(output_of("/usr/bin/notifyutil", "-g", PRESSURE_KEY))
    return thermal_by_speed(output_of("/usr/bin/pmset", "-g", "therm")) if state == "unknown" else state


def thermal_by_level(notifyutil: str) -> Thermal:
    """State by the text of `notifyutil -g`, which has a level on every Mac."""
    found = _LEVEL.search(notifyutil)
    return "unknown" if found is None or int(found[1]) >= len(_BY_LEVEL) else _BY_LEVEL[int(found[1])]


def thermal_by_speed(pmset: str) -> Thermal:
    """State by the text of `pmset -g therm`: the speed limit in percent, which Apple silicon may leave out."""
    found = _SPEED_LIMIT.search(pmset)
    if found is None:
        return "nominal" if _NO_WARNING in pmset else "unknown"
    speed = int(found[1])
    if speed >= 100:
        return "nominal"
    return "fair" if speed >= 80 else "serious" if speed >= 50 else "critical"
