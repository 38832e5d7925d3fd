"""Hosts that hold several models in turn: `python -m tests.bench.model_switches [--switches 20] [--chaos-s 0]`.

Real hosts and workers over a Redis of their own; models are copies of one with other weights. Figures: the first token
of a cold model over its load and a warm first token; the memory of the host and its workers after many switches over
that after the first ones; the longest gap between two tokens of a running row while another model is loaded, over the
longest without. `--chaos-s`: three hosts and four models for so long, while processes, Redis among them, are killed and
stopped; each result is compared with the one that was computed in peace, and each sequence has to end.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from redis.asyncio import Redis
from redis.exceptions import RedisError

from api.serve.embedded_redis import EmbeddedRedis
from shared.catalogue import HeldModel
from shared.machine.memory import footprint
from shared.redis.connection.client import connect
from shared.redis.processes.catalogue import CatalogueStore
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.redis.tokens.reader import FrameReader
from shared.sequences import SamplingParams, SequenceClass, SequenceResult, SequenceSpec
from tests.e2e.rings import Process
from tests.waiting import wait_until


def prompt_of(at: int) -> tuple[int, ...]:
    """Ids of a prompt that shares no beginning with another one."""
    return tuple(range(3 + at, 35 + at))


PROMPTS = [prompt_of(at) for at in range(4)]
ROW_TOKENS = 1500  # of the row that is watched
OTHER_NORM = "model.norm.weight"  # is rolled, so that models of one shape write different texts


def copies(model: Path, folder: Path, count: int) -> list[Path]:
    """Models like one, under other names, which write other texts."""
    made = []
    for at in range(count):
        path = folder / f"{model.name}-{at}"
        shutil.copytree(model, path)
        weights = path / "model.safetensors"
        data = bytearray(weights.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        tensor = json.loads(data[8 : 8 + length])[OTHER_NORM]
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        shift = at * (end - begin) // tensor["shape"][0]
        data[begin:end] = data[begin + shift : end] + data[begin : begin + shift]
        weights.write_bytes(data)
        made.append(path)
    return made


@contextmanager
def host(url: str, models: Sequence[Path], name: str, *flags: str) -> Iterator[Process]:
    process = start_host(url, models, name, *flags)
    try:
        yield process
    finally:
        process.stop()


def start_host(url: str, models: Sequence[Path], name: str, *flags: str) -> Process:
    given = [argument for model in models for argument in ("--model", str(model))]
    return Process.start("worker", "--redis", url, "--worker-id", name, "--drain-grace-s", "2", *given, *flags)


def children(pid: int) -> list[int]:
    """Process ids of a host's workers, and of its spare."""
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in listed.stdout.split()]


class Models:
    """Models of a ring as a client and an operator see them."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.store = redis, CatalogueStore(redis)
        self._calls: dict[str, SequenceCalls] = {}
        self._asked = 0

    @asynccontextmanager
    async def calling(self, *models: str) -> AsyncIterator[None]:
        self._calls = {model: SequenceCalls(self.redis, model, f"bench-{model}") for model in models}
        for calls in self._calls.values():
            await calls.__aenter__()
        try:
            yield
        finally:
            for calls in self._calls.values():
                await calls.__aexit__(None, None, None)

    async def call(
        self, model: str, tokens: int, prompt: tuple[int, ...] = PROMPTS[0], kind: SequenceClass = "interactive"
    ) -> tuple[float, SequenceResult]:
        """Seconds until a sequence's end, and its result."""
        self._asked += 1
        calls, began = self._calls[model], time.perf_counter()
        sampling = SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)
        name = f"{model}-{self._asked}-{began}"
        spec = SequenceSpec(name, model, prompt, sampling, kind, job=calls.owner)
        (result,) = await calls.call([spec])
        return time.perf_counter() - began, result

    async def held(self, model: str) -> HeldModel | None:
        read = await self.store.read()
        return next((held for _, held in read.holding(model)), None)

    async def until_ready(self, model: str, of: Process | None = None) -> HeldModel:
        """Wait until a model is loaded, by a host that lives."""

        async def is_ready() -> bool:
            assert of is None or of.popen.poll() is None, of.output
            held = await self.held(model)
            return held is not None and held.state == "ready"

        await wait_until(is_ready)
        held = await self.held(model)
        assert held is not None
        return held


async def switches(url: str, models: Sequence[Path], count: int, pause_s: float, flags: Sequence[str]) -> None:
    """A host that holds one model at a time, and is asked for each of them in turn."""
    names = [model.name for model in models]
    ratios, loads, memory, before, after, warm = [], [], [], [], [], []
    redis = connect(url)
    ring = Models(redis)
    with host(url, models, "switching", "--max-loaded-models", "1", *flags) as process:
        async with ring.calling(*names):
            await ring.until_ready(names[0], process)
            await ring.call(names[0], 1)
            for at in range(count):
                model = names[(at + 1) % len(names)]
                await asyncio.sleep(pause_s)  # until there is a spare again
                memory.append(sum(map(footprint, [process.popen.pid, *children(process.popen.pid)])))
                asked_ms = time.time_ns() / 1e6
                cold_s, _ = await ring.call(model, 1)
                held = await ring.until_ready(model)
                before.append((held.since_ms - asked_ms) / 1000 - held.load_s)
                after.append(cold_s - before[-1] - held.load_s)
                warm_s = median([(await ring.call(model, 1, prompt_of(1 + each)))[0] for each in range(3)])
                warm.append(warm_s)
                loads.append(held.load_s)
                ratios.append(cold_s / (held.load_s + warm_s))
    await redis.aclose()
    print(f"{count} switches: a load takes {median(loads):.2f} s (median)")
    print(f"cold first token / (load + warm first token): {median(ratios):.3f} (median), {max(ratios):.3f} (most)")
    parts = (("the look and the other model's end", before), ("from ready to the token", after), ("warm token", warm))
    print("; ".join(f"{what} {median(each):.2f} s" for what, each in parts), "(medians)")
    first, last = (median(part) / 1e6 for part in (memory[: len(names)], memory[-len(names) :]))
    print(f"memory of the host and its workers: {first:.0f} MB, after all switches {last:.0f} MB: {last / first:.3f}")


async def gaps(url: str, model: str, tokens: int, meanwhile: Callable[[], object]) -> list[float]:
    """Seconds between the tokens of one row; `meanwhile` is called when it has begun."""
    redis, reader = connect(url), FrameReader(url, "watching")
    await reader.start()
    name = f"watched-{time.time_ns()}"
    feed = reader.open(model, [name])
    spec = SequenceSpec(name, model, PROMPTS[0], SamplingParams(tokens, 0, ignore_eos=True), api="watching")
    await SequenceQueue(redis, model).enqueue([spec])
    found, last = [], 0.0
    while not feed.done:
        events = await feed.next()
        now = time.perf_counter()
        if last:
            found.append(now - last)
        elif events:
            meanwhile()
        last = now
    feed.close()
    await reader.stop()
    await redis.aclose()
    return found[1:]


async def disturbance(url: str, models: Sequence[Path], tokens: int, pause_s: float, flags: Sequence[str]) -> None:
    """Gaps of a running row: alone, while another model is loaded on its host, and while two processes from outside the
    ring compute for as long, since a load reads in one thread and computes in another."""
    first, second = (model.name for model in models[:2])
    redis = connect(url)
    ring = Models(redis)
    with host(url, models[:2], "disturbed", "--max-loaded-models", "2", *flags) as process:
        async with ring.calling(first, second):
            await ring.until_ready(first, process)
            await ring.call(first, 16)
            await asyncio.sleep(pause_s)
            alone = await gaps(url, first, tokens, lambda: None)
            loading: list[asyncio.Task[object]] = []

            def load() -> None:
                loading.append(asyncio.create_task(ring.call(second, 1)))

            beside = await gaps(url, first, tokens, load)
            await loading[0]
            held = await ring.until_ready(second)
            await asyncio.sleep(pause_s)
            busy = f"import time\nend = time.time() + {held.load_s}\nwhile time.time() < end: pass"
            both = [sys.executable, "-c", busy]
            control = await gaps(url, first, tokens, lambda: [subprocess.Popen(both) for _ in range(2)])
    await redis.aclose()
    print(f"the load took {held.load_s:.2f} s, the watched row {sum(beside):.2f} s")
    for what, found in (
        ("alone", alone),
        ("while another model is loaded", beside),
        ("while two other processes compute as long", control),
    ):
        print(f"gaps between tokens {what}: {_shown(found)}")


def _shown(found: Sequence[float]) -> str:
    late = quantiles(found, n=100)[98] if len(found) > 1 else found[0]
    return f"median {1000 * median(found):.1f} ms, p99 {1000 * late:.1f} ms, longest {1000 * max(found):.1f} ms"


@dataclass
class Seen:
    """What clients of a ring in chaos have seen."""

    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # right ones, by model and prompt
    ended: Counter[str] = field(default_factory=Counter)  # by class
    wrong: list[str] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)  # longest, by class
    faults: Counter[str] = field(default_factory=Counter)

    def take(self, model: str, prompt: int, kind: str, took_s: float, result: SequenceResult) -> None:
        self.ended[kind] += 1
        self.waits[kind] = max(self.waits.get(kind, 0), took_s)
        if result.completion_ids != self.texts[model, prompt]:
            reason = f"{result.finish.reason} {result.finish.error_code} {result.finish.error_message}"
            self.wrong.append(f"{model}, prompt {prompt}, {reason}: {result.completion_ids}")


async def chaos(server: EmbeddedRedis, models: Sequence[Path], seconds: float, seed: int, flags: Sequence[str]) -> int:
    """Three hosts, whose processes die; 1 if a client has seen what it must not see."""
    rng, seen, names = random.Random(seed), Seen(), [model.name for model in models]
    print(f"chaos: seed {seed}, {seconds:.0f} s", flush=True)
    shapes = ["1", "2", "1"]  # models that each host holds

    def start(at: int, name: str = "") -> Process:
        own = ("--max-loaded-models", shapes[at], "--batch-turn-s", "60", *flags)
        return start_host(server.url, models, name or f"h{at}", *own)

    hosts = [start(at) for at in range(len(shapes))]
    redis = connect(server.url)
    ring, stopping, output = Models(redis), asyncio.Event(), ""
    try:
        async with ring.calling(*names):
            for name in names:
                for prompt in range(len(PROMPTS)):
                    _, result = await ring.call(name, 24, PROMPTS[prompt])
                    seen.texts[name, prompt] = result.completion_ids
            assert len({tuple(text) for text in seen.texts.values()}) > len(names), "the models differ"
            print(f"{len(seen.texts)} texts are known", flush=True)

            async def client(kind: SequenceClass) -> None:
                while not stopping.is_set():
                    name, prompt = rng.choice(names), rng.randrange(len(PROMPTS))
                    took_s, result = await ring.call(name, 24, PROMPTS[prompt], kind)
                    seen.take(name, prompt, kind, took_s, result)
                    await asyncio.sleep(rng.expovariate(1))

            kinds: list[SequenceClass] = ["interactive", "interactive", "batch", "batch", "batch"]
            clients = [asyncio.create_task(client(kind)) for kind in kinds]
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await asyncio.sleep(rng.uniform(2, 12))
                at = rng.randrange(len(hosts))
                output += await _harm(rng, seen, ring, server, models, hosts, at, start)
                for task in clients:
                    if task.done():
                        task.result()
            stopping.set()
            began = time.monotonic()
            await asyncio.gather(*clients)
            print(f"the last sequences ended {time.monotonic() - began:.1f} s after the last fault")
    finally:
        for process in hosts:
            process.popen.send_signal(signal.SIGCONT)
            process.stop()
            output += process.output
        await redis.aclose()
    alarms = [line for line in output.splitlines() if "loop_failed" in line or "Traceback" in line]
    print(f"faults: {dict(seen.faults)}; sequences that ended: {dict(seen.ended)}")
    print(f"longest, by class: { {kind: round(wait, 1) for kind, wait in seen.waits.items()} } s")
    for line in [*seen.wrong[:10], *alarms[:5]]:
        print("WRONG:", line[:1000])
    return 1 if seen.wrong or alarms else 0


async def _harm(
    rng: random.Random,
    seen: Seen,
    ring: Models,
    server: EmbeddedRedis,
    models: Sequence[Path],
    hosts: list[Process],
    at: int,
    start: Callable[..., Process],
) -> str:
    """One fault; the output of a host that has ended by it."""
    kind = rng.choice(
        ["worker killed"] * 4
        + ["worker stopped", "host killed", "host ended", "host stopped", "twin", "redis", "order", "order"]
        + ["model removed", "files replaced", "files cut"]
    )
    workers = children(hosts[at].popen.pid)
    seen.faults[kind] += 1
    if kind == "redis":
        await asyncio.to_thread(server.restart)
    elif kind == "order":
        names = sorted(ring._calls)
        with suppress(RedisError, OSError):
            await ring.store.order(rng.choice(["load", "unload"]), rng.choice(names))  # type: ignore[arg-type]
    elif kind == "model removed":
        with suppress(RedisError, OSError):
            entry = rng.choice(list((await ring.store.read()).entries.values()))
            await ring.store.remove(entry.name)
            await asyncio.sleep(rng.uniform(0, 4))
            await ring.store.put(entry)
    elif kind.startswith("files"):
        await asyncio.to_thread(_replace, rng.choice(models) / "model.safetensors", kind == "files cut", rng)
    elif kind == "host stopped":  # its workers go on, and its leases and heartbeat expire if it lasts long
        _signal(hosts[at].popen.pid, signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(1, 20))
        _signal(hosts[at].popen.pid, signal.SIGCONT)
    elif kind == "twin":  # two hosts at once, as a person starts one too many
        twin = start(at, f"twin{rng.randrange(100)}")
        await asyncio.sleep(rng.uniform(1, 10))
        twin.stop(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        return twin.output
    elif kind.startswith("host"):
        code = hosts[at].stop(signal.SIGKILL if kind == "host killed" else signal.SIGTERM)
        has_begun = bool(hosts[at].output)  # one that has not is ended by the signal itself
        assert code in (0, -signal.SIGKILL, 0 if has_begun else -signal.SIGTERM), hosts[at].output
        ended, hosts[at] = hosts[at].output, start(at)
        return ended
    elif workers:
        pid = rng.choice(workers)
        with suppress(ProcessLookupError):
            if kind == "worker killed":
                _signal(pid, signal.SIGKILL)
            else:
                _signal(pid, signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(1, 8))
                _signal(pid, signal.SIGCONT)
    return ""


def _replace(weights: Path, is_cut: bool, rng: random.Random) -> None:
    """Put the same bytes in a file's place, after the old ones were cut off while a load may be reading them."""
    whole = weights.with_name("whole")
    shutil.copy(weights, whole)
    if is_cut:
        os.truncate(weights, rng.randrange(weights.stat().st_size))
        time.sleep(rng.uniform(0, 4))
    whole.replace(weights)


def _signal(pid: int, number: signal.Signals) -> None:
    subprocess.run(["kill", f"-{number.value}", str(pid)], check=False, stderr=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.model_switches")
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--models", type=int, default=3, help="copies of it")
    parser.add_argument("--switches", type=int, default=20, help="0: none")
    parser.add_argument("--pause-s", type=float, default=5, help="between two switches, for a spare to start")
    parser.add_argument("--tokens", type=int, default=ROW_TOKENS, help="of the row that is watched; 0: none is")
    parser.add_argument("--chaos-s", type=float, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args, flags = parser.parse_known_args()
    code = 0
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder, "redis")) as server:
        models = copies(args.model, Path(folder), 4 if args.chaos_s else args.models)
        flags = ["--adapter-cache-dir", f"{folder}/adapters", *flags]
        if args.switches:
            asyncio.run(switches(server.url, models, args.switches, args.pause_s, flags))
        if args.tokens:
            asyncio.run(disturbance(server.url, models, args.tokens, args.pause_s, flags))
        if args.chaos_s:
            code = asyncio.run(chaos(server, models, args.chaos_s, args.seed, flags))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
