"""Language models that only mlx-vlm has, small and with random weights, from their folders into a batch."""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_model.borrowed import FAMILIES, REFUSED
from mlx_model.config import EngineConfig
from mlx_model.loader import check_model, load_model
from shared.errors import SetupError
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.small_models import EOS, write_tokenizer

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {"head_dim": 16, "max_position_embeddings": 512, "eos_token_id": EOS}
CONFIGS: dict[str, dict[str, Any]] = {
    "k2_horizon": SIZES | {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mimo_v2": SIZES
    | {"num_key_value_heads": 1, "v_head_dim": 8, "swa_head_dim": 16, "swa_v_head_dim": 8, "swa_num_attention_heads": 2}
    | {"swa_num_key_value_heads": 1, "sliding_window_size": 8, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1]}
    | {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"partial_rotary_factor": 0.5, "skip_vision": True},
    "step3p7": {
        "text_config": SIZES
        | {"num_attention_groups": 1, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
        | {"share_expert_dim": 16, "moe_layers_enum": [1], "layer_types": ["sliding_attention", "full_attention"]}
        | {"sliding_window": 8, "use_head_wise_attn_gate": True},
        "vision_config": {"width": 16, "layers": 1, "heads": 2, "image_size": 28},
    },
}


def written(folder: Path, name: str) -> Path:
    """A folder of the family, with weights for which every layer matters."""
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    described = {"model_type": name} | CONFIGS[name]
    mx.random.seed(0)
    model = module.Model(module.ModelConfig.from_dict(json.loads(json.dumps(described))))
    model.update(tree_map(lambda weight: weight + 0.3 * mx.random.normal(weight.shape), model.parameters()))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(described))
    write_tokenizer(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_borrowed_model_gives_each_row_what_it_gives_it_alone(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / name, name)
    check_model(EngineConfig(str(folder)))
    loaded = load_model(EngineConfig(str(folder)))
    specs = [spec(f"s{n}", prompt_of(n, seed=n), max_tokens=6) for n in (19, 4, 11)]
    together = Bench(loaded)
    together.submit(*specs[:2])
    together.turn()
    together.turn()
    together.submit(*specs[2:])
    together.run()
    for each in specs:
        alone = Bench(loaded)
        alone.submit(msgspec.structs.replace(each, id="alone"))
        alone.run()
        assert together.tokens(each.id) == alone.tokens("alone")
        assert together.logprobs(each.id) == pytest.approx(alone.logprobs("alone"), abs=1e-4)
        told = [*each.prompt_ids, *together.tokens(each.id)]
        own = loaded.model.language_model(mx.array([told[:-1]])).logits[0, len(each.prompt_ids) - 1 :]
        assert mx.argmax(own, axis=-1).tolist() == together.tokens(each.id), "as mlx-vlm computes it in one piece"


def test_what_no_batch_can_hold_is_refused_by_its_name(tmp_path: Path) -> None:
    for kind in REFUSED:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(SetupError, match=f"'{kind}' keep .* not supported"):
            check_model(EngineConfig(str(tmp_path)))
