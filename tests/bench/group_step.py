"""What a decode step costs where ranks divide the model, and what of it is sums: `python -m tests.bench.group_step`.

Random weights of the shapes of Qwen3 8B and 32B in bfloat16, made on the device, one process a GPU, over NCCL (without
CUDA: small shapes over the ring). Each process turns an engine of its own by the same facts. Of each case: the time of
a decode step, what of it the host spends in handing over work (`mx.async_eval`), and the same with sums over ranks left
out, which gives wrong tokens in the same time as right ones.

Cases of two ranks differ in the environment, since what NCCL and MLX do about CUDA graphs is settled at start.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25_600, "num_attention_heads": 64},
    "small": {"hidden_size": 256, "num_hidden_layers": 12, "intermediate_size": 512, "num_attention_heads": 8},
}
KV_HEADS, HEAD, VOCABULARY = 8, 128, 151_936
PROMPT, WARM, STEPS = 128, 12, 30
NO_GRAPHS = {"MLX_USE_CUDA_GRAPHS": "0"}
APART = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "0"}
CLUSTERS = {"NCCL_CGA_CLUSTER_SIZE": "0"}


@dataclass(frozen=True)
class Case:
    """One start of one or two processes."""

    shape: str
    ranks: int
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    rows: tuple[int, ...] = (1, 8, 32)
    prompt: int = 0


def cases(shapes: list[str], prompt: int) -> Iterator[Case]:
    """The most telling ones first."""
    first, *others = shapes
    yield Case(first, 2, "as it is", prompt=prompt)
    yield Case(first, 2, "graphs, NCCL alone", APART, prompt=prompt)
    yield Case(first, 2, "no graphs", NO_GRAPHS, prompt=prompt)
    for shape in others:
        yield Case(shape, 2, "as it is", prompt=prompt)
        yield Case(shape, 2, "graphs, NCCL alone", APART, prompt=prompt)
    few = (1, 32)
    yield Case(first, 2, "NCCL alone, no clusters", APART | CLUSTERS, few)
    yield Case(first, 2, "NCCL alone, graphs of 10", APART | {"MLX_MAX_OPS_PER_BUFFER": "10"}, few)
    yield Case(first, 2, "NCCL alone, graphs of 100", APART | {"MLX_MAX_OPS_PER_BUFFER": "100"}, few)
    yield Case(first, 2, "no mixing only", {"NCCL_GRAPH_MIXING_SUPPORT": "0"}, few)
    yield Case(first, 2, "no registering only", {"NCCL_GRAPH_REGISTER": "0"}, few)


def started(case: Case, folder: Path) -> list[subprocess.Popen[str]]:
    """Its processes; the first one's output is read."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free.getsockname()[1], other.getsockname()[1]]
    hosts = folder / f"hosts-{ports[0]}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    processes = []
    for rank in range(case.ranks):
        group = {"MLX_RANK": str(rank), "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0])}
        group |= {"MLX_HOSTFILE": str(hosts), "NCCL_NVLS_ENABLE": "0"}
        environment = os.environ | (group if case.ranks > 1 else {}) | case.environment
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        place = rank if case.ranks > 1 else sorted(SHAPES).index(case.shape) % 2
        environment["CUDA_VISIBLE_DEVICES"] = shown[place % len(shown)]
        asked = json.dumps([case.shape, case.ranks, list(case.rows), case.prompt])
        command = [sys.executable, "-m", "tests.bench.group_step", "--rank", asked]
        quiet = None if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, stdout=quiet or subprocess.PIPE, text=True))
    return processes


def ended(case: Case, processes: list[subprocess.Popen[str]], patience_s: float) -> None:
    """Print what it says, or that it failed."""
    about = f"{case.shape:5} {case.ranks} {case.name:26}"
    try:
        out, _ = processes[0].communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        processes[0].kill()
        out = f"{processes[0].communicate()[0]}took too long\n"
    for process in processes:
        process.kill()
        process.wait()
    for line in (out or "failed\n").splitlines():
        print(about, line, flush=True)


def main() -> None:
    """All cases, as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["8B", "32B"], choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=220.0, help="no case is begun after these")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt that is timed")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(*json.loads(args.rank))
        os._exit(0)  # NCCL may wait for the other one, which is killed
    until = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        alone = [Case(shape, 1, "", prompt=args.prompt) for shape in args.shapes]  # each on a GPU of its own
        processes = [started(case, Path(folder)) for case in alone]
        for case, its in zip(alone, processes, strict=True):
            ended(case, its, args.seconds)
        for case in cases(args.shapes, args.prompt):
            if time.monotonic() > until:
                print(f"{case.shape:5} {case.ranks} {case.name:26} not begun: the time is up")
                continue
            ended(case, started(case, Path(folder)), max(5.0, until + 20 - time.monotonic()))


# -- one rank


def rank(shape: str, ranks: int, rows: list[int], prompt: int) -> None:
    """Measure; prints a line a number of rows."""
    from worker.engine.model import fast_blas

    fast_blas.install()

    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    cuda = mx.cuda.is_available()
    group = mx.distributed.init(strict=True, backend="nccl" if cuda else "ring") if ranks > 1 else None
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, mx.stream(generation_stream):
        loaded = random_model(shape, group, Path(folder))
    print(f"made in {time.perf_counter() - began:.1f} s, {mx.get_active_memory() / 2**30:.2f} GiB", flush=True)
    from worker.engine.messages import EngineConfig

    config = EngineConfig("", max_rows=max(rows), prefill_rows=64, prefill_chunk=8192, prefix_cache_bytes=0)
    if prompt:
        print(f"prompt of {prompt}: {prompt_ms(loaded, config, prompt):8.2f} ms", flush=True)
    for count in rows:
        whole, handed = step_ms(loaded, config, count)
        line = f"{count:3} rows: step {whole:7.2f} ms, handing over {handed:7.2f}"
        if ranks > 1:
            with without_sums():
                bare, bare_handed = step_ms(loaded, config, count)
            line += f"; without sums {bare:7.2f}, handing over {bare_handed:7.2f}"
        print(line, flush=True)


def random_model(shape: str, group: Any, folder: Path) -> Any:
    """A `LoadedModel` of random weights, of which each rank makes its part."""
    import mlx.core as mx
    import msgspec
    from mlx_lm.models import qwen3

    from tests.engine.small_models import LLAMA, write_model
    from worker.engine.kv.cuda import attention
    from worker.engine.kv.layout import KvLayout
    from worker.engine.messages import EngineConfig
    from worker.engine.model.loader import _measure, load_model
    from worker.engine.model.sharding import read_weights, shard
    from worker.engine.model.sites import Whole, module_shapes
    from worker.engine.ranks.ranks import ranks_of

    other = load_model(EngineConfig(str(write_model(folder / "tiny", LLAMA))))  # for its tokenizer
    attention.install()
    small = shape == "small"
    config = {
        "model_type": "qwen3",
        "num_key_value_heads": KV_HEADS,
        "head_dim": 32 if small else HEAD,
        "vocab_size": 4096 if small else VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    }
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config | SHAPES[shape]))
    ranks = ranks_of(group)
    whole = None if ranks is None else Whole(ranks, module_shapes(model))
    if ranks is not None:
        shard(model, ranks)
    model.set_dtype(mx.float32 if small else mx.bfloat16)
    read_weights(model)
    mx.clear_cache()
    bytes_each, window, vocabulary, dtype = _measure(model, KvLayout())
    card = msgspec.structs.replace(
        other.card,
        vocab_size=vocabulary,
        context_length=32_768,
        kv_bytes_per_token=bytes_each,
        kv_window=window,
        dtype=dtype,
    )
    return replace(other, model=model, card=card, whole=whole, kv_limit_bytes=1 << 40)


def _engine(loaded: Any, config: Any, rows: int, length: int, tokens: int) -> Any:
    from shared.sequences import SamplingParams, SequenceSpec
    from worker.engine.engine import Engine
    from worker.engine.messages import RowRequest

    engine = Engine(loaded, config)
    params = SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)
    specs = [
        SequenceSpec(str(at), "m", tuple((31 * at + 7 * id_) % 4000 for id_ in range(length)), params)
        for at in range(rows)
    ]
    engine.submit([RowRequest(spec) for spec in specs])
    return engine


def _turn(engine: Any, loaded: Any) -> Any:
    from worker.engine.ranks.turns import TurnFacts

    return engine.turn(None if loaded.ranks is None else TurnFacts(now_ms=0))


def prompt_ms(loaded: Any, config: Any, length: int) -> float:
    """From a prompt's arrival to its first token, the least of a few."""
    times = []
    for _ in range(4):
        engine = _engine(loaded, config, 1, length, 1)
        began = time.perf_counter()
        while not _turn(engine, loaded).events:
            pass
        times.append(time.perf_counter() - began)
        engine.close()
    return min(times) * 1000


def step_ms(loaded: Any, config: Any, rows: int) -> tuple[float, float]:
    """Of a decode step, and what of it the host hands over work for."""
    import mlx.core as mx

    engine = _engine(loaded, config, rows, PROMPT, WARM + STEPS + 40)
    while len(_turn(engine, loaded).events) < rows:
        pass
    for _ in range(WARM):
        _turn(engine, loaded)
    handed, plain = [0.0], mx.async_eval

    def timed(*arrays: Any) -> None:
        began = time.perf_counter()
        plain(*arrays)
        handed[0] += time.perf_counter() - began

    mx.async_eval = timed
    try:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(STEPS // 3):
                _turn(engine, loaded)
            times.append((time.perf_counter() - began) / (STEPS // 3))
    finally:
        mx.async_eval = plain
    engine.close()
    mx.synchronize()
    return median(times) * 1000, handed[0] / STEPS * 1000


@contextmanager
def without_sums() -> Iterator[None]:
    """Each rank takes its own part for the sum."""
    import mlx.core as mx

    plain = mx.distributed.all_sum
    mx.distributed.all_sum = lambda x, *, group=None, stream=None: x
    try:
        yield
    finally:
        mx.distributed.all_sum = plain


if __name__ == "__main__":
    main()
