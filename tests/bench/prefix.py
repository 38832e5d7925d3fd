"""What the prefix cache and groups save: `python -m tests.bench.prefix [--shape small|medium] [--rounds 5]`.

Each pair of requests runs back to back through one engine thread, on a model with random weights, so the ratios hold
whatever else the machine does. The last comparison shows what keeping prefixes costs prompts that share nothing.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from mlx_model.config import EngineConfig
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import MEDIUM
from tests.bench.models import QWEN3_SMALL, random_qwen3
from worker.engine.messages import RowRequest, StepOutput
from worker.engine.orders import Submit
from worker.engine.thread import EngineThread

SHAPES = {"small": QWEN3_SMALL, "medium": MEDIUM}
PREFIX, QUESTION, GROUP_PROMPT, GROUP, DIFFERENT = 2000, 30, 512, 16, 32
VOCAB = 4096


class Timed:
    """An engine thread, and how long sequences take to their first tokens and to their ends."""

    def __init__(self, model: Path, prefix_cache_bytes: int = 1 << 30) -> None:
        self._draw = random.Random(0)
        self._first: set[str] = set()
        self._ended: set[str] = set()
        self._news = threading.Condition()
        self._count = 0
        config = EngineConfig(str(model), max_rows=DIFFERENT, prefix_cache_bytes=prefix_cache_bytes)
        self.engine = EngineThread(config, self._on_step, self._on_death)
        self.engine.start()

    def prompt(self, length: int) -> list[int]:
        """Random ids that no other prompt begins with."""
        return [self._draw.randrange(3, VOCAB) for _ in range(length)]

    def first_tokens(self, prompts: list[list[int]]) -> float:
        """Seconds until each of these prompts, submitted together, has its first token; then waits for their ends."""
        self._count += 1
        specs = [
            SequenceSpec(f"{self._count}.{at}", "m", tuple(ids), SamplingParams(2, at, ignore_eos=True))
            for at, ids in enumerate(prompts)
        ]
        wanted = {spec.id for spec in specs}
        began = time.perf_counter()
        self.engine.send(Submit([RowRequest(spec) for spec in specs]))
        with self._news:
            self._news.wait_for(lambda: wanted <= self._first)
            seconds = time.perf_counter() - began
            self._news.wait_for(lambda: wanted <= self._ended)
        return seconds

    def _on_step(self, output: StepOutput) -> None:
        with self._news:
            self._first.update(event.seq for event in output.events if event.tokens)
            self._ended.update(event.seq for event in output.events if event.finish)
            self._news.notify_all()

    def _on_death(self, error: BaseException) -> None:
        raise SystemExit(f"the engine died: {error!r}")


@contextmanager
def timed(model: Path, prefix_cache_bytes: int = 1 << 30) -> Iterator[Timed]:
    """An engine thread that ends."""
    engine = Timed(model, prefix_cache_bytes)
    try:
        yield engine
    finally:
        engine.engine.stop()


def compare(title: str, aim: str, pair: Callable[[], tuple[float, float]], rounds: int) -> None:
    """Print second / first of `rounds` pairs as min-median-max."""
    pair()
    pairs = [pair() for _ in range(rounds)]
    ratios = sorted(second / first for first, second in pairs)
    first, second = median(first for first, _ in pairs), median(second for _, second in pairs)
    print(
        f"{title:76s} {ratios[0]:.2f}-{median(ratios):.2f}-{ratios[-1]:.2f}   "
        f"({1e3 * first:,.0f} -> {1e3 * second:,.0f} ms){aim}",
        flush=True,
    )


def second_request(engine: Timed) -> tuple[float, float]:
    """Time to first token of two requests on one prefix: the first, the second."""
    prefix = engine.prompt(PREFIX)
    one, two = ([*prefix, *engine.prompt(QUESTION)] for _ in range(2))
    return engine.first_tokens([one]), engine.first_tokens([two])


def group(engine: Timed) -> tuple[float, float]:
    """16 samples of one prompt; 16 prompts."""
    samples = engine.first_tokens([engine.prompt(GROUP_PROMPT)] * GROUP)
    return samples, engine.first_tokens([engine.prompt(GROUP_PROMPT) for _ in range(GROUP)])


def nothing_shared(off: Timed, on: Timed, length: int) -> tuple[float, float]:
    """Different prompts at once: without a cache, with one."""
    return tuple(  # type: ignore[return-value]
        engine.first_tokens([engine.prompt(length) for _ in range(DIFFERENT)]) for engine in (off, on)
    )


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"first tokens, second / first of each pair, min-median-max of {args.rounds}")
    with tempfile.TemporaryDirectory() as folder:
        model = random_qwen3(Path(folder), SHAPES[args.shape])
        with timed(model) as engine:
            title = f"first, second request on a prefix of {PREFIX}"
            compare(title, "  aim: at most 0.20", lambda: second_request(engine), args.rounds)
            title = f"{GROUP} samples of {GROUP_PROMPT} tokens, {GROUP} different prompts"
            compare(title, "  aim: at least 8", lambda: group(engine), args.rounds)
        with timed(model, 0) as off, timed(model) as on:
            for length in (100, 300):
                title = f"{DIFFERENT} different prompts of {length} tokens: cache off, on"
                compare(title, "", lambda length=length: nothing_shared(off, on, length), args.rounds)  # type: ignore[misc]


if __name__ == "__main__":
    main()
