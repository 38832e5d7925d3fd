"""What people and disks do to a ring from outside: files of KV are damaged, strangers connect to workers' ports."""

import asyncio
import contextlib
import os
import random
import shutil
from pathlib import Path

from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry
from tests.e2e.rings import MODEL

FILES = 8  # that are damaged at a time
STRANGERS = 24  # at each port
HUGE = (0xFFFFFFFF).to_bytes(4, "big")


def damage(folder: Path, rng: random.Random) -> int:
    """Cut, empty, overwrite, swap, replace or delete some of a folder's files; how many. Workers may take them away."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = rng.sample(files, min(FILES, len(files)))
    for path in chosen:
        with contextlib.suppress(OSError):
            _damage(path, rng.choice(files), rng)
    return len(chosen)


def _damage(path: Path, other: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    match rng.choice(("cut", "empty", "bytes", "swap", "copy", "delete", "folder")):
        case "cut":
            os.truncate(path, rng.randrange(size + 1))
        case "empty":
            os.truncate(path, 0)
        case "bytes":
            with path.open("r+b") as file:
                file.seek(rng.randrange(max(1, size)))
                file.write(rng.randbytes(64))
        case "swap":
            between = path.with_suffix(".between")
            path.rename(between)
            other.rename(path)
            between.rename(other)
        case "copy":
            shutil.copy(other, path)
        case "delete":
            path.unlink()
        case _:
            path.unlink()
            path.mkdir()


async def visit(redis_url: str, rng: random.Random, stay_s: float) -> int:
    """Connect to the ports at which workers give KV: with garbage, a huge length, a part of a greeting, in silence.

    How many got in so far as to be cut off by the worker.
    """
    redis = connect(redis_url)
    try:
        workers = await WorkerRegistry(redis).workers(MODEL)
    finally:
        await redis.aclose()
    places = [worker.kv_address.rpartition(":") for worker in workers if worker.kv_address]
    asked = [_visit(host, int(port), rng, stay_s) for host, _, port in places for _ in range(STRANGERS)]
    return sum(await asyncio.gather(*asked))


async def _visit(host: str, port: int, rng: random.Random, stay_s: float) -> bool:
    says = rng.choice(
        (rng.randbytes(4096), HUGE, HUGE + rng.randbytes(65536), rng.randbytes(7), b"GET / HTTP/1.1\r\n\r\n", b"")
    )
    try:
        async with asyncio.timeout(stay_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(says)
                await reader.read()  # until it hangs up
                return True
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False
