"""Heads on this machine's default device: `python -m tests.bench.heads [--steps 60] [--json FILE]`.

Trains a reward head with a LoRA, heads that act, and, by PPO beside a policy, a value head, all on models/tiny in fp32.
Then an engine loads these versions and is asked for many texts while rows decode. What it says is held against mlx-lm's
hidden states on the CPU and the head in numpy, in double precision: the largest difference, and what it makes of
actions' log-probabilities. Without a ring, so that it runs where a GPU is and nothing else. The exit code is 1 where
outputs differ by more than `BOUND`.
"""

# ruff: noqa: E402  (the faster BLAS has to be in place before mlx is imported)
from mlx_model import fast_blas

fast_blas.install()

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.tuner.utils import load_adapters

from api.rl.policies import act_by, outputs_of
from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.adapter_files.formats import prepare
from shared.adapters import AdapterManifest
from shared.process.settings import load
from shared.sequences import SamplingParams, SequenceSpec
from shared.text.codec import TextCodec
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import MadeAdapter, twin
from tests.training.run import train
from trainer.learn.compute import finished
from trainer.learn.options import AdapterShape, HeadSettings, Schedule
from trainer.learners.data import DataOptions
from trainer.learners.head_examples import Form, HeadExample, HeadText, spread_of
from trainer.learners.heads import HeadLearner
from trainer.settings import TrainSettings
from trainer.versions.checkpoint import write_adapter

MODEL = "models/tiny"
BOUND = 1e-3  # of outputs, relative to the largest one of the head where that is above 1
BATCH, HELD_OUT, TEXTS = 64, 200, 64
FORMS: dict[Form, int] = {"pairs": 1, "actions": 2, "vectors": 3}  # and the versions that they become
VALUE = 4
VALUE_FLAGS: list[str] = []  # of its run, besides the recipe's

Doubles = npt.NDArray[np.float64]


class Said(NamedTuple):
    """One line of the result."""

    head: str
    trained_ms: float  # of a train step, but for the first
    right: float  # of what is held out, or the mean reward that the policy earned
    apart: float  # largest difference of an output to the reference
    logp_apart: float  # of actions


def main() -> int:
    """Train, serve, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    loaded = load_model(EngineConfig(MODEL, dtype="float32"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained = {form: _head(loaded, form, folder / str(version), options.steps) for form, version in FORMS.items()}
        made = {f"a@{version}": _made(loaded, folder, version) for version in FORMS.values()}
        lines = _compared(loaded, made, trained)
        _show(lines)
        value = _value(folder, max(1, options.steps // 6))
        lines += _compared(loaded, {f"a@{VALUE}": _made(loaded, folder, VALUE)}, {"value": value})
        _show(lines[-1:])
    if options.json is not None:
        options.json.write_text(json.dumps([line._asdict() for line in lines], indent=1))
    return int(any(line.apart > BOUND for line in lines))


def _show(lines: Sequence[Said]) -> None:
    for line in lines:
        print(
            f"{mx.default_device()} {line.head:8} {line.trained_ms:8.1f} ms a train step, {line.right:.2f} right; "
            f"outputs differ by {line.apart:.1e}, log-probabilities of actions by {line.logp_apart:.1e}",
            flush=True,
        )


# -- learning


def _examples(form: Form, codec: TextCodec, count: int, seed: int) -> list[HeadExample]:
    """Sums with a right and a random answer; or which of two numbers is larger, by name or by what they are apart."""
    draw = np.random.default_rng(seed)
    made = []
    for a, b, wrong in draw.integers(10, 100, (count, 3)).tolist():

        def text(said: str) -> HeadText:
            return HeadText(None, said, tuple(codec.encode(said)))

        if form == "pairs":
            made.append(HeadExample((text(f"{a}+{b}={a + b}"), text(f"{a}+{b}={a + b + wrong - 9}"))))
        elif form == "actions":
            made.append(HeadExample((text(f"{a} or {b}?"),), float(a < b)))
        else:
            made.append(HeadExample((text(f"{a} or {b}?"),), action=(float(a - b), (a + b) / 200)))
    return made


def _head(loaded: LoadedModel, form: Form, folder: Path, steps: int) -> tuple[float, float]:
    """Train one and write it down; milliseconds of a train step and what is right of what is held out."""
    codec = TextCodec(loaded.tokenizer)
    items, held_out = (_examples(form, codec, count, seed) for count, seed in ((steps * BATCH, 0), (HELD_OUT, 1)))
    options = DataOptions(Schedule(peak=3e-3), AdapterShape(rank=16), 8192, 1.0, 0.0, (0.9, 0.99), 0)
    start: Any = spread_of(items) if form == "vectors" else 0.0
    labels = ("left", "right") if form == "actions" else ()
    learner = HeadLearner(loaded.model, form, labels, start, HeadSettings(head_learning_rate=1e-2), options)
    finished(learner.train(items[:BATCH], 0))
    began = time.perf_counter()
    for step in range(1, steps):
        finished(learner.train(items[step * BATCH : (step + 1) * BATCH], step))
    took_ms = 1000 * (time.perf_counter() - began) / max(1, steps - 1)
    folder.mkdir()
    write_adapter(folder, learner.weights(), learner.config())
    return took_ms, finished(learner.measure(held_out)).right


def _value(folder: Path, steps: int) -> tuple[float, float]:
    """Teach a policy by PPO, with a value head beside it; its last version goes into the folder."""
    flags = ["--config", "trainer/recipes/tiny-fixed.yaml", "--model", MODEL, "--loss", "ppo", "--steps", str(steps)]
    flags += VALUE_FLAGS
    settings = load(TrainSettings, [*flags, "--run-dir", str(folder / "run"), "--evaluate-every", "0"])
    began = time.perf_counter()
    _, sink = asyncio.run(train(settings))
    took_ms = 1000 * (time.perf_counter() - began) / steps  # with its rollouts
    (folder / str(VALUE)).mkdir()
    write_adapter(folder / str(VALUE), sink.versions[sink.latest], sink.config)
    lines = (settings.folder / "metrics.jsonl").read_text().splitlines()
    return took_ms, float(json.loads(lines[-1])["reward"])


# -- serving


def _made(loaded: LoadedModel, folder: Path, version: int) -> MadeAdapter:
    own = folder / str(version)
    config, file = (own / "adapter_config.json").read_bytes(), own / "adapters.safetensors"
    card = loaded.card
    found = prepare(config, file, folder / "prepared", shapes=card.modules, hidden_size=card.hidden_size)
    manifest = AdapterManifest(
        "a", version, found.kind, found.rank, found.scale, found.modules, "", 0, str(version), file.stat().st_size,
        1 << 20, 0, heads=found.heads,
    )  # fmt: skip
    bare = own / "bare"  # for mlx-lm, which knows no heads
    bare.mkdir()
    tensors: Any = mx.load(str(file))
    lora = {name: np.array(value) for name, value in tensors.items() if not name.startswith("heads.")}
    write_adapter(bare, lora, config)
    return MadeAdapter(file, manifest, load_adapters(twin(loaded.model), str(bare)))


def _compared(loaded: LoadedModel, made: dict[str, MadeAdapter], trained: dict[str, tuple[float, float]]) -> list[Said]:
    texts = [each.texts[-1].ids for each in _examples("pairs", TextCodec(loaded.tokenizer), TEXTS, 2)]
    rows = [row(f"decoding-{at}", [20 + at] * 9, adapter=next(iter(made))) for at in range(4)]
    asked = {id: [_asked(id, at, ids, made[id]) for at, ids in enumerate(texts)] for id in made}
    with AdapterBench(loaded, made) as bench:
        bench.provide()
        bench.submit(*rows)
        for specs in asked.values():
            bench.submit(*specs)
        bench.run()
        said = {
            id: np.stack([np.frombuffer(bench.events[spec.id][0].embedding or b"", "<f4") for spec in specs])
            for id, specs in asked.items()
        }
    return [
        _line(name, figures, made[id], said[id], texts)
        for id, (name, figures) in zip(made, trained.items(), strict=True)
    ]


def _asked(id: str, at: int, ids: Sequence[int], adapter: MadeAdapter) -> SequenceSpec:
    (head,) = adapter.manifest.heads
    return SequenceSpec(f"{id}-{at}", "m", tuple(ids), SamplingParams(0, 0), kind="head", adapter=id, head=head)


def _line(
    name: str, figures: tuple[float, float], adapter: MadeAdapter, said_NO: Any, texts: Sequence[Sequence[int]]
) -> Said:
    wanted_NO = np.stack([_reference(adapter, ids) for ids in texts])
    apart = float(np.max(np.abs(said_NO - wanted_NO) / np.maximum(1.0, np.abs(wanted_NO).max(axis=0))))
    ((_, spec),) = adapter.manifest.heads.items()
    logp_apart = 0.0
    if spec.kind in ("categorical", "gaussian"):
        acts, wanted = (
            act_by(outputs_of(spec, each), None, seed=7, deterministic=True, temperature=1.0)
            for each in (said_NO, wanted_NO.astype(np.float32))
        )
        logp_apart = float(np.max(np.abs(np.array(acts["action_log_probs"]) - np.array(wanted["action_log_probs"]))))
    return Said(name, *figures, apart, logp_apart)


def _reference(adapter: MadeAdapter, ids: Sequence[int]) -> Doubles:
    """The head in numpy, on what mlx-lm's model with the same LoRA shows on the CPU."""
    ((name, _),) = adapter.manifest.heads.items()
    with mx.stream(mx.cpu):
        state_H = np.array(adapter.reference.model(mx.array([ids]))[0, -1]).astype(np.float64)
        tensors: Any = mx.load(str(adapter.path))
        weight_OH, bias_O = (np.array(tensors[f"heads.{name}.{part}"], np.float64) for part in ("weight", "bias"))
    return np.asarray(weight_OH @ state_H + bias_O)


if __name__ == "__main__":
    sys.exit(main())
