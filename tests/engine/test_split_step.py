"""A decode step whose layers are computed in two parts says what mlx-lm's forward says, in each family."""

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from msgspec import structs

from mlx_model import device
from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from mlx_model.step.decode_step import decode_step_of, join_products
from mlx_model.step.split_step import LAYERS, SplitStep, splits
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import make_adapter
from tests.engine.conftest import prompt_of
from tests.engine.kv_models import CONFIGS, HEADS, ROPE, SIZES
from tests.engine.small_models import LLAMA, write_model
from worker.engine.batch import row_model

TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
QWEN = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 16}
GLM = HEADS | ROPE | {"attention_bias": True, "partial_rotary_factor": 0.5}
GEMMA4 = HEADS | TYPES | {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1}
QWEN3_5 = CONFIGS["qwen3_5"]["text_config"]
SHORT = {"conv_L_cache": 3, "norm_eps": 1e-5, "rope_theta": 1e4, "full_attn_idxs": [1], "conv_bias": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": CONFIGS["gemma3_text"] | {"sliding_window": 6},
    "gemma4_text": GEMMA4
    | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": TYPES["layer_types"] * 2}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "attention_k_eq_v": False}
    | {"enable_moe_block": False},
    "gemma4_text experts": GEMMA4
    | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "top_k_experts": 2}
    | {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 16},
    "glm4": GLM,
    "glm4_moe": GLM
    | EXPERTS
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": 4, "routed_scaling_factor": 1.0}
    | {"first_k_dense_replace": 1, "use_qk_norm": True, "tie_word_embeddings": False, "rope_scaling": None},
    "gpt_oss": CONFIGS["gpt_oss"] | {"sliding_window": 6},
    "lfm2": CONFIGS["lfm2"],
    "lfm2_moe": HEADS | SHORT | EXPERTS | {"num_dense_layers": 1, "use_expert_bias": True},
    "ministral3": HEADS
    | TYPES
    | {"head_dim": 16}
    | {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}},
    "qwen3_5": CONFIGS["qwen3_5"],
    "qwen3_5 experts": {"text_config": QWEN3_5 | QWEN},
    "qwen3_moe": HEADS | ROPE | QWEN | {"mlp_only_layers": [0], "tie_word_embeddings": False},
    "qwen3_next": HEADS | ROPE | QWEN3_5 | QWEN | {"tie_word_embeddings": False, "model_type": "qwen3_next"},
}


def small(name: str) -> Any:
    of = name.partition(" ")[0]
    module = importlib.import_module(f"mlx_lm.models.{of}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(SIZES | {"model_type": of} | FAMILIES[name]))
    model.update(tree_map(lambda weight: weight + 0.2 * mx.random.normal(weight.shape), model.parameters()))
    return model


def batch(model: Any) -> list[Any]:
    """Caches of three rows behind prompts of unequal length, one of them longer than the windows."""
    rows = []
    for ids in ([5, 6, 7, 1, 2, 9, 8, 8], [1, 2, 9, 4], [3]):
        caches = make_prompt_cache(model)
        model(mx.array([ids]), cache=caches)
        rows.append(caches)
    return [type(of_layer[0]).merge(list(of_layer)) for of_layer in zip(*rows, strict=True)]


def told(model: Any, step: Any) -> list[mx.array]:
    """Logits of some steps, one of them of three tokens a row."""
    caches, logits = batch(model), []
    for at in range(3):
        logits.append(step(mx.array([[at], [at + 7], [3 * at]]), cache=caches))
    logits.append(step(mx.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), cache=caches))
    logits.append(step(mx.array([[4], [1], [5]]), cache=caches))
    mx.eval(logits)
    return logits


def stepping(step: SplitStep) -> Any:
    return lambda tokens, cache: step(tokens, cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_mlx_lm(name: str) -> None:
    model = small(name)
    assert splits(model)
    wanted = told(model, model)
    for one, other in zip(wanted, told(model, stepping(SplitStep(model, compiles=False))), strict=True):
        assert mx.array_equal(one, other)
    join_products(model)
    for one, other in zip(wanted, told(model, stepping(SplitStep(model, compiles=True))), strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-4), "products of another width may add up in another order"


def test_every_family_that_splits_is_tried() -> None:
    assert {type(layer) for name in FAMILIES for layer in small(name).layers} == set(LAYERS)


def test_layers_are_computed_by_what_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits would also come of layers that leave everything to mlx-lm's forward."""
    model = small("qwen3_next")
    step, caches = SplitStep(model, compiles=False), batch(model)
    calls: list[str] = []

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        calls.append("by itself")
        raise AssertionError

    for layer in model.layers:
        layer.__class__ = type("Refusing", (type(layer),), {"__call__": counted})
    mx.eval(step(mx.array([[1], [2], [3]]), caches))
    assert not calls
    new = [ArraysCache(2) if isinstance(each, ArraysCache) else each for each in make_prompt_cache(model)]
    with pytest.raises(AssertionError):
        step(mx.array([[1]]), new)
    assert calls == ["by itself"], "a state that is empty is mlx-lm's to make"


def test_a_step_that_is_wrong_or_fails_is_not_taken() -> None:
    model = small("qwen3_next")
    step = SplitStep(model, compiles=False)
    assert step.agrees()
    model.layers[0].mlp.shared_expert.up_proj.weight = model.layers[0].mlp.shared_expert.up_proj.weight * -3
    assert not step.agrees(), "it has the weights of before"
    model.layers[1].self_attn.q_proj.weight = mx.zeros((3, 3))
    assert not SplitStep(model, compiles=False).agrees()


def test_models_that_are_not_known_keep_their_forward(tmp_path: Path) -> None:
    model = small("qwen3_moe")
    assert (decode_step_of(model) is None) == device.on_cpu(), "there a compiler would run for seconds"
    model.layers[1].mlp.sharding_group = object()
    assert not splits(model), "experts of several ranks"
    model = small("gemma3_text")
    model.layers[0].__class__ = type("Other", (type(model.layers[0]),), {})
    assert not splits(model)


def test_rows_with_adapters_and_of_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of attention and of experts are put around a model that has its step already, and around one before."""
    config = LLAMA | FAMILIES["qwen3_moe"] | {"hidden_size": 64, "vocab_size": 320, "model_type": "qwen3_moe"}
    write_model(tmp_path / "model", config)
    keys = ("self_attn.q_proj", "mlp.gate_proj", "mlp.switch_mlp.up_proj")
    said: list[dict[str, Any]] = []
    for step in (lambda *of: None, lambda model, tuning: SplitStep(model, compiles=False)):
        monkeypatch.setattr(row_model, "decode_step_of", step)
        loaded = load_model(EngineConfig(str(tmp_path / "model"), kv_limit_bytes=1 << 28))
        made = make_adapter(loaded.model, tmp_path / f"a{len(said)}", keys=keys)
        with AdapterBench(loaded, {"a@1": made}) as bench:
            bench.publish("a@1")
            rows = [row(f"s{at}", prompt_of(9, at), each, max_tokens=6) for at, each in enumerate(("", "a@1"))]
            for each in (rows, [structs.replace(rows[0], id="again")]):
                bench.submit(*each)
                bench.run()
            said.append({seq: (bench.tokens(seq), bench.logprobs(seq)) for seq in bench.events})
        assert type(loaded.model.layers[1]) is qwen3_moe.Qwen3MoeDecoderLayer and splits(loaded.model)
    assert said[0] == said[1]
    assert said[0]["s0"][0] == said[0]["again"][0] != said[0]["s1"][0]
