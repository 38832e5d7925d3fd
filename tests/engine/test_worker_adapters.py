"""A whole worker process object: sequences with adapters from the queue to the committed result."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from mlx_model.loader import LoadedModel
from shared.adapter_files.config import mlx_config
from shared.adapter_files.formats import prepare
from shared.errors import UnknownAdapterError
from shared.owners import ADMINS, ANYBODY, Asker
from shared.process.worker_settings import WorkerSettings
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.sequences import SequenceResult, decode_result
from tests.engine.adapter_bench import row
from tests.engine.adapter_models import MadeAdapter, make_adapter
from tests.engine.conftest import prompt_of
from tests.waiting import wait_until
from worker.process import WorkerProcess


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@asynccontextmanager
async def running(redis_url: str, llama_folder: Path, folder: Path) -> AsyncIterator[WorkerProcess]:
    settings = WorkerSettings(redis=redis_url, model=str(llama_folder), worker_id="w1", adapter_cache_dir=folder)
    process = WorkerProcess(settings)
    task = asyncio.create_task(process.run())
    yield process
    process.stop()
    assert await task == 0


@pytest.fixture
async def worker(redis_url: str, llama_folder: Path, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    async with running(redis_url, llama_folder, tmp_path) as process:
        yield process


async def publish(redis: Redis, made: MadeAdapter, folder: Path, base: str, asker: Asker = ANYBODY) -> None:
    manifest = made.manifest
    config = mlx_config(manifest.kind, manifest.rank, manifest.scale, manifest.modules)
    adapter = prepare(config, made.path, folder)
    await AdapterStore(redis, who_asks=lambda: asker).publish("math", adapter, base_sha256=base)


async def results_of(redis: Redis, model: str, job: str, count: int) -> dict[str, SequenceResult]:
    stream = keys.finished(model, job)

    async def done() -> bool:
        return bool(await redis.xlen(stream) == count)

    await wait_until(done)
    found = [decode_result(fields[b"result"]) for _, fields in await redis.xrange(stream)]
    return {each.id: each for each in found}


async def test_sequences_run_on_published_versions(
    redis: Redis,
    redis_url: str,
    llama: LoadedModel,
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama.card.name
    registry = WorkerRegistry(redis)
    monkeypatch.setattr("shared.redis.processes.worker_registry.REPORT_AFTER_S", 0.0)
    await redis.zadd(keys.weights(model), {"others": time.time() * 1000 + 60_000})  # before the worker is up

    async def up() -> bool:
        return bool(await registry.workers(model)) and any(line["event"] == "worker.ready" for line in lines)

    async def seen() -> bool:
        return (await registry.workers(model))[0].adapters == {"math": 1}

    with capture_logs() as lines:  # from before its start: it may be ready at any time after that
        async with running(redis_url, llama_folder, tmp_path):
            await wait_until(up)
            await _runs_on_versions(redis, llama, tmp_path)
            await wait_until(seen)
    assert [line["worker"] for line in lines if line["event"] == "worker.weights_differ"] == ["w1"]


async def _runs_on_versions(redis: Redis, llama: LoadedModel, tmp_path: Path) -> None:
    model = llama.card.name
    await publish(redis, make_adapter(llama.model, tmp_path / "made"), tmp_path, llama.card.base_sha256)
    group = [
        row(f"g{at}", prompt_of(8), "math", group="g", kv_on_swap="keep", adapter_policy="follow") for at in range(4)
    ]
    specs = [row("base", prompt_of(8)), row("pin", prompt_of(8), "math@1"), row("no", prompt_of(8), "nobody"), *group]
    specs = [msgspec.structs.replace(spec, model=model, job="j") for spec in specs]
    await SequenceQueue(redis, model).enqueue(specs)
    results = await results_of(redis, model, "j", len(specs))
    assert (results["no"].finish.reason, results["no"].finish.error_code) == ("error", UnknownAdapterError.code)
    versions = {seq: [span.version for span in each.spans] for seq, each in results.items()}
    assert versions == {"base": [""], "pin": ["math@1"], "no": [], **{spec.id: ["math@1"] for spec in group}}
    assert results["pin"].completion_ids == results["g0"].completion_ids != results["base"].completion_ids


async def test_a_name_that_has_become_another_tenant_s_is_not_there_any_more(
    redis: Redis, worker: WorkerProcess, llama: LoadedModel, tmp_path: Path
) -> None:
    model = llama.card.name

    async def up() -> bool:
        return bool(await WorkerRegistry(redis).workers(model))

    await wait_until(up)
    made = make_adapter(llama.model, tmp_path / "made")
    await publish(redis, made, tmp_path, llama.card.base_sha256, Asker("acme", limited=True))
    tenants = {"own": "acme", "others": "bobs", "admin": ADMINS, "none": ""}
    specs = [
        msgspec.structs.replace(row(seq, prompt_of(8), "math", adapter_policy="follow"), tenant=tenant)
        for seq, tenant in tenants.items()
    ]
    await SequenceQueue(redis, model).enqueue([msgspec.structs.replace(spec, model=model, job="j") for spec in specs])
    results = await results_of(redis, model, "j", len(specs))
    assert {seq: each.finish.error_code for seq, each in results.items() if each.finish.reason == "error"} == {
        "others": UnknownAdapterError.code
    }
