"""Care of a run for its machine between two train steps: waits while it may not train, or is on battery, and frees
memory under pressure.

A trainer inside a worker is held by the worker, which knows when; there this only follows the run's own settings.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import mlx.core as mx
import structlog

from mlx_model.memory import watched_memory
from shared.machine.memory import Pressure, worst
from shared.machine.power import machine_power
from shared.process.machine_settings import MachineSettings
from trainer.learn.compute import ComputeHost, at_once

log = structlog.get_logger()

LOOK_S = 5.0
MEMORY_LOOK_S = 1.0  # steps may be units of milliseconds
EASE_S = 30.0  # that a train step waits for critical pressure to end: its memory may be what is missing


class MachineCare:
    """Holds the next train step back, where the machine or the user wants it."""

    def __init__(self, settings: MachineSettings, host: ComputeHost) -> None:
        self._settings = settings
        self._host = host
        self._took_s = 0.0  # for the train step before
        self._looked = float("-inf")  # at memory, monotonic

    @contextlib.asynccontextmanager
    async def step(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Begin when a train step may begin, or the run is to end; what runs inside is the step."""
        if self._host.permission is not None:
            await self._host.permission.wait()
        await self._wait_for_power(stop, self._took_s)
        await self._free_memory(stop)
        began = time.monotonic()
        try:
            yield
        finally:
            self._took_s = time.monotonic() - began

    async def _wait_for_power(self, stop: asyncio.Event, took_s: float) -> None:
        policy = self._settings.on_battery
        if policy == "go" or not await self._on_battery():
            return
        if policy == "slow":
            await _pause(stop, took_s)
            return
        log.warning("train.waits_for_power", hint="--on-battery pause: it goes on when the machine is on mains")
        while not stop.is_set() and await self._on_battery():
            await _pause(stop, LOOK_S)
        log.info("train.on_mains")

    async def _free_memory(self, stop: asyncio.Event) -> None:
        if time.monotonic() - self._looked < MEMORY_LOOK_S:
            return
        self._looked = time.monotonic()
        pressure = await asyncio.to_thread(self._pressure)
        if pressure == "normal":
            return
        log.warning("train.memory", pressure=pressure, does="gives back freed memory")
        await self._host.run(at_once(mx.clear_cache))
        until = time.monotonic() + EASE_S
        while not stop.is_set() and time.monotonic() < until and await asyncio.to_thread(self._pressure) == "critical":
            await _pause(stop, LOOK_S)

    def _pressure(self) -> Pressure:
        ranks = () if self._host.others is None else self._host.others.ranks()
        own = watched_memory(self._settings.memory_limit_bytes).pressure
        return worst(own, *(rank.machine.pressure for rank in ranks))

    async def _on_battery(self) -> bool:
        return (await asyncio.to_thread(machine_power)).source == "battery"


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or return at once when the run is to end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
