"""KV on disk: `python -m tests.bench.disk [--rounds 3] [--kind NAME | --qwen3 4b] [--folder DIR]`.

First, a worker ends and another one starts: time to the first token of a second turn whose first one is on disk, over
that of a prompt of the same length that nobody has read. Then, what running streams notice: their gaps while prompts
are written to disk, and while they are read from there, beside their gaps when nothing of this happens. The models have
random weights, as in `turns`.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import random
import threading
import time
from math import nan
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from mlx_model.config import DiskConfig, EngineConfig
from mlx_model.loader import LoadedModel
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import in_memory
from tests.bench.turns import ANSWER, KINDS, PROMPT, QUESTION, SHAPE, Talk, choose, chosen
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

AIM, GAP_AIM_MS = 0.3, 10
STREAMS, PROMPTS = 8, 12
IDLE_S = 100e-6  # in which the tier has found nothing to do
QUIET = 30  # steps without disk or prompt, before the next prompt comes
DRAW = random.Random(0)  # of all engines: what is new must be on no disk


class DiskTalk(Talk):
    """An engine whose reads and writes run in threads, turned by hand."""

    def __init__(self, loaded: LoadedModel, folder: Path | None, *, cache_bytes: int = 1 << 30) -> None:
        super().__init__(loaded)
        self._draw = DRAW
        self._woken = threading.Event()
        disk = None if folder is None else DiskConfig(str(folder), flush_interval_s=0.1)
        config = EngineConfig("", prefill_chunk=512, prefix_cache_bytes=cache_bytes, disk=disk)
        self._engine = Engine(loaded, config, wake=self._woken.set)
        self.worked: list[
            float
        ] = []  # seconds of its own time that the thread has spent on the disk tier, turn by turn
        work = self._engine.prefixes.work

        def timed() -> None:
            began = time.thread_time()
            work()
            self.worked.append(time.thread_time() - began)

        self._engine.prefixes.work = timed  # type: ignore[method-assign]

    def until_known(self, files: int) -> None:
        """Wait until the engine has looked over its folder."""
        while self._engine.stats().disk.files < files:
            time.sleep(0.01)

    def turn(self) -> list[str]:
        """One turn, when there is something to do; the sequences that got a token."""
        if not self._engine.busy:
            self._woken.wait(0.05)
        self._woken.clear()
        return [event.seq for event in self._engine.turn().events if event.tokens]

    def end(self) -> int:
        """As a worker that ends in order; files that are there then."""
        self._engine.close(keep=True)
        return self._engine.stats().disk.files

    def say(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds to the first token, and the tokens."""
        self._count += 1
        name, first_s, tokens = str(self._count), 0.0, 0
        began = time.perf_counter()
        self.submit(name, prompt, ANSWER)
        answer: list[int] = []
        while tokens < ANSWER:
            if not self._engine.busy:
                self._woken.wait(0.05)
            self._woken.clear()
            for event in self._engine.turn().events:
                if event.seq == name:
                    first_s = first_s or time.perf_counter() - began
                    answer += event.tokens
                    tokens += len(event.tokens)
        return first_s, answer

    def submit(self, name: str, prompt: list[int], tokens: int) -> None:
        """Ask for tokens."""
        sampling = SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)
        self._engine.submit([RowRequest(SequenceSpec(name, "m", tuple(prompt), sampling))])


def after_a_restart(loaded: LoadedModel, folder: Path) -> tuple[float, float]:
    """Seconds to the first token after a restart: of a second turn, and of a prompt of its length that is new."""
    before = DiskTalk(loaded, folder)
    prompt = before.prompt(PROMPT)
    _, answer = before.say(prompt)
    files = before.end()
    after = DiskTalk(loaded, folder)
    after.until_known(files)
    after.say(after.prompt(64))
    warm_s, _ = after.say([*prompt, *answer, *after.prompt(QUESTION)])
    cold_s, _ = after.say(after.prompt(PROMPT + ANSWER + QUESTION))
    after.end()
    return warm_s, cold_s


def gaps(talk: DiskTalk, prompts: list[list[int]]) -> tuple[list[float], list[float]]:
    """Seconds between the tokens of running streams: while disk and memory have nothing to do, and while they do.

    These prompts come one after another; while one is fed, nothing is noted, for that takes its time in any case.
    """
    engine = talk._engine
    for stream in range(STREAMS):
        talk.submit(f"stream {stream}", talk.prompt(8), 3500)
    while engine.stats().prefilling or not engine.stats().rows:
        talk.turn()
    alone: list[float] = []
    beside: list[float] = []
    for at, prompt in enumerate(prompts):
        talk.submit(f"prompt {at}", prompt, 1)
        left, last = QUIET, 0.0
        while left:
            seqs = talk.turn()
            stats, now = engine.stats(), time.perf_counter()
            is_fed = stats.prefilling > 0 or f"prompt {at}" in seqs or stats.rows > STREAMS
            is_busy = stats.waiting > 0 or stats.disk.waiting > 0 or engine.prefixes.busy
            if last and not is_fed:
                (beside if is_busy else alone).append(now - last)
            last = 0.0 if is_fed else now
            left -= not (is_fed or is_busy)
    return sorted(alone), sorted(beside)


def report(title: str, alone: list[float], beside: list[float]) -> None:
    """p50, p99 and the longest."""

    def figures(found: list[float]) -> list[float]:
        return [1e3 * found[min(len(found) - 1, int(part * len(found)))] if found else nan for part in (0.5, 0.99, 1.0)]

    pairs = zip(("p50", "p99", "longest"), figures(alone), figures(beside), strict=True)
    shown = "   ".join(f"{name} {before:.1f} -> {after:.1f} ms" for name, before, after in pairs)
    print(f"{title:12s} {shown}   ({len(beside)} gaps)   aim: p99 at most {GAP_AIM_MS} ms more", flush=True)


def streams_beside(loaded: LoadedModel, folder: Path) -> None:
    """What running streams notice of writes, then of reads."""
    kv_bytes = 4 * 2 * 6 * 4 * 32 * PROMPT  # float32: keys and values of layers, heads, dimensions
    writing = DiskTalk(loaded, folder, cache_bytes=3 * kv_bytes)
    prompts = [writing.prompt(PROMPT) for _ in range(PROMPTS)]
    report("writes", *gaps(writing, prompts))
    report("  its thread", [0.0], sorted(each for each in writing.worked if each > IDLE_S))
    reading = DiskTalk(loaded, folder, cache_bytes=3 * kv_bytes)
    reading.until_known(writing.end())
    report("reads", *gaps(reading, prompts))
    report("  its thread", [0.0], sorted(each for each in reading.worked if each > IDLE_S))
    stats = reading._engine.stats().disk
    print(f"{stats.hits} of {PROMPTS} prompts came from disk, {stats.dropped} files dropped", flush=True)
    reading.end()


def main() -> None:
    """Measure each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    choose(parser)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary one")
    args = parser.parse_args()
    print(f"after a restart, second turn after {PROMPT} tokens and an answer of {ANSWER}, first token: disk / cold")
    for kind, loaded in chosen(args):
        with TemporaryDirectory(dir=args.folder) as folder:
            after_a_restart(loaded, Path(folder))
            pairs = [after_a_restart(loaded, Path(folder)) for _ in range(args.rounds)]
            warm, cold = (1e3 * median(each) for each in zip(*pairs, strict=True))
            ratio = median(warm_s / cold_s for warm_s, cold_s in pairs)
            print(f"{kind:20s} {ratio:.3f}   ({warm:,.0f} / {cold:,.0f} ms)   aim: at most {AIM}", flush=True)
    print(f"gaps of {STREAMS} streams, dense, while nothing happens -> beside {PROMPTS} prompts of {PROMPT} tokens")
    with TemporaryDirectory(dir=args.folder) as folder:
        streams_beside(in_memory(SHAPE | KINDS["dense"]), Path(folder))


if __name__ == "__main__":
    main()
