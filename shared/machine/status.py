"""The status of a machine, which its processes report in heartbeats."""

import msgspec

from shared.machine.memory import Pressure
from shared.machine.power import Source
from shared.machine.thermal import Thermal


class MachineStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The machine of one worker, and what the worker does about it."""

    memory_total: int = 0  # bytes; of the control group, where that is tighter. 0: not reported
    memory_available: int = 0
    footprint: int = 0  # bytes that the process holds
    pressure: Pressure = "normal"
    relief: str = ""  # what is done about it, for people; "": nothing
    most_rows: int = -1  # that it fills at present; -1: as many as it has
    power: Source = "unknown"
    charge: int = -1  # percent; -1: no battery
    thermal: Thermal = "unknown"

    @property
    def troubles(self) -> list[str]:
        """Reasons, in words, why the worker is below its full speed."""
        troubles = []
        if self.relief:
            troubles.append(f"memory pressure is {self.pressure}: {self.relief}")
        elif self.pressure != "normal":
            troubles.append(f"memory pressure is {self.pressure}")
        if self.thermal in ("serious", "critical"):
            troubles.append(f"thermal state {self.thermal}: the system slows the machine down")
        return troubles

    @property
    def notes(self) -> list[str]:
        """Troubles, and the battery, for a page."""
        if self.power != "battery":
            return self.troubles
        charge = f", {self.charge}% charged" if self.charge >= 0 else ""
        return [*self.troubles, f"on battery{charge}"]
