"""Ranks over MLX's ring that hold a model layer by layer: they say what one process says of it."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.sequences import SequenceSpec
from tests.engine import rank_tasks
from tests.engine.adapter_bench import AdapterBench
from tests.engine.adapter_models import LINEARS, MadeAdapter, make_adapter
from tests.engine.conftest import Bench
from tests.engine.kv_models import CONFIGS
from tests.engine.ranks import Task, start
from tests.engine.small_models import write_model
from tests.engine.test_ranks import (
    CLOSE,
    CLOSE_IN_8_BITS,
    HEADS,
    KINDS,
    MOE,
    SHAPE,
    TEXT,
    Ran,
    assert_close,
    sequences_of,
)
from worker.engine.messages import EngineConfig
from worker.engine.model.loader import load_model

FOUR = {"num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"num_hidden_layers": 5, "tie_word_embeddings": False},
    "quantised": SHAPE | {"num_hidden_layers": 3},
    "three_heads": SHAPE | FOUR | {"num_attention_heads": 6, "num_key_value_heads": 3, "model_type": "qwen3"},
    "olmo2": SHAPE | FOUR | {"model_type": "olmo2"},
    "qwen3_moe": SHAPE | FOUR | MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma3": SHAPE | CONFIGS["gemma3_text"] | HEADS | {"model_type": "gemma3_text"} | FOUR,
    "gpt_oss": SHAPE | CONFIGS["gpt_oss"] | HEADS | {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"] * 2} | FOUR,
    "qwen3_5": SHAPE | {"model_type": "qwen3_5", "text_config": TEXT | {"model_type": "qwen3_5", "num_hidden_layers": 5}, "tie_word_embeddings": False},
    "one_layer": SHAPE | {"num_hidden_layers": 1},
}
WHOLE = tuple(name for name in MODELS if name != "one_layer")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("p")
    r = object.__new__(Ran)
    r.count = 2
    r.folders = {}
    for at, (name, config) in enumerate(MODELS.items()):
        r.folders[name] = str(write_model(folder / name, config, seed=at, bits=4 if name == "quantised" else None))
    r.tasks = {}
    specs = msgspec.to_builtins(sequences_of())
    for name in WHOLE:
        r._add(name, "sequences", name, specs=specs, config={}, engine={})
    for kind, (config, engine) in KINDS.items():
        r._add(kind, "sequences", "llama", specs=specs, config=config, engine=engine)
    r._add("refused one_layer", "refusal", "one_layer")
    told = start(2, folder / "ring", list(r.tasks.values()), "pipeline")
    r._told = dict(zip(r.tasks, zip(*told, strict=True), strict=True))
    return r

@pytest.mark.parametrize("key", [*WHOLE, *KINDS])
def test_ranks_say_what_one_process_says(ran: Ran, key: str) -> None:
    told, alone = ran.told(key), ran.alone(key)
    assert told["tokens"] == alone["tokens"] and told["ends"] == alone["ends"]
    for what in ("logprobs", "scores", "embeddings"):
        assert_close(told[what], alone[what], CLOSE_IN_8_BITS if "8 bits" in key else CLOSE)
    assert all(told[what] for what in ("scores", "embeddings"))
    print(key, told["kv"], alone["kv"])
def test_r(ran):
    print(ran._told["refused one_layer"])
