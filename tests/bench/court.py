"""The court: how many tokens a faulty worker writes until it is named, and what the court costs the others.

`python -m tests.bench.court [--faults weight kv adapter] [--shares 0.1 0.01 0.001]` starts two sound workers and one
with a fault of tests/e2e/wrong_worker.py for each pair. They write sequences in bursts, and each burst is followed by a
pause in which idle workers check. It prints how many tokens the faulty one had written when one and when two others had
found it wrong, and how often the sound ones were found wrong.

`--cost 0.001` compares, with sound workers alone, a ring with this share and one without: the same bursts and pauses by
turns, tokens per second and CPU seconds of all workers, the checks in the pauses included.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from redis.asyncio import Redis

from shared.adapter_files.formats import prepare_directory
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.recordings import Court, forget_verdicts, standing_of, trusted_accusers
from tests.bench.adapter_publish import adapter
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.waiting import wait_until

SOUND, FAULTY = ("sound-1", "sound-2"), "faulty"
NAME = "measured"  # the adapter that is asked for, in its second version
PAUSE_S = 0.5  # of the measurement of cost, after a burst


@contextlib.contextmanager
def workers(served: Ring, folder: Path, fault: str, share: float) -> Iterator[None]:
    """Two sound workers and a faulty one."""
    flags = ("--redis", served.redis_url, "--model", f"models/{MODEL}", "--replay-share", str(share))
    with contextlib.ExitStack() as stack:
        started = []
        for id in (*SOUND, FAULTY):
            module = ("tests.e2e.wrong_worker", fault) if id == FAULTY else ("worker",)
            own = ("--worker-id", id, "--adapter-cache-dir", str(folder / id))
            started.append(Process.start(*module, *flags, *own))
            stack.callback(started[-1].stop)
        for process in started:
            process.wait_for_line("worker.ready")
        yield


async def publish(redis: Redis, folder: Path) -> None:
    """Two versions of an adapter."""
    card = await WorkerRegistry(redis).card(MODEL)
    assert card is not None
    for seed in (1, 2):
        (folder / f"w{seed}").mkdir()
        prepared = prepare_directory(adapter(folder, seed), folder / f"w{seed}")
        await AdapterStore(redis).publish(NAME, prepared, base_sha256=card.base_sha256)


async def burst(http: httpx.AsyncClient, count: int, tokens: int, model: str = MODEL) -> list[str]:
    """Ids of so many sequences that were written at once."""

    async def one(seed: int) -> str:
        body: dict[str, Any] = {"model": model, "prompt": f"Question {seed}:", "seed": seed, "max_tokens": tokens}
        names: list[str] = []

        async def answered() -> bool:
            answer = await http.post("/v1/completions", json=body | {"ignore_eos": True})
            if answer.status_code == 503:  # the machine is busy, or its workers have just come
                return False
            names.append(f"{answer.raise_for_status().json()['id']}-0")
            return True

        await wait_until(answered)
        return names[0]

    begin = time.monotonic_ns() % 10**9
    return await asyncio.gather(*map(one, range(begin, begin + count)))


async def checked(redis: Redis) -> None:
    """Wait until no sequence is to be checked."""
    court = Court(redis, MODEL)

    async def empty() -> bool:
        return not await court.length()

    await wait_until(empty)


async def until_named(served: Ring, fault: str, share: float, rounds: int, tokens: int) -> None:
    """Print the tokens of the faulty worker until it was disputed and until it was wrong, by round."""
    redis = connect(served.redis_url)
    at_once = max(3, min(96, round(1.2 / share)))  # a third of them are the faulty worker's
    model = f"{NAME}@2" if fault == "adapter" else MODEL
    named: list[tuple[int, int]] = []
    falsely: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=served.url, timeout=None) as http:
        for _ in range(rounds):
            written, disputed = 0, 0
            for id in (*SOUND, FAULTY):
                await forget_verdicts(redis, MODEL, id)
            while True:
                for name in await burst(http, at_once, tokens, model):
                    written += tokens * (await redis.hget(keys.sequence(MODEL, name), "worker") == FAULTY.encode())
                await checked(redis)
                standing = standing_of(await trusted_accusers(redis, MODEL, FAULTY))
                disputed = disputed or (written if standing else 0)
                if standing == "wrong":
                    break
            named.append((disputed, written))
            for id in SOUND:
                falsely[standing_of(await trusted_accusers(redis, MODEL, id)) or "neither"] += 1
    await redis.aclose()
    firsts, seconds = zip(*named, strict=True)
    print(
        f"{fault}, share {share:g}, sequences of {tokens}: disputed after {sorted(firsts)} of its tokens, wrong after "
        f"{sorted(seconds)}; sound workers then: {dict(falsely)}",
        flush=True,
    )


async def cost(rings: dict[float, Ring], rounds: int, count: int, tokens: int) -> None:
    """Print the ratios of the second ring over the first one."""
    rates, seconds = ({share: list[float]() for share in rings} for _ in range(2))
    for at in range(rounds + 1):
        for share in list(rings)[:: 1 if at % 2 else -1]:
            redis = connect(rings[share].redis_url)
            processes = [psutil.Process(worker.pid) for worker in await WorkerRegistry(redis).workers(MODEL)]
            before, took = sum(map(_cpu_s, processes)), 0.0
            async with httpx.AsyncClient(base_url=rings[share].url, timeout=None) as http:
                for _ in range(4):
                    begin = time.monotonic()
                    await burst(http, count, tokens)
                    took += time.monotonic() - begin
                    await asyncio.sleep(PAUSE_S)
            await checked(redis)
            await redis.aclose()
            if at:  # the first round warms up
                rates[share].append(4 * count * tokens / took)
                seconds[share].append(sum(map(_cpu_s, processes)) - before)
    without, with_it = rates
    speeds = sorted(b / a for a, b in zip(rates[without], rates[with_it], strict=True))
    work = sum(seconds[with_it]) / sum(seconds[without])
    print(
        f"share {with_it:g} over none, {rounds} rounds of {4 * count * tokens} tokens: tokens/s min median max "
        f"{speeds[0]:.3f} {median(speeds):.3f} {speeds[-1]:.3f}; CPU seconds of the workers {work:.3f}"
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(argv: list[str] | None = None) -> int:
    """Measure faults, or the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", default=["weight", "kv", "adapter"])
    parser.add_argument("--shares", nargs="*", type=float, default=[0.1, 0.01, 0.001])
    parser.add_argument("--cost", type=float, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=int, default=64, help="sequences at once, with --cost")
    parser.add_argument("--tokens", type=int, default=32, help="of a sequence")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if args.cost is not None:
            rings = {
                share: stack.enter_context(ring(folder / str(share), "--workers", "2", "--replay-share", str(share)))
                for share in (0.0, args.cost)
            }
            asyncio.run(cost(rings, args.rounds, args.burst, args.tokens))
            return 0
        served = stack.enter_context(ring(folder / "ring", "--workers", "0"))
        for fault in args.faults:
            for share in args.shares:
                with workers(served, folder, fault, share):
                    asyncio.run(_measured(served, folder, fault, share, args.rounds, args.tokens))
    return 0


async def _measured(served: Ring, folder: Path, fault: str, share: float, rounds: int, tokens: int) -> None:
    redis = connect(served.redis_url)
    if fault == "adapter" and not (folder / "w1").exists():
        await publish(redis, folder)
    await redis.aclose()
    await until_named(served, fault, share, rounds, tokens)


if __name__ == "__main__":
    sys.exit(main())
