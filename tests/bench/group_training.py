"""Train steps of groups whose samples continue one prompt: `python -m tests.bench.group_training`.

Ways to compute the same gradients, in turn in one process, as ratios: *rows* compute their prompt with each sample, as
models whose layers cannot hand a prompt on do; *copied* compute it once, and each sample copies its keys and values;
*in place* samples read them where they are; *unfused* is copied with MLX's choice of attention and with logits that are
computed again for their gradients. Each line has train tokens a second of CPU time (on a CPU, so that
other processes count little; else of time), the peak of memory, and the utilisation (utilisation.py).
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_model.kv import padded
from mlx_model.kv.kinds import can_share
from tests.bench.adapters import SHAPES, random_model
from tests.bench.steady_training import random_groups
from tests.bench.utilisation import StepWork, product_rate
from trainer.learn import logprobs
from trainer.learn.batches import pad
from trainer.learn.logprobs import BatchArrays, TokenScores, head_chunk, row_scores, shared_scores, to_arrays
from trainer.learn.optimize import padding
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy

Scores = Callable[..., TokenScores]
OTHERS = ("rows", "in place", "unfused")
CLOSE = 1e-4  # of the largest number of a gradient


def measured(policy: Policy, scores: Scores, x: BatchArrays, clock: Callable[[], float]) -> tuple[float, int, Any]:
    """Seconds of one forward and backward pass, its peak of memory beyond what is held, and the gradient."""

    def loss(tree: Any) -> tuple[mx.array, mx.array]:
        found = scores(tree, x)
        entropy = mx.where(x.mask_BT, mx.stop_gradient(found.entropy_BT), 0.0).sum()
        return mx.where(x.mask_BT, found.logp_BT * x.advantage_B[:, None], 0.0).sum(), entropy

    held = mx.get_active_memory()
    mx.reset_peak_memory()
    began = clock()
    values, gradient = nn.value_and_grad(policy.model, loss)(policy.model)
    mx.eval(values, gradient)
    return clock() - began, mx.get_peak_memory() - held, gradient


def apart(one: Any, other: Any) -> float:
    """How far two gradients are apart at most, as a part of the largest number of each array."""
    others = dict(tree_flatten(other))
    pairs = ((array, others[path]) for path, array in tree_flatten(one))
    return max(mx.max(mx.abs(a - b)).item() / max(mx.max(mx.abs(b)).item(), 1e-30) for a, b in pairs)  # type: ignore


def measure(policy: Policy, ways: dict[str, Scores], work: StepWork, shape: dict[str, Any], args: Any) -> None:
    x = to_arrays(pad(random_groups(1, work.samples, work.prompt, work.completion, shape["vocab_size"]), padding()))
    clock = time.process_time if mx.default_device() == mx.Device(mx.cpu) else time.perf_counter
    times, peaks, gradients = {name: list[float]() for name in ways}, dict[str, int](), dict[str, Any]()
    for _ in range(args.rounds):
        for name, scores in ways.items():
            seconds, peaks[name], gradients[name] = measured(policy, scores, x, clock)
            times[name].append(seconds)
    print(f"{work.samples} samples of {work.completion} after {work.prompt:,}:", flush=True)
    tokens, peak = work.samples * work.completion, args.peak_tflops * 1e12 or product_rate(args.dtype, clock)
    for name in ways:
        ratios = sorted(a / b for a, b in zip(times[name], times["copied"], strict=True))
        rate = tokens / median(times[name])
        assert apart(gradients[name], gradients["copied"]) < CLOSE or args.dtype != "float32"
        print(
            f"  {name:9s} time {ratios[0]:.2f} {median(ratios):.2f} {ratios[-1]:.2f} of copied, {rate:,.0f} tok/s,"
            f" peak {peaks[name] / 1e6:,.0f} MB ({peaks[name] / peaks['copied']:.2f}),"
            f" utilisation {work.operations(shape) * rate / tokens / peak:.3f}",
            flush=True,
        )


def main() -> None:
    """Measure all sizes that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--layers", type=int, default=0, help="0: as the shape has")
    parser.add_argument("--samples", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--prompt", type=int, nargs="*", default=[256, 1024, 2048])
    parser.add_argument("--completion", type=int, default=64)
    parser.add_argument("--ways", nargs="*", choices=OTHERS, default=["rows", "in place"])
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device; default: a product is measured")
    parser.add_argument("--rounds", type=int, default=3)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
    args = parser.parse_args()
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    policy = Policy(random_model(shape, args.dtype).model, AdapterShape())
    chunk, form = head_chunk(policy.base), can_share(policy.base, make_prompt_cache(policy.base))
    logprobs.LEAST_SPARED = 0
    fused = padded.is_right()
    print(f"fused attention in shapes with gradients: {fused}", flush=True)
    every = {
        "copied": partial(shared_scores, chunk=chunk, learns="logp", reads="fused" if fused else None),
        "unfused": partial(shared_scores, chunk=chunk),
        "in place": partial(shared_scores, chunk=chunk, learns="logp", reads=form),
        "rows": partial(row_scores, chunk=chunk, learns="logp"),
    }
    ways = {name: scores for name, scores in every.items() if name == "copied" or name in args.ways}
    for prompt in args.prompt:
        for samples in args.samples:
            measure(policy, ways, StepWork(1, samples, prompt, args.completion), shape, args)


if __name__ == "__main__":
    main()
