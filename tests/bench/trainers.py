"""Several processes that compute one run's train steps: `python -m tests.bench.trainers [--shape small|qwen3-4b|...]`.

Steps of one process, and of `--trainers` that share them, on a model with random weights and the same samples: seconds
a step, and by how much losses differ. They share them through a Redis of their own, or as ranks of one trainer
(`--through ranks`, `--distributed-sharding data`), whose gradients are summed by NCCL, or by the ring on a CPU. Each
process gets a GPU of `--gpus 0,1`, or on a CPU so many threads (`--threads`), so that what is compared is one machine's
part and several of them. It says how far it is; a run that loses a process, or takes longer than `--limit-s`, ends with
exit code 1 and says where it stood. `--exchange-alone` measures what a step's weights and gradient cost on their way
through Redis, without a model.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mlx_model import fast_blas

fast_blas.install()  # before MLX is loaded

from api.serve.embedded_redis import EmbeddedRedis  # noqa: E402
from ranks.children import ALL_DEVICES  # noqa: E402
from tests.bench.models import SHAPES  # noqa: E402
from trainer.learn.batches import Sample, SampleGroup  # noqa: E402

RUN = "bench"  # and the number of processes: a member ends with the run that it finds ended
WARM_UP = 2  # steps: the second is divided by the speeds of the first


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", default="float32", help="of the base")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--through", choices=("redis", "ranks"), default="redis", help="how they share a step")
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
    parser.add_argument("--limit-s", type=float, default=150, help="of each of the two runs")
    parser.add_argument("--exchange-alone", action="store_true", help="only bytes and ms of weights and gradients")
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


def learner_options(options: argparse.Namespace) -> Any:
    """What the learner of each run is made with."""
    from trainer.learn.gate import GateLimits
    from trainer.learn.options import AdapterShape, OptimizeOptions, Schedule
    from trainer.learners.kinds import PolicyOptions

    optimize = OptimizeOptions(
        schedule=Schedule(peak=1e-5),
        microbatch_tokens=options.microbatch_tokens,
        max_completion=options.length,
        distances_every=0,
    )
    return PolicyOptions(AdapterShape(rank=options.rank), optimize, GateLimits())


async def lead(options: argparse.Namespace, url: str, model: str, trainers: int) -> None:
    """All steps, by processes that share them through Redis; prints seconds and losses."""
    import msgspec

    from mlx_model.config import EngineConfig
    from mlx_model.loader import load_model
    from shared.process.settings import version
    from shared.redis.connection.client import connect
    from shared.redis.training.shared_runs import SharedRun
    from trainer.learn.compute import ThreadHost, at_once
    from trainer.learners.handle import HostHandle
    from trainer.learners.kinds import made_with
    from trainer.learners.policy import PolicyLearner
    from trainer.learners.shared import SharedHandle
    from trainer.learners.shared_exchange import RunLead, RunSpec

    made = learner_options(options)
    async with (
        ThreadHost() as host,
        contextlib.aclosing(connect(url)) as redis,
        contextlib.aclosing(connect(url, blocking=True)) as blocking,
        RunLead(SharedRun(redis, f"{RUN}-{trainers}", blocking=blocking)) as leading,
    ):
        loaded = await host.run(at_once(lambda: load_model(EngineConfig(model))))
        say(f"  leader: {loaded.card.dtype} base on {device()} loaded")
        spec = RunSpec(
            model="bench",
            base_sha256=loaded.card.base_sha256,
            options=msgspec.msgpack.encode(made),
            settings={},
            exchange=options.exchange,
            version=version(),
        )
        mine: HostHandle[PolicyLearner] = await HostHandle.open(host, made_with("policy", made), loaded.model)
        await leading.begin(spec)
        learner = SharedHandle(mine, leading, trainers, options.limit_s)

        async def check() -> str:
            present = 1 + len(await leading.members())
            if present < trainers:
                raise SystemExit("a member is missing: no figure")
            return f"{present} of {trainers} trainers"

        figures = await taken(options, learner, check)
        leading.end()
    print(json.dumps(figures))


async def lead_ranks(options: argparse.Namespace, url: str, model: str, trainers: int) -> None:
    """The same by ranks of one trainer; by one process, where there is one."""
    from mlx_model.config import EngineConfig
    from mlx_model.loader import LoadedModel, load_model
    from shared.process.settings import load
    from trainer.learn.compute import ComputeHost, ThreadHost, at_once
    from trainer.learners.group import leading
    from trainer.learners.handle import HostHandle
    from trainer.learners.kinds import made_with
    from trainer.learners.placing import placement
    from trainer.learners.policy import PolicyLearner
    from trainer.settings import TrainSettings

    made = learner_options(options)

    async def steps(host: ComputeHost, loaded: LoadedModel) -> dict[str, Any]:
        say(f"  rank 0 of {trainers}: {loaded.card.dtype} base on {device()} loaded")

        async def check() -> str:
            return f"{trainers} ranks"

        learner: HostHandle[PolicyLearner] = await HostHandle.open(
            host, made_with("policy", made), loaded.model, whole=loaded.whole
        )
        return await taken(options, learner, check)

    if trainers == 1:
        async with ThreadHost() as host:
            loaded = await host.run(at_once(lambda: load_model(EngineConfig(model))))
            print(json.dumps(await steps(host, loaded)))
        return
    line = ["--redis", url, "--model", model, "--num-local-ranks", str(trainers), "--distributed-sharding", "data"]
    settings = load(TrainSettings, line)
    placed = placement(settings)
    assert placed is not None, "there are several"
    async with leading(settings, placed) as leads:
        loaded = await leads.loaded()
        figures = await leads.run(steps(leads.host, loaded))
    print(json.dumps(figures))


async def taken(options: argparse.Namespace, learner: Any, check: Callable[[], Awaitable[str]]) -> dict[str, Any]:
    """All steps; `check` says after each who takes part."""
    from trainer.learners.policy import PolicyLearner

    seconds, losses = [], []
    for step in range(WARM_UP + options.steps):
        groups, began = groups_of(options, step), time.perf_counter()
        trained = await learner.call(PolicyLearner.train, groups, step, step, ((1, 2, 3, 4),))
        await learner.accept()
        seconds.append(time.perf_counter() - began)
        losses.append(trained.report.loss)
        say(f"  step {step + 1} of {WARM_UP + options.steps}: {seconds[-1]:.2f} s, {await check()}")
    size = sum(value.nbytes for value in trained.weights.values())
    return {"seconds": seconds[WARM_UP:], "losses": losses, "adapter_bytes": size}


def say(text: str) -> None:
    """To whoever waits; the results go to standard output."""
    print(text, file=sys.stderr, flush=True)


def device() -> str:
    """Where MLX computes in this process."""
    import mlx.core as mx

    return f"{mx.default_device()} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"


def place(options: argparse.Namespace, number: int) -> dict[str, str]:
    """The environment of one process."""
    threads = str(options.threads)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    environment |= {"NCCL_NVLS_ENABLE": "0"}  # not all hosts let a container have multicast
    if options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = options.gpus.split(",")[number]
        environment[ALL_DEVICES] = options.gpus  # from which other ranks take theirs
    return environment


def measured(options: argparse.Namespace, url: str, model: Path, trainers: int) -> dict[str, Any]:
    """One run of all steps; SystemExit that says why when it comes to no end."""
    join = [sys.executable, "-m", "trainer", "--redis", url, "--model", str(model), "--join-run", f"{RUN}-{trainers}"]
    command = [sys.executable, "-m", "tests.bench.trainers", *sys.argv[1:], "--lead", url, str(model), str(trainers)]
    say(f"{trainers} trainers: at most {options.limit_s:.0f} s")
    until = time.monotonic() + options.limit_s
    leader = subprocess.Popen(command, env=place(options, 0), stdout=subprocess.PIPE, text=True)
    joining = range(1, trainers if options.through == "redis" else 1)  # rank 0 starts the other ranks
    members = [subprocess.Popen(join, env=place(options, number)) for number in joining]
    try:
        while leader.poll() is None:
            gone = [each.returncode for each in members if each.poll()]
            if gone:
                raise SystemExit(f"{trainers} trainers: a member has ended with exit code {gone[0]}, see above")
            if time.monotonic() > until:
                raise SystemExit(f"{trainers} trainers: no end after {options.limit_s:.0f} s (--limit-s); see above")
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait(0.5)
        assert leader.stdout is not None
        lines = leader.stdout.read().splitlines()  # few, so that the pipe was never full
        if leader.returncode:
            raise SystemExit(f"{trainers} trainers: the leader has ended with exit code {leader.returncode}, see above")
        for member in members:
            member.wait(30)
    finally:
        for process in (leader, *members):
            process.kill()
            process.wait()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


async def exchange_alone(options: argparse.Namespace, url: str) -> None:
    """Bytes and ms of one gradient from array to array, as each step has one a member; the weights go the other way."""
    from shared.redis.connection.client import connect
    from shared.redis.training.shared_runs import SharedRun
    from trainer.learners.shared_exchange import gradient_bytes, gradient_of

    draw = np.random.default_rng(0)
    arrays = {
        name: draw.standard_normal(shape, dtype=np.float32)
        for name, shape in lora_shapes(SHAPES[options.shape], options.rank).items()
    }
    shapes = {name: value.shape for name, value in arrays.items()}
    async with (
        contextlib.aclosing(connect(url)) as redis,
        contextlib.aclosing(connect(url, blocking=True)) as blocking,
    ):
        parcels = SharedRun(redis, RUN, blocking=blocking).parcels
        for number in range(options.steps):
            at = [time.perf_counter()]
            data = gradient_bytes(arrays, options.exchange)
            at.append(time.perf_counter())
            parcel = await parcels.put(data)
            at.append(time.perf_counter())
            found = await parcels.get(parcel)
            at.append(time.perf_counter())
            gradient_of(found, shapes)
            at.append(time.perf_counter())
            await parcels.drop(parcel)
            parts = " ".join(f"{1000 * (end - begin):.0f}" for begin, end in itertools.pairwise(at))
            print(
                f"{number}: {len(data) / 1e6:.1f} MB, {1000 * (at[-1] - at[0]):.0f} ms (pack put get unpack: {parts})"
            )


def lora_shapes(model: dict[str, Any], rank: int) -> dict[str, tuple[int, int]]:
    """A and B of all linear layers of a Qwen3."""
    hidden, inner, size = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    queries, keys = model["num_attention_heads"] * size, model["num_key_value_heads"] * size
    linear = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
    linear |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    shapes = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (inputs, outputs) in linear.items():
            shapes |= {f"{layer}.{name}.lora_a": (inputs, rank), f"{layer}.{name}.lora_b": (rank, outputs)}
    return shapes


def main() -> None:
    options = flags().parse_args()
    if options.lead:
        url, model, trainers = options.lead
        leads = lead if options.through == "redis" else lead_ranks
        asyncio.run(leads(options, url, model, int(trainers)))
        return
    if options.exchange_alone:
        with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as redis:
            asyncio.run(exchange_alone(options, redis.url))
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        say(f"writing a model of random weights: {options.shape}, {options.dtype}")
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
