"""Families of models: what llama.cpp calls their parts and figures, and what mlx-lm calls them.

llama.cpp stores some weights otherwise than they were published: it changes the order of the rows of llama's queries
and keys, whose halves it rotates in pairs, and adds one to Gemma's norms. Both are undone here.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import SetupError
from shared.gguf.file import GgufFile, GgufTensor

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_KINDS = ("weight", "bias")
_FREQUENCIES = "rope_freqs"  # of long contexts of Llama 3, from which its settings are found
_LLAMA3_LENGTH, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PLAIN = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICHED = {
    **_ATTENTION,
    **_MLP,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Config = dict[str, Any]


@dataclass(frozen=True)
class GgufFamily:
    """How a family's files become a folder of mlx-lm."""

    model_type: str  # mlx-lm's name
    parts: dict[str, str]  # of a layer
    more: Callable[[GgufFile, Config], Config] = field(default=lambda _file, _config: {})
    permutes: bool = False  # rows of queries and keys are in llama.cpp's order
    norms_minus: float = 0.0  # that llama.cpp added to the norms
    ties: bool | None = None  # the head is the embedding; None: if the file has no head


def _llama(file: GgufFile, config: Config) -> Config:
    if file.get("expert_count", 0):
        raise SetupError(f"{file.path}: llama models with experts (Mixtral) cannot be converted")
    biased = any(".attn_q.bias" in name for name in file.tensors)
    return {"attention_bias": biased, **_frequencies(file, config)}


def _experts(file: GgufFile, _config: Config) -> Config:
    return {
        "num_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length"),
        "intermediate_size": whole(file, "feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(file: GgufFile, config: Config) -> Config:
    return {
        "query_pre_attn_scalar": _query_scale(config, layers_of_largest=46),
        "attn_logit_softcapping": _figure(file.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": _figure(file.get("final_logit_softcapping", 30.0)),
    }


def _gemma3(file: GgufFile, config: Config) -> Config:
    return {
        "query_pre_attn_scalar": _query_scale(config, layers_of_largest=62),
        "sliding_window": whole(file, "attention.sliding_window"),
        "sliding_window_pattern": file.get("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": _figure(file.get("rope.freq_base_swa", 10_000.0)),
    }


def _query_scale(config: Config, layers_of_largest: int) -> int:
    """Files do not say it: the largest model of the generation divides by what a head would have of the state."""
    if config["num_hidden_layers"] == layers_of_largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


FAMILIES = {
    "llama": GgufFamily("llama", _PLAIN, _llama, permutes=True),
    "qwen2": GgufFamily("qwen2", _PLAIN),
    "qwen3": GgufFamily("qwen3", {**_PLAIN, **_HEAD_NORMS}),
    "qwen3moe": GgufFamily("qwen3_moe", {**_PLAIN, **_HEAD_NORMS, **_EXPERTS}, _experts),
    "gemma": GgufFamily("gemma", _PLAIN, norms_minus=1, ties=True),
    "gemma2": GgufFamily("gemma2", _SANDWICHED, _gemma2, norms_minus=1, ties=True),
    "gemma3": GgufFamily("gemma3_text", {**_SANDWICHED, **_HEAD_NORMS}, _gemma3, norms_minus=1),
}


def family_of(file: GgufFile) -> GgufFamily:
    """The file's family; SetupError names those that there are."""
    if (family := FAMILIES.get(file.architecture)) is None:
        named = repr(file.architecture) if file.architecture else "not named"
        raise SetupError(
            f"{file.path}: the architecture is {named}; {', '.join(FAMILIES)} can be converted. Of other models get a "
            "folder with safetensors"
        )
    return family


def config_of(file: GgufFile) -> Config:
    """The model's config.json, but for what says how it is quantised."""
    family = family_of(file)
    hidden, heads = whole(file, "embedding_length"), whole(file, "attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise SetupError(f"{file.path} has no tensor token_embd.weight")
    config: Config = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": whole(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(file, "attention.head_count_kv", heads),
        "head_dim": whole(file, "attention.key_length", hidden // heads),
        "intermediate_size": whole(file, "feed_forward_length"),
        "rms_norm_eps": _figure(file.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _figure(file.get("rope.freq_base", 10_000.0)),
        "max_position_embeddings": whole(file, "context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors if family.ties is None else family.ties,
        **_scaling(file),
    }
    config |= family.more(file, config)
    _check_layers(file, family, config["num_hidden_layers"])
    return config


def target_of(file: GgufFile, family: GgufFamily, tensor: GgufTensor) -> str | None:
    """The name of the module that a tensor belongs to, and its parameter; None: it is not needed."""
    name, _, kind = tensor.name.rpartition(".")
    layer = _LAYER.fullmatch(name)
    if name == _FREQUENCIES or (name == "output" and family.ties):
        return None
    part = family.parts.get(layer[2]) if layer else _OUTSIDE.get(name)
    if part is None or kind not in _KINDS:
        raise SetupError(f"{file.path}: models of {file.architecture} have no tensor {tensor.name}")
    return f"model.layers.{layer[1]}.{part}.{kind}" if layer else f"{part}.{kind}"


def row_order(config: Config, family: GgufFamily, tensor: GgufTensor) -> NDArray[np.intp] | None:
    """Which of the file's rows stands where; None: all as they are."""
    part = tensor.name.split(".")[-2]
    if not family.permutes or part not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    count = tensor.shape[0] if tensor.name.endswith(".weight") else tensor.shape[-1]
    return np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def minus(family: GgufFamily, tensor: GgufTensor) -> float:
    """The number that llama.cpp has added to each number of a tensor."""
    return family.norms_minus if tensor.name.endswith("norm.weight") else 0.0


def whole(file: GgufFile, key: str, default: int | None = None) -> int:
    """A whole number of the metadata above zero; SetupError when it is missing or something else."""
    value = file.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, list):
        raise SetupError(f"{file.path}: {file.architecture}.{key} differs by layer, which cannot be converted")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SetupError(f"{file.path}: {file.architecture}.{key} is {value!r}, not a number above zero")
    return value


def _figure(value: float) -> float:
    """A number in 32 bits as people write it: 1e-05, not 9.99999974e-06."""
    return float(f"{value:.7g}")


def _scaling(file: GgufFile) -> Config:
    kind, factor = file.get("rope.scaling.type", "none"), file.get("rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": _figure(factor)}}
    if kind == "yarn":
        length = whole(file, "rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": _figure(factor), "original_max_position_embeddings": length}
        return {"rope_scaling": scaling}
    raise SetupError(f"{file.path}: positions are scaled by {kind!r}, which cannot be converted")


def _frequencies(file: GgufFile, config: Config) -> Config:
    """Llama 3's scaling of positions. A file has its results only; settings that lead to others are not guessed."""
    tensor = file.tensors.get(f"{_FREQUENCIES}.weight")
    if tensor is None:
        return {}
    stored = np.ascontiguousarray(file.blocks(tensor)).view(np.float32).reshape(-1)
    factor = float(stored.max())
    waves = 2 * math.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    smooth = np.clip((_LLAMA3_LENGTH / waves - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if expected.shape != stored.shape or not np.allclose(expected, stored, rtol=1e-3):
        raise SetupError(f"{file.path}: its rope_freqs are not those of Llama 3.1, 3.2 or 3.3, and no others are known")
    scaling = {
        "rope_type": "llama3",
        "factor": _figure(factor),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }
    return {"rope_scaling": scaling}


def _check_layers(file: GgufFile, family: GgufFamily, layers: int) -> None:
    """SetupError unless each layer has the parts that the first one has, and there are as many as the file says."""
    parts: dict[int, set[str]] = {layer: set() for layer in range(layers)}
    for name in file.tensors:
        if layer := _LAYER.fullmatch(name):
            parts.setdefault(int(layer[1]), set()).add(layer[2])
    wrong = next((layer for layer in parts if layer >= layers or not parts[layer] or parts[layer] != parts[0]), None)
    if wrong is not None:
        odd = sorted(parts[wrong] ^ parts[0]) or ["all of it"]
        raise SetupError(f"{file.path}: of {layers} layers the one of number {wrong} is not as the first: {odd[0]}")
    for name in ("token_embd", "output_norm"):
        if f"{name}.weight" not in file.tensors:
            raise SetupError(f"{file.path} has no tensor {name}.weight")
