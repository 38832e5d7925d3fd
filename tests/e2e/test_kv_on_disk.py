"""A worker that is killed finds the KV of earlier prompts on disk again, and says so everywhere."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.rings import MODEL, ring
from tests.waiting import HANG_S, wait_until

PROMPT = "The quick brown fox jumps over the lazy dog. " * 10
ASK = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}


async def test_a_killed_worker_goes_on_from_disk(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    flags = ("--ssd-cache-dir", str(folder), "--ssd-policy", "write_through", "--ssd-flush-interval-s", "0")
    with ring(tmp_path / "data", *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as http:

            async def worker(says: Callable[[dict[str, Any]], bool]) -> None:
                async def so() -> bool:
                    workers = (await http.get("/health")).json()["workers"]
                    return any(says(each["ssd_cache"]) for each in workers)

                await wait_until(so)

            cold = (await http.post("/v1/completions", json=ASK)).json()
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            await worker(lambda cache: cache["bytes"] > 1000)
            [alive] = await asyncio.to_thread(server.workers)
            os.kill(alive.pid, signal.SIGKILL)
            await wait_until(lambda: len(server.server.printed("worker.ready")) == 2)
            warm = (await http.post("/v1/completions", json=ASK)).raise_for_status().json()
            assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
            assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
            await worker(lambda cache: (cache["hits"], cache["errors"], cache["limit_bytes"]) == (1, 0, 50 * 10**9))

            async def counted() -> bool:  # a worker writes its counters after the heartbeat that /health reads
                hits = f'mlx_parallm_ssd_cache_hits_total{{model_name="{MODEL}"}} 1.0'
                return hits in (await http.get("/metrics")).text

            await wait_until(counted)

            async def shown() -> bool:  # the page gathers what it shows once in a while
                page = (await http.get("/dashboard")).text
                return "on disk" in page and "50 GB, 1 hit" in page

            await wait_until(shown)
            (await http.post("/reset_prefix_cache")).raise_for_status()
            await wait_until(lambda: not list(folder.glob("*/*.safetensors")))
