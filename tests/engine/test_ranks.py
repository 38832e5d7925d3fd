"""Ranks over MLX's ring that divide a model: they say what one process says of it, and all of them say the same."""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pytest

from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from ranks.backend import let_sockets_wait
from shared.sequences import SequenceSpec
from tests.engine import rank_tasks
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import LINEARS, MadeAdapter, make_adapter
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import CONFIGS
from tests.engine.rank_tasks import embedded, sampled, scored
from tests.engine.ranks import Task, start
from tests.engine.small_models import LLAMA, write_model

pytestmark = pytest.mark.long  # two processes

COUNT = 2
CLOSE, CLOSE_IN_8_BITS = 1e-4, 1e-2  # the latter: a number of KV may round to the one above
HEADS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
SHAPE = LLAMA | HEADS | {"head_dim": 32, "rope_theta": 1e4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
SCALED = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "quantised": SHAPE,
    "qwen3": SHAPE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": SHAPE | MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma3": SHAPE | CONFIGS["gemma3_text"] | HEADS | {"model_type": "gemma3_text"},
    "gpt_oss": SHAPE | CONFIGS["gpt_oss"] | HEADS | {"model_type": "gpt_oss"},
    "ministral3": SHAPE | {"model_type": "ministral3", "rope_parameters": SCALED},
    "three_heads": SHAPE | {"num_attention_heads": 6, "num_key_value_heads": 3, "model_type": "qwen3"},
    "olmo2": SHAPE | {"model_type": "olmo2"},
}
WHOLE = tuple(name for name in MODELS if name not in ("three_heads", "olmo2"))
LEARNED = {  # how a learner learns, and on what
    "grpo": ("quantised", {}), "grpo, layers again": ("qwen3_moe", {"checkpoint_layers": True}),
    "grpo, scaled by position": ("ministral3", {}),
    "ppo": ("llama", {}), "sft": ("llama", {}), "dpo": ("gpt_oss", {}), "distill": ("qwen3_moe", {}),
    "pairs": ("llama", {}), "vectors": ("quantised", {}),  # of a head
    "grpo, samples divided": ("qwen3_moe", {"sharding": "data"}),
    "ppo, samples divided": ("llama", {"sharding": "data"}),
    "sft, examples divided": ("quantised", {"sharding": "data"}),
    "dpo, pairs divided": ("llama", {"sharding": "data"}),
    "distill, rows divided": ("llama", {"sharding": "data"}),
}  # fmt: skip
SEEING = ("smolvlm", "qwen3_vl", "gemma3")  # of tests/engine/vision_models.py
SEES = find_spec("mlx_vlm") is not None
needs_eyes = pytest.mark.skipif(not SEES, reason="mlx-vlm is not installed")
LEARNING = ("llama", "quantised", "qwen3_moe", "gpt_oss")
EXPERTS = tuple(f"mlp.switch_mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of llama: how it is loaded, and how it runs
    "kv in 8 bits": ({"kv_bits": 8, "kv_group_size": 32}, {}),
    "bounded kv": ({"max_kv_size": 24}, {}),
    "drafts": ({}, {"drafts": 4}),
    "compiled steps": ({}, {"compiles": True}),  # as on a GPU, sums and all
}


def sequences_of() -> list[SequenceSpec]:
    """Greedy and drawn ones, a group, a grammar, penalties, a score and an embedding."""
    rows = [spec(f"g{at}", prompt_of(length, at), max_tokens=24) for at, length in enumerate((3, 17, 60))]
    rows += [spec("again", [5, 6, 7, 8] * 6, max_tokens=30)]
    rows += [spec(f"n{at}", prompt_of(40, 1), group="n", temperature=0.8, top_p=0.9, seed=at) for at in range(3)]
    rows += [sampled("penal", presence_penalty=0.5, repetition_penalty=1.3, seed=5), sampled("top", top_k=7, seed=6)]
    rows += [sampled("json", grammar=rank_tasks.GRAMMAR, max_tokens=16)]
    return [*rows, scored("score"), embedded("mean")]


def versions_of(name: str, folder: Path, model: Any) -> dict[str, MadeAdapter]:
    """Several ranks and places, DoRA where outputs are divided, and DoRA where inputs are."""
    places = (*LINEARS[:4], *EXPERTS) if name == "qwen3_moe" else LINEARS
    shapes: list[tuple[str, int, dict[str, Any]]] = [
        ("a", 1, {"keys": places}),
        ("a", 2, {"keys": places, "rank": 16}),
        ("b", 1, {"keys": ("self_attn.q_proj", "self_attn.v_proj"), "dora": True}),
        ("b", 2, {"keys": ("self_attn.o_proj",), "dora": True}),
        ("b", 3, {"keys": (*places[:1], "lm_head", "model.embed_tokens"), "rank": 3}),
    ]
    made = [make_adapter(model, folder, name=of, version=number, **how) for of, number, how in shapes]
    return {each.manifest.id: each for each in made}


class Ran:
    """All tasks, each run by all ranks."""

    def __init__(self, folder: Path, count: int, models: dict[str, dict[str, Any]] = MODELS) -> None:
        self.count = count
        self._folder = folder
        self.folders: dict[str, str] = {}
        for at, (name, config) in enumerate(models.items()):
            bits = 4 if name == "quantised" else None
            self.folders[name] = str(write_model(folder / name, config, seed=at, bits=bits))
        self.tasks: dict[str, Task] = {}
        self.made: dict[str, dict[str, MadeAdapter]] = {}

    def start(self, sharding: str = "tensor") -> Self:
        """Run them all."""
        told = start(self.count, self._folder / "ring", list(self.tasks.values()), sharding)
        self._told = dict(zip(self.tasks, zip(*told, strict=True), strict=True))
        return self

    def add(self, key: str, of: str, model: str, **arguments: Any) -> None:
        """A task."""
        self.tasks[key] = Task(of, {"folder": self.folders[model]} | arguments)

    def add_sequences(self, names: Sequence[str]) -> None:
        """Of each model, and of each kind of llama's KV."""
        specs = msgspec.to_builtins(sequences_of())
        for name in names:
            self.add(name, "sequences", name, specs=specs, config={}, engine={})
        for kind, (config, engine) in KINDS.items():
            self.add(kind, "sequences", "llama", specs=specs, config=config, engine=engine)

    def add_adapters(self, names: Sequence[str]) -> None:
        """Rows of many versions."""
        for name in names:
            made = self.made[name] = versions_of(name, self._folder / f"{name}-adapters", self.loaded(name).model)
            files = [[str(each.path), msgspec.to_builtins(each.manifest)] for each in made.values()]
            rows = msgspec.to_builtins(self.adapted())
            self.add(f"adapters {name}", "adapters", name, made=files, specs=rows)
            if name == "llama":
                self.add("loads", "loads", name, made=[files[0], files[1], files[2]], seed=3)

    def add_seeing(self, names: Sequence[str]) -> None:
        """Rows with images, of small models that see."""
        if not SEES:
            return
        from tests.engine.vision_models import write_vision_model

        for at, name in enumerate(names):
            key = f"sees {name}"
            self.folders[key] = str(write_vision_model(self._folder / key, name))
            made = make_adapter(self.loaded(key).model, self._folder / f"{key}-adapters")
            files = [[str(made.path), msgspec.to_builtins(made.manifest)]]
            self.add(key, "sees", key, seed=at, made=files)

    @staticmethod
    def adapted() -> list[SequenceSpec]:
        """Rows of many versions, and those that follow."""
        names = ["a", "", "a@1", "b@1", "b@3", "a"]
        rows = [row(f"s{at}", prompt_of(5 + at, at), name, max_tokens=30) for at, name in enumerate(names)]
        follows = msgspec.structs.replace(rows[0], adapter_policy="follow")
        return [follows, *rows[1:], row("refused", prompt_of(4), "b@2")]

    def loaded(self, name: str) -> Any:
        """In this process alone."""
        return load_model(EngineConfig(self.folders[name], kv_limit_bytes=1 << 30))

    def told(self, key: str) -> Any:
        """What all ranks say of a task."""
        first, *others = self._told[key]
        for other in others:
            for what in ("tokens", "ends", "versions", "specs", "came"):
                assert other == first or other.get(what) == first.get(what), f"ranks differ in {what}"
        return first

    def alone(self, key: str) -> Any:
        """What one process says."""
        return rank_tasks.run([self.tasks[key]], None)[0]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ran = Ran(tmp_path_factory.mktemp("ranks"), COUNT)
    ran.add_sequences(WHOLE)
    for seed, name in enumerate(("llama", "gpt_oss")):
        ran.add(f"schedule {name}", "schedule", name, seed=seed)
    ran.add_adapters(("llama", "quantised", "qwen3_moe"))
    ran.add("memory", "memory", "qwen3_moe")
    ran.add("sums", "sums_on_a_cpu", "llama")
    for name in LEARNING:
        ran.add(f"gradient {name}", "gradient", name)
    for key, (name, how) in LEARNED.items():
        ran.add(f"learns {key}", "learns", name, kind=key.split(",")[0], **how)
    ran.add("dora", "dora", "llama")
    ran.add_seeing(SEEING)
    for name in ("three_heads", "olmo2"):
        ran.add(f"refused {name}", "refusal", name)
    return ran.start()


def assert_close(ours: dict[str, list[float]], theirs: dict[str, list[float]], bound: float = CLOSE) -> None:
    assert ours.keys() == theirs.keys()
    for seq, numbers in ours.items():
        np.testing.assert_allclose(numbers, theirs[seq], atol=bound, rtol=0, err_msg=seq)


def assert_equal(ran: Ran, key: str) -> tuple[Any, Any]:
    """What ranks say of sequences, and what one process does: the same."""
    told, alone = ran.told(key), ran.alone(key)
    assert told["tokens"] == alone["tokens"] and told["ends"] == alone["ends"]
    for what in ("logprobs", "scores", "embeddings"):
        assert_close(told[what], alone[what], CLOSE_IN_8_BITS if "8 bits" in key else CLOSE)
    assert all(told[what] for what in ("scores", "embeddings"))
    assert told["drafted"] == alone["drafted"] and (told["drafted"] > 0) == (key == "drafts")
    return told, alone


@pytest.mark.parametrize("key", [*WHOLE, *KINDS])
def test_ranks_say_what_one_process_says(ran: Ran, key: str) -> None:
    told, alone = assert_equal(ran, key)
    assert told["kv"] * ran.count == alone["kv"], "each rank keeps the KV of its heads"


def assert_scheduled(ran: Ran, name: str) -> None:
    """Sequences of a random schedule are those of one process that is asked for them together."""
    told = ran.told(f"schedule {name}")
    specs = [msgspec.convert(each, SequenceSpec) for each in told["specs"]]
    alone = Bench(ran.loaded(name), max_rows=64, prefix_cache_bytes=0, prefill_rows=1, prefill_chunk=4096)
    alone.submit(*(msgspec.structs.replace(each, group="", sequence_class="interactive") for each in specs))
    alone.run()
    for each in specs:
        tokens = told["tokens"][each.id]
        assert tokens == alone.tokens(each.id)[: len(tokens)]
        assert told["ends"][each.id] == "cancelled" or len(tokens) == each.sampling.max_tokens
    assert "length" in told["ends"].values()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_whatever_the_schedule_ranks_stay_together_and_tokens_are_those_of_one_process(ran: Ran, name: str) -> None:
    assert_scheduled(ran, name)


def assert_seen(ran: Ran, name: str) -> None:
    """Rows with images say what they say in one process, as far as they went in both."""
    told, alone = ran.told(f"sees {name}"), ran.alone(f"sees {name}")
    assert told["ends"]["broken"] == "error" and "could not be encoded" in told["why"]
    for seq, tokens in told["tokens"].items():
        theirs = alone["tokens"][seq]
        if "cancelled" in (told["ends"][seq], alone["ends"][seq]):
            assert tokens[: len(theirs)] == theirs[: len(tokens)]
        else:
            assert tokens == theirs and told["ends"][seq] == alone["ends"][seq]
    assert told["cached"] and len({tuple(each) for each in told["tokens"].values()}) > 5


@needs_eyes
@pytest.mark.parametrize("name", SEEING)
def test_images_that_one_rank_encodes_are_seen_by_all(ran: Ran, name: str) -> None:
    assert_seen(ran, name)


def assert_true_to_versions(ran: Ran, name: str) -> Any:
    """What ranks say of rows of many versions."""
    told, rows = ran.told(f"adapters {name}"), ran.adapted()
    with AdapterBench(ran.loaded(name), ran.made[name]) as bench:
        for each in rows[:-1]:
            tokens, versions = told["tokens"][each.id], told["versions"][each.id]
            assert tokens == bench._likeliest(each, tokens, versions), each.adapter
        assert {version for versions in told["versions"].values() for version in versions} >= {"b@1", "b@3"}
    assert set(told["versions"]["s0"]) == {"a@1", "a@2"}, "a follower moves to what has been loaded"
    return told


@pytest.mark.parametrize("name", ["llama", "quantised", "qwen3_moe"])
def test_rows_of_many_versions_are_true_to_them(ran: Ran, name: str) -> None:
    told = assert_true_to_versions(ran, name)
    assert told["tokens"]["refused"] == []
    assert "DoRA is not supported where ranks divide its inputs" in told["failed"]["b@2"]


def test_loads_and_evictions_amid_rows_leave_ranks_together(ran: Ran) -> None:
    assert_loaded(ran)


def assert_loaded(ran: Ran) -> None:
    """Versions came and went, alike on all ranks."""
    told = ran.told("loads")
    assert {version for versions in told["versions"].values() for version in versions} >= {"", "a@1", "a@2", "b@1"}


def test_logprobs_of_a_version_are_those_of_one_process(ran: Ran) -> None:
    told, alone = ran.told("adapters llama"), ran.alone("adapters llama")
    pinned = [each.id for each in ran.adapted() if each.adapter_policy != "follow" and each.id != "refused"]
    assert_close({seq: told["logprobs"][seq] for seq in pinned}, {seq: alone["logprobs"][seq] for seq in pinned})
    assert told["bytes"] < alone["bytes"], "a rank keeps its part of an adapter"


def test_ranks_that_cannot_reach_one_anothers_memory_agree_on_mlxs_sums(ran: Ran) -> None:
    told = ran.told("sums")
    assert not told["came"] and told["sums"] == [[COUNT * (COUNT + 1) / 2] * 16] * 2


def test_a_rank_has_its_part_of_the_weights(ran: Ran) -> None:
    held, whole = ran.told("memory")["held"], ran.alone("memory")["held"]
    assert held < 0.7 * whole, "embeddings and norms are on every rank"


def test_what_cannot_be_divided_is_refused_with_the_reason(ran: Ran) -> None:
    heads = ran.told("refused three_heads")
    assert "2 ranks cannot divide the 3 heads (n_kv_heads) of model.layers." in heads
    assert "mlx-lm's olmo2 cannot be divided among ranks" in ran.told("refused olmo2")


@pytest.mark.parametrize("name", LEARNING)
def test_gradients_of_a_divided_model_are_those_of_one_process(ran: Ran, name: str) -> None:
    told, alone = ran.told(f"gradient {name}"), ran.alone(f"gradient {name}")
    assert told["loss"] == pytest.approx(alone["loss"], abs=CLOSE)
    assert_close(told["gradient"], alone["gradient"])
    largest = [max(map(abs, each)) for each in alone["gradient"].values()]
    assert min(largest) > 10 * CLOSE, "each of them is large enough to be told from nothing"


def test_ranks_that_round_otherwise_begin_with_the_same_dora(ran: Ran) -> None:
    first, other = ran._told["dora"]
    assert first == other


@pytest.mark.parametrize("key", LEARNED)
def test_train_steps_on_a_divided_model_are_those_of_one_process(ran: Ran, key: str) -> None:
    told, alone = ran.told(f"learns {key}"), ran.alone(f"learns {key}")
    for ours, theirs in zip(told["told"], alone["told"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=CLOSE, rtol=0)
    assert len(told["gradients"]) == len(alone["gradients"]) > 3
    for ours, theirs in zip(told["gradients"], alone["gradients"], strict=True):
        assert_close(ours, theirs)
    assert_close(told["weights"], alone["weights"], 2 * CLOSE)  # where a gradient is all but zero, rounding decides
    assert told["config"] == alone["config"], "what is published names whole layers"
    assert {each["digest"] for each in ran._told[f"learns {key}"]} == {told["digest"]}


def test_sockets_of_the_ring_wait_and_no_others() -> None:
    with ExitStack() as stack:
        places, ends = [], []
        for _ in range(2):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            places.append([f"127.0.0.1:{server.getsockname()[1]}"])
            ends.append(stack.enter_context(socket.create_connection(server.getsockname())))
            ends.append(stack.enter_context(server.accept()[0]))
        for end in ends:
            end.setblocking(False)
        open_before = len(list(Path("/dev/fd").iterdir()))
        let_sockets_wait(places, 0)
        assert len(list(Path("/dev/fd").iterdir())) == open_before
        assert [os.get_blocking(end.fileno()) for end in ends] == [False, True, True, False]
        with pytest.raises(BlockingIOError):  # and not for ever
            ends[1].recv(1)
