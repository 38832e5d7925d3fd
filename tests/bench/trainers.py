"""Several processes that compute one run's train steps: `python -m tests.bench.trainers [--shape small|qwen3-4b|...]`.

Steps of one process, and of `--trainers` that share them through a Redis of their own, on a model with random weights
and the same samples: seconds a step, and by how much losses differ. Each process gets a GPU of `--gpus 0,1`, or on a
CPU so many threads (`--threads`), so that what is compared is one machine's part and several of them.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from api.serve.embedded_redis import EmbeddedRedis
from tests.bench.models import QWEN3_0_6B, QWEN3_4B, QWEN3_SMALL
from trainer.learn.batches import Sample, SampleGroup

SHAPES: dict[str, dict[str, Any]] = {"small": QWEN3_SMALL, "qwen3-0.6b": QWEN3_0_6B, "qwen3-4b": QWEN3_4B}
RUN = "bench"
WARM_UP = 2  # steps: the second is divided by the speeds of the first


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", default="float32", help="of the base")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=8, help="in a train step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--microbatch-tokens", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--exchange", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gpus", default="", help="one for each process: 0,1")
    parser.add_argument("--threads", type=int, default=1, help="of each process, on a CPU")
    parser.add_argument("--lead", nargs=3, metavar=("REDIS", "MODEL", "TRAINERS"), help=argparse.SUPPRESS)
    return parser


def groups_of(options: argparse.Namespace, step: int) -> list[SampleGroup]:
    """Samples of a step, as if the model had drawn them evenly."""
    draw, vocabulary = np.random.default_rng(step), SHAPES[options.shape]["vocab_size"]

    def sample(number: int) -> Sample:
        length = int(draw.integers(options.length // 2, options.length + 1))
        ids = tuple(int(i) for i in draw.integers(0, vocabulary, length))
        return Sample(ids, (-math.log(vocabulary),) * length, (True,) * length, (0,) * length, 0.5 - number % 2)

    def group(number: int) -> SampleGroup:
        prompt = tuple(int(i) for i in draw.integers(0, vocabulary, options.prompt))
        return SampleGroup(f"{number:04d}", prompt, tuple(sample(i) for i in range(options.group_size)))

    return [group(number) for number in range(options.groups)]


async def lead(options: argparse.Namespace, url: str, model: str, trainers: int) -> None:
    """All steps, with so many processes; prints seconds and losses."""
    from shared.process.settings import version
    from shared.redis.connection.client import connect
    from shared.redis.training.shared_runs import SharedRun
    from trainer.gate import GateLimits
    from trainer.learn.compute import ThreadHost, at_once
    from trainer.learn.options import AdapterShape, OptimizeOptions, Schedule
    from trainer.learners.asks import LearnerOptions
    from trainer.learners.loop_learner import build_learner
    from trainer.shares.exchange import Lead
    from trainer.shares.leader import SharedLearner
    from trainer.shares.messages import RunSpec
    from worker.engine.messages import EngineConfig
    from worker.engine.model.loader import load_model

    optimize = OptimizeOptions(
        schedule=Schedule(peak=1e-5),
        microbatch_tokens=options.microbatch_tokens,
        max_completion=options.length,
        distances_every=0,
    )
    made = LearnerOptions(AdapterShape(rank=options.rank), optimize, GateLimits())
    async with (
        ThreadHost() as host,
        contextlib.aclosing(connect(url)) as redis,
        contextlib.aclosing(connect(url, blocking=True)) as blocking,
        Lead(SharedRun(redis, RUN, blocking=blocking)) as leading,
    ):
        loaded = await host.run(at_once(lambda: load_model(EngineConfig(model))))
        import msgspec

        spec = RunSpec(
            model="bench",
            base_sha256=loaded.card.base_sha256,
            options=msgspec.msgpack.encode(made),
            settings={},
            exchange=options.exchange,
            version=version(),
        )
        learner = await SharedLearner.open_shared(
            host, lambda: build_learner(loaded.model, made), leading, spec, trainers, 240
        )
        seconds, losses = [], []
        for step in range(WARM_UP + options.steps):
            groups, began = groups_of(options, step), time.perf_counter()
            trained = await learner.train(groups, step, step, ((1, 2, 3, 4),))
            await learner.accept()
            seconds.append(time.perf_counter() - began)
            losses.append(trained.report.loss)
        leading.end()
    size = sum(value.nbytes for value in trained.weights.values())
    print(json.dumps({"seconds": seconds[WARM_UP:], "losses": losses, "adapter_bytes": size}))


@contextlib.contextmanager
def members(options: argparse.Namespace, url: str, model: Path, count: int) -> Iterator[None]:
    """So many processes that join."""
    command = [sys.executable, "-m", "trainer", "--redis", url, "--model", str(model), "--join-run", RUN]
    running = [subprocess.Popen(command, env=place(options, number + 1)) for number in range(count)]
    try:
        yield
        for process in running:
            process.wait(30)
    finally:
        for process in running:
            process.kill()
            process.wait()


def place(options: argparse.Namespace, number: int) -> dict[str, str]:
    """The environment of one process."""
    threads = str(options.threads)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    if options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = options.gpus.split(",")[number]
    return environment


def measured(options: argparse.Namespace, url: str, model: Path, trainers: int) -> dict[str, Any]:
    """One run of all steps."""
    command = [sys.executable, "-m", "tests.bench.trainers", *sys.argv[1:], "--lead", url, str(model), str(trainers)]
    with members(options, url, model, trainers - 1):
        done = subprocess.run(command, env=place(options, 0), check=True, stdout=subprocess.PIPE, text=True)
    print("\n".join(done.stdout.splitlines()[-4:-1]))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = flags().parse_args()
    if options.lead:
        from worker.engine.model import fast_blas

        fast_blas.install()
        url, model, trainers = options.lead
        asyncio.run(lead(options, url, model, int(trainers)))
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        code = f"from tests.bench.models import *; random_qwen3(Path({folder!r}) / 'model', {SHAPES[options.shape]!r}, "
        subprocess.run([sys.executable, "-c", f"{code}{options.dtype!r})"], check=True)  # its memory is given back
        redis = stack.enter_context(EmbeddedRedis(Path(folder)))
        counts = [1, options.trainers]
        outcomes = [measured(options, redis.url, Path(folder, "model"), count) for count in counts]
    alone, shared = (median(outcome["seconds"]) for outcome in outcomes)
    tokens = sum(len(s.completion_ids) for group in groups_of(options, WARM_UP) for s in group.samples)
    print(
        f"{options.shape} {options.dtype}, rank {options.rank}: {outcomes[0]['adapter_bytes'] / 1e6:.1f} MB of adapter"
    )
    for count, outcome in zip(counts, outcomes, strict=True):
        shown = " ".join(f"{each:.2f}" for each in outcome["seconds"])
        print(f"  {count} trainers: {median(outcome['seconds']):.3f} s a step of {tokens} tokens  ({shown})")
    gap = max(abs(one - other) for one, other in zip(*(outcome["losses"] for outcome in outcomes), strict=True))
    print(f"  {options.trainers} over 1: {alone / shared:.2f}   largest difference of losses: {gap:.1e}")


if __name__ == "__main__":
    main()
