"""Followers on rank 0's own machine: its child processes, which end with it (shared/process/lifeline.py)."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace

from ranks.placement import Placement, RankSettings, own_device
from shared.process.lifeline import VARIABLE

END_S = 5.0  # for a child to end by itself


class Children:
    """Processes of one group's other ranks. `on_exit` is called with the rank and exit code of each that ends."""

    def __init__(self, settings: RankSettings, placed: Placement, on_exit: Callable[[int, int], None]) -> None:
        self._settings, self._placed, self._on_exit = settings, placed, on_exit
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the processes of all other ranks."""
        for rank in range(1, self._placed.size):
            placed = replace(self._placed, rank=rank)
            environment = {
                **os.environ,
                **self._settings.environment(),
                "PARALLM_DISTRIBUTED_RANK": str(rank),
                "PARALLM_DISTRIBUTED_GROUP": placed.group,
                "CUDA_VISIBLE_DEVICES": own_device(placed, os.environ.get(ALL_DEVICES, "")),
                VARIABLE: "1",
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                placed.kind,
                stdin=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,  # a Ctrl-C reaches rank 0 alone, which ends them in order
            )
            self._processes[rank] = process
            self._watching.append(asyncio.create_task(self._watch(rank, process)))

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self._on_exit(rank, await process.wait())

    def kill(self) -> None:
        """At once, stopped ones too."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """Wait for processes that were asked to end, and kill those that do not."""
        for task in self._watching:
            task.cancel()
        waits = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=END_S)
            self.kill()
            await asyncio.wait(waits, timeout=END_S)


ALL_DEVICES = "PARALLM_GROUP_DEVICES"  # what rank 0 was allowed before it took its own


def take_device(placed: Placement) -> None:
    """Let this process see the one device of its rank, before MLX looks; children take theirs from `ALL_DEVICES`."""
    if not placed.is_local or placed.rank:
        return
    os.environ.setdefault(ALL_DEVICES, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    os.environ["CUDA_VISIBLE_DEVICES"] = own_device(placed, os.environ[ALL_DEVICES])
