"""What is no network, no weights of one, or no input to it is refused by name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.adapter_files.export import export
from shared.adapter_files.formats import inherit_config, prepare, prepare_directory
from shared.adapters import AdapterManifest
from shared.errors import AdapterRejectedError, InvalidRequestError, UnreadableMessageError
from shared.networks.shapes import plan
from shared.networks.tensors import check_tensors, pack, unpack
from tests.unit.networks import ALL, GAUSSIAN, LSTM, MLP, SERIES, TOKENS, inputs_of, spec_of, weights_of

Layers = list[dict[str, Any]]


def config_of(described: Any) -> bytes:
    return json.dumps({"network": described}).encode()


def prepared(tmp_path: Path, described: Any, tensors: dict[str, Any]) -> Any:
    save_file(tensors, tmp_path / "adapters.safetensors")
    return prepare(config_of(described), tmp_path / "adapters.safetensors", tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_a_network_is_a_version_with_its_signature_filled_in(name: str, tmp_path: Path) -> None:
    adapter = prepared(tmp_path, ALL[name], weights_of(ALL[name]))
    assert (adapter.kind, adapter.modules, adapter.network) == ("network", (), spec_of(ALL[name]))
    shown = {name: each.shape for name, each in adapter.network.outputs.items()}
    wanted = {
        "mlp": {"action_logits": (2,), "value": (1,)},
        "gaussian": {"action_mean": (2,), "action_log_std": (2,)},
        "lstm": {"action_logits": (3,)},
        "series": {"y": (2,), "each": (None, 6)},
        "conv": {"y": (3,)},
        "tokens": {"action_logits": (4,)},
    }
    assert shown == wanted[name]
    fields = {
        each: getattr(adapter, each) for each in ("kind", "rank", "scale", "modules", "sha256", "size", "network")
    }
    manifest = AdapterManifest("n", 1, base_sha256="", parent=0, chunk_size=1, created_ms=0, **fields)
    again = msgspec.json.decode(msgspec.json.encode(manifest), type=AdapterManifest)
    assert again == manifest and json.loads(inherit_config(again))["network"]["inputs"]


def test_a_network_is_exported_with_its_description_and_not_for_peft(tmp_path: Path) -> None:
    adapter = prepared(tmp_path, MLP, weights_of(MLP))
    for name in ("out", "again"):
        (tmp_path / name).mkdir()
    with pytest.raises(AdapterRejectedError, match="a network has no place in PEFT"):
        export(adapter, adapter.path, tmp_path / "out", "peft", "")
    export(adapter, adapter.path, tmp_path / "out", "mlx-lm", "")
    again = prepare_directory(tmp_path / "out", tmp_path / "again")
    assert (again.kind, again.network, again.sha256) == ("network", adapter.network, adapter.sha256)


def with_layers(*layers: dict[str, Any], inputs: Any = None, of: str = "") -> dict[str, Any]:
    return {
        "inputs": inputs or {"x": {"shape": [4]}},
        "layers": list(layers),
        "outputs": {"y": {"of": of or layers[-1]["name"]}},
    }


def linear(name: str = "a", units: int = 2, **more: Any) -> dict[str, Any]:
    return {"type": "linear", "name": name, "units": units, **more}


STEPS = {"x": {"shape": [None, 4]}}


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ([], "object"),
        ({**MLP, "code": "import os"}, "code"),
        (with_layers(linear(pickle="x")), "pickle"),
        (with_layers({"type": "lambda", "name": "a"}), "lambda"),
        (with_layers(linear(activation="exec")), "exec"),
        (with_layers(linear(), linear()), "two things are called 'a'"),
        (with_layers(linear("x")), "two things are called 'x'"),
        (with_layers(linear("A")), "'A' is no name"),
        (with_layers(linear(of=["b"]), linear("b")), "reads 'b'"),
        (with_layers(linear(), of="x"), "no such layer"),
        (with_layers(linear(units=0)), "units 0"),
        (with_layers(linear(units=1 << 40)), "units"),
        (with_layers(*[linear(f"l{at}") for at in range(65)]), "65 layers"),
        ({**with_layers(linear()), "layers": []}, "0 layers"),
        (with_layers(linear(units=16_384), linear("b", 16_384)), "products"),
        (with_layers(*[linear(f"l{at}", 2048) for at in range(6)]), "weights"),
        (with_layers(linear(), inputs={"text": {"shape": [4]}}), "language model"),
        (with_layers(linear(), inputs={"x": {"shape": [4, 4, 4]}}), "shape of float32"),
        (with_layers(linear(), inputs={"x": {"shape": [4] * 10_000}}), "shape of float32"),
        (with_layers(linear(), inputs={"x": {"shape": [None]}}), "width None"),
        (with_layers(linear(), inputs={"x": {"shape": [-1]}}), "width -1"),
        (with_layers(linear(), inputs={"x": {"shape": [2000, 4]}}), "2000 steps"),
        (with_layers(linear(), inputs={"x": {"shape": [4], "dtype": "float64"}}), "float64"),
        (with_layers(linear(), inputs={"x": {"shape": [], "dtype": "int32"}}), "below"),
        (with_layers(linear(), inputs={"x": {"shape": [], "dtype": "int32", "below": 3}}), "only an embedding"),
        (with_layers({"type": "embedding", "name": "a", "units": 2}), "something else than one input of dtype int32"),
        (with_layers({"type": "conv1d", "name": "a", "channels": 2, "kernel": 3}), "a convolution reads"),
        (with_layers({"type": "steps", "name": "a", "take": "flatten"}, inputs=STEPS), "fixed number of steps"),
        (with_layers({"type": "steps", "name": "a", "take": "last"}), "'last' reads [steps, width]"),
        (
            with_layers(linear(), inputs={"x": {"shape": [4]}, "z": {"shape": [3, 4]}}),
            "joins [4] and [3, 4]",
        ),
        (
            with_layers(
                {"type": "conv1d", "name": "a", "channels": 1, "kernel": 512, "padding": 255},
                inputs={"x": {"shape": [512, 18]}},
            ),
            "reads",
        ),
        (
            with_layers(
                {"type": "conv1d", "name": "a", "channels": 1, "kernel": 1, "padding": 1024, "stride": 1024},
                inputs={"x": {"shape": [1, 16_384]}},
            ),
            "reads 33,570,816 numbers",
        ),
        (with_layers(linear(of=["x", "x"])), "reads the same value twice"),
        ({**MLP, "outputs": {"value": {"of": "v", "shape": [2]}}}, "shape [2], layer 'v' gives [1]"),
    ],
)  # fmt: skip
def test_what_is_no_network_is_refused_by_name(tmp_path: Path, described: Any, words: str) -> None:
    with pytest.raises(AdapterRejectedError, match=r"adapter_config.json: network") as refused:
        prepared(tmp_path, described, {"a.weight": np.zeros((2, 4), np.float32)})
    assert words in refused.value.message and len(refused.value.message) < 500


def test_a_network_stands_alone_and_is_bounded_in_depth(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "t.safetensors")
    for config, words in (
        (json.dumps({"network": MLP, "heads": {}}).encode(), "'heads' with 'network'"),
        (b'{"network":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "adapter_config.json"),
    ):
        with pytest.raises(AdapterRejectedError, match=words):
            prepare(config, tmp_path / "t.safetensors", tmp_path)


def test_weights_are_those_of_the_description(tmp_path: Path) -> None:
    right = weights_of(MLP)
    bare = {name: each for name, each in right.items() if not name.endswith("bias")}
    assert prepared(tmp_path, MLP, bare).network is not None, "biases may be left out"
    wrong = right["pi.weight"].copy()
    wrong[1, 3] = np.nan
    for tensors, words in (
        ({name: each for name, each in right.items() if name != "pi.weight"}, "pi.weight is missing, shape [2, 16]"),
        ({**right, "pi.other": right["pi.bias"]}, "pi.other: the network has no such tensor"),
        ({**right, "pi.weight": right["pi.weight"].T.copy()}, "pi.weight: shape [16, 2], expected [2, 16]"),
        ({**right, "pi.weight": wrong}, "pi.weight: value 19 is not finite"),
        ({**right, "pi.weight": np.full_like(wrong, 3e38)}, "pi.weight for inputs of 1 comes to inf"),
        ({**right, "pi.weight": right["pi.weight"].astype(np.float64)}, "dtype F64"),
    ):
        with pytest.raises(AdapterRejectedError) as refused:
            prepared(tmp_path, MLP, tensors)
        assert words in refused.value.message


def changed(described: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**inputs_of(described, 2), **changes}


@pytest.mark.parametrize(
    ("described", "tensors", "param", "words"),
    [
        (MLP, {}, "inputs", "'observation' is missing: observation (float32 [B, 4])"),
        (MLP, changed(MLP, x=np.zeros((2, 1), np.float32)), "inputs", "reads no 'x'"),
        (MLP, {"observation": np.zeros((2, 5), np.float32)}, "inputs.observation", "[2, 5]; [B, 4]"),
        (MLP, {"observation": np.zeros((0, 4), np.float32)}, "inputs.observation", "[0, 4]; [B, 4]"),
        (MLP, {"observation": np.zeros((2, 4), np.int32)}, "inputs.observation", "is int32; float32"),
        (MLP, {"observation": np.full((2, 4), np.nan, np.float32)}, "inputs.observation", "[0, 0] is no finite"),
        (TOKENS, {"cell": np.array([8, 9], np.int32)}, "inputs.cell", "the value at [1] is not within 0 to 8"),
        (LSTM, changed(LSTM, **{"memory.h": np.zeros((2, 8), np.float32)}), "inputs", "'memory.c' is missing"),
        (
            LSTM,
            changed(LSTM, **{f"memory.{part}": np.zeros((3, 8), np.float32) for part in "hc"}),
            "inputs.memory.h",
            "has 3 rows, 'observation' has 2",
        ),
        (SERIES, inputs_of(SERIES, 1, steps=1025), "inputs.series", "T from 1 to 1024"),
        (SERIES, {**inputs_of(SERIES, 1), "last": np.zeros((1, 4, 2), np.float32)}, "inputs", "which differ"),
    ],
)
def test_what_a_network_does_not_read_is_refused_by_name(
    described: dict[str, Any], tensors: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_tensors(spec_of(described), tensors)
    assert refused.value.param == param and words in refused.value.message


def test_what_a_row_would_cost_is_known_before_it_is_computed() -> None:
    layers = [
        *({"type": "lstm", "name": f"l{at}", "units": 256} for at in range(3)),
        {"type": "steps", "name": "end", "take": "last"},
    ]
    wide = {**SERIES, "layers": layers, "outputs": {"y": {"of": "end"}}}
    spec = spec_of(wide)
    assert check_tensors(spec, inputs_of(wide, 2, steps=500)).rows(1000) == 32
    with pytest.raises(InvalidRequestError, match="products for a row"):
        check_tensors(spec, inputs_of(wide, 1, steps=1024))
    assert plan(spec_of(GAUSSIAN)).products == 2 * 3 + 2
    ids = {"x": {"shape": [1024], "dtype": "int32", "below": 9}}
    looked_up = with_layers({"type": "embedding", "name": "a", "units": 256}, inputs=ids)
    assert plan(spec_of(looked_up)).rows(1000) == 16, "what takes no products takes memory: a MiB for a row here"


def test_what_a_layer_copies_before_it_computes_counts_as_memory() -> None:
    wide = [linear(f"l{at}", 256, of=["x"]) for at in range(16)]
    joins = {"type": "steps", "name": "a", "take": "mean", "of": [each["name"] for each in wide]}
    rows = plan(spec_of(with_layers(*wide, joins, inputs={"x": {"shape": [1024, 4]}}))).rows(1000)
    assert rows == 1, "16 MiB for a row"
    deep = [linear(f"l{at}", 256, of=["x"]) for at in range(64)]
    kept = plan(spec_of(with_layers(*deep, inputs={"x": {"shape": [256, 4]}})))
    assert kept.rows(1000) == 4, "16 MiB of values for a row until its end"
    padded = {"type": "conv1d", "name": "a", "channels": 1, "kernel": 1, "padding": 1000, "stride": 1024}
    assert plan(spec_of(with_layers(padded, inputs={"x": {"shape": [48, 512]}}))).rows(1000) == 4, "4 MiB for a row"


def test_tensors_travel_as_they_are_and_what_is_none_is_refused() -> None:
    tensors = {**inputs_of(LSTM, 1), **inputs_of(TOKENS, 1)}
    again = unpack(pack(tensors))
    assert all(np.array_equal(again[name], each) and again[name].dtype == each.dtype for name, each in tensors.items())
    torn = msgspec.msgpack.encode({"a": ["float32", [3], b"1234"]})
    negative = msgspec.msgpack.encode({"a": ["float32", [-1, -1], b"1234"]})
    for data in (b"", b"\xc1", msgspec.msgpack.encode([1]), torn, negative):
        with pytest.raises(UnreadableMessageError):
            unpack(data)
