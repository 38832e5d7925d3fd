"""Adapter directories: what goes in, what comes out, and every refusal."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from shared.adapter_files.config import mlx_config as written_config
from shared.adapter_files.config import read_config
from shared.adapter_files.export import Format, export
from shared.adapter_files.formats import prepare_directory, prepared
from shared.adapter_files.tensors import Tensor, read_tensors, write_tensors
from shared.errors import AdapterRejectedError
from tests.unit.adapter_files import (
    IN,
    OUT,
    RANK,
    SHAPES,
    Array,
    Q,
    V,
    lora,
    mlx_config,
    peft_config,
    peft_tensors,
    write,
)

DORA = {"fine_tune_type": "dora"}


def refused(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Array], **options: Any) -> str:
    folder = write(tmp_path / "adapter", config, tensors)
    with pytest.raises(AdapterRejectedError) as caught:
        prepare_directory(folder, tmp_path, **options)
    assert caught.value.status == 400
    return caught.value.message


# -- what goes in


def test_mlx_tensors_go_through_byte_for_byte(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", mlx_config(), lora())
    with prepared(folder, shapes=SHAPES) as adapter:
        data = adapter.path.read_bytes()
    assert data == (folder / "adapters.safetensors").read_bytes()
    assert adapter.sha256 == hashlib.sha256(data).hexdigest()
    assert adapter.size == len(data)
    assert (adapter.kind, adapter.rank, adapter.scale) == ("lora", RANK, 20.0)
    assert adapter.modules == (Q, V)


def test_what_is_checked_is_a_copy(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", mlx_config(), lora())
    with prepared(folder) as adapter:
        (folder / "adapters.safetensors").write_bytes(b"gone")
        assert hashlib.sha256(adapter.path.read_bytes()).hexdigest() == adapter.sha256


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_lora_computes_the_same_as_its_conversion(tmp_path: Path, rslora: bool) -> None:
    """PEFT: W + alpha / r (or sqrt r) * lora_B @ lora_A on [out, in]; mlx-lm: x @ lora_a @ lora_b * scale."""
    tensors = peft_tensors(lora())
    with prepared(write(tmp_path / "adapter", peft_config(use_rslora=rslora), tensors), shapes=SHAPES) as adapter:
        converted = load_file(adapter.path)
    x = np.random.default_rng(1).standard_normal((3, IN)).astype(np.float32)
    for module in (Q, V):
        a, b = (tensors[f"base_model.model.{module}.{part}.weight"] for part in ("lora_A", "lora_B"))
        factor = 16 / (np.sqrt(RANK) if rslora else RANK)
        theirs = x @ (factor * (b @ a)).T
        ours = (x @ converted[f"{module}.lora_a"]) @ converted[f"{module}.lora_b"] * adapter.scale
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_peft_dora_computes_the_same_as_its_conversion(tmp_path: Path) -> None:
    """DoRA, arXiv 2402.09353: m * (W + s B A) / ||W + s B A||, the norm over each output's inputs."""
    draw = np.random.default_rng(2)
    tensors = peft_tensors(lora((Q,), dora=True))
    folder = write(tmp_path / "adapter", peft_config(use_dora=True), tensors)
    with prepared(folder, shapes=SHAPES) as adapter:
        converted = load_file(adapter.path)
    assert adapter.kind == "dora"
    w, x = draw.standard_normal((OUT, IN)), draw.standard_normal((3, IN))
    prefix = f"base_model.model.{Q}"
    adapted = w + 16 / RANK * tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
    magnitude = tensors[f"{prefix}.lora_magnitude_vector"]
    theirs = x @ (magnitude[:, None] * adapted / np.linalg.norm(adapted, axis=1, keepdims=True)).T
    a, b, m = (converted[f"{Q}.{part}"] for part in ("lora_a", "lora_b", "m"))
    denominator = np.linalg.norm(w + (adapter.scale * b.T) @ a.T, axis=1)
    ours = (m / denominator) * (x @ w.T + adapter.scale * (x @ a) @ b)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_peft_embedding_keys_are_known(tmp_path: Path) -> None:
    vocab, dims, module = 30, 8, "model.embed_tokens"
    tensors = {
        f"base_model.model.{module}.lora_embedding_A": np.ones((RANK, vocab), np.float32),
        f"base_model.model.{module}.lora_embedding_B": np.ones((dims, RANK), np.float32),
    }
    folder = write(tmp_path / "adapter", peft_config(target_modules=["embed_tokens"]), tensors)
    with prepared(folder, shapes={module: (vocab, dims)}) as adapter:
        converted = load_file(adapter.path)
    assert converted[f"{module}.lora_a"].shape == (vocab, RANK)
    assert converted[f"{module}.lora_b"].shape == (RANK, dims)


def test_older_peft_keys_are_known(tmp_path: Path) -> None:
    tensors = peft_tensors(lora((Q,), dora=True))
    key = f"base_model.model.{Q}.lora_magnitude_vector"
    tensors[f"{key}.weight"] = tensors.pop(key).reshape(1, -1)
    with prepared(write(tmp_path / "adapter", peft_config(use_dora=True), tensors)) as adapter:
        assert load_file(adapter.path)[f"{Q}.m"].shape == (OUT,)


def test_experts_have_three_dimensions(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.switch_mlp.up_proj"
    tensors = {
        f"{module}.lora_a": np.ones((8, RANK, IN), np.float32),
        f"{module}.lora_b": np.ones((8, OUT, RANK), np.float32),
    }
    with prepared(write(tmp_path / "adapter", mlx_config(), tensors), shapes={module: (IN, OUT)}) as adapter:
        assert adapter.modules == (module,)


def test_dora_on_an_embedding_has_one_magnitude_a_token(tmp_path: Path) -> None:
    module = "model.embed_tokens"
    tensors = {
        f"{module}.lora_a": np.ones((30, RANK), np.float32),
        f"{module}.lora_b": np.ones((RANK, 8), np.float32),
        f"{module}.m": np.ones(30, np.float32),
    }
    with prepared(write(tmp_path / "adapter", mlx_config(**DORA), tensors)) as adapter:
        assert adapter.kind == "dora"


def test_bfloat16_is_read_as_the_upper_half_of_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 0.0, 3.0e38], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_tensors(tmp_path / "t", {"x": Tensor("BF16", bits)}, {})
    tensor = read_tensors(tmp_path / "t", max_bytes=1000)["x"]
    np.testing.assert_allclose(tensor.floats(), values, rtol=0.01)
    assert tensor.first_not_finite() is None
    write_tensors(tmp_path / "t", {"x": Tensor("BF16", np.array([0x3F80, 0xFF80], np.uint16))}, {})
    assert read_tensors(tmp_path / "t", max_bytes=1000)["x"].first_not_finite() == 1


def test_the_configuration_that_we_write_is_one_that_we_read() -> None:
    config = read_config(written_config("dora", 8, 2.0, (Q, V, "lm_head")))
    assert (config.kind, config.rank, config.scale) == ("dora", 8, 2.0)
    assert all(config.names(module) for module in (Q, V, "lm_head"))
    assert not config.names("model.layers.0.mlp.up_proj")


# -- refusals: configuration


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (mlx_config(fine_tune_type="full"), "fine_tune_type 'full'"),
        (mlx_config(lora_parameters={"rank": RANK, "alpha": 16}), "scale = alpha / rank"),
        (mlx_config(lora_parameters={"rank": 0, "scale": 1.0}), "rank 0"),
        (mlx_config(lora_parameters={"rank": 4096, "scale": 1.0}), "rank 4096"),
        (mlx_config(lora_parameters={"rank": "4", "scale": 1.0}), "rank"),
        (mlx_config(lora_parameters={"scale": 1.0}), "rank"),
        ({"num_layers": 3}, "lora_parameters"),
        (mlx_config(lora_parameters={"rank": RANK, "scale": 20.0, "keys": ["self_attn.k_proj"]}), Q),
        (mlx_config(lora_parameters={"rank": RANK + 1, "scale": 20.0}), f"rank {RANK}, adapter_config.json says"),
    ],
)
def test_a_bad_mlx_configuration_is_refused(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    assert word in refused(tmp_path, config, lora())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.down"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({"r": 0}, "r 0"),
        ({"lora_alpha": 1e999}, "malformed"),  # Infinity is no JSON
        ({"target_modules": ["k_proj"]}, Q),
        ({"use_dora": True}, "m is missing"),
    ],
)
def test_a_bad_peft_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    assert word in refused(tmp_path, peft_config(**changes), peft_tensors(lora()))


@pytest.mark.parametrize("target", ["all-linear", ".*q_proj", None])
def test_targets_that_are_patterns_are_not_run(tmp_path: Path, target: str | None) -> None:
    with prepared(write(tmp_path / "adapter", peft_config(target_modules=target), peft_tensors(lora()))) as adapter:
        assert adapter.modules == (Q, V)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"{" * 100_000, b" " * 2_000_000])
def test_a_configuration_that_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(AdapterRejectedError):
        read_config(text)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", peft_config(), peft_tensors(lora()))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterRejectedError, match="only safetensors"):
        prepare_directory(folder, tmp_path)


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError, match=r"adapter_config\.json"):
        prepare_directory(tmp_path, tmp_path)


# -- refusals: tensors


def changed(key: str, value: Array | None, *, dora: bool = False) -> dict[str, Array]:
    tensors = lora(dora=dora)
    tensors.pop(key, None)
    if value is not None:
        tensors[key] = value
    return tensors


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (changed(f"{Q}.lora_b", None), f"{Q}: lora_b is missing"),
        (changed(f"{V}.lora_a", None), f"{V}: lora_a is missing"),
        (changed(f"{Q}.weight", zeros(3)), f"{Q}.weight: no key"),
        (changed(f"{Q}.lora_A.weight", zeros(RANK, IN)), "no key of a mlx-lm adapter"),
        (changed(f"{Q}.m", zeros(OUT)), f"{Q}: m belongs to DoRA"),
        (changed(f"{Q}.lora_b", zeros(RANK + 1, OUT)), "do not fit"),
        (changed(f"{Q}.lora_b", zeros(OUT, RANK)), "do not fit"),
        (changed(f"{Q}.lora_a", zeros(IN)), "do not fit"),
        (lora(rank=RANK * 2), f"rank {RANK * 2}"),
        (lora((Q, "model.layers.9.nothing")), "no such module"),
        (lora((Q, "model.layers.0.mlp.up_proj")), "the base model's has 12 and 40"),
        ({}, "no tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Array], word: str) -> None:
    assert word in refused(tmp_path, mlx_config(), tensors, shapes=SHAPES)


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (lora(), f"{Q}: m is missing"),
        (changed(f"{V}.m", None, dora=True), f"{V}: m is missing"),
        (changed(f"{V}.m", zeros(IN), dora=True), f"{V}: m has shape"),
    ],
)
def test_magnitudes_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Array], word: str) -> None:
    assert word in refused(tmp_path, mlx_config(**DORA), tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, value: float, dtype: type) -> None:
    tensors = {key: tensor.astype(dtype) for key, tensor in lora().items()}
    tensors[f"{V}.lora_b"][1, 3] = value
    assert f"{V}.lora_b: value {OUT + 3} is not finite" in refused(tmp_path, mlx_config(), tensors)


def scaled(value: float, part: str, *, dora: bool = False) -> dict[str, Array]:
    tensors = lora(dora=dora)
    tensors[f"{V}.{part}"] = np.full_like(tensors[f"{V}.{part}"], value)
    return tensors


@pytest.mark.parametrize(
    ("tensors", "scale", "dtype", "words"),
    [
        (lora(), 1e300, "float32", "scale 1e+300 is not finite in float32"),
        (scaled(3e38, "lora_a"), 0.0, "bfloat16", f"{V}.lora_a for inputs of 1 comes to inf"),
        (scaled(3e38, "lora_b"), 2.0, "bfloat16", f"{V}.lora_b times the scale 2 comes to 6e+38"),
        (scaled(3e38, "lora_b"), 1.0, "bfloat16", f"{V}: A B times the scale 1, for inputs of 1, comes to"),
        (
            scaled(1e5, "lora_a"),
            1e-6,
            "float16",
            f"{V}.lora_a for inputs of 1 comes to 1.2e+06, which is not finite in f",
        ),
        (scaled(1e4, "lora_b"), 8.0, "float16", f"{V}.lora_b times the scale 8 comes to 8e+04"),
    ],
)
def test_what_overflows_in_the_dtype_of_the_base_is_refused(
    tmp_path: Path, tensors: dict[str, Array], scale: float, dtype: str, words: str
) -> None:
    config = mlx_config(lora_parameters={"rank": RANK, "scale": scale})
    assert words in refused(tmp_path, config, tensors, dtype=dtype)


def test_magnitudes_and_experts_that_overflow_are_refused(tmp_path: Path) -> None:
    words = refused(tmp_path, mlx_config(**DORA), scaled(3e38, "m", dora=True), dtype="bfloat16")
    assert f"{V}.m for inputs of 1 comes to" in words
    draw, module = np.random.default_rng(3), "model.layers.0.mlp.switch_mlp.up_proj"
    a, b = (draw.standard_normal(shape).astype(np.float32) for shape in ((2, RANK, IN), (2, OUT, RANK)))
    a[1] = 3e38
    assert f"{module}, expert 1.lora_a" in refused(
        tmp_path, mlx_config(), {f"{module}.lora_a": a, f"{module}.lora_b": b}
    )


def test_what_is_large_and_fits_the_base_is_taken(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", mlx_config(), scaled(1e5, "lora_a"))
    with prepared(folder, dtype="bfloat16") as adapter:
        assert adapter.modules == (Q, V)
    with pytest.raises(AdapterRejectedError), prepared(folder, dtype="float16"):
        pass


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = changed(f"{Q}.lora_a", None) | {f"{Q}.lora_a": np.zeros((IN, RANK), np.int8)}
    assert "dtype I8" in refused(tmp_path, mlx_config(), tensors)  # type: ignore[arg-type]


def test_two_peft_keys_for_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = peft_tensors(lora())
    tensors[f"{Q}.lora_A.weight"] = zeros(RANK, IN)
    assert "a second lora_a" in refused(tmp_path, peft_config(), tensors)


def test_saved_base_weights_are_refused(tmp_path: Path) -> None:
    tensors = peft_tensors(lora()) | {"base_model.model.lm_head.weight": zeros(4, 4)}
    assert "base_model.model.lm_head.weight: no key" in refused(tmp_path, peft_config(), tensors)


# -- refusals: the file itself


def raw_file(tmp_path: Path, data: bytes) -> Path:
    folder = write(tmp_path / "adapter", mlx_config(), lora())
    (folder / "adapters.safetensors").write_bytes(data)
    return folder


def with_header(header: Any, data: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


GOOD = {f"{Q}.lora_a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}


def entry(**changes: Any) -> dict[str, Any]:
    return {f"{Q}.lora_a": {**GOOD[f"{Q}.lora_a"], **changes}}


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "torn"),
        (b"\0\0\0", "torn"),
        (struct.pack("<Q", 1000) + b"{}", "torn"),
        (struct.pack("<Q", 2**62) + b"{}", "no safetensors file"),
        (with_header(b"not json", b""), "no JSON object"),
        (with_header(b"[]", b""), "no JSON object"),
        (with_header({f"{Q}.lora_a": 3}, b""), "malformed header entry"),
        (with_header(entry(shape=[-1, 1]), b"1234"), "is empty"),
        (with_header(entry(shape=[0]), b""), "is empty"),
        (with_header(entry(shape=[2**40, 2**40]), b"1234"), "the header lies"),
        (with_header(entry(data_offsets=[0, 8]), b"12345678"), "the header lies"),
        (with_header(entry(data_offsets=[4, 8]), b"12345678"), "the header lies"),
        (with_header(entry(data_offsets=[-4, 0]), b"1234"), "the header lies"),
        (with_header(entry(dtype="F64"), b"1234"), "dtype F64"),
        (with_header(GOOD, b"12"), "torn"),
        (with_header(GOOD, b"123456"), "bytes that its header does not name"),
        (with_header(GOOD | {"other.lora_b": GOOD[f"{Q}.lora_a"]}, b"1234"), "the header lies"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, data: bytes, word: str) -> None:
    with pytest.raises(AdapterRejectedError, match=word):
        prepare_directory(raw_file(tmp_path, data), tmp_path)


def test_a_torn_download_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = (write(tmp_path / "whole", mlx_config(), lora()) / "adapters.safetensors").read_bytes()
    for end in range(0, len(whole), 97):
        with pytest.raises(AdapterRejectedError):
            prepare_directory(raw_file(tmp_path, whole[:end]), tmp_path)


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    assert "larger than the 100 bytes" in refused(tmp_path, mlx_config(), lora(), max_bytes=100)


def test_the_header_is_json_for_others_too(tmp_path: Path) -> None:
    with prepared(write(tmp_path / "adapter", peft_config(), peft_tensors(lora()))) as adapter:
        data = adapter.path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert msgspec.json.decode(data[8 : 8 + length])["__metadata__"] == {"format": "mlx"}


# -- out again


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("form", ["mlx-lm", "peft"])
def test_what_is_exported_comes_in_again_as_it_was(tmp_path: Path, form: Format, dora: bool) -> None:
    embedding = "model.embed_tokens"
    tensors = lora(dora=dora) if dora else lora((Q, V, embedding))
    source = write(tmp_path / "adapter", mlx_config(**(DORA if dora else {})), tensors)
    (tmp_path / "out").mkdir()
    with prepared(source) as made:
        export(made, made.path, tmp_path / "out", form, "somewhere/model")
        with prepared(tmp_path / "out") as again:
            assert (again.kind, again.rank, again.scale, again.modules) == (made.kind, 4, 20.0, made.modules)
            read = load_file(again.path)
    assert read.keys() == tensors.keys()
    assert all(np.array_equal(read[name], tensors[name]) for name in tensors)
    if form == "peft":
        names = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
        expected = {name for name in peft_tensors(tensors) if embedding not in name}
        if not dora:
            expected |= {f"base_model.model.{embedding}.lora_embedding_{part}" for part in "AB"}
        assert names == expected
        said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (said["lora_alpha"], said["base_model_name_or_path"]) == (80.0, "somewhere/model")
        assert said.get("ensure_weight_tying", False) == (not dora), "of the embedding, a tied output layer goes along"


def test_what_peft_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.switch_mlp.up_proj"
    shapes = {"lora_a": (3, 4, 12), "lora_b": (3, 20, 4)}
    stacked: dict[str, Array] = {f"{experts}.{part}": np.ones(shape, np.float32) for part, shape in shapes.items()}
    heads = lora() | {"heads.reward.weight": np.ones((1, 12), np.float32)}
    embedding = "model.embed_tokens"
    magnitudes = lora((embedding,), dora=True) | {f"{embedding}.m": np.ones(IN, np.float32)}
    cases = [
        (mlx_config(), stacked, f"{experts}: PEFT has no adapters on stacked experts"),
        (mlx_config(heads={"reward": {"kind": "scalar"}}), heads, "heads.reward: PEFT has no such heads"),
        (mlx_config(**DORA), magnitudes, f"{embedding}: DoRA on an embedding differs in PEFT"),
    ]
    for at, (config, tensors, said) in enumerate(cases):
        source = write(tmp_path / str(at), config, tensors)
        (tmp_path / f"out{at}").mkdir()
        with prepared(source) as made, pytest.raises(AdapterRejectedError, match=said):
            export(made, made.path, tmp_path / f"out{at}", "peft", "")
        assert not list((tmp_path / f"out{at}").iterdir())
