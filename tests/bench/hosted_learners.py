"""Learners in the worker that serves: `python -m tests.bench.hosted_learners [--shape small|qwen3-0.6b|...]`.

What streams keep of their speed beside them, and learners of theirs beside streams: the whole program, with
`--learners` and `--training-share`. Stretches of streams alone, of both and of learners alone take turns, so the ratios
hold whatever else the machine does. Of the thread, streams are promised what the share leaves.
"""

import argparse
import asyncio
import contextlib
import math
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from shared.learners import LearnerSpec, PassRequest, StepRequest
from shared.redis.connection.client import connect
from shared.redis.training.learner_store import LearnerStore
from tests.bench.learners import examples
from tests.bench.load import load
from tests.bench.models import SHAPES, random_qwen3
from tests.e2e.rings import ring

NAME = "model"
ALONE_S = 6.0
ANSWER_S = 300.0


class Learners:
    """That ask for one pass and one step after another."""

    def __init__(self, store: LearnerStore, count: int, shape: str, rows: int, length: int) -> None:
        self._store = store
        self._specs = [
            LearnerSpec(id=f"learner-{at}", model=NAME, rank=8, scale=8.0, seed=at, adapter=f"learner-{at}")
            for at in range(count)
        ]
        self._numbers = [0] * count
        self._shape, self._rows, self._length = shape, rows, length
        self.tokens = 0  # learnt from

    async def create(self) -> None:
        for spec in self._specs:
            await self._store.create(spec)
        await asyncio.gather(*(self._round(at) for at in range(len(self._specs))))  # kernels, and sizes

    @contextlib.asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """They learn meanwhile; what is under way then comes to its end."""
        stopping = asyncio.Event()
        tasks = [asyncio.create_task(self._rounds(at, stopping)) for at in range(len(self._specs))]
        try:
            yield
        finally:
            stopping.set()
            await asyncio.gather(*tasks)

    async def _rounds(self, at: int, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await self._round(at)

    async def _round(self, at: int) -> None:
        rows, length = self._rows, self._length
        for request in (examples(self._shape, rows, length, self._numbers[at]), StepRequest(learning_rate=1e-5)):
            self._numbers[at] += 1
            await self._store.place(self._specs[at], self._numbers[at], request)
            answer = await self._store.answer(self._specs[at].id, self._numbers[at], ANSWER_S)
            assert answer is not None, "no answer"
            self.tokens += rows * length if isinstance(request, PassRequest) else 0


async def measure(options: argparse.Namespace, url: str, redis_url: str) -> None:
    """Print what each keeps beside the other."""
    vocabulary = SHAPES[options.shape]["vocab_size"]
    prompts = np.random.default_rng(0).integers(3, vocabulary, (options.streams, 64)).tolist()
    asked = {"model": NAME, "max_tokens": options.tokens, "temperature": 0.0, "ignore_eos": True}
    bodies = [{**asked, "prompt": prompt} for prompt in prompts]
    async with contextlib.aclosing(connect(redis_url)) as redis:
        learners = Learners(LearnerStore(redis), options.learners, options.shape, options.rows, options.length)
        await learners.create()
        await load(url, "/v1/completions", bodies)
        kept, learnt, gaps = [], [], []
        for _ in range(options.rounds):
            alone = await load(url, "/v1/completions", bodies)
            async with learners.learning():
                before = learners.tokens
                both = await load(url, "/v1/completions", bodies)
                beside = (learners.tokens - before) / both.took_s
            async with learners.learning():
                before = learners.tokens
                await asyncio.sleep(ALONE_S)
                by_itself = (learners.tokens - before) / ALONE_S
            kept.append(both.tokens_per_s / alone.tokens_per_s)
            learnt.append(beside / by_itself if by_itself else math.nan)
            gaps.append(1000 * max((gap for stream in both.streams for gap in stream.gaps_s), default=math.nan))
            print(
                f"streams {alone.tokens_per_s:.0f} -> {both.tokens_per_s:.0f} tok/s, learners {by_itself:.0f} -> "
                f"{beside:.0f}, longest gap {gaps[-1]:.0f} ms",
                flush=True,
            )
    print(
        f"share {options.share}: streams keep {median(kept):.2f} ({min(kept):.2f} to {max(kept):.2f}), promised "
        f"{1 - options.share:.2f}; learners {median(learnt):.2f} ({min(learnt):.2f} to {max(learnt):.2f})"
    )


def main() -> None:
    """Start the program, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.2, help="--training-share")
    parser.add_argument("--rows", type=int, default=2, help="of a pass: it counts when it is through")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000, help="of a stream: passes of learners take seconds")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with serving(options) as (url, redis_url):
        asyncio.run(measure(options, url, redis_url))


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The program, with learners: its URL and that of its Redis."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_qwen3(Path(folder, NAME), SHAPES[options.shape], options.dtype)
        settings = ("--served-model-name", NAME, "--dtype", options.dtype, "--log-json", "true")
        learning = ("--learners", str(options.learners), "--training-share", str(options.share))
        with ring(Path(folder) / "data", *settings, *learning, model=model) as started:
            started.server.wait_for_line(r"learners\.ready")
            yield started.url, started.redis_url


if __name__ == "__main__":
    main()
