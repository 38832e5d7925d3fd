"""GGUF files for tests, written by llama.cpp's own package in llama.cpp's names and order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH
from gguf.quants import quantize

from tests.engine.small_models import EOS

LETTERS = "abcdefgh "  # of the small byte-level tokenizer, with a merge or two


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], form: GGMLQuantizationType
) -> Path:
    """Write a file in which all matrices have the given form, and all vectors 32 bits."""
    writer = GGUFWriter(path, str(metadata["general.architecture"]))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        writer.add_array(key, value) if isinstance(value, list) else add[type(value)](key, value)
    for name, values in tensors.items():
        if values.ndim > 1:
            writer.add_tensor(name, quantize(values, form), raw_dtype=form)
        else:
            writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokens(count: int) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with so many tokens."""
    tokens = [*LETTERS.replace(" ", "\u0120"), "ab", "\u0120a", *(f"<unused{index}>" for index in range(count - 11))]
    kinds = [1] * 11 + [5] * (count - 11)
    tokens[EOS], kinds[EOS] = "<|im_end|>", 3
    tokens[EOS + 1], kinds[EOS + 1] = "<think>", 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b", "\u0120 a"],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def model_metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's figures under llama.cpp's names, with a byte-level tokenizer."""
    named = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_theta", 10_000.0),
    }
    more = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "attention.sliding_window": "sliding_window",
    }
    named |= {key: config[ours] for key, ours in more.items() if ours in config}
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in named.items()},
        **byte_tokens(int(config["vocab_size"])),
    }


def llama_cpp_tensors(architecture: str, folder: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A folder's weights as llama.cpp's converter stores them."""
    arch = next(arch for arch in MODEL_ARCH if arch.name.lower() == architecture)
    names = get_tensor_name_map(arch, int(config["num_hidden_layers"]))
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    tensors = {}
    for name, array in weights.items():
        values = np.array(array.astype(mx.float32))
        for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if architecture == "llama" and part in name:
                heads = values.reshape(int(config[count]), 2, -1, *values.shape[1:])
                values = heads.swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        module, _, kind = name.replace(".switch_mlp.", ".experts.").rpartition(".")
        tensors[f"{names.get_name(module)}.{kind}"] = values
    return tensors
