"""Rows on different adapters in one batch compute what mlx-lm's own LoRA and DoRA layers compute alone."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama, qwen3_moe
from mlx_lm.tuner.lora import LoRALinear

from mlx_model.lora.layers import MultiLoRALinear
from mlx_model.lora.reader import read_adapter
from mlx_model.lora.stacks import AdaptedModel
from mlx_model.sites import find_sites, shared_inputs
from shared.errors import AdapterRejectedError
from tests.engine.adapter_models import ATTENTION, EVERYWHERE, LINEARS, MadeAdapter, make_adapter, twin
from tests.engine.small_models import LLAMA

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
SWITCHES = ("mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj")


def model_of(config: dict[str, Any], *, bits: int = 0, dtype: mx.Dtype = mx.float32, tied: bool = False) -> Any:
    module = qwen3_moe if config["model_type"] == "qwen3_moe" else llama
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config | {"tie_word_embeddings": tied}))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    model.eval()
    mx.eval(model.parameters())
    return model


def adapted_with(model: Any, made: list[MadeAdapter], dtype: mx.Dtype = mx.float32, slots: int = 6) -> AdaptedModel:
    """Adapter i sits in slot i + 1."""
    adapted = AdaptedModel(model, slots, dtype)
    for slot, each in enumerate(made, start=1):
        fill(adapted, slot, each)
    return adapted


def fill(adapted: AdaptedModel, slot: int, made: MadeAdapter) -> None:
    weights = read_adapter(made.path, made.manifest, adapted.sites, adapted.dtype, 64)
    adapted.prepare_kernels(weights)
    for arrays in adapted.fill(slot, weights):
        mx.eval(arrays)


def ids_of(rows: int, length: int) -> mx.array:
    return mx.random.randint(0, 256, (rows, length), key=mx.random.key(rows * 100 + length))


def assert_rows_equal(adapted: AdaptedModel, model: Any, references: list[Any], slots: list[int], length: int) -> None:
    """Row by row against the reference of its slot, a model run alone."""
    ids = ids_of(len(slots), length)
    adapted.select(slots, True)
    batch = model(ids)
    for row, slot in enumerate(slots):
        alone = references[slot](ids[row : row + 1])[0]
        assert mx.allclose(batch[row], alone, rtol=1e-4, atol=1e-4), (row, slot)
        assert mx.array_equal(mx.argmax(batch[row], -1), mx.argmax(alone, -1)), (row, slot)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("length", [1, 7])
def test_a_mixed_batch_equals_each_adapter_alone(tmp_path: Path, bits: int, length: int) -> None:
    model = model_of(LLAMA, bits=bits)
    base = twin(model)
    made = [
        make_adapter(model, tmp_path, version=1),
        make_adapter(model, tmp_path, version=2, rank=16, scale=10.0),
        make_adapter(model, tmp_path, version=3, rank=5, dora=True),
        make_adapter(model, tmp_path, version=4, keys=("self_attn.q_proj", "self_attn.v_proj")),
    ]
    adapted = adapted_with(model, made)
    references = [base, *(each.reference for each in made)]
    assert_rows_equal(adapted, model, references, [1, 0, 2, 3, 4, 1, 3], length)
    assert_rows_equal(adapted, model, references, [4], length)


@pytest.mark.parametrize(("bits", "tied", "dora"), [(0, False, True), (0, True, False), (4, True, False)])
def test_embeddings_and_the_output_layer_are_adapted_too(tmp_path: Path, bits: int, tied: bool, dora: bool) -> None:
    model = model_of(LLAMA, bits=bits, tied=tied)
    base = twin(model)
    made = [
        make_adapter(model, tmp_path, version=1, keys=EVERYWHERE, dora=dora),
        make_adapter(model, tmp_path, version=2, keys=("model.embed_tokens",)),
    ]
    adapted = adapted_with(model, made)
    assert_rows_equal(adapted, model, [base, *(each.reference for each in made)], [0, 1, 2, 1], 5)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("length", [1, 40])  # long: the mixture sorts its tokens by expert
def test_experts_of_a_mixture_are_adapted(tmp_path: Path, bits: int, length: int) -> None:
    model = model_of(MOE, bits=bits)
    base = twin(model)
    made = [
        make_adapter(model, tmp_path, version=1, keys=SWITCHES),
        make_adapter(model, tmp_path, version=2, keys=SWITCHES + ATTENTION, rank=4),
    ]
    adapted = adapted_with(model, made)
    assert_rows_equal(adapted, model, [base, *(each.reference for each in made)], [2, 0, 1, 2, 1], length)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_in_bf16_a_layer_equals_mlx_lms_bit_by_bit(tmp_path: Path, dtype: mx.Dtype) -> None:
    model = model_of(LLAMA, dtype=mx.bfloat16)
    made = [make_adapter(model, tmp_path, version=version, dtype=dtype) for version in (1, 2)]
    adapted = adapted_with(model, made, dtype)
    slots = [1, 2, 0, 1]
    for length in (1, 5):
        for path, site in adapted.sites.items():
            if site.kind != "linear" or path == "lm_head":
                continue
            x = mx.random.normal((4, length, site.inputs), key=mx.random.key(3)).astype(mx.bfloat16)
            adapted.select(slots, False)
            batch = dict(model.named_modules())[path](x)
            assert batch.dtype == mx.bfloat16
            for row, slot in enumerate(slots):
                layer = dict(made[slot - 1].reference.named_modules())[path] if slot else site.module
                assert isinstance(layer, LoRALinear) or not slot
                alone = layer(x[row : row + 1])[0]
                on_gpu = adapted.rows.kernel == "fused" and dtype == mx.bfloat16
                if on_gpu and length == 1:
                    assert mx.allclose(batch[row], alone, rtol=2**-7, atol=2**-7), "x A stays in fp32"
                elif on_gpu:  # MLX takes another kernel for more rows, so x A is rounded elsewhere
                    assert mx.linalg.norm(batch[row] - alone) < 2**-6 * mx.linalg.norm(alone)
                else:
                    assert mx.array_equal(batch[row], alone), (path, row, length)


def test_take_computes_what_gather_computes(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    base = twin(model)
    made = [make_adapter(model, tmp_path, version=1, keys=EVERYWHERE)]
    adapted = adapted_with(model, made)
    adapted.rows.kernel = "take"
    assert_rows_equal(adapted, model, [base, made[0].reference], [0, 1, 1], 1)
    assert_rows_equal(adapted, model, [base, made[0].reference], [0, 1, 1], 6)


def test_nothing_is_wrapped_before_an_adapter_needs_it(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    layer = model.model.layers[0].self_attn
    before = layer.q_proj
    adapted = AdaptedModel(model, 4, mx.float32)
    assert layer.q_proj is before
    assert adapted.nbytes == 0
    fill(adapted, 1, make_adapter(model, tmp_path, keys=("self_attn.q_proj",)))
    assert isinstance(layer.q_proj, MultiLoRALinear)
    assert type(layer.k_proj) is nn.Linear
    assert type(model.lm_head) is nn.Linear


def test_rows_on_the_base_call_the_plain_layers(tmp_path: Path) -> None:
    model = model_of(LLAMA, dtype=mx.bfloat16)
    base = twin(model)
    adapted = adapted_with(model, [make_adapter(model, tmp_path, keys=EVERYWHERE)], mx.bfloat16)
    adapted.select([0, 0, 0], False)
    ids = ids_of(3, 4)
    assert mx.array_equal(model(ids), base(ids))


def test_a_slot_can_be_used_again(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    base = twin(model)
    everything = make_adapter(model, tmp_path, version=1, rank=16, dora=True)
    little = make_adapter(model, tmp_path, version=2, rank=4, keys=("mlp.up_proj",))
    adapted = adapted_with(model, [everything])
    fill(adapted, 1, little)
    assert_rows_equal(adapted, model, [base, little.reference], [1, 0, 1], 3)
    for arrays in adapted.fill(1, {}):
        mx.eval(arrays)
    assert_rows_equal(adapted, model, [base, base], [1, 0, 1], 3)


def test_projections_of_one_input_form_a_group() -> None:
    model = model_of(LLAMA)
    groups = shared_inputs(model, find_sites(model))
    names = [tuple(path.rpartition(".")[2] for path in group) for group in groups]
    assert names == [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)] * 2 + [
        ("lm_head",)
    ]
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear, "the trace leaves nothing behind"


def test_a_member_called_alone_computes_its_own_delta(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    made = make_adapter(model, tmp_path)
    adapted = adapted_with(model, [made])
    attention, expected = model.model.layers[0].self_attn, made.reference.model.layers[0].self_attn
    adapted.select([1, 1], False)
    for _ in range(2):
        x, other = (mx.random.normal((2, 1, 64)) for _ in range(2))
        for name, each in (("k_proj", x), ("k_proj", x), ("q_proj", other), ("v_proj", x), ("q_proj", x)):
            assert mx.allclose(attention[name](each), expected[name](each), atol=1e-5)


def test_a_bias_stays_out_of_doras_gain(tmp_path: Path) -> None:
    model = model_of(LLAMA | {"attention_bias": True})
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer.self_attn[name].bias = mx.random.normal(layer.self_attn[name].bias.shape)
    base = twin(model)
    made = [make_adapter(model, tmp_path, version=1, dora=True), make_adapter(model, tmp_path, version=2)]
    adapted = adapted_with(model, made)
    assert_rows_equal(adapted, model, [base, *(each.reference for each in made)], [1, 2, 0], 4)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rank": 128}, "rank 128"),
        ({"modules": ("model.layers.9.mlp.up_proj",)}, "no module model.layers.9"),
        ({"rank": 4}, "shapes"),
    ],
)
def test_what_this_model_cannot_take_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    import msgspec

    model = model_of(LLAMA)
    made = make_adapter(model, tmp_path, keys=LINEARS)
    manifest = msgspec.structs.replace(made.manifest, **changes)
    with pytest.raises(AdapterRejectedError, match=word):
        read_adapter(made.path, manifest, find_sites(model), mx.float32, 64)


def test_what_is_not_finite_in_the_dtype_of_the_worker_is_refused(tmp_path: Path) -> None:
    import msgspec

    model = model_of(LLAMA)
    made = make_adapter(model, tmp_path, keys=LINEARS)
    manifest = msgspec.structs.replace(made.manifest, scale=1e8)
    assert read_adapter(made.path, manifest, find_sites(model), mx.float32, 64)
    with pytest.raises(AdapterRejectedError, match="not finite in mlx"):
        read_adapter(made.path, manifest, find_sites(model), mx.float16, 64)
