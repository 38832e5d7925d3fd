"""What the ranks of a test do (`ranks.py` starts them), or one process alone to compare with: without a group."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from mlx_model import fast_blas

fast_blas.install()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_lm.generate import generation_stream  # noqa: E402
from pytest import MonkeyPatch  # noqa: E402

from mlx_model.collectives import ranks  # noqa: E402
from mlx_model.collectives.cuda import sums  # noqa: E402
from mlx_model.collectives.ranks import Ranks, one_after_another  # noqa: E402
from mlx_model.config import EngineConfig, SpeculationConfig  # noqa: E402
from mlx_model.loader import LoadedModel, load_model  # noqa: E402
from mlx_model.step.decode_step import DecodeStep, decode_step_of  # noqa: E402
from shared.adapters import AdapterManifest  # noqa: E402
from shared.errors import SetupError  # noqa: E402
from shared.sequences import SamplingParams, SequenceSpec  # noqa: E402
from tests.engine.adapter_bench import AdapterBench, row  # noqa: E402
from tests.engine.adapter_models import MadeAdapter  # noqa: E402
from tests.engine.conftest import Bench, prompt_of, spec  # noqa: E402
from tests.engine.ranks import Channel, Task, joined  # noqa: E402
from tests.waiting import HANG_S  # noqa: E402
from trainer.hosted import rehearse  # noqa: E402
from trainer.learn.batches import Sample, SampleGroup  # noqa: E402
from trainer.learn.compute import finished  # noqa: E402
from trainer.learn.gate import GateLimits  # noqa: E402
from trainer.learn.losses import LossOptions  # noqa: E402
from trainer.learn.options import AdapterShape, HeadSettings, OptimizeOptions, Schedule, ValueOptions  # noqa: E402
from trainer.learn.policy import Policy  # noqa: E402
from trainer.learners.data import DataOptions  # noqa: E402
from trainer.learners.distilling import ScoredRow  # noqa: E402
from trainer.learners.handle import Local  # noqa: E402
from trainer.learners.head_examples import Form, HeadExample, HeadText, spread_of  # noqa: E402
from trainer.learners.heads import HeadLearner  # noqa: E402
from trainer.learners.kinds import HeadOptions, Kind, PolicyOptions, TuneOptions, made_with  # noqa: E402
from trainer.learners.ranks import RankLearner  # noqa: E402
from trainer.learners.tuning_examples import Tuning  # noqa: E402
from trainer.settings import TrainSettings  # noqa: E402
from worker.engine.batch import row_model  # noqa: E402

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHARDING: Any = "tensor"  # of the ranks
GRAMMAR = json.dumps({"grammars": [{"json_schema": SCHEMA}]})


def schedule(group: Any, folder: str, seed: int, **config: Any) -> Any:
    """A random schedule: its sequences, and what became of each."""
    from tests.engine.test_schedules import Schedule

    loaded = _load(folder, group, **config)
    run = Schedule(loaded, seed)
    run.run()
    ends = {seq: run.bench.finish(seq).reason for seq in run.specs}
    tokens = {seq: run.bench.tokens(seq) for seq in run.specs}
    return {"specs": msgspec.to_builtins(list(run.specs.values())), "tokens": tokens, "ends": ends}


def sequences(group: Any, folder: str, specs: list[Any], config: dict[str, Any], engine: dict[str, Any]) -> Any:
    """These sequences in one batch: tokens, log-probabilities, and what is reported of each."""
    engine = dict(engine)
    if engine.pop("compiles", False):
        with MonkeyPatch.context() as patch:
            patch.setattr(
                row_model,
                "decode_step_of",
                lambda model, *_: decode_step_of(model) and DecodeStep(model, compiles=True),
            )
            return sequences(group, folder, specs, config, engine)
    drafts = engine.pop("drafts", 0)
    speculation = SpeculationConfig(tokens=drafts, adapts_to_time=False) if drafts else None
    bench = Bench(_load(folder, group, **config), speculation=speculation, **engine)
    each = [msgspec.convert(spec, SequenceSpec) for spec in specs]
    bench.submit(*each)
    bench.run()
    told = {spec.id: bench.events[spec.id][-1] for spec in each}
    embeddings = {seq: np.frombuffer(event.embedding, "<f4").tolist() for seq, event in told.items() if event.embedding}
    return {
        "tokens": {spec.id: bench.tokens(spec.id) for spec in each},
        "logprobs": {spec.id: bench.logprobs(spec.id) for spec in each},
        "ends": {spec.id: bench.finish(spec.id).reason for spec in each},
        "scores": {seq: event.score_logprobs for seq, event in told.items() if event.score_logprobs},
        "embeddings": embeddings,
        "kv": bench.loaded.card.kv_bytes_per_token,
        "drafted": bench.engine.drafting.stats.accepted,
    }


def adapters(group: Any, folder: str, made: list[list[Any]], specs: list[Any]) -> Any:
    """Rows of many versions in one batch, followers that move to one that is loaded amid them."""
    files = _made(made)
    with AdapterBench(_load(folder, group), files, slots=5) as bench:
        bench.provide(*(version for version in files if version != "a@2"))
        bench.publish("a@1")
        rows = [msgspec.convert(spec, SequenceSpec) for spec in specs]
        bench.submit(*rows)
        bench.until(lambda: len(bench.tokens(rows[0].id)) > 6)
        bench.publish_and_read("a@2")
        bench.run()
        bench.assert_nothing_is_held()
        return {
            "tokens": {each.id: bench.tokens(each.id) for each in rows},
            "versions": {each.id: bench.versions(each.id) for each in rows},
            "logprobs": {each.id: bench.logprobs(each.id) for each in rows},
            "failed": bench.slots.stats.failed,
            "bytes": bench.slots.stats.bytes,
        }


def loads(group: Any, folder: str, seed: int, made: list[list[Any]]) -> Any:
    """Versions that come, are waited for and are pushed out of two slots while rows come and go."""
    draw = random.Random(seed)
    files = _made(made)
    with AdapterBench(_load(folder, group), files, slots=2, prefill_chunk=16) as bench:
        bench.provide()
        bench.publish("a@1")
        names = ["", "a", "a@1", "a@2", "b@1"]
        rows: list[SequenceSpec] = []
        for turn in range(40):
            if draw.random() < 0.4:
                ref = draw.choice(names)
                policy = "follow" if ref == "a" and draw.random() < 0.5 else "pinned"
                prompt = prompt_of(draw.choice([3, 20, 45]), draw.randrange(4))
                rows.append(row(f"r{len(rows)}", prompt, ref, adapter_policy=policy, max_tokens=draw.choice([3, 15])))
                bench.submit(rows[-1])
            if draw.random() < 0.1 and rows:
                bench.engine.cancel(draw.choice(rows).id)
            if turn == 20:
                bench.publish("a@2")
            bench.turn()
        bench.run()
        tokens = {each.id: bench.tokens(each.id) for each in rows}
        return {"tokens": tokens, "versions": {each.id: bench.versions(each.id) for each in rows}}


def sees(group: Any, folder: str, seed: int, made: list[list[Any]]) -> Any:
    """Rows with images and rows of text come and go; each image is encoded once, and told piece by piece."""
    from tests.engine.vision_bench import AdaptedGaze
    from tests.engine.vision_models import WHAT, picture

    draw, loaded = random.Random(seed), _load(folder, group)
    texts = ["Tell me of the sea. " * 4, WHAT, "<image> or <image>?", "<image> and <image>, then <image>: which?"]
    most = 20_000  # bytes of images' vectors
    with (
        MonkeyPatch.context() as patch,
        AdaptedGaze(loaded, _made(made), prefill_chunk=16, image_cache_bytes=most) as bench,
    ):
        patch.setattr("worker.engine.gallery.SENT_BYTES", 600)
        bench.publish("a@1")
        asked: list[str] = []
        for turn in range(40):
            if draw.random() < 0.4:
                text, adapter = draw.choice(texts), draw.choice(["", "", "a@1"])
                shown = [picture(draw.randrange(6), 60, 45) for _ in range(text.count("<image>"))]
                for sample in range(draw.choice([1, 1, 3])):
                    asked.append(f"{turn} {sample}")
                    tokens = draw.choice([3, 15])
                    bench.ask(asked[-1], text, shown, group=str(turn), adapter=adapter, max_tokens=tokens)
            if draw.random() < 0.2 and asked:
                bench.engine.cancel(draw.choice(asked))
            bench.turn()
        bench.run()
        bench.ask("broken", WHAT, [picture(99)], breaks=True)
        bench.run()
        bench.ask("whole", WHAT, [picture(99)])
        bench.run()
        gallery, stats = bench.engine.gallery, bench.engine.stats().vision
        assert not gallery.wanted and not gallery.failed and not gallery.busy and 0 < stats.bytes <= most
        assert (stats.encoded > 0) == (loaded.tower is not None) == (group is None or group.rank() == 0)
        return {
            "tokens": {seq: bench.tokens(seq) for seq in bench.shown},
            "ends": {seq: bench.finish(seq).reason for seq in bench.shown},
            "cached": sum(bench.finish(seq).cached_tokens for seq in bench.shown),
            "why": bench.finish("broken").error_message,
        }


def _made(made: list[list[Any]]) -> dict[str, MadeAdapter]:
    """Adapters as a task names them."""
    each = [(path, msgspec.convert(manifest, AdapterManifest)) for path, manifest in made]
    return {manifest.id: MadeAdapter(Path(path), manifest, None) for path, manifest in each}


def gradient(group: Any, folder: str) -> Any:
    """Of LoRA everywhere, summed over ranks; and what a train step's update makes of its first parameters."""
    loaded = _load(folder, group)
    with mx.stream(generation_stream):
        policy = Policy(loaded.model, AdapterShape(rank=4, scale=2.0), seed=1, whole=loaded.whole)
        draw = np.random.default_rng(0)
        policy.load({name: each + draw.normal(0, 0.05, each.shape) for name, each in policy.weights().items()})
        ids = mx.array([prompt_of(30, 1), prompt_of(30, 2)])

        def loss(model: Any) -> mx.array:
            logits = model(ids[:, :-1])
            return nn.losses.cross_entropy(logits, ids[:, 1:], reduction="mean")

        value, part = nn.value_and_grad(policy.model, loss)(policy.model)
        whole = dict(tree_flatten(policy.whole(part)))
        mx.eval(value, whole)
    told = {name: np.array(each, np.float32).ravel().tolist() for name, each in sorted(whole.items())}
    return {"loss": value.item(), "gradient": told}


def dora(group: Any, folder: str) -> int:
    """A new DoRA policy's digest, on ranks whose norms differ as those of unlike machines do."""
    loaded = _load(folder, group, sharding="data")
    assert group is not None and loaded.whole is not None
    loaded.model.update(tree_map(lambda value: value * (1 + 1e-3 * group.rank()), loaded.model.parameters()))
    with mx.stream(generation_stream):
        return Policy(loaded.model, AdapterShape(kind="dora", rank=4), whole=loaded.whole).digest()


class Recorded:
    """What a learner was told of each update: the gradient that it is made of, whole."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, list[float]]] = []

    def __call__(self, gradient: Any) -> Any:
        told = sorted(tree_flatten(gradient))
        self.gradients.append({name: np.array(each, np.float32).ravel().tolist() for name, each in told})
        return gradient


def learns(group: Any, folder: str, kind: str, checkpoint_layers: bool = False, **config: Any) -> Any:
    """Train steps, some of which are taken back: reports, gradients and weights, by whom ranks ask or one process."""
    loaded = _load(folder, group, **config)
    if group is not None and group.rank():
        assert CHANNEL is not None, "there are ranks"
        rank = RankLearner(loaded)
        CHANNEL.follow(rank.unit)
        return {"digest": rank._learner.digest()}
    learned = learns_from_samples if kind in ("grpo", "ppo") else learns_from_data
    told = learned(loaded, kind, checkpoint_layers)
    if CHANNEL is not None:
        CHANNEL.unit(b"end")
    return told


class Asked:
    """A learner whose methods are called as a run calls them: on all ranks, where there are several."""

    def __init__(self, loaded: LoadedModel, kind: Kind, options: Any) -> None:
        made = made_with(kind, options)
        self._local: Local[Any] = Local.open(made, loaded.model, whole=loaded.whole, others=CHANNEL)
        self.here = self._local.learner

    def __getattr__(self, method: str) -> Any:
        return lambda *args: finished(self._local.named_work(method, args))


def learns_from_samples(loaded: LoadedModel, kind: str, checkpoint_layers: bool) -> Any:
    loss = LossOptions("ppo", 0.2, 0.2) if kind == "ppo" else LossOptions(kl_coefficient=0.05)
    value = ValueOptions(hidden=8, rate=10.0) if kind == "ppo" else None
    # Sizes of microbatches follow the clock: of rank 0, on all ranks.
    optimize = OptimizeOptions(
        loss=loss, value=value, schedule=Schedule(peak=1e-4), microbatch_tokens=256, microbatch_s=1e-4, minibatches=2,
        max_completion=12, distances_every=2, max_grad_norm=0.05,
    )  # fmt: skip
    options = PolicyOptions(AdapterShape(rank=4), optimize, GateLimits(), 1, checkpoint_layers)
    if CHANNEL is not None:
        finished(rehearse(loaded, TrainSettings(max_tokens=2, lora_rank=2), CHANNEL))  # leaves nothing behind
    learner = Asked(loaded, "policy", options)
    recorded = recording(learner.here)
    learner.load(moved(learner.weights()))
    learner.begin_with(moved(learner.weights()))
    groups, told = samples(), []
    for step in range(3):
        trained = learner.train(groups, step, step, [groups[0].prompt_ids])
        checks = [float(check.passed) for check in trained.checks]
        distances = trained.report.distances
        told.append([trained.report.loss, trained.report.grad_norm, trained.report.kl, *checks])
        told.append([] if distances is None else [float(each) for each in astuple(distances)])
        if step == 1:
            learner.revert()
        else:
            learner.accept()
            learner.anchor(learner.weights())
    snapshot, gaps = learner.snapshot(), learner.gaps(groups, None)
    before = learner.weights()
    learner.train(groups, 3, 3, [])
    learner.restore(snapshot)
    assert all(np.array_equal(each, before[name]) for name, each in learner.weights().items())
    wrong = snapshot.adapter | {"other": np.zeros(1, np.float32)}
    with pytest.raises(ValueError, match="other"):
        learner.load(wrong)
    last = learner.train(groups, 3, 3, [])
    told.append([last.report.loss, last.report.grad_norm, *gaps])
    one = [replace(groups[0], samples=groups[0].samples[:1])]  # fewer than there are ranks
    last = learner.train(one, 4, 4, [])
    told.append([last.report.loss, last.report.grad_norm])
    return result(learner.here, told, recorded)


def learns_from_data(loaded: LoadedModel, kind: str, checkpoint_layers: bool) -> Any:
    options = DataOptions(Schedule(peak=1e-4), AdapterShape(rank=4), 96, 0.05, 0.0, (0.9, 0.99), 1, checkpoint_layers)
    tuning: Tuning = "dpo" if kind == "dpo" else "sft"
    learner: Asked
    items: list[Any] = [replace(group, samples=group.samples[: 1 if kind == "distill" else 2]) for group in samples()]
    if kind in ("pairs", "vectors"):
        items = examples(kind)
        learner = header(loaded, items, "pairs" if kind == "pairs" else "vectors", options)
    else:
        if kind == "distill":
            items = taught(items)
            learner = Asked(loaded, "distill", options)
        else:
            learner = Asked(loaded, "tune", TuneOptions(tuning, 0.3, options))
    recorded = recording(learner.here)
    learner.begin_with(moved(learner.weights()))
    told = []
    for step in range(3):
        report = learner.train(items, step)
        measured = learner.measure(items)
        told.append([report.loss, report.grad_norm, measured.loss or 0.0, measured.margin or 0.0])
        if step == 1:
            learner.revert()
        else:
            learner.accept()
    snapshot, good = learner.snapshot(), learner.weights()
    learner.train(items, 3)
    learner.restore(snapshot, good)
    report = learner.train(items, 3)
    told.append([report.loss, report.grad_norm])
    if isinstance(learner.here, HeadLearner):
        told += learner.read([item.texts[0] for item in items])
    return result(learner.here, told, recorded)


def taught(items: list[SampleGroup]) -> list[ScoredRow]:
    """By a teacher whose scores are made up."""
    draw, rows = np.random.default_rng(3), []
    for item in items:
        (sample,) = item.samples
        top = [draw.choice(250, 4, replace=False).tolist() for _ in sample.completion_ids]
        scores = [(-1.5 - np.arange(4) * draw.uniform(0.5, 1)).tolist() for _ in sample.completion_ids]
        rows.append(
            ScoredRow(
                "t@1",
                item.prompt_ids,
                sample.completion_ids,
                sample.mask,
                tuple(map(tuple, top)),
                tuple(map(tuple, scores)),
            )
        )
    return rows


def examples(kind: str) -> list[HeadExample]:
    """What a head learns from."""
    draw = np.random.default_rng(11)

    def text(at: int) -> HeadText:
        return HeadText("a prompt", "an answer", tuple(draw.integers(0, 250, 4 + 3 * at).tolist()))

    if kind == "pairs":
        return [HeadExample((text(at), text(at + 1)), weight=1.0 + at) for at in range(6)]
    return [HeadExample((text(at),), action=tuple(draw.normal(0, 2, 2).tolist())) for at in range(6)]


def header(loaded: LoadedModel, items: list[HeadExample], form: Form, options: DataOptions) -> Asked:
    """Of pairs with a LoRA beside it, of vectors alone."""
    start, head = (0.0, HeadSettings(head_hidden=8)) if form == "pairs" else (spread_of(items), HeadSettings())
    options = options if form == "pairs" else replace(options, shape=None)
    return Asked(loaded, "head", HeadOptions(form, (), start, head.model_dump(), options))


def recording(learner: Any) -> Recorded:
    """Of the gradients that have been summed."""
    recorded, policy = Recorded(), learner.policy
    if policy is None:  # a head alone
        whole = learner.whole
        learner.whole = lambda gradients: recorded(whole(gradients))
        return recorded
    whole = policy.whole
    policy.whole = lambda gradient: recorded(whole(gradient))
    return recorded


def result(learner: Any, told: list[list[float]], recorded: Recorded) -> Any:
    weights = {name: each.ravel().tolist() for name, each in sorted(learner.weights().items())}
    config = learner.config().decode()
    digest = learner.digest()
    return {"told": told, "gradients": recorded.gradients, "weights": weights, "config": config, "digest": digest}


def moved(weights: dict[str, Any]) -> dict[str, Any]:
    """Away from the base, so that no gradient is all but zero."""
    draw = np.random.default_rng(0)
    return {name: (each + draw.normal(0, 0.05, each.shape)).astype(np.float32) for name, each in weights.items()}


def samples() -> list[SampleGroup]:
    """Prompts and completions of different lengths."""
    draw = np.random.default_rng(7)

    def sample(at: int) -> Sample:
        ids = tuple(draw.integers(0, 250, 2 + 3 * at).tolist())
        return Sample(ids, (-5.0,) * len(ids), (True,) * len(ids), (0,) * len(ids), (-1.0) ** at)

    return [
        SampleGroup(str(at), tuple(prompt_of(3 + 18 * at, at)), tuple(sample(each) for each in range(4)))
        for at in range(2)
    ]


def memory(group: Any, folder: str) -> Any:
    """Bytes of the weights of this rank, and the most that was in memory while they came."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = _load(folder, group)
    held = sum(each.nbytes for _, each in tree_flatten(loaded.model.parameters()))
    return {"held": held, "peak": mx.get_peak_memory() - before}


def sums_on_a_cpu(group: Any, folder: str) -> Any:
    """Whether ranks without GPUs sum through memory of theirs, and what their sums are."""
    opened = sums.open_to(group)
    told = sums.all_sum(mx.full((2, 16), float(group.rank() + 1)), group)
    return {"came": opened, "sums": told.tolist()}


def refusal(group: Any, folder: str, **config: Any) -> Any:
    """Why this cannot be loaded."""
    try:
        _load(folder, group, **config)
    except SetupError as error:
        return error.message
    return ""


def comes_back(group: Any, folder: str) -> Any:
    """Whether the first rank gets what the last one makes in a decode step before that one goes on."""
    mx.synchronize(generation_stream)  # the latest engine's forward is under way, and on the same links
    ranks = one_after_another(Ranks(group))
    got, made_B1H = Path(folder, "came-back"), mx.full((2, 1, 4), float(group.rank()))
    told_B1H = ranks.from_last(made_B1H)
    if group.rank() == 0:
        came = bool((told_B1H == group.size() - 1).all())
        got.touch()
        return {"came": came}
    ends = time.monotonic() + HANG_S
    while not got.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    came = got.exists()
    mx.eval(told_B1H)
    return {"came": came}


def by_sums(group: Any, task: str, **arguments: Any) -> Any:
    """Another task, where ranks hand on as they do without sends."""
    with MonkeyPatch.context() as patch:
        patch.setattr(ranks, "has_sends", lambda: False)
        return globals()[task](group, **arguments)


def sampled(seq: str, **sampling: Any) -> SequenceSpec:
    """A sequence that is drawn."""
    return spec(seq, prompt_of(9, len(seq)), temperature=1.0, **sampling)


def embedded(seq: str) -> SequenceSpec:
    """A prompt's mean."""
    return SequenceSpec(seq, "m", tuple(prompt_of(11, 5)), SamplingParams(0, 0), kind="embed", pooling="mean")


def scored(seq: str) -> SequenceSpec:
    """Log-probabilities of a continuation."""
    ids = tuple(prompt_of(6, 8))
    return SequenceSpec(seq, "m", tuple(prompt_of(30, 6)), SamplingParams(0, 0), kind="score", score_ids=ids)


def _load(folder: str, group: Any, **config: Any) -> LoadedModel:
    return load_model(EngineConfig(folder, kv_limit_bytes=1 << 30, **{"sharding": SHARDING} | config), group)


def run(tasks: list[Task], group: Any) -> list[Any]:
    """Each of these, one after another."""
    known = globals()
    return [known[task.of](group, **task.arguments) for task in tasks]


CHANNEL: Channel | None = None


def main(folder: Path, sharding: str) -> None:
    """One rank."""
    global CHANNEL, SHARDING
    SHARDING = sharding
    group = joined()
    CHANNEL = channel = Channel(folder, Ranks(group))
    Bench.facts = staticmethod(channel.facts)  # type: ignore[assignment]
    told = run(msgspec.json.decode((folder / "tasks.json").read_bytes(), type=list[Task]), group)
    (folder / f"rank-{group.rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
