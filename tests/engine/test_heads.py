"""Heads read the last hidden state under their row's own version, whatever runs beside them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import mamba2

from mlx_model.config import EngineConfig
from mlx_model.heads.head import DenseLayer, Head
from mlx_model.loader import LoadedModel, load_model
from mlx_model.pooling import hidden_size
from shared.heads import HeadSpec
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import MadeAdapter, make_adapter
from tests.engine.conftest import Bench, prompt_of
from tests.engine.kv_models import BOUNDED, CONFIGS, QUANTISED, SIZES, Model
from tests.engine.small_models import write_tokenizer

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]

SCALAR = HeadSpec("scalar")
TOPICS = HeadSpec("labels", labels=("a", "b", "c"), activation="gelu")
SPECS = {"value": SCALAR, "topic": TOPICS}
HIDDEN = 24


def weights_of(spec: HeadSpec, inputs: int, seed: int) -> Weights:
    draw = np.random.default_rng(seed)
    hidden = HIDDEN if spec.activation else 0
    shapes = {"weight": (spec.outputs, hidden or inputs), "bias": (spec.outputs,)}
    if hidden:
        shapes |= {"hidden.weight": (hidden, inputs), "hidden.bias": (hidden,)}
    return {part: (draw.standard_normal(shape) / 8).astype(np.float32) for part, shape in shapes.items()}


def computed(weights: Weights, state_H: Array) -> Array:
    """The same in numpy, in double precision."""
    x = state_H.astype(np.float64)
    if "hidden.weight" in weights:
        x = weights["hidden.weight"] @ x + weights["hidden.bias"]
        x = x * 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in x]))
    return np.asarray(weights["weight"] @ x + weights["bias"])


class Versions:
    """A LoRA with heads (a@1, a@2), heads alone (h@1), a LoRA without (a@3), and the weights of all heads."""

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.made: dict[str, MadeAdapter] = {}
        self.weights: dict[tuple[str, str], Weights] = {}
        self._inputs = loaded.card.hidden_size
        for number in (1, 2):
            self._add(make_adapter(loaded.model, folder, version=number), seed=10 * number)
        plain = make_adapter(loaded.model, folder, version=3)
        self.made["a@3"] = plain
        bare = msgspec.structs.replace(plain.manifest, name="h", version=1, kind="head", rank=0, modules=())
        self._add(MadeAdapter(folder / "nothing", bare, loaded.model), seed=7)

    def _add(self, made: MadeAdapter, seed: int) -> None:
        version = made.manifest.id
        tensors: dict[str, Any] = dict(mx.load(str(made.path))) if made.path.exists() else {}  # type: ignore[arg-type]
        sized = {}
        for at, (name, spec) in enumerate(SPECS.items()):
            weights = weights_of(spec, self._inputs, seed + at)
            self.weights[version, name] = weights
            tensors |= {f"heads.{name}.{part}": mx.array(each) for part, each in weights.items()}
            sized[name] = msgspec.structs.replace(spec, inputs=self._inputs, hidden=HIDDEN if spec.activation else 0)
        path = made.path.with_name(f"{version}-heads.safetensors")
        mx.save_safetensors(str(path), tensors)
        manifest = msgspec.structs.replace(made.manifest, heads=sized)
        self.made[version] = replace(made, path=path, manifest=manifest)


@pytest.fixture(scope="module")
def versions(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(llama, tmp_path_factory.mktemp("heads"))


def asked(seq: str, ids: list[int], adapter: str, head: str = "value", **fields: Any) -> SequenceSpec:
    return SequenceSpec(seq, "m", tuple(ids), SamplingParams(0, 0), kind="head", adapter=adapter, head=head, **fields)


def outputs(bench: Bench, seq: str) -> Array:
    [event] = bench.events[seq]
    assert event.finish is not None and event.finish.reason == "stop" and event.tokens == []
    assert event.embedding is not None
    return np.frombuffer(event.embedding, "<f4")


def reference(versions: Versions, spec: SequenceSpec) -> Array:
    model = versions.made[spec.adapter].reference
    state_H = np.array(model.model(mx.array([spec.prompt_ids]))[0, -1].astype(mx.float32))
    return computed(versions.weights[spec.adapter, spec.head], state_H)


def count_forwards(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward that shows hidden states."""
    model, rows = bench.engine.model, []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, cache: (rows.append(len(cache[-1].rows)), hidden(ids, cache))[1])
    return rows


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 64, 150])
@pytest.mark.parametrize("head", ["value", "topic"])
@pytest.mark.parametrize("version", ["a@1", "h@1"])
def test_values_are_those_of_a_reference_in_any_chunks(
    llama: LoadedModel, versions: Versions, version: str, head: str, length: int
) -> None:
    wanted = asked("v", prompt_of(length), version, head)
    with AdapterBench(llama, versions.made, prefill_chunk=64) as bench:
        bench.provide()
        bench.submit(wanted)
        bench.run()
        np.testing.assert_allclose(outputs(bench, "v"), reference(versions, wanted), rtol=1e-5, atol=1e-5)
        assert bench.events["v"][0].version == version
        bench.assert_nothing_is_held()


def test_rows_of_several_versions_share_a_forward(
    llama: LoadedModel, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [
        asked(f"{version}{at}", prompt_of(5 + 3 * at, seed=at), version, ("value", "topic")[at % 2])
        for at, version in enumerate(("a@1", "h@1", "a@2", "a@1"))
    ]
    with AdapterBench(llama, versions.made, prefill_chunk=128) as bench:
        bench.provide()
        bench.submit(*(row(f"load {each}", [1, 2], each, max_tokens=1) for each in ("a@1", "a@2", "h@1")))
        bench.run()
        forwards = count_forwards(bench, monkeypatch)
        bench.submit(*wanted)
        bench.run()
        assert forwards == [4]
        for each in wanted:
            np.testing.assert_allclose(outputs(bench, each.id), reference(versions, each), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*CONFIGS, *BOUNDED, *QUANTISED} - {"mamba2"}))  # it shows no hidden states
def test_texts_that_share_a_forward_are_read_as_alone_whatever_the_kv(
    model_of: Model, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    loaded = model_of(name)
    weights = weights_of(SCALAR, hidden_size(loaded.model), seed=3)
    tensors = {part: mx.array(each) for part, each in weights.items()}
    head = Head(SCALAR, DenseLayer(tensors["weight"], tensors["bias"]))
    loaded = replace(loaded, heads={"value": head})
    wanted = [asked(f"v{at}", prompt_of(4 + 5 * at, seed=at, vocab=100), "") for at in range(4)]
    together, alone = Bench(loaded, prefill_chunk=128), Bench(loaded, prefill_chunk=128)
    forwards = count_forwards(together, monkeypatch)
    together.submit(*wanted)
    together.run()
    assert forwards == [4]
    for each in wanted:
        alone.submit(each)
        alone.run()
        np.testing.assert_allclose(outputs(together, each.id), outputs(alone, each.id), rtol=1e-4, atol=1e-4)


def test_the_card_of_a_model_without_hidden_states_says_so(llama: LoadedModel, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "mamba2"} | SIZES | CONFIGS["mamba2"] | {"time_step_limit": [0.01, 10.0]}
    model = mamba2.Model(mamba2.ModelArgs.from_dict(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    assert load_model(EngineConfig(str(tmp_path))).card.head_inputs is None
    assert llama.card.head_inputs == 64


def test_rows_that_decode_and_texts_that_heads_read_leave_each_other_alone(
    llama: LoadedModel, versions: Versions
) -> None:
    with AdapterBench(llama, versions.made, prefill_chunk=16) as bench:
        bench.provide()
        bench.submit(row("load", [1, 2], "a@2", max_tokens=1))  # or the row may decode while this is read
        bench.run()
        bench.events.clear()
        decoding = row("s1", prompt_of(20), "a@1", max_tokens=30)
        bench.submit(decoding)
        bench.until(lambda: len(bench.tokens("s1")) > 2)
        wanted = [asked(f"v{at}", prompt_of(4 + 13 * at, seed=at), "a@2") for at in range(5)]
        bench.submit(*wanted)
        bench.until(lambda: len(bench.events.keys()) == 6)
        assert bench.events["s1"][-1].finish is None  # between its steps, not behind them
        bench.run()
        bench.assert_true_to_its_versions(decoding)
        for each in wanted:
            np.testing.assert_allclose(outputs(bench, each.id), reference(versions, each), rtol=1e-5, atol=1e-5)
        assert bench.engine.stats().rows == 0


def test_a_pinned_row_keeps_its_version_and_a_newer_one_has_its_own(llama: LoadedModel, versions: Versions) -> None:
    ids = prompt_of(12)
    with AdapterBench(llama, versions.made) as bench:
        for version in ("a@1", "a@2"):
            bench.publish(version)
            bench.load(version)
        wanted = [asked("old", ids, "a@1"), asked("new", ids, "a@2"), asked("latest", ids, "a")]
        bench.submit(*wanted)
        bench.run()
        for each in wanted[:2]:
            np.testing.assert_allclose(outputs(bench, each.id), reference(versions, each), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(outputs(bench, "latest"), outputs(bench, "new"))
        assert not np.allclose(outputs(bench, "old"), outputs(bench, "new"))


def test_a_row_that_would_follow_is_refused(llama: LoadedModel, versions: Versions) -> None:
    with AdapterBench(llama, versions.made) as bench:
        bench.publish("a@1")
        bench.submit(asked("v", [1, 2, 3], "a", adapter_policy="follow"), asked("w", [1, 2, 3], "a"))
        bench.run()
        assert (bench.finish("v").reason, bench.finish("v").error_code) == ("error", "unsupported_parameter")
        assert bench.finish("w").reason == "stop"


def test_heads_go_with_their_slot(llama: LoadedModel, versions: Versions) -> None:
    held: dict[str, int] = {}
    with AdapterBench(llama, versions.made, slots=1) as bench:
        bench.provide()
        for at, version in enumerate(("a@1", "h@1", "a@2", "a@1", "h@1")):
            wanted = asked(f"v{at}", prompt_of(9), version, "topic")
            bench.submit(wanted)
            bench.run()
            np.testing.assert_allclose(outputs(bench, f"v{at}"), reference(versions, wanted), rtol=1e-5, atol=1e-5)
            assert held.setdefault(version, bench.slots.stats.bytes) == bench.slots.stats.bytes, "no others are held"


@pytest.mark.parametrize(
    ("adapter", "head", "owner"), [("a@3", "value", "a@3"), ("a@1", "nope", "a@1"), ("", "value", "model")]
)
def test_a_row_whose_version_has_no_such_head_ends_with_a_word_of_it(
    llama: LoadedModel, versions: Versions, adapter: str, head: str, owner: str
) -> None:
    with AdapterBench(llama, versions.made) as bench:
        bench.provide()
        bench.submit(asked("v", [1, 2, 3], adapter, head), asked("w", [1, 2, 3], "a@1"))
        bench.run()
        assert bench.finish("v").reason == "error"
        assert owner in bench.finish("v").error_message and repr(head) in bench.finish("v").error_message
        assert bench.finish("w").reason == "stop"


def test_texts_that_share_a_forward_are_read_by_a_head_at_once(
    llama: LoadedModel, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, ...]] = []
    compute = Head.__call__
    monkeypatch.setattr(
        Head, "__call__", lambda head, states_NH: (read.append(states_NH.shape), compute(head, states_NH))[1]
    )
    wanted = [
        asked(f"{version} {head} {at}", prompt_of(5 + at, seed=at), version, head)
        for at in range(3)
        for version, head in (("a@1", "value"), ("a@1", "topic"), ("h@1", "value"))
    ]
    with AdapterBench(llama, versions.made, prefill_chunk=256, max_rows=16) as bench:
        bench.provide()
        bench.submit(*(row(f"load {each}", [1, 2], each, max_tokens=1) for each in ("a@1", "h@1")))
        bench.run()
        bench.submit(*wanted)
        bench.run()
        assert sorted(read) == [(3, 64)] * 3
        for each in wanted:
            np.testing.assert_allclose(outputs(bench, each.id), reference(versions, each), rtol=1e-5, atol=1e-5)


def test_arithmetic_that_fails_ends_its_row_and_nobody_elses(
    llama: LoadedModel, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(layer: DenseLayer, x_NI: mx.array) -> mx.array:
        raise RuntimeError("out of memory")

    with AdapterBench(llama, versions.made) as bench:
        bench.provide()
        decoding = row("s", prompt_of(20), "a@1", max_tokens=30)
        bench.submit(decoding)
        bench.until(lambda: len(bench.tokens("s")) > 2)
        with monkeypatch.context() as patched:
            patched.setattr(DenseLayer, "__call__", out_of_memory)
            bench.submit(
                *(asked(f"v{at}", [1, 2, 3 + at], "a@1") for at in range(5))
            )  # more than an engine gives up at
            bench.until(lambda: len(bench.events) == 6)
        for at in range(5):
            assert bench.finish(f"v{at}").error_code == "engine_error"
            assert "'value': RuntimeError: out of memory" in bench.finish(f"v{at}").error_message
        bench.submit(asked("after", [1, 2, 3], "a@1"))
        bench.run()
        assert bench.finish("after").reason == "stop"
        bench.assert_true_to_its_versions(decoding)
        bench.assert_nothing_is_held()


def test_what_is_not_finite_is_no_answer(llama: LoadedModel) -> None:
    wild = Head(SCALAR, DenseLayer(mx.full((1, 64), 3e38), mx.array([3e38])))
    bench = Bench(replace(llama, heads={"wild": wild, "value": Head(SCALAR, DenseLayer(mx.ones((1, 64)), None))}))
    bench.submit(asked("v", [1, 2, 3], "", "wild"), asked("w", [1, 2, 3], ""))
    bench.run()
    assert bench.finish("v").error_code == "unsupported_model" and "'wild'" in bench.finish("v").error_message
    assert bench.events["v"][-1].embedding is None
    assert bench.finish("w").reason == "stop"


def test_a_worker_counts_the_memory_of_heads(llama: LoadedModel, versions: Versions) -> None:
    with AdapterBench(llama, versions.made) as bench:
        bench.provide()
        bench.submit(asked("v", [1, 2, 3], "h@1"), asked("w", [1, 2, 3], "a@1"))
        bench.run()
        weights = [each for (version, _), each in versions.weights.items() if version in ("h@1", "a@1")]
        of_heads = sum(tensor.nbytes for each in weights for tensor in each.values())
        assert bench.slots.stats.bytes == bench.slots._adapted.nbytes + of_heads


def test_a_head_for_other_hidden_states_is_refused_by_the_worker_that_loads_it(
    llama: LoadedModel, versions: Versions
) -> None:
    made = versions.made["h@1"]
    wide = msgspec.structs.replace(SCALAR, inputs=65)
    manifest = msgspec.structs.replace(made.manifest, heads={"value": wide})
    with AdapterBench(llama, {"h@1": replace(made, manifest=manifest)}) as bench:
        bench.provide()
        bench.submit(asked("v", [1, 2, 3], "h@1"))
        bench.run()
        assert "'value' reads 65 numbers" in bench.finish("v").error_message
        assert "64" in bench.finish("v").error_message
