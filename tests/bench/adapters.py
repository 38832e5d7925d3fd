"""What adapters cost: `python -m tests.bench.adapters [--shape small|0.6b|4b] [--rows 32 128]`.

Decode steps with 1, 4 and 8 adapters against the base, as ratios of interleaved runs in one process; the mixed batch
against running the adapters one after another; and the gaps between decode steps while a version is loaded.
Models have random weights and live in memory only.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import importlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlx_model import cuda_graphs
from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.device import on_cuda
from mlx_model.kv.cuda import attention as cuda_attention
from mlx_model.loader import LoadedModel
from mlx_model.lora import kernels
from mlx_model.step.decode_step import join_products
from shared.adapters import AdapterManifest
from shared.sequences import ModelCard, SamplingParams, SequenceSpec
from shared.text.codec import TokenizerBundle
from tests.bench.models import QWEN3_0_6B, QWEN3_4B, QWEN3_SMALL
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

ROUNDS, STEPS, PROMPT = 5, 24, 32
MEDIUM: dict[str, Any] = {**QWEN3_SMALL, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
DEEP: dict[str, Any] = {**MEDIUM, "num_hidden_layers": 36}  # as many modules as a 4B, an eighth of their width
SHAPES = {"small": QWEN3_SMALL, "medium": MEDIUM, "deep": DEEP, "0.6b": QWEN3_0_6B, "4b": QWEN3_4B}


def random_model(shape: dict[str, Any], dtype: str) -> LoadedModel:
    """A Qwen3 with random weights, in memory only."""
    config = {
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **shape,
    }
    return in_memory(config, dtype)


def in_memory(config: dict[str, Any], dtype: str = "float32") -> LoadedModel:
    """A model of mlx-lm with random weights, which the tokenizer cannot spell."""
    cuda_graphs.prepare()
    cuda_attention.install()
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: p.astype(getattr(mx, dtype)), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    if on_cuda():
        join_products(model)  # as a load does
    card = ModelCard("random", 4096, config["vocab_size"], (), "", "", kv_bytes_per_token=1, dtype=dtype)
    bundle = TokenizerBundle(tokenizer_json=EMPTY_TOKENIZER, chat_template="", eos_token_ids=(), special_tokens={})
    return LoadedModel(card, bundle, model, config, Path(), 1 << 50)


EMPTY_TOKENIZER = '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'


def random_adapter(slots: AdapterSlots, folder: Path, version: int, rank: int, dtype: str) -> AdapterManifest:
    """A LoRA on every linear inside a layer."""
    weights: dict[str, mx.array] = {}
    for path, site in slots._adapted.sites.items():
        if "layers." in path and site.kind == "linear":
            weights[f"{path}.lora_a"] = (mx.random.normal((site.inputs, rank)) / site.inputs**0.5).astype(
                getattr(mx, dtype)
            )
            weights[f"{path}.lora_b"] = (mx.random.normal((rank, site.outputs)) * 0.01).astype(getattr(mx, dtype))
    file = folder / f"a-{version}.safetensors"
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    modules = tuple(sorted({key.rpartition(".")[0] for key in weights}))
    size = file.stat().st_size
    manifest = AdapterManifest("a", version, "lora", rank, 2.0, modules, "", 0, str(version), size, size, 0)
    slots.provide(file, manifest)
    return manifest


class Bench:
    """An engine with slots on one model."""

    def __init__(self, loaded: LoadedModel, folder: Path, rank: int) -> None:
        self.woken = threading.Event()
        self.slots = AdapterSlots(loaded, SlotConfig(slots=8, max_rank=256), self.woken.set)
        config = EngineConfig("", max_rows=512, prefill_rows=64, prefill_chunk=1 << 16)
        self.engine = Engine(loaded, config, self.slots)
        self.vocab = loaded.card.vocab_size
        self.manifests = [
            random_adapter(self.slots, folder, version, rank, loaded.card.dtype) for version in range(1, 10)
        ]
        self._count = 0

    def start(self, adapters: list[str], steps: int, policy: Any = "pin") -> None:
        """One row per entry, each decoding for more than `steps` steps; returns when all decode.

        Adapters come first: rows that decode while the last ones are loaded would end before all are there.
        """
        self.bring({adapter for adapter in adapters if adapter})
        specs = []
        for at, adapter in enumerate(adapters):
            self._count += 1
            sampling = SamplingParams(steps + len(adapters) + 64, at, temperature=0.0, ignore_eos=True)
            prompt = tuple((at * 7919 + i * 31) % self.vocab for i in range(PROMPT))
            specs.append(SequenceSpec(f"s{self._count}", "m", prompt, sampling, adapter=adapter, adapter_policy=policy))
        self.engine.submit([RowRequest(spec) for spec in specs])
        while self.engine.stats().rows < len(adapters) or self.engine.stats().prefilling:
            self.turn()
            stats = self.engine.stats()
            if stats.rows + stats.waiting < len(adapters):
                raise RuntimeError(f"{len(adapters) - stats.rows - stats.waiting} rows ended before all decoded")

    def bring(self, versions: set[str]) -> None:
        """Load what is not in a slot."""
        for version in sorted(versions - self.slots.stats.loaded.keys()):
            for _ in self.loading(version):
                pass

    @property
    def absent(self) -> int:
        """A version that no row uses and that is in no slot: of five versions on four slots there is one."""
        return next(version for version in range(5, 10) if f"a@{version}" not in self.slots.stats.loaded)

    def turn(self) -> int:
        """One turn; the tokens that it brought."""
        if not self.engine.busy:
            self.woken.wait(0.1)
            self.woken.clear()
        return sum(len(event.tokens) for event in self.engine.turn().events)

    def loading(self, version: str) -> Iterator[float]:
        """The gaps between decode steps while a version that a row wants is loaded."""
        self._count += 1
        spec = SequenceSpec(f"w{self._count}", "m", (1, 2), SamplingParams(1, 0), adapter=version)
        self.engine.submit([RowRequest(spec)])
        return gaps(self, lambda: version in self.slots.stats.loaded)

    def until(self, rows: int) -> None:
        """Turn until only so many rows are left."""
        while self.engine.stats().rows > rows or self.engine.stats().waiting:
            self.turn()

    def time_slices(self, times: list[float]) -> None:
        """Note how long the engine writes between two steps, the forward under way not counted."""
        work = self.slots.work

        def timed(budget_s: float) -> bool:
            if not (self.slots._loads or self.slots._read):
                return work(budget_s)
            mx.synchronize()
            began = time.perf_counter()
            more = work(budget_s)
            mx.synchronize()
            times.append(time.perf_counter() - began)
            return more

        self.slots.work = timed  # type: ignore[method-assign]

    def stop(self) -> None:
        """End all rows."""
        for seq in list(self.engine.rows):
            self.engine.cancel(seq)
        while self.engine.busy:
            self.engine.turn()

    def step_ms(self, adapters: list[str]) -> float:
        """Median time of a decode step with these rows."""
        self.start(adapters, STEPS)
        for _ in range(3):
            self.turn()
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            self.turn()
            times.append(time.perf_counter() - began)
        self.stop()
        return median(times) * 1e3


def cycled(rows: int, adapters: int) -> list[str]:
    """Rows on so many adapters in turn; none: the base."""
    return [f"a@{1 + at % adapters}" if adapters else "" for at in range(rows)]


def spread(values: list[float]) -> str:
    """Min-median-max."""
    return f"{min(values):.2f}-{median(values):.2f}-{max(values):.2f}"


def overhead(bench: Bench, rows: int, counts: Sequence[int]) -> None:
    """Decode steps against the base, and, of several counts, the mixed batch against one adapter after another."""
    bench.step_ms(cycled(rows, 8))
    bench.step_ms(cycled(rows, 0))
    measured = [{count: bench.step_ms(cycled(rows, count)) for count in (0, *counts)} for _ in range(ROUNDS)]
    base = median(each[0] for each in measured)
    for count in counts:
        ratios = [each[count] / each[0] for each in measured]
        print(f"{rows:4d} rows, {count} adapters / base: {spread(ratios)}   (base {base:.2f} ms a step)", flush=True)
    if rows >= 8 and 8 in counts and len(counts) > 1:
        ratios = []
        for each in measured:
            alone = sum(bench.step_ms([f"a@{version}"] * (rows // 8)) for version in range(1, 9))
            ratios.append(alone / each[8])
        print(f"{rows:4d} rows, 8 adapters one after another / mixed: {spread(ratios)}", flush=True)


def load_gaps(bench: Bench, rows: int) -> None:
    """Gaps between decode steps while versions are loaded, and the time that their slices take."""
    quiet, during, loads, slices = list[float](), list[float](), list[float](), list[float]()
    bench.start(cycled(rows, 4), 3000)
    for _ in range(6):
        quiet += list(gaps(bench, steps(20)))
        began = time.perf_counter()
        during += bench.loading(f"a@{bench.absent}")
        loads.append(time.perf_counter() - began)
        bench.until(rows)
    bench.time_slices(slices)
    for _ in range(3):
        list(bench.loading(f"a@{bench.absent}"))
        bench.until(rows)
    bench.stop()
    usual, size = median(quiet), bench.manifests[0].size / 1e6
    print(f"{rows:4d} rows, {len(loads)} loads of {size:.0f} MB, request to slot {median(loads):.2f} s")
    print(f"     step {usual * 1e3:.1f} ms, p99 {p99(quiet) * 1e3:.1f} ms")
    print(f"     while loading: median {median(during) * 1e3:.1f}, p99 {p99(during) * 1e3:.1f} ms")
    print(f"     pause, p99 - usual step: {(p99(during) - usual) * 1e3:.1f} ms")
    print(f"     slices of writing: p99 {p99(slices) * 1e3:.1f}, longest {max(slices) * 1e3:.1f} ms", flush=True)


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def steps(count: int) -> Callable[[], bool]:
    """A condition that holds after so many asks."""
    left = iter(range(count))
    return lambda: next(left, None) is None


def gaps(bench: Bench, done: Callable[[], bool]) -> Iterator[float]:
    """Times between turns that bring tokens, until a condition holds."""
    last = time.perf_counter()
    while not done():
        if bench.turn():
            now = time.perf_counter()
            yield now - last
            last = now


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=["small", "medium", "deep"], choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 4, 8], help="adapters in a batch")
    parser.add_argument("--block", type=int, nargs=2, help="threads and inputs at once of the CUDA kernel of deltas")
    parser.add_argument("--only", choices=("overhead", "loads"))
    args = parser.parse_args()
    if args.block:
        kernels.CUDA_BLOCK = kernels.Block(*args.block)
    is_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtype = "float32" if is_cpu else "bfloat16"
    print(f"{mx.default_device()}, {os.cpu_count()} cores, {dtype}; min-median-max of {ROUNDS}")
    for shape in args.shape:
        for rank, measure in ((args.rank, "overhead"), (64 if is_cpu else 16, "loads")):
            if args.only not in (None, measure) or (is_cpu and (measure == "loads") != (shape == "deep")):
                continue
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(random_model(SHAPES[shape], dtype), Path(folder), rank)
                print(f"{shape}: rank {rank} on all linears, kernel {bench.slots._adapted.rows.kernel}")
                for rows in args.rows:
                    if measure == "loads":
                        load_gaps(bench, rows)
                    else:
                        overhead(bench, rows, args.counts)
                bench.slots.close()


if __name__ == "__main__":
    main()
