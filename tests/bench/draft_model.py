"""A draft model over none: `python -m tests.bench.draft_model [--shape small|medium|0.6b|4b] [--rows 1 8 32]`.

Weights are random, so no smaller model would say the same. So the model's later layers are made to say little: those
before them, as a model of their own, are of one mind with it, the oftener the smaller `--faint` is.
The other draft model is the model itself: the best case of a base that drafts for its own adapter, always right.
Tokens per second are ratios of runs in turn, in one process; tokens must be equal.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_model.config import EngineConfig, SpeculationConfig
from mlx_model.draft import DraftModel
from mlx_model.kv.layout import KvLayout
from mlx_model.loader import LoadedModel
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from tests.bench.own_time import OwnTime
from tests.bench.speculation import Decoding
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest
from worker.engine.speculation.drafting import Drafting

PART = 8  # of the layers: one in so many drafts, at least one
CONTEXT = 4096


def with_part(loaded: LoadedModel, faint: float) -> LoadedModel:
    """The model with its first layers as its draft model; what the others add to them is made as faint as that."""
    layers = loaded.model.layers
    kept = max(1, len(layers) // PART)
    for layer in layers[kept:]:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * faint
    module = type(loaded.model)(type(loaded.model.args)(**vars(loaded.model.args) | {"num_hidden_layers": kept}))
    module.model.embed_tokens, module.model.norm = loaded.model.model.embed_tokens, loaded.model.model.norm
    module.model.layers = layers[:kept]
    mx.eval(loaded.model.parameters())
    return drafting(loaded, module)


def drafting(loaded: LoadedModel, module: Any) -> LoadedModel:
    """The model, for which this one drafts."""
    return replace(loaded, draft=DraftModel("draft", module, loaded.card.vocab_size, CONTEXT, 1, KvLayout()))


class Runs:
    """One engine with the draft model and one without, over the same prompts."""

    def __init__(self, loaded: LoadedModel, rows: int, tokens: int, context: int, drafts: SpeculationConfig) -> None:
        config = EngineConfig("", max_rows=rows, prefill_chunk=256, prefix_cache_bytes=0)
        self._clock = OwnTime()
        with mock.patch("worker.engine.engine.Drafting", partial(Drafting, clock=self._clock)):
            self._plain, self._drafting = Engine(loaded, config), Engine(loaded, replace(config, speculation=drafts))
        self._rows, self._tokens, self._context, self._vocab = rows, tokens, context, loaded.card.vocab_size
        self.drafted = self.accepted = self.changed = 0

    def ratio(self, seed: int) -> float:
        """Tokens per second with drafts over those without; turns of both alternate."""
        draw = random.Random(seed)
        requests = [
            RowRequest(
                SequenceSpec(
                    str(at),
                    "m",
                    tuple(draw.randrange(3, self._vocab) for _ in range(self._context)),
                    SamplingParams(self._tokens, seed + at, temperature=0.0, ignore_eos=True),
                )
            )
            for at in range(self._rows)
        ]
        before = self._drafting.stats().speculation
        plain, drafts = Decoding(self._plain, requests), Decoding(self._drafting, requests)
        while plain.is_busy or drafts.is_busy:
            if plain.is_busy:
                plain.turn()
            self._clock.go_on()
            if drafts.is_busy:
                drafts.turn()
            self._clock.stop()
        after = self._drafting.stats().speculation
        self.changed += sum(first != second for first, second in zip(plain.written, drafts.written, strict=True))
        self.drafted += after.drafted - before.drafted
        self.accepted += after.accepted - before.accepted
        return drafts.tokens / drafts.seconds / (plain.tokens / plain.seconds)


def table(name: str, loaded: LoadedModel, rows: Sequence[int], args: argparse.Namespace) -> None:
    """Ratios with one draft model; `always`: whether it pays or not."""
    for always in (False, True):
        config = SpeculationConfig(args.draft, adapts_to_time=not always, adapts_to_rows=not always, own_text=False)
        for count in rows:
            runs = Runs(loaded, count, args.tokens, args.context, config)
            ratios = [runs.ratio(seed) for seed in range(args.rounds + 1)][1:]
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            how = "always" if always else "where it pays"
            print(
                f"{name}, {how}, {count:3} rows: x {median(ratios):.2f} ({shown}), accepted {runs.accepted} of "
                f"{runs.drafted}, {runs.changed} rows changed",
                flush=True,
            )


def main() -> None:
    """Two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--draft", type=int, default=7, help="tokens of a draft, at most")
    parser.add_argument("--faint", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=3)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
    args = parser.parse_args()
    loaded = random_model(SHAPES[args.shape], args.dtype)
    table("the model itself", drafting(loaded, loaded.model), args.rows, args)
    table("a part of it", with_part(loaded, args.faint), args.rows, args)


if __name__ == "__main__":
    main()
