"""From a publish to the first token of the new version at each of 2 workers: `python -m tests.bench.adapter_publish`.

A real ring: streams that follow an adapter run over HTTP on both workers; each round publishes a version through the
store and waits until every stream has shown a token of it. The clock starts when the publish begins (bytes included).
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from shared.adapter_files.formats import prepare_directory
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry
from tests.e2e.rings import MODEL, Ring, ring
from tests.unit.adapter_files import mlx_config, write
from tests.waiting import wait_until

ROUNDS, STREAMS, RANK, WORKERS = 12, 8, 16, 2
SHAPES = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (128, 64), "mlp.down_proj": (384, 128)}
CONFIG = mlx_config(num_layers=3, lora_parameters={"rank": RANK, "scale": 2.0, "dropout": 0.0})


def adapter(folder: Path, seed: int) -> Path:
    """A random LoRA of models/tiny on disk."""
    draw = np.random.default_rng(seed)
    tensors = {
        f"model.layers.{layer}.{path}.lora_{side}": (0.05 * draw.standard_normal(shape)).astype(np.float32)
        for layer in range(3)
        for path, (inputs, outputs) in SHAPES.items()
        for side, shape in (("a", (inputs, RANK)), ("b", (RANK, outputs)))
    }
    return write(folder / f"v{seed}", CONFIG, tensors)


class Follower:
    """Streams one after another on the newest version; remembers when each version was first seen."""

    def __init__(self) -> None:
        self.seq = ""
        self.first: dict[str, tuple[str, float]] = {}  # version -> sequence and monotonic time

    async def run(self, http: httpx.AsyncClient) -> None:
        """For ever."""
        body = {"model": "hot", "prompt": "Count.", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        body |= {"adapter_policy": "follow", "return_weight_versions": True}
        while True:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    self.seq = f"{chunk['id']}-0"
                    for span in chunk["choices"][0].get("weight_versions", []):
                        self.first.setdefault(span["version"], (self.seq, time.monotonic()))


async def measure(served: Ring, folder: Path) -> dict[str, list[float]]:
    """Milliseconds by worker."""
    redis = connect(served.redis_url)
    store, took = AdapterStore(redis, keep_n=4), dict[str, list[float]]()
    card = await WorkerRegistry(redis).card(MODEL)
    assert card is not None
    followers = [Follower() for _ in range(STREAMS)]
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        tasks: list[asyncio.Task[None]] = []
        for number in range(ROUNDS + 1):
            (folder / f"w{number}").mkdir()
            prepared = prepare_directory(adapter(folder, number), folder / f"w{number}")
            began = time.monotonic()
            version = (await store.publish("hot", prepared, base_sha256=card.base_sha256)).id
            tasks = tasks or [asyncio.create_task(follower.run(http)) for follower in followers]
            await wait_until(lambda known=version: all(known in each.first for each in followers))
            if number:
                first: dict[str, float] = {}
                for each in followers:
                    seq, at = each.first[version]
                    worker = (await redis.hget(keys.sequence(MODEL, seq), "worker") or b"").decode()
                    first[worker] = min(first.get(worker, at), at)
                for worker, at in first.items():
                    took.setdefault(worker, []).append(1000 * (at - began))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await redis.aclose()
    return took


def main() -> None:
    """Print min median max for each worker."""
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder) / "ring", "--workers", str(WORKERS)) as served:
        asyncio.run(wait_until(lambda: len(served.server.printed("worker.ready")) == WORKERS))
        for worker, ms in sorted(asyncio.run(measure(served, Path(folder))).items()):
            print(
                f"worker {worker}: publish -> first token of the new version, {len(ms)} rounds: "
                f"min median max {min(ms):.0f} {median(ms):.0f} {max(ms):.0f} ms"
            )


if __name__ == "__main__":
    sys.exit(main())
