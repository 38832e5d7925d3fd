"""Small models with random weights, one or more for each way in which a layer keeps what it has read."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_map

from mlx_model.kv.kinds import window_of
from mlx_model.kv.layout import layout_of
from mlx_model.loader import LoadedModel
from mlx_model.mended import mend

Model = Callable[[str], LoadedModel]  # by name

VOCAB, WINDOW = 320, 24
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5}
ROPE = {"rope_theta": 1e4, "head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": HEADS | ROPE,
    "qwen3": HEADS | ROPE | {"tie_word_embeddings": True},
    "deepseek_v3": HEADS
    | {"num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"qk_nope_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gemma3_text": HEADS
    | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "gpt_oss": HEADS
    | ROPE
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    | {"layer_types": ["sliding_attention", "full_attention"]}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    "qwen3_5": {
        "text_config": SIZES
        | HEADS
        | {"model_type": "qwen3_5", "head_dim": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 1}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 0}
        | {"full_attention_interval": 2, "partial_rotary_factor": 0.5}
        | {"rope_parameters": {"type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    },
    "lfm2": HEADS
    | {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 32, "block_multiple_of": 8}
    | {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1]},
    "jamba": HEADS
    | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    | {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1},
    "falcon_h1": HEADS
    | {"head_dim": 16, "mamba_d_head": 16, "mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_n_heads": 2},
    "mamba2": {"num_heads": 2, "head_dim": 32, "state_size": 8, "conv_kernel": 4, "n_groups": 1, "use_bias": False}
    | {"use_conv_bias": True, "time_step_limit": (0.01, 10), "time_step_rank": "auto"}
    | {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
}
PLAIN, WINDOWED, RECURRENT = (
    ("llama", "qwen3", "deepseek_v3"),
    ("gemma3_text", "gpt_oss"),
    ("qwen3_5", "lfm2", "jamba", "falcon_h1", "mamba2"),
)
BOUNDED = ("llama last-24", "qwen3_5 last-24", "gemma3_text last-40", "gpt_oss last-24", "deepseek_v3 last-24")
QUANTISED = ("llama 4", "qwen3 8", "lfm2 4", "qwen3_5 8", "gemma3_text 8", "gpt_oss 4", "deepseek_v3 8")
GROUP = 32  # divides the heads of these models, which are wider than the others'
WIDER = {"hidden_size": 64, "head_dim": GROUP, "kv_lora_rank": GROUP, "qk_rope_head_dim": GROUP, "block_dim": 64}


def in_one_piece(loaded: LoadedModel, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[float]]:
    """Where each of these tokens stands, the likeliest one, and its own log-probability: of one forward without us."""
    ids = mx.array([[*prompt, *tokens[:-1]]])
    logits_TV = loaded.model(ids, cache=loaded.kv.new(loaded.model))[0, len(prompt) - 1 :].astype(mx.float32)
    told_T1 = mx.take_along_axis(logits_TV, mx.array(list(tokens))[:, None], axis=-1)
    logprobs_T = told_T1[:, 0] - mx.logsumexp(logits_TV, axis=-1)
    return mx.argmax(logits_TV, axis=-1).tolist(), logprobs_T.tolist()  # type: ignore[return-value]


def small(name: str, llama: LoadedModel) -> LoadedModel:
    """A model of mlx-lm whose tokens depend on all that it reads: its name and, where KV is quantised or bounded, how.

    That is the bits, or `last-` and the positions.
    """
    of, _, how = name.partition(" ")
    bits, bound = ("", int(how.removeprefix("last-"))) if how.startswith("last-") else (how, 0)
    module = importlib.import_module(f"mlx_lm.models.{of}")
    mx.random.seed(0)
    config = {"model_type": of} | SIZES | CONFIGS[of]
    if bits:
        config |= WIDER
        config |= {"text_config": config["text_config"] | WIDER} if "text_config" in config else {}
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda weight: weight + 0.3 * mx.random.normal(weight.shape), model.parameters()))
    mend(model)
    kv = layout_of(model, int(bits or 0), GROUP, bound)
    card = msgspec.structs.replace(llama.card, vocab_size=VOCAB, kv_window=window_of(kv.new(model)))
    return replace(llama, model=model, card=card, kv=kv)
