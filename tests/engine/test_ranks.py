"""Ranks over MLX's ring that hold a model together: what they say is what one process says, and all say the same."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.sequences import SequenceSpec
from tests.engine import rank_tasks
from tests.engine.conftest import prompt_of, spec
from tests.engine.kv_models import CONFIGS
from tests.engine.rank_tasks import JSON, embedded, sampled, scored
from tests.engine.ranks import Task, start
from tests.engine.small_models import LLAMA, write_model

HEADS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
SHAPE = LLAMA | HEADS | {"head_dim": 16}
MODELS: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": (SHAPE, None),
    "quantised": (SHAPE, 4),
    "qwen3": (SHAPE | {"model_type": "qwen3", "rope_theta": 1e4, "tie_word_embeddings": True}, None),
    "qwen3_moe": (
        SHAPE
        | {"model_type": "qwen3_moe", "rope_theta": 1e4, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        None,
    ),
    "gemma3": (SHAPE | CONFIGS["gemma3_text"] | HEADS | {"model_type": "gemma3_text"}, None),
    "gpt_oss": (SHAPE | CONFIGS["gpt_oss"] | HEADS | {"model_type": "gpt_oss"}, None),
}
COUNT = 2


def sequences_of(model: str) -> list[SequenceSpec]:
    """Greedy and drawn ones, a group, a grammar, penalties, a score and an embedding."""
    prompt = prompt_of(40, 1)
    rows = [spec(f"g{at}", prompt_of(length, at), max_tokens=24) for at, length in enumerate((3, 17, 60))]
    rows += [spec(f"n{at}", prompt, group="n", temperature=0.8, top_p=0.9, seed=at) for at in range(3)]
    rows += [sampled("penal", presence_penalty=0.5, repetition_penalty=1.3, seed=5), sampled("top", top_k=7, seed=6)]
    grammar = json.dumps({"grammars": [{"json_schema": json.loads(JSON)}]})
    return [*rows, sampled("json", grammar=grammar, max_tokens=16), scored("score"), embedded("mean")]


def tasks_in(folder: Path) -> list[Task]:
    """Of every model."""
    tasks = []
    for at, (name, (config, bits)) in enumerate(MODELS.items()):
        place = str(write_model(folder / name, config, seed=at, bits=bits))
        specs = msgspec.to_builtins(sequences_of(name))
        tasks.append(Task("sequences", {"folder": place, "specs": specs, "config": {}, "engine": {}}))
        tasks.append(Task("schedule", {"folder": place, "seed": at}))
    return tasks


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Task], list[list[Any]]]:
    """All tasks, as the ranks have run them."""
    folder = tmp_path_factory.mktemp("ranks")
    tasks = tasks_in(folder)
    return tasks, start(COUNT, folder, tasks)


def test_all(ran: tuple[list[Task], list[list[Any]]]) -> None:
    tasks, told = ran
    for at, task in enumerate(tasks):
        ranks = [each[at] for each in told]
        if task.of == "sequences":
            alone = rank_tasks.run([task], None)[0]
            for seq in alone["tokens"]:
                assert ranks[0]["tokens"][seq] == alone["tokens"][seq], (task.arguments["folder"], seq)
