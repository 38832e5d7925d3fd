"""A decode step of few operations says what mlx-lm's forward says: on a CPU bit by bit."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.tuner.lora import LoRALinear

from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import make_adapter
from tests.engine.conftest import prompt_of
from tests.engine.kv_models import CONFIGS
from tests.engine.small_models import LLAMA, QWEN3, write_model
from worker.engine.messages import EngineConfig
from worker.engine.model.loader import load_model
from worker.engine.model.one_token import OneToken, join_products, one_token_of

BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
SCALED = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
MODELS: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": (LLAMA | BIASES | SCALED, None),
    "qwen2": (LLAMA | {"model_type": "qwen2"}, None),
    "qwen3": (QWEN3, None),
    "qwen3 in 4 bits": (QWEN3 | {"tie_word_embeddings": False}, 4),
}


def load(folder: Path, config: dict[str, Any], bits: int | None = None) -> Any:
    return mlx_lm.utils.load_model(write_model(folder / "model", config, bits=bits))[0]


def decoded(model: Any, step: Any, tokens: int = 4) -> list[mx.array]:
    """Logits of some steps behind prompts of several lengths; `step` is called as the model is."""
    caches = [BatchKVCache([0, 2, 1]) for _ in model.layers]
    model(mx.array([[5, 6, 7], [1, 2, 9], [3, 4, 8]]), cache=caches)
    told = []
    for at in range(tokens):
        told.append(step(mx.array([[at], [at + 7], [3 * at]]), caches))
    mx.eval(told)
    return told


def is_same(one: mx.array, other: mx.array) -> bool:
    on_cpu = mx.default_device() == mx.Device(mx.cpu)  # elsewhere products of another width add up in another order
    return bool(mx.array_equal(one, other) if on_cpu else mx.allclose(one, other, rtol=1e-2, atol=1e-2))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_mlx_lm(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, *MODELS[name])
    wanted = decoded(model, lambda tokens, caches: model(tokens, cache=caches))
    apart = decoded(model, OneToken(model, compiles=False))
    join_products(model)
    joined = OneToken(model, compiles=True)
    assert len(joined._layers[0].inputs) == 1, "products of the same input are one"
    for which in (apart, decoded(model, joined)):
        for one, other in zip(wanted, which, strict=True):
            assert is_same(one, other)


def test_layers_of_different_kinds_are_compiled_by_themselves(tmp_path: Path) -> None:
    """As in files of mixed quantisation."""
    model = load(tmp_path, QWEN3 | {"num_hidden_layers": 3})
    model.layers[1].mlp.down_proj = model.layers[1].mlp.down_proj.to_quantized(32, 8)
    wanted = decoded(model, lambda tokens, caches: model(tokens, cache=caches))
    for one, other in zip(wanted, decoded(model, OneToken(model, compiles=True)), strict=True):
        assert is_same(one, other)


def test_other_models_keep_their_forward(tmp_path: Path) -> None:
    gemma = LLAMA | CONFIGS["gemma3_text"] | {"model_type": "gemma3_text"}
    assert one_token_of(load(tmp_path / "gemma", gemma)) is None
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    assert one_token_of(load(tmp_path / "windows", LLAMA | windows)) is None
    model = load(tmp_path / "wrapped", LLAMA)
    assert one_token_of(model) is not None
    model.layers[1].mlp.up_proj = LoRALinear.from_base(model.layers[1].mlp.up_proj)
    assert one_token_of(model) is None, "what it would compute is not known"


def test_rows_of_the_base_beside_adapters_and_alone(tmp_path: Path) -> None:
    """With an adapter a batch has mlx-lm's forward, without one ours: a row of the base says the same in both."""
    loaded = load_model(EngineConfig(str(write_model(tmp_path / "model", QWEN3)), kv_limit_bytes=1 << 28))
    made = make_adapter(loaded.model, tmp_path)
    with AdapterBench(loaded, {made.manifest.id: made}) as bench:
        bench.provide(made.manifest.id)
        bench.publish(made.manifest.id)
        prompt = prompt_of(9)
        for name, beside in (("alone", []), ("mixed", ["a@1"]), ("again", [])):
            bench.submit(row(name, prompt, "", max_tokens=12), *(row(f"{name}+", prompt, each) for each in beside))
            bench.run()
        assert bench.tokens("alone") == bench.tokens("mixed") == bench.tokens("again")
        assert bench.tokens("mixed+")[:12] != bench.tokens("mixed")
