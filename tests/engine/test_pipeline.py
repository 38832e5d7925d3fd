"""Ranks over MLX's ring that hold a model layer by layer: they say what one process says of it."""

from typing import Any

import msgspec
import pytest

from mlx_model.chain import plan
from shared.errors import SetupError
from tests.engine.kv_models import CONFIGS
from tests.engine.test_ranks import (
    HEADS,
    KINDS,
    MOE,
    SHAPE,
    Ran,
    assert_close,
    assert_equal,
    assert_loaded,
    assert_scheduled,
    assert_seen,
    assert_true_to_versions,
    needs_eyes,
    sequences_of,
)

FOUR = {"num_hidden_layers": 4}
TEXT = CONFIGS["qwen3_5"]["text_config"] | HEADS | {"num_hidden_layers": 5, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"num_hidden_layers": 5, "tie_word_embeddings": False},
    "quantised": SHAPE | {"num_hidden_layers": 3},
    "olmo2": SHAPE | FOUR | {"model_type": "olmo2", "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen3_moe": SHAPE | FOUR | MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma3": SHAPE | CONFIGS["gemma3_text"] | HEADS | FOUR | {"model_type": "gemma3_text"},
    "qwen3_5": SHAPE | {"model_type": "qwen3_5", "text_config": TEXT, "tie_word_embeddings": False},
}


SEEING = ("qwen2_5_vl", "lfm2_vl")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ran = Ran(tmp_path_factory.mktemp("pipeline"), 2, MODELS)
    ran.add_sequences(tuple(MODELS))
    ran.add("schedule qwen3_5", "schedule", "qwen3_5", seed=1)
    ran.add_adapters(("llama",))
    ran.add("memory", "memory", "qwen3_moe")
    ran.add("comes back", "comes_back", "llama")
    ran.add_seeing(SEEING)
    return ran.start("pipeline")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ran = Ran(tmp_path_factory.mktemp("three"), 3, {name: MODELS[name] for name in ("llama", "gemma3")})
    asked = {"specs": msgspec.to_builtins(sequences_of()), "config": {}, "engine": {}}
    ran.add("llama", "sequences", "llama", **asked)
    ran.add("by sums", "by_sums", "llama", task="sequences", **asked)
    ran.add("refused gemma3", "refusal", "gemma3")
    ran.add("comes back", "comes_back", "llama")
    return ran.start("pipeline")


@pytest.mark.parametrize("key", [*MODELS, *KINDS])
def test_ranks_say_what_one_process_says(ran: Ran, key: str) -> None:
    told, alone = assert_equal(ran, key)
    assert told["kv"] < 0.7 * alone["kv"], "each rank keeps the KV of its layers"


@pytest.mark.parametrize("key", ["llama", "by sums"])
def test_three_ranks_do_too_and_where_there_are_no_sends(three: Ran, key: str) -> None:
    assert_equal(three, key)


def test_whatever_the_schedule_ranks_stay_together(ran: Ran) -> None:
    assert_scheduled(ran, "qwen3_5")


@needs_eyes
@pytest.mark.parametrize("name", SEEING)
def test_images_that_one_rank_encodes_are_seen_by_all(ran: Ran, name: str) -> None:
    assert_seen(ran, name)


def test_what_the_last_rank_makes_comes_back_while_it_goes_on(ran: Ran, three: Ran) -> None:
    for ranks in (ran, three):
        assert ranks.told("comes back") == {"came": True}


def test_rows_of_many_versions_are_true_to_them(ran: Ran) -> None:
    told = assert_true_to_versions(ran, "llama")
    alone = ran.alone("adapters llama")
    pinned = [each.id for each in ran.adapted() if each.adapter_policy != "follow"]
    assert_close({seq: told["logprobs"][seq] for seq in pinned}, {seq: alone["logprobs"][seq] for seq in pinned})
    assert told["tokens"]["refused"] == alone["tokens"]["refused"] != [], "DoRA at o_proj, of which a rank has all"
    assert told["bytes"] < alone["bytes"], "a rank keeps what its layers need of an adapter"
    assert_loaded(ran)


def test_a_rank_has_its_layers_weights(ran: Ran) -> None:
    held, whole = ran.told("memory")["held"], ran.alone("memory")["held"]
    assert held < 0.65 * whole, "the output layer is on every rank"


def test_ranks_that_would_lack_a_kind_of_layer_are_refused(three: Ran) -> None:
    assert "3 ranks are too many: each needs a layer of each of the 2 kinds" in three.told("refused gemma3")


@pytest.mark.parametrize(
    ("nbytes", "kinds", "extra", "ranges"),
    [
        ([1] * 5, "aaaaa", [0, 0], [range(2), range(2, 5)]),
        ([1] * 5, "aaaaa", [2, 0], [range(2), range(2, 5)]),
        ([1] * 6, "aaaaaa", [3, 0], [range(1), range(1, 6)]),
        ([9, 1, 1, 1], "aaaa", [0, 0], [range(1), range(1, 4)]),
        ([1] * 6, "aaaaab", [0], [range(6)]),
        ([1] * 8, "aaabaaab", [0, 0], [range(4), range(4, 8)]),
        ([1] * 3, "aaa", [0, 0, 0], [range(1), range(1, 2), range(2, 3)]),
    ],
)
def test_layers_are_shared_out_by_bytes(nbytes: list[int], kinds: str, extra: list[int], ranges: list[range]) -> None:
    found = plan(nbytes, list(kinds), extra)
    assert max(sum(nbytes[at] for at in each) + more for each, more in zip(found, extra, strict=True)) == max(
        sum(nbytes[at] for at in each) + more for each, more in zip(ranges, extra, strict=True)
    )
    assert [at for each in found for at in each] == list(range(len(nbytes)))


@pytest.mark.parametrize(
    ("layers", "kinds", "ranks", "said"),
    [(2, "aa", 3, "3 ranks cannot hold 2 layers"), (6, "aaaaab", 2, "2 ranks are too many: each needs a layer")],
)
def test_more_ranks_than_layers_are_refused(layers: int, kinds: str, ranks: int, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        plan([1] * layers, list(kinds), [0] * ranks)
