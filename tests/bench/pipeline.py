"""Two ranks that hold a model layer by layer, against one process: `python -m tests.bench.pipeline`.

Random weights in fp32, on the CPU also where there is a GPU, over MLX's ring, with one thread a process for products. A
prompt is fed in pieces, and rows decode in two parts, so that a rank may compute one while the other computes another.
Printed is how many times faster two ranks are than one, least, median and most of all rounds, and what the least times
say; of rows also how many times faster in parts than in one.

On a machine of two cores each rank has one of them, if nothing else runs. `--cores N` gives each of the three processes
N cores of its own, as if it had a machine.
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.group_step import _turn

SHAPE = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
VOCABULARY = 512
ON_THE_CPU = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PARALLM_CUDA_ATTENTION": "0"}
PROMPT, PIECE, TOKENS = 1024, 128, 16
ROWS = (2, 32)


def main() -> None:
    """Rounds of one process and of two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=0, help="for each process alone; 0: all have all")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(Path(args.rank))
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_model(Path(folder))
        cores = sorted(os.sched_getaffinity(0))
        if 3 * args.cores > len(cores):
            parser.error(f"--cores {args.cores}: three processes need {3 * args.cores}, and {len(cores)} are here")
        alone, *two = [stack.enter_context(each) for each in _started(Path(folder), cores, args.cores)]
        times: dict[str, list[list[float]]] = {}
        for _ in range(args.rounds):
            for what in ("prompt", *ROWS):
                took = [_asked([alone], what), _asked(two, what)]
                took += [] if what == "prompt" else [_asked(two, f"{what} whole")]
                times.setdefault(str(what), []).append(took)
        for what, each in times.items():
            one, both, *whole = zip(*each, strict=True)
            line = f"{what if what == 'prompt' else f'{what} rows':8} over one process {_told(one, both)}"
            print(line + "".join(f"; in parts over in one {_told(other, both)}" for other in whole), flush=True)
        for process in (alone, *two):
            process.kill()


def _told(slow: Sequence[float], fast: Sequence[float]) -> str:
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    least = min(slow) / min(fast)
    return f"{min(ratios):.2f} {median(ratios):.2f} {max(ratios):.2f}, least times {least:.2f}"


def _started(folder: Path, cores: list[int], each_has: int) -> list[subprocess.Popen[str]]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    (folder / "hosts.json").write_text(json.dumps(hosts))
    command = [sys.executable, "-m", "tests.bench.pipeline", "--rank", str(folder)]
    processes = []
    for place, at in enumerate((None, 0, 1)):
        group = {} if at is None else {"MLX_RANK": str(at), "MLX_HOSTFILE": str(folder / "hosts.json")}
        environment = os.environ | ON_THE_CPU | group
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        if each_has:  # before it has made a thread that computes: it still starts Python
            os.sched_setaffinity(process.pid, cores[place * each_has : (place + 1) * each_has])
        processes.append(process)
    return processes


def _asked(processes: list[subprocess.Popen[str]], what: object) -> float:
    """The first one's time."""
    for process in processes:
        assert process.stdin is not None, "it is asked over it"
        process.stdin.write(f"{what}\n")
        process.stdin.flush()
    told = []
    for process in processes:
        assert process.stdout is not None, "it answers over it"
        told.append(float(process.stdout.readline()))
    return told[0]


def write_model(folder: Path) -> None:
    from tests.engine.small_models import LLAMA, write_model

    config = LLAMA | SHAPE | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": VOCABULARY}
    write_model(folder, config | {"max_position_embeddings": 2 * PROMPT})


def rank(folder: Path) -> None:
    """Answer: a time for each that is asked."""
    from mlx_model import fast_blas

    fast_blas.install()

    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # on a machine with a GPU, too; mlx-lm takes its stream when it is imported
    from mlx_model.config import EngineConfig
    from mlx_model.loader import load_model
    from tests.engine.ranks import joined
    from worker.engine.batch.row_model import RowModel

    in_parts = RowModel.stages
    group = joined() if "MLX_RANK" in os.environ else None
    config = EngineConfig(
        str(folder), max_rows=max(ROWS), prefill_chunk=PIECE, prefix_cache_bytes=0, sharding="pipeline"
    )
    loaded = load_model(replace(config, kv_limit_bytes=1 << 30), group)
    for line in sys.stdin:
        what, *whole = line.split()
        RowModel.stages = property(lambda self: 1) if whole else in_parts  # type: ignore[method-assign]
        took = _prompt_s(loaded, config) if what == "prompt" else _step_s(loaded, config, int(what))
        print(took, flush=True)


def _engine(loaded: Any, config: Any, rows: int, length: int, tokens: int) -> Any:
    from shared.sequences import SamplingParams, SequenceSpec
    from worker.engine.engine import Engine
    from worker.engine.messages import RowRequest

    engine = Engine(loaded, config)
    params = SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)
    ids = [tuple((31 * at + 7 * id_) % VOCABULARY for id_ in range(length)) for at in range(rows)]
    engine.submit([RowRequest(SequenceSpec(str(at), "m", each, params)) for at, each in enumerate(ids)])
    return engine


def _prompt_s(loaded: Any, config: Any) -> float:
    engine = _engine(loaded, config, 1, PROMPT, 1)
    began = time.perf_counter()
    while not (events := _turn(engine, loaded).events):
        engine.settle()
    took = time.perf_counter() - began
    assert events[0].tokens, events
    engine.close()
    return took


def _step_s(loaded: Any, config: Any, rows: int) -> float:
    engine = _engine(loaded, config, rows, 16, TOKENS + 16)
    told = 0
    while told < 4 * rows:
        told += len(_turn(engine, loaded).events)
    began, told = time.perf_counter(), 0
    while told < TOKENS // 2 * rows:
        told += len(_turn(engine, loaded).events)
    took = time.perf_counter() - began
    engine.close()
    return took


if __name__ == "__main__":
    main()
