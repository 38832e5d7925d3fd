"""Models of mlx-lm that need help to run in a batch: they say there what they say alone. Others no batch may have."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import ChunkedKVCache, KVCache, make_prompt_cache

from mlx_model.batching import WRONG, check_batch
from mlx_model.loader import LoadedModel
from mlx_model.mended import mend
from shared.errors import SetupError
from tests.engine.conftest import Bench, prompt_of, spec

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
STATE = {"mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
    "nemotron_h": HEADS
    | STATE
    | {"max_position_embeddings": 512, "attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False}
    | {"time_step_limit": (0.0, 1e4), "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True}
    | {"residual_in_fp32": False, "hybrid_override_pattern": ["M", "*"]},
    "recurrent_gemma": HEADS
    | {"attention_bias": False, "conv1d_width": 3, "logits_soft_cap": 30.0, "rms_norm_eps": 1e-4, "rope_theta": 1e3}
    | {"attention_window_size": 64, "block_types": ["recurrent", "attention"]},
    "gemma2": HEADS | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_inner": 64, "n_head": 2, "n_positions": 512}
    | {"layer_norm_epsilon": 1e-5},
    "llama4": {
        "text_config": SIZES
        | HEADS
        | {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_bias": False, "attention_chunk_size": 4}
        | {"head_dim": 16, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64, "num_experts_per_tok": 1}
        | {"num_local_experts": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_scaling": None}
        | {"rope_theta": 1e4, "use_qk_norm": True, "floor_scale": 4}
    },
    "jamba": HEADS
    | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    | {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1}
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 512},
    "rwkv7": {"norm_eps": 1e-5, "head_dim": 16, "a_low_rank_dim": 4, "v_low_rank_dim": 4, "gate_low_rank_dim": 4}
    | {"decay_low_rank_dim": 4},
    "olmo_hybrid": HEADS
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "tie_word_embeddings": False}
    | {"attention_bias": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "baichuan_m1": HEADS
    | {"rope_theta": 1e4, "sliding_window": 6, "sliding_window_layers": [1], "conv_window": 2, "rms_norm_eps": 1e-5},
    "bailing_moe_linear": HEADS
    | {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 16, "num_experts": 2, "num_shared_experts": 1, "norm_topk_prob": True}
    | {
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "topk_group": 1,
    },
    "mamba2": {"num_heads": 2, "head_dim": 32, "state_size": 8, "conv_kernel": 4, "n_groups": 1, "use_bias": False}
    | {"use_conv_bias": True, "time_step_limit": (0.01, 10), "time_step_rank": "auto"}
    | {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
}
# What has recurrent layers and was found right when padded, with mlx-lm 0.32.2, besides those mended above.
RIGHT = {
    "bailing_hybrid", "bailing_moe_v3", "falcon_h1", "gear", "granitemoehybrid", "kimi_k3", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba2", "nemotron_h", "plamo2", "qwen3_5", "qwen3_next",
}  # fmt: skip

NOT_RECURRENT = {"gemma2", "gpt_bigcode", "llama4"}


def small(name: str, llama: LoadedModel) -> LoadedModel:
    """A model with random weights, large enough for every layer to matter."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name} | SIZES | CONFIGS[name]))
    model.update(tree_map(lambda weight: weight + mx.random.normal(weight.shape), model.parameters()))
    mend(model)
    return replace(llama, model=model, card=msgspec.structs.replace(llama.card, vocab_size=320))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_prompts_of_any_lengths_get_in_a_batch_what_they_get_alone(name: str, llama: LoadedModel) -> None:
    loaded = small(name, llama)
    specs = [spec(f"s{n}", prompt_of(n, seed=n), max_tokens=4) for n in (9, 4, 7, 1, 6)]
    specs = [msgspec.structs.replace(each, id=f"s{at}") for at, each in enumerate(specs)]
    together = Bench(loaded)
    together.submit(*specs[:4])
    together.turn()
    together.turn()
    together.submit(*specs[4:])
    together.run()
    for each in specs:
        alone = Bench(loaded)
        alone.submit(each)
        alone.run()
        assert together.tokens(each.id) == alone.tokens(each.id)
        assert together.logprobs(each.id) == pytest.approx(alone.logprobs(each.id), abs=1e-4)


@pytest.mark.parametrize("name", [name for name in sorted(CONFIGS) if name != "mamba2"])
def test_a_model_that_is_mended_computes_what_mlx_lm_s_own_does(name: str, llama: LoadedModel) -> None:
    mended = small(name, llama).model
    module = importlib.import_module(f"mlx_lm.models.{name}")
    own = module.Model(module.ModelArgs.from_dict({"model_type": name} | SIZES | CONFIGS[name]))
    own.update(mended.parameters())
    ids = mx.array([prompt_of(11)])
    np.testing.assert_allclose(mended(ids), own(ids), atol=1e-4)
    ours, theirs = make_prompt_cache(mended), make_prompt_cache(own)
    for piece in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
        np.testing.assert_allclose(mended(piece, cache=ours), own(piece, cache=theirs), atol=1e-4)


def test_every_recurrent_model_of_mlx_lm_has_been_looked_at() -> None:
    files = Path(mlx_lm.models.__path__[0]).glob("*.py")
    recurrent = {file.stem for file in files if "ArraysCache(" in file.read_text() and file.stem != "cache"}
    assert recurrent == (RIGHT | CONFIGS.keys() | {"longcat_flash_ngram"}) - NOT_RECURRENT, (
        "try what is new, and say what it is"
    )


def test_a_model_that_is_wrong_in_a_batch_is_refused_at_start(llama: LoadedModel) -> None:
    from mlx_lm.models import afm7

    sizes = {"hidden_dim": 32, "num_heads": 2, "num_kv_heads": 1, "num_layers": 2, "num_kv_reuse_layers": 1}
    model = afm7.Model(afm7.ModelArgs("afm7", vocab_size=320, hidden_dim_scale_factor=2.0, rope_theta=1e3, **sizes))
    with pytest.raises(SetupError, match=r"afm7 cannot be trusted in a batch: .*; with --max-batch-size 1 it runs"):
        check_batch(model, 32)
    check_batch(model, 1)
    assert WRONG.keys() == {"afm7", "longcat_flash_ngram", "phi3small"}


class Unbatchable:
    """Stands in for model code that takes single sequences only."""

    layers = (None,)

    def __init__(self, cache: type[Any]) -> None:
        self._cache = cache

    def make_cache(self) -> list[Any]:
        return [self._cache(16) if self._cache is ChunkedKVCache else self._cache()]

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        cache[0].update_and_fetch(*[mx.zeros((*tokens_BL.shape[:1], 2, tokens_BL.shape[1], 4))] * 2)
        return mx.zeros((1, 2, 2, 2)) + cache[0].make_mask(tokens_BL.shape[1])  # as mlx-lm's gemma2 does


def test_a_model_that_runs_in_no_batch_is_refused_at_start(llama: LoadedModel) -> None:
    check_batch(llama.model, 32)
    for rows in (2, 32):  # its two heads would fit two rows by chance
        with pytest.raises(SetupError, match=r"in a batch \(ValueError: .*; with --max-batch-size 1 it may run"):
            check_batch(Unbatchable(KVCache), rows)
    with pytest.raises(SetupError, match="ChunkedKVCache, of which there is no batched form"):
        check_batch(Unbatchable(ChunkedKVCache), 1)
