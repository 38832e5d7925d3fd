"""A trainer hosted in the engine's thread: `python -m tests.bench.hosted [--shape small|qwen3-0.6b|...]`.

What training costs the streams that decode meanwhile, what it gets done, and what memory it takes, all in one process
on one model with random weights, without Redis. Stretches with and without training alternate, and each one with is
compared to the two around it: on an H200 stretches of 5 s without training differ by a third among themselves, by which
prompts join in them, so one pair says little. The last part is the real loop: rollouts in the same batch, gate, hot
loads.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_model.config import EngineConfig
from mlx_model.memory import free_bytes
from shared.process import logs
from shared.seeds import derived_seed
from shared.text.codec import TextCodec
from tests.bench.local_ring import LocalRing, LocalSink, LocalSource
from tests.bench.models import QWEN3_0_6B, QWEN3_4B, QWEN3_SMALL, random_qwen3
from tests.bench.steady_training import Training, accepted, random_groups, tokens_of
from tests.bench.utilisation import StepWork, product_rate
from tests.training.nobody import NoBoard, NoOrders
from trainer.hosted import FREE_PART, rehearse
from trainer.learn.batches import SampleGroup
from trainer.learn.compute import EngineHost, Work
from trainer.learners.policy import PolicyLearner
from trainer.ring.board import RingBoard
from trainer.ring.mailbox import RingMailbox
from trainer.ring.ring import TrainerRing
from trainer.rollouts.conversation import Opening
from trainer.rollouts.environments import Observation, Outcome
from trainer.runs.loop import TrainLoop
from trainer.runs.metrics import read
from trainer.runs.parts import Parts
from trainer.settings import TrainSettings

SHAPES: dict[str, dict[str, Any]] = {
    "small": QWEN3_SMALL,
    "medium": {**QWEN3_SMALL, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536},
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-4b": QWEN3_4B,
}


ALONE_STEPS = 3


@dataclass(frozen=True)
class Options:
    """What is measured."""

    shape: str
    dtype: str
    streams: int
    rollout_rows: int
    prompt: int
    stream_tokens: int
    groups: int
    samples: int
    completion: int
    rank: int
    share: float
    pause_s: float
    rounds: int
    stretch_s: float
    loop_s: float
    microbatch_gb: float
    peak_tflops: float
    layers: int

    @property
    def sizes(self) -> dict[str, Any]:
        """The model's."""
        return SHAPES[self.shape] | ({"num_hidden_layers": self.layers} if self.layers else {})

    def settings(self, folder: Path) -> TrainSettings:
        """The trainer's."""
        changes: dict[str, Any] = {
            "run_dir": folder,
            "prompts_per_step": self.groups,
            "group_size": self.samples,
            "max_tokens": self.completion,
            "lora_rank": self.rank,
            "microbatch_s": self.pause_s,
            "microbatch_gb": self.microbatch_gb,
            "mask_overlong": False,
            "probe_prompts": 2,
            "distances_every": 0,
            "checkpoint_every": 0,
            "parity_every": 0,
            "max_probe_kl": 100.0,
            "reward_margin": 10.0,
            "resume": "no",
            "steps": 1_000_000,
        }
        return TrainSettings.model_construct(**(TrainSettings().model_dump() | changes))


@dataclass
class Stretch:
    """What happened in a few seconds."""

    seconds: float
    stream_tokens: int
    tokens: int
    gaps_ms: list[float] = field(default_factory=list)
    train_tokens: int = 0
    train_steps: int = 0
    units: int = 0
    unit_s: float = 0.0
    peak_bytes: int = 0
    active_bytes: int = 0  # at the end, between two units

    @property
    def rate(self) -> float:
        return self.stream_tokens / self.seconds


def watch(ring: LocalRing, seconds: float, training: Training | None = None) -> Stretch:
    """What happens in a few seconds; training is on when it is given."""
    if training:
        training.start()
    time.sleep(min(1.0, seconds / 4))
    mx.reset_peak_memory()
    began, tokens, streamed, steps = time.perf_counter(), ring.tokens, ring.stream_tokens, len(ring.steps_at)
    units = ring.engine.stats().guests
    trained = (training.tokens, training.steps) if training else (0, 0)
    time.sleep(seconds)
    assert ring.death is None, ring.death
    if training and training.error:
        raise training.error
    now, after = time.perf_counter(), ring.engine.stats().guests
    stretch = Stretch(now - began, ring.stream_tokens - streamed, ring.tokens - tokens)
    # With the gap that the stretch begins in, and the one that it ends in so far: one that is longer than the stretch
    # would else be seen by none.
    before = ring.steps_at[steps - 1] if steps else began
    stretch.gaps_ms = (np.diff(np.array([before, *ring.steps_at[steps:], now])) * 1000).tolist()
    stretch.peak_bytes = max(mx.get_peak_memory(), training.peak_bytes if training else 0)
    stretch.units, stretch.unit_s = after.units - units.units, after.seconds - units.seconds
    if training:
        stretch.train_tokens, stretch.train_steps = training.tokens - trained[0], training.steps - trained[1]
        training.stop()
    stretch.active_bytes = ring.call(mx.get_active_memory)
    return stretch


class ByChance:
    """Random prompts; the reward is a hash of the answer."""

    name = "chance"

    async def reset(self, index: int) -> Observation:
        return Observation(str(index))

    async def step(self, observation: Observation, action: str) -> Outcome:
        return Outcome(float(derived_seed(action) % 2))


class RandomPrompts:
    """Stands for the chat template."""

    def __init__(self, options: Options, vocab: int) -> None:
        self._options, self._vocab = options, vocab

    async def opening(self, observation: Observation) -> Opening:
        draw = np.random.default_rng(int(str(observation.prompt)))
        return Opening(tuple(int(i) for i in draw.integers(3, self._vocab, self._options.prompt)))

    def action(self, observation: Observation, ids: Any) -> str:
        return ",".join(map(str, ids))


async def run_loop(ring: LocalRing, options: Options, folder: Path) -> dict[str, Any]:
    """The whole loop for a while, beside the streams."""
    settings = options.settings(folder / "run")
    card = ring.loaded.card
    sink = LocalSink(ring, folder, settings.adapter)
    board, mailbox = RingBoard(NoBoard()), RingMailbox(NoOrders())
    local = TrainerRing(card.base_sha256, TextCodec(ring.loaded.tokenizer), LocalSource(ring), sink, board, mailbox)
    parts: Any = Parts(
        host=EngineHost(ring.engine),
        model=ring.loaded.model,
        ring=local,
        conversation=RandomPrompts(options, card.vocab_size),  # type: ignore[arg-type]
        environment=ByChance(),
    )
    loop = TrainLoop(settings, parts)
    running = asyncio.create_task(loop.run())
    await asyncio.wait([running, asyncio.create_task(sink.published(2))], return_when=asyncio.FIRST_COMPLETED)
    before, versions = len(read(settings.folder / "metrics.jsonl")), sink.latest
    stretch = await asyncio.to_thread(watch, ring, options.loop_s)
    lines = read(settings.folder / "metrics.jsonl")[before:]
    versions = sink.latest - versions
    loop.stop()
    await running
    return {
        "updates_per_minute": 60 * versions / stretch.seconds,
        "stream_tok_per_s": stretch.rate,
        "all_tok_per_s": stretch.tokens / stretch.seconds,
        "train_tok_per_s": sum(line.tokens for line in lines) / stretch.seconds,
        "guest_share": stretch.unit_s / stretch.seconds,
        "lag_max": max((line.lag_max for line in lines), default=0),
        "rejected": sink.rejected,
        **percentiles(stretch.gaps_ms),
    }


def percentiles(gaps_ms: list[float]) -> dict[str, float]:
    """Time between two decode steps."""
    if not gaps_ms:
        return {}
    p50, p99 = np.percentile(gaps_ms, [50, 99])
    return {"gap_p50_ms": float(p50), "gap_p99_ms": float(p99), "gap_max_ms": max(gaps_ms)}


def spread(values: list[float]) -> str:
    """Min, median, max."""
    return f"{min(values):.2f}-{median(values):.2f}-{max(values):.2f}"


def bench(options: Options, folder: Path) -> dict[str, Any]:
    """All parts."""
    model = random_qwen3(folder / "model", options.sizes, options.dtype)
    config = EngineConfig(
        str(model),
        max_rows=options.streams + options.rollout_rows,
        dtype=options.dtype,
        guest_share=options.share,
        prefix_cache_bytes=0,
        warm_up=True,
    )
    ring = LocalRing(config, rank=max(64, options.rank))
    base = ring.call(mx.get_active_memory)
    said("model loaded")
    options = replace(options, microbatch_gb=options.microbatch_gb or free_bytes() / FREE_PART / 1e9)
    settings = options.settings(folder / "fixed")
    if mx.default_device() != mx.Device(mx.cpu):
        began = time.perf_counter()
        ring.engine.run_between_steps(lambda: rehearse(ring.loaded, settings, None)).result(600)
        said(f"warmed up in {time.perf_counter() - began:.1f} s")
    learner = ring.call(
        lambda: PolicyLearner(
            ring.loaded.model, settings.adapter_shape(), settings.optimize_options(), settings.limits(), seed=0
        )
    )
    state = ring.call(lambda: _state_bytes(learner))
    training = Training(ring, learner, random_groups(*sizes_of(options), ring.loaded.card.vocab_size))
    training.settle()
    said(f"training runs, microbatches of {training.size.positions} positions")
    ring.stream(options.streams, options.prompt, options.stream_tokens)
    watch(ring, options.stretch_s / 2)
    watch(ring, options.stretch_s, training)
    said(f"streams decode, microbatches of {training.size.positions} positions")
    alone, beside = [watch(ring, options.stretch_s)], list[Stretch]()
    for _ in range(options.rounds):
        beside.append(watch(ring, options.stretch_s, training))
        alone.append(watch(ring, options.stretch_s))
    result: dict[str, Any] = {
        "device": str(mx.default_device()),
        "shape": options.shape,
        "dtype": options.dtype,
        "streams": options.streams,
        "share": options.share,
        **figures(alone, beside),
        "memory": memory(alone, beside, base, state),
        "microbatch_positions": training.size.positions,
    }
    said(f"decode kept {kept(result)}, {result['train_tok_per_s_beside']:,.0f} train tok/s beside")
    ring.end_streams()
    result["train_tok_per_s_idle"] = training.steady_rate(ALONE_STEPS)
    said(f"idle: {result['train_tok_per_s_idle']:,.0f} train tok/s, microbatches of {training.size.positions}")
    for size, times in sorted(training.times.items()):
        seconds, tokens = map(median, zip(*times, strict=True))
        said(f"  cut to {size}: {seconds:.3f} s each, {tokens / seconds:,.0f} tok/s, {len(times)} times")
    groups, training.learner, learner = training.groups, None, None  # type: ignore[assignment]
    result["train_tok_per_s_alone"] = ring.engine.run_between_steps(lambda: train_alone(ring, settings, groups)).result(
        600
    )
    result["idle_over_alone"] = result["train_tok_per_s_idle"] / result["train_tok_per_s_alone"]
    work = StepWork(*sizes_of(options)).operations(options.sizes)
    peak = 1e12 * options.peak_tflops or ring.call(lambda: product_rate(options.dtype))
    trained = options.groups * options.samples * options.completion
    for where in ("beside", "idle", "alone"):
        result[f"mfu_{where}"] = result[f"train_tok_per_s_{where}"] / trained * work / peak
    mfu = f"{result['mfu_alone']:.3f} of {peak / 1e12:.2f} TFLOP/s"
    said(f"alone: {result['train_tok_per_s_alone']:,.0f} train tok/s, {mfu}")
    if options.loop_s:
        ring.stream(options.streams, options.prompt, options.stream_tokens)
        watch(ring, options.stretch_s / 2)
        result["loop"] = asyncio.run(run_loop(ring, options, folder))
        ring.end_streams()
    assert ring.engine.stop(60)
    return result


def train_alone(ring: LocalRing, settings: TrainSettings, groups: list[SampleGroup]) -> Work[float]:
    """Train tokens a second of a trainer that has the device for itself: microbatches have no bound on their time."""
    options = replace(settings.optimize_options(), microbatch_s=0.0, microbatch_bytes=0)
    learner = PolicyLearner(ring.loaded.model, settings.adapter_shape(), options, settings.limits(), seed=0)
    times = []
    for step in range(1 + ALONE_STEPS):  # the first one compiles
        began = time.perf_counter()
        for _ in accepted(learner, groups, step):
            pass
        times.append(time.perf_counter() - began)
    yield
    return tokens_of(groups) / median(times[1:])


def sizes_of(options: Options) -> tuple[int, int, int, int]:
    """Prompts of a train step, samples of each, and their lengths."""
    return options.groups, options.samples, options.prompt, options.completion


def rate(stretches: Sequence[Stretch]) -> float:
    """Tokens a second of all of them."""
    return sum(s.stream_tokens for s in stretches) / sum(s.seconds for s in stretches)


def kept(result: dict[str, Any]) -> str:
    """Of the speed of decoding, in all and by stretch."""
    return f"{result['decode_kept_in_all']:.2f} in all, by stretch {spread(result['decode_kept'])}"


def figures(alone: list[Stretch], beside: list[Stretch]) -> dict[str, Any]:
    """What decoding and training had of stretches with training, each between two without."""
    return {
        "decode_tok_per_s_alone": median(s.rate for s in alone),
        "decode_tok_per_s_training": median(s.rate for s in beside),
        "decode_kept": [s.rate / rate(alone[at : at + 2]) for at, s in enumerate(beside)],
        "decode_kept_in_all": rate(beside) / rate(alone),
        "train_tok_per_s_beside": median(s.train_tokens / s.seconds for s in beside),
        "train_steps_per_minute_beside": median(60 * s.train_steps / s.seconds for s in beside),
        "unit_ms_beside": median(1000 * s.unit_s / max(1, s.units) for s in beside),
        "time_share_beside": median(s.unit_s / s.seconds for s in beside),
        "gaps_alone": percentiles([g for s in alone for g in s.gaps_ms]),
        "gaps_training": percentiles([g for s in beside for g in s.gaps_ms]),
    }


def memory(alone: list[Stretch], beside: list[Stretch], base: int, state: int) -> dict[str, float]:
    """Bytes and ratios; `state`: of adapter and optimizer."""
    inference, hosted = median(s.active_bytes for s in alone), median(s.active_bytes for s in beside)
    return {
        "base": base,
        "inference": inference,
        "hosted": hosted,
        "adapter_and_optimizer": state,
        "hosted_without_state_over_inference": (hosted - state) / inference,
        "peak_over_inference": max(s.peak_bytes for s in beside) / max(s.peak_bytes for s in alone),
    }


def said(what: str) -> None:
    """Tell how far it is: a run that is cut off still leaves its figures."""
    print(f"[{time.process_time():6.1f} s of CPU] {what}", file=sys.stderr, flush=True)


def _state_bytes(learner: PolicyLearner) -> int:
    snapshot = learner.snapshot()
    return sum(value.nbytes for part in (snapshot.adapter, snapshot.optimizer) for value in part.values())


def report(r: dict[str, Any]) -> None:
    """For a person, and one line for a program."""
    mb = {name: f"{value / 1e6:,.0f} MB" for name, value in r["memory"].items()}
    rates = {name: f"{value:,.0f}" for name, value in r.items() if "_tok_per_s" in name}
    print(f"{r['device']}, {r['shape']} {r['dtype']}, {r['streams']} streams, share {r['share']}")
    print(f"decode          {rates['decode_tok_per_s_alone']} tok/s alone")
    print(f"  and training  {rates['decode_tok_per_s_training']} tok/s, kept {kept(r)}")
    print(
        f"train           {rates['train_tok_per_s_beside']} tok/s in {r['time_share_beside']:.2f} of the time", end=""
    )
    print(f", {r['train_steps_per_minute_beside']:.1f} train steps a minute")
    print(f"  idle worker   {rates['train_tok_per_s_idle']} tok/s")
    print(f"  alone         {rates['train_tok_per_s_alone']} tok/s; idle over alone {r['idle_over_alone']:.2f}")
    print(f"  utilisation   {r['mfu_alone']:.3f} alone, {r['mfu_idle']:.3f} idle, {r['mfu_beside']:.3f} beside streams")
    print(f"unit            {r['unit_ms_beside']:.0f} ms, microbatches of {r['microbatch_positions']} positions")
    for name in ("alone", "training"):
        gaps = " ".join(f"{key[4:-3]} {value:.1f}" for key, value in r[f"gaps_{name}"].items())
        print(f"gaps {name:11s}{gaps} ms between decode steps")
    print(f"memory          base {mb['base']}, inference {mb['inference']}, hosted {mb['hosted']}", end="")
    print(f" with adapter and optimizer of {mb['adapter_and_optimizer']}")
    print(f"  ratios        without those two {r['memory']['hosted_without_state_over_inference']:.2f}", end="")
    print(f", peak {r['memory']['peak_over_inference']:.2f}")
    if loop := r.get("loop"):
        print(f"whole loop      {loop['updates_per_minute']:.1f} updates a minute, lag {loop['lag_max']}", end="")
        print(f", {loop['train_tok_per_s']:,.0f} train tok/s, streams {loop['stream_tok_per_s']:,.0f} tok/s", end="")
        print(f", all rows {loop['all_tok_per_s']:,.0f} tok/s, p99 gap {loop['gap_p99_ms']:.1f} ms")
    print(json.dumps(r))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", default="", help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rollout-rows", type=int, default=8, help="rows besides, for the loop's samples")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--stream-tokens", type=int, default=256)
    parser.add_argument("--groups", type=int, default=4, help="prompts in a train step")
    parser.add_argument("--samples", type=int, default=8, help="samples of each")
    parser.add_argument("--completion", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--pause-ms", type=float, default=50.0, help="aim for one microbatch")
    parser.add_argument("--microbatch-gb", type=float, default=0.0, help="default: as a worker's")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device; default: a product is measured")
    parser.add_argument("--layers", type=int, default=0, help="0: as the shape has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stretch-s", type=float, default=4.0)
    parser.add_argument("--loop-s", type=float, default=15.0, help="0: leave the loop out")
    args = vars(parser.parse_args())
    args["pause_s"] = args.pop("pause_ms") / 1000
    args["dtype"] = args["dtype"] or ("float32" if mx.default_device() == mx.Device(mx.cpu) else "bfloat16")
    logs.configure("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        report(bench(Options(**args), Path(folder)))


if __name__ == "__main__":
    main()
