"""A worker process object whose machine runs on battery: what it claims, and what it reports."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from shared.machine.power import Power
from shared.process.worker_settings import WorkerSettings
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.queue.sequence_queue import SequenceQueue
from tests.engine.adapter_bench import row
from tests.engine.conftest import prompt_of
from tests.waiting import wait_until
from worker import machine_watch
from worker.machine_watch import MachineReaders
from worker.process import WorkerProcess


@pytest.mark.parametrize(("policy", "most"), [("pause", 0), ("slow", 8)])
async def test_a_worker_on_battery_does_as_it_was_told_and_goes_on_with_mains(
    redis_url: str, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, most: int
) -> None:
    monkeypatch.setattr(machine_watch, "POWER_LOOK_S", 0.05)
    power = [Power("battery", 81)]
    settings = WorkerSettings(
        redis=redis_url, model=str(llama_folder), worker_id="w1", adapter_cache_dir=tmp_path, on_battery=policy
    )
    process = WorkerProcess(settings, readers=MachineReaders(power=lambda: power[0], thermal=lambda: "fair"))
    running = asyncio.create_task(process.run())
    redis = connect(redis_url)
    try:
        registry, name = WorkerRegistry(redis), llama_folder.name

        async def status() -> WorkerStatus | None:
            return next(iter(await registry.workers(name)), None)

        async def on_battery() -> bool:
            seen = await status()
            return seen is not None and seen.machine.most_rows == most

        await wait_until(on_battery)
        seen = await status()
        assert seen is not None and seen.state == ("paused" if policy == "pause" else "ready")
        assert (seen.machine.power, seen.machine.charge, seen.machine.thermal) == ("battery", 81, "fair")
        assert seen.machine.notes == ["on battery, 81% charged"] and seen.machine.troubles == []
        queue = SequenceQueue(redis, name)
        await queue.enqueue([msgspec.structs.replace(row("seq-1", prompt_of(5), job="job"), model=name)])
        if policy == "pause":
            depth = await queue.depth()
            assert sum(each.waiting for each in depth.values()) == 1
        power[0] = Power("mains", 81)

        async def is_done() -> bool:
            depth = await queue.depth()
            return not any(each.waiting or each.leased for each in depth.values())

        await wait_until(is_done)
    finally:
        process.stop()
        assert await running == 0
        await redis.aclose()
