"""A worker's watch over its machine: memory twice a second, power and heat now and then.

Memory: what `MemoryRelief` decides is done here, for the highest pressure on any rank: the system's, the GPU's, and
with --memory-limit that of what the process itself holds. Power: with --on-battery the worker fills fewer rows, or
none, while the machine runs on battery.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from mlx_model.memory import watched_memory
from shared.machine.memory import worst
from shared.machine.power import Power, machine_power
from shared.machine.status import MachineStatus
from shared.machine.thermal import Thermal, machine_thermal
from shared.process.worker_settings import WorkerSettings
from shared.ranks import RankStatus
from worker.claims import Returns, youngest
from worker.engine.orders import Relieve
from worker.engine.thread import EngineThread
from worker.memory_relief import MemoryRelief, Relief
from worker.rows import ClaimedRows

log = structlog.get_logger()

LOOK_S = 0.5
POWER_LOOK_S = 10.0
ROWS_ON_BATTERY = 0.25  # with --on-battery slow


@dataclass(frozen=True)
class MachineReaders:
    """Where the facts come from."""

    memory: Callable[[int], MachineStatus] = watched_memory  # of a process that may take so many bytes
    power: Callable[[], Power] = machine_power
    thermal: Callable[[], Thermal] = machine_thermal


class MachineWatch:
    """Looks at the machine of one worker, and has the worker follow. `handed_back` counts sequences that went back."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: EngineThread,
        returns: Returns,
        rows: ClaimedRows,
        handed_back: Callable[[int], None] = lambda sequences: None,
        ranks: Callable[[], tuple[RankStatus, ...]] = lambda: (),
        readers: MachineReaders = MachineReaders(),  # frozen
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._returns = returns
        self._rows = rows
        self._handed_back = handed_back
        self._ranks = ranks
        self._readers = readers
        self._read_memory = partial(readers.memory, settings.memory_limit_bytes)
        self._steps = MemoryRelief(settings.max_batch_size)
        self._relief = Relief(most_rows=settings.max_batch_size)
        self._memory = MachineStatus()
        self._power = Power()
        self._thermal: Thermal = "unknown"

    @property
    def most_rows(self) -> int:
        """Rows to fill at present; 0: nothing is claimed."""
        return min(self._relief.most_rows, self._rows_by_power)

    @property
    def rests(self) -> bool:
        """True while nothing new is begun because the machine runs on battery."""
        return self._rows_by_power == 0

    @property
    def status(self) -> MachineStatus:
        """The machine for a heartbeat."""
        most = self.most_rows
        charge = self._power.charge
        return msgspec.structs.replace(
            self._memory,
            relief=self._relief.note,
            most_rows=-1 if most == self._settings.max_batch_size else most,
            power=self._power.source,
            charge=-1 if charge is None else charge,
            thermal=self._thermal,
        )

    async def watch_memory(self) -> None:
        """Look at the memory for ever."""
        while True:
            await self.look_at_memory()
            await asyncio.sleep(LOOK_S)

    async def watch_power(self) -> None:
        """Look at power and heat for ever."""
        while True:
            await self.look_at_power()
            await asyncio.sleep(POWER_LOOK_S)

    async def look_at_memory(self) -> None:
        """One look, and what follows from it."""
        self._memory = await asyncio.to_thread(self._read_memory)
        pressure = worst(self._memory.pressure, *(rank.machine.pressure for rank in self._ranks()))
        before, self._relief = self._relief, self._steps.look(pressure, len(self._rows.occupying()))
        relief = self._relief
        if relief.drops_caches or before.drops_caches:
            self._engine.send(Relieve(drops_caches=relief.drops_caches))
        self._hold_guests()
        if relief.note != before.note:
            log.warning(
                "worker.memory",
                pressure=pressure,
                relief=relief.note or "over",
                available_gb=round(self._memory.available / 1e9, 2),
                held_gb=round(self._memory.held / 1e9, 2),
                rows=len(self._rows.occupying()),
            )
        if relief.hand_back and (gone := youngest(self._rows, relief.hand_back)):
            await self._returns.hand_back(gone)
            self._engine.send(Relieve(drops_caches=True))  # their KV went into the cache of prefixes
            self._handed_back(len(gone))
            log.warning("worker.memory_handed_back", sequences=len(gone), pressure=pressure)
        if relief.most_rows > before.most_rows:
            self._rows.changed.set()  # claiming goes on

    async def look_at_power(self) -> None:
        """One look at power and heat."""
        before = self._power.source
        self._power, self._thermal = await asyncio.to_thread(lambda: (self._readers.power(), self._readers.thermal()))
        self._hold_guests()
        if self._power.source != before and "battery" in (self._power.source, before):
            log.warning("worker.power", source=self._power.source, on_battery=self._settings.on_battery)
            self._rows.changed.set()

    @property
    def _rows_by_power(self) -> int:
        rows = self._settings.max_batch_size
        if self._power.source != "battery" or self._settings.on_battery == "go":
            return rows
        return max(1, int(rows * ROWS_ON_BATTERY)) if self._settings.on_battery == "slow" else 0

    def _hold_guests(self) -> None:
        on_battery = self._power.source == "battery" and self._settings.on_battery != "go"
        self._engine.hold_guests(self._relief.holds_guests or on_battery)
