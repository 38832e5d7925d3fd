"""Decode steps of a family, compiled, over those of mlx-lm's forward: by family and rows.

Widths are those of models that people run, layers are few, weights random, in bf16. The ways take turns in each round.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_model.cuda_graphs import prepare
from mlx_model.step.decode_step import DecodeStep, join_products
from mlx_model.step.split_step import SplitStep, splits

VOCAB = 32_000
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "attention_bias": False}
ROPE = {"rope_theta": 1e6, "head_dim": 128, "rope_scaling": None}
TURNS = {"type": "default", "mrope_section": [11, 11, 10], "rope_theta": 1e7, "partial_rotary_factor": 0.25}
DELTA = {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
DELTA |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 512}
SHORT = {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "rope_theta": 1e6}


def _heads(hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return COMMON | sizes | {"num_key_value_heads": kv_heads, "tie_word_embeddings": False} | more


FAMILIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "qwen3": lambda _: _heads(2560, 9728, 32, 8, **ROPE),
    "qwen3_moe": lambda _: _heads(2048, 6144, 32, 4, **ROPE, **EXPERTS),
    "qwen3_next": lambda _: _heads(2048, 5120, 16, 2, **ROPE, **EXPERTS, **DELTA)
    | {"head_dim": 256, "partial_rotary_factor": 0.25, "num_experts": 256, "moe_intermediate_size": 512},
    "qwen3_5": lambda layers: {
        "text_config": _heads(2560, 9216, 16, 4, model_type="qwen3_5", head_dim=256, num_hidden_layers=layers)
        | DELTA
        | {"rope_parameters": dict(TURNS), "num_experts": 0}
    },
    "gemma3_text": lambda _: _heads(2560, 10240, 8, 4)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 4},
    "gemma4_text": lambda layers: _heads(2560, 10240, 8, 2)
    | {"head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": layers // 2}
    | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB, "attention_k_eq_v": False}
    | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * (layers // 4), "enable_moe_block": False},
    "gpt_oss": lambda layers: _heads(2880, 2880, 64, 8, **ROPE)
    | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
    | {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}},
    "ministral3": lambda layers: _heads(3072, 9216, 32, 8, head_dim=128)
    | {"layer_types": ["full_attention"] * layers}
    | {"rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1, "rope_type": "default"}
       | {"original_max_position_embeddings": 16_384}},
    "lfm2": lambda layers: _heads(2048, 8192, 32, 8)
    | SHORT
    | {"block_dim": 2048, "block_ff_dim": 12_288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    | {"block_auto_adjust_ff_dim": True, "full_attn_idxs": list(range(2, layers, 3))},
    "lfm2_moe": lambda layers: _heads(2048, 7168, 32, 8)
    | SHORT
    | {"full_attn_idxs": list(range(2, layers, 3)), "num_experts": 32, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1792, "norm_topk_prob": True, "num_dense_layers": 2, "use_expert_bias": True},
    "glm4": lambda _: _heads(4096, 13_696, 32, 2, head_dim=128, partial_rotary_factor=0.5, rope_theta=1e4)
    | {"attention_bias": True},
    "glm4_moe": lambda _: _heads(4096, 10_944, 96, 8, head_dim=128, partial_rotary_factor=0.5, rope_theta=1e6)
    | {"attention_bias": True, "moe_intermediate_size": 1408, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
    | {"n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 1, "use_qk_norm": False, "rope_scaling": None},
}  # fmt: skip


def model_of(family: str, layers: int, dtype: mx.Dtype) -> Any:
    """A model with random weights."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = {"model_type": family, "num_hidden_layers": layers} | FAMILIES[family](layers)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    for _, weight in tree_flatten(model.parameters()):
        mx.eval(weight)
    return model


def rows_behind(model: Any, rows: int, prompt: int) -> list[Any]:
    """Caches of a batch behind a prompt of this length."""
    caches: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.arange(prompt)[None] % VOCAB, cache=caches))
    return [type(cache).merge([cache] * rows) for cache in caches]


def step_ms(step: Callable[..., mx.array], caches: list[Any], rows: int, steps: int) -> float:
    """Milliseconds a step takes, each one given out before the one before is read."""
    tokens = mx.zeros((rows, 1), mx.int32)
    began = time.perf_counter()
    for _ in range(steps):
        latest = tokens
        tokens = mx.argmax(step(tokens, caches), axis=-1)
        mx.async_eval(tokens)
        mx.eval(latest)
    mx.eval(tokens)
    return (time.perf_counter() - began) / steps * 1000


def main() -> None:
    """Print a line for each family and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    asked = parser.parse_args()
    prepare()
    for family in asked.family:
        began = time.perf_counter()
        model = model_of(family, asked.layers, getattr(mx, asked.dtype))

        def mlx_lms(tokens: mx.array, caches: list[Any], model: Any = model) -> mx.array:
            logits: mx.array = model(tokens, cache=caches)
            return logits

        join_products(model)
        step = SplitStep(model, compiles=True) if splits(model) else DecodeStep(model, compiles=True)
        ways: dict[str, Callable[..., mx.array]] = {"mlx-lm": mlx_lms, "ours": step}
        print(f"{family}: made in {time.perf_counter() - began:.1f} s", flush=True)
        for rows in asked.rows:
            caches = {way: rows_behind(model, rows, asked.prompt) for way in ways}
            for way, each in ways.items():
                step_ms(each, caches[way], rows, 3)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(asked.rounds):
                for way, each in ways.items():
                    times[way].append(step_ms(each, caches[way], rows, asked.steps))
            ratios = sorted(theirs / ours for theirs, ours in zip(*times.values(), strict=True))
            medians = "  ".join(f"{way} {statistics.median(each):.2f} ms" for way, each in times.items())
            ratio = f"{ratios[0]:.2f} *{statistics.median(ratios):.2f}* {ratios[-1]:.2f}"
            print(f"{family:12} rows {rows:3}  {medians}  ratio {ratio}", flush=True)
        del model, ways, caches, step
        mx.clear_cache()


if __name__ == "__main__":
    main()
