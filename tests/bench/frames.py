"""Token frames through Redis: `python -m tests.bench.frames [--processes 1|2] [--rows 32]`.

Two figures. Flood: how many tokens a second travel from a worker's FrameWriter to an api's feeds when the worker writes
as fast as it can, one round trip a decode step. Latency: from the write to the reader at 100 decode steps a second.
Each row has a feed and a reading task of its own. On uvloop, as uvicorn runs.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path

import uvloop

from api.serve.embedded_redis import EmbeddedRedis
from shared.frames import Finish, TokenEvent
from shared.redis.connection.client import connect
from shared.redis.tokens.feed import SequenceCursor
from shared.redis.tokens.reader import FrameReader
from shared.redis.tokens.writer import FrameWriter
from tests.waiting import wait_until

MODEL = "m"
STEPS_A_SECOND = 100


def step(rows: int, position: int, last: int) -> list[TokenEvent]:
    """One decode step: a token for every row. The first row's logprob is the time of the write."""
    finish = Finish("length") if position == last else None
    events = [TokenEvent(f"s{row}", 1, position, [1000 + row], [-0.25], finish=finish) for row in range(rows)]
    events[0].logprobs = [time.time()]
    return events


async def write(url: str, rows: int, steps: int, pace: float) -> None:
    """Write `steps` decode steps, `pace` seconds apart."""
    redis = connect(url)
    writer = FrameWriter(redis, MODEL, "w")
    due = time.perf_counter()
    for position in range(steps):
        await writer.write({"bench": step(rows, position, steps - 1)}, {}, [])
        if pace:
            due += pace
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    await redis.aclose()


async def read(reader: FrameReader, rows: int) -> tuple[int, list[float]]:
    """Read until all rows have finished; tokens, and the latency of every step in ms."""
    feeds = [reader.open(MODEL, [f"s{row}"]) for row in range(rows)]
    latencies: list[float] = []

    async def drain(row: int) -> int:
        tokens = 0
        while not feeds[row].done:
            for _, event in await feeds[row].next():
                tokens += len(event.tokens)
                if row == 0:
                    latencies.append(1000 * (time.time() - event.logprobs[0]))
        feeds[row].close()
        return tokens

    return sum(await asyncio.gather(*(drain(row) for row in range(rows)))), latencies


def write_in_a_process(url: str, rows: int, steps: int, pace: float) -> None:
    """The worker as a process of its own."""
    uvloop.run(write(url, rows, steps, pace))


async def measure(url: str, rows: int, steps: int, pace: float, processes: int) -> tuple[float, list[float]]:
    """Tokens a second, and latencies."""
    reader = FrameReader(url, "bench")
    await reader.start()
    reading = asyncio.create_task(read(reader, rows))
    await asyncio.sleep(0)
    began = time.perf_counter()
    if processes == 1:
        await write(url, rows, steps, pace)
        tokens, latencies = await reading
    else:
        child = multiprocessing.get_context("spawn").Process(target=write_in_a_process, args=(url, rows, steps, pace))
        child.start()
        await wait_until(lambda: any(cursor.position for cursor in first_cursors(reader)))
        began = time.perf_counter()  # after the child's imports
        tokens, latencies = await reading
        child.join()
    took = time.perf_counter() - began
    await reader.stop()
    return tokens / took, sorted(latencies)


def first_cursors(reader: FrameReader) -> list[SequenceCursor]:
    """Where the first row's feed stands."""
    return list(reader._cursors.get("s0", []))


async def compare(rows: int, seconds: float, processes: int) -> None:
    """Print both figures."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        rate, _ = await measure(server.url, rows, int(seconds * 2_000), 0.0, processes)
        print(f"flood, {rows} rows a frame, {processes} process(es): {rate:,.0f} tokens/s")
        steps = int(seconds * STEPS_A_SECOND)
        rate, latencies = await measure(server.url, rows, steps, 1 / STEPS_A_SECOND, processes)
        median, late = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
        print(f"at {rate:,.0f} tokens/s: write -> reader p50 {median:.2f} ms, p99 {late:.2f} ms")


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    chosen = parser.parse_args()
    uvloop.run(compare(chosen.rows, chosen.seconds, chosen.processes))


if __name__ == "__main__":
    main()
