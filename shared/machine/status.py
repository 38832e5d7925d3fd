"""The status of a machine, which its processes report in heartbeats."""

from typing import Self

import msgspec

from shared.machine.memory import GpuMemory, MachineMemory, Pressure, pressure_on
from shared.machine.power import Source
from shared.machine.thermal import Thermal


class MachineStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The machine of one process, and what a worker does about it."""

    memory_total: int = 0  # bytes; of the control group, where that is tighter. 0: not reported
    memory_available: int = 0
    footprint: int = 0  # bytes that the process holds
    gpu_total: int = 0  # of a GPU with memory of its own. 0: it computes in the machine's
    gpu_available: int = 0
    gpu_held: int = 0  # by the process
    pressure: Pressure = "normal"
    relief: str = ""  # what is done about it, for people; "": nothing
    most_rows: int = -1  # that it fills at present; -1: as many as it has
    power: Source = "unknown"
    charge: int = -1  # percent; -1: no battery
    thermal: Thermal = "unknown"

    @classmethod
    def of(cls, memory: MachineMemory, footprint: int, gpu: GpuMemory, limit: int) -> Self:
        """The memory of a process that may take `limit` bytes; 0: what the machine has."""
        return cls(
            memory_total=memory.total,
            memory_available=memory.available,
            footprint=footprint,
            gpu_total=gpu.total,
            gpu_available=gpu.available,
            gpu_held=gpu.held,
            pressure=pressure_on(memory, footprint, gpu, limit),
        )

    @property
    def held(self) -> int:
        """Bytes that the process holds where its model is."""
        return self.gpu_held if self.gpu_total else self.footprint

    @property
    def available(self) -> int:
        """Bytes that are left where its model is."""
        return self.gpu_available if self.gpu_total else self.memory_available

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
