"""Models of each family go to a GGUF file, as llama.cpp writes it, and come back with the same logits."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.utils import load_model as load_folder

from mlx_model.config import EngineConfig
from mlx_model.loader import check_model, load_model
from shared.errors import SetupError
from shared.gguf.cached import FOLDER
from shared.gguf.conversion import Conversion
from tests.engine.small_models import LLAMA, QWEN3, write_model
from tests.gguf_files import llama_cpp_tensors, model_metadata, write_gguf

SMALL = QWEN3 | {"vocab_size": 320, "max_position_embeddings": 128, "hidden_size": 64, "head_dim": 32}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA = SMALL | {"query_pre_attn_scalar": 32, "sliding_window": 8, "sliding_window_pattern": 6, "rope_theta": 1e6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"rope_theta": 10_000.0},
    "qwen2": SMALL | {"model_type": "qwen2", "head_dim": 16},
    "qwen3": SMALL,
    "qwen3moe": SMALL | EXPERTS | {"model_type": "qwen3_moe", "tie_word_embeddings": False},
    "gemma": SMALL | {"model_type": "gemma"},
    "gemma2": SMALL | {"model_type": "gemma2", "query_pre_attn_scalar": 32},
    "gemma3": GEMMA | {"model_type": "gemma3_text", "num_hidden_layers": 6},
}
TOKENS = mx.array([[1, 5, 9, 40, 7, 300, 2, 2, 8, 1, 0, 13]])


def logits(folder: Path) -> np.ndarray:
    model, _ = load_folder(folder)
    model.set_dtype(mx.float32)
    return np.array(model(TOKENS))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_model_comes_back_with_its_logits(architecture: str, tmp_path: Path) -> None:
    config = FAMILIES[architecture]
    source = write_model(tmp_path / "source", config)
    tensors = llama_cpp_tensors(architecture, source, config)
    metadata = model_metadata(architecture, config)
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors, GGMLQuantizationType.F16)
    Conversion(path).write(tmp_path / "back")
    expected, found = logits(source), logits(tmp_path / "back")
    spread = float(np.std(expected))
    np.testing.assert_allclose(found, expected, atol=(0.05 if "gemma" in architecture else 0.01) * spread)


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q8_0", "Q5_1"])
def test_quantised_weights_are_those_of_the_file(form: str, tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    tensors = llama_cpp_tensors("llama", write_model(tmp_path / "source", config), config)
    metadata = model_metadata("llama", config)
    kind = GGMLQuantizationType[form]
    quantised = write_gguf(tmp_path / "quantised.gguf", metadata, tensors, kind)
    Conversion(quantised).write(tmp_path / "quantised")
    widened = {name: stored_in(values, kind) for name, values in tensors.items()}
    Conversion(write_gguf(tmp_path / "wide.gguf", metadata, widened, GGMLQuantizationType.F32)).write(tmp_path / "wide")
    model, described = load_folder(tmp_path / "quantised")
    assert ("quantization" in described) == (form != "Q5_1")
    assert hasattr(model.model.layers[0].self_attn.q_proj, "scales") == (form != "Q5_1")
    expected = logits(tmp_path / "wide")
    np.testing.assert_allclose(logits(tmp_path / "quantised"), expected, atol=0.01 * float(np.std(expected)))
    Conversion(quantised, dequantize=True).write(tmp_path / "whole")
    assert "quantization" not in load_folder(tmp_path / "whole")[1]
    np.testing.assert_allclose(logits(tmp_path / "whole"), expected, atol=0.01 * float(np.std(expected)))


def test_a_worker_loads_a_file_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    config = FAMILIES["llama"]
    tensors = llama_cpp_tensors("llama", write_model(tmp_path / "source", config), config)
    metadata = model_metadata("llama", config)
    path = write_gguf(tmp_path / "Small-Q8.gguf", metadata, tensors, GGMLQuantizationType.Q8_0)
    asked = EngineConfig(model=str(path))
    check_model(asked)
    assert not (tmp_path / "cache").exists(), "a check writes nothing"
    loaded = load_model(asked)
    assert loaded.card.name == "Small-Q8" and loaded.card.quantization == "8 bits, groups of 32"
    assert loaded.tokenizer.chat_template and 257 in loaded.tokenizer.eos_token_ids
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(SetupError, match="is cut"):
        check_model(replace(asked))
    with pytest.raises(SetupError, match="is cut"):
        load_model(asked)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_positions_of_llama_3_are_found_from_their_frequencies(factor: float, tmp_path: Path) -> None:
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = FAMILIES["llama"] | {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **scaling}}
    tensors = llama_cpp_tensors("llama", write_model(tmp_path / "source", config), config)
    slowed = np.array(Llama3RoPE(16, base=500_000.0, scaling_config=scaling)._freqs)
    tensors["rope_freqs.weight"] = slowed / 500_000.0 ** (np.arange(0, 16, 2) / 16)
    metadata = model_metadata("llama", config)
    path = write_gguf(tmp_path / "long.gguf", metadata, tensors, GGMLQuantizationType.F16)
    Conversion(path).write(tmp_path / "back")
    expected = logits(tmp_path / "source")
    np.testing.assert_allclose(logits(tmp_path / "back"), expected, atol=0.01 * float(np.std(expected)))
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"][::-1]
    other = write_gguf(tmp_path / "other.gguf", metadata, tensors, GGMLQuantizationType.F16)
    with pytest.raises(SetupError, match="no others are known"):
        Conversion(other)


def stored_in(values: np.ndarray, form: GGMLQuantizationType) -> np.ndarray:
    """Numbers as a file of that form says them."""
    from gguf.quants import dequantize, quantize

    return dequantize(quantize(values, form), form) if values.ndim > 1 else values


def test_every_family_of_the_table_is_tested() -> None:
    families = importlib.import_module("shared.gguf.families").FAMILIES
    assert families.keys() == FAMILIES.keys()
