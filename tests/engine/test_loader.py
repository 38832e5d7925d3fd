"""What is told of a model, and which models load."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from transformers.utils import logging as transformers_logging

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, base_sha256, load_model
from shared.errors import SetupError
from shared.text.codec import TextCodec
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import CONFIGS
from tests.engine.small_models import BOS, EOS, LLAMA, QWEN3, write_model


def test_the_card_describes_the_model(llama: LoadedModel) -> None:
    card = llama.card
    assert (card.name, card.context_length, card.vocab_size) == ("llama", 1024, 320)
    assert card.eos_token_ids == (EOS,)
    assert card.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dimensions, fp32
    assert (card.dtype, card.quantization) == ("float32", "")
    assert card.tokenizer_sha256 == llama.tokenizer.sha256
    assert card.modules["model.layers.1.mlp.down_proj"] == (128, 64)
    assert card.modules["model.layers.0.self_attn.k_proj"] == (64, 32)
    assert card.modules["lm_head"] == (64, 320)
    assert card.modules["model.embed_tokens"] == (320, 64)
    assert len(card.modules) == 16
    assert llama.kv_limit_bytes > 1 << 20


LLAMA_3 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"""
SINGLE, PAIR = [ord("1"), ord("2")], [256]


@pytest.mark.parametrize(
    ("of", "ids"),
    [
        ({"model_type": "mistral", "transformers_version": "4.50.0"}, SINGLE),
        ({"model_type": "mistral"}, SINGLE),
        ({"model_type": "mistral", "transformers_version": "5.1.0"}, PAIR),
        ({"model_type": "llama", "transformers_version": "4.57.3"}, PAIR),
        ({"model_type": "llama"}, PAIR),
    ],
)
def test_the_wrong_split_of_older_mistral_folders_is_mended_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, of: dict[str, str], ids: list[int]
) -> None:
    write_model(tmp_path, LLAMA)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | of))
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]  # more than 100,000: of such a size are those in question
    vocab["12"] = 256
    vocab |= {f"<unused-{at}>": at for at in range(260, 100_100)}
    file["model"]["merges"] = [["1", "2"]]
    for at, token in enumerate(file["added_tokens"], 257):
        token["id"] = vocab[token["content"]] = at
    split = {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated", "invert": False}
    file["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, {**file["pre_tokenizer"], "use_regex": False}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    transformers_logging.enable_propagation()
    loaded = load_model(EngineConfig(str(tmp_path)))
    assert TextCodec(loaded.tokenizer).encode("12", add_special_tokens=False) == ids
    assert "incorrect regex" not in caplog.text


def test_the_tokenizer_travels(llama: LoadedModel) -> None:
    codec = TextCodec(llama.tokenizer)
    assert codec.decode(codec.encode("Grüße ☃")) == "Grüße ☃"
    assert llama.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert codec.decode([BOS, 65, EOS]) == "A"
    assert "messages" in llama.tokenizer.chat_template


def test_the_base_hash_names_config_and_weights(tmp_path: Path) -> None:
    first, same = write_model(tmp_path / "a", LLAMA), write_model(tmp_path / "b", LLAMA)
    assert base_sha256(first) == base_sha256(same)
    assert base_sha256(first) != base_sha256(write_model(tmp_path / "c", LLAMA, seed=1))
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert base_sha256(first) != base_sha256(same)


def test_weights_that_change_while_they_are_read_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = write_model(tmp_path, LLAMA), mlx_lm.utils.load_tokenizer

    def replaced(*given: Any) -> Any:
        (folder / "new").write_bytes((folder / "model.safetensors").read_bytes())
        (folder / "new").replace(folder / "model.safetensors")
        return read(*given)

    monkeypatch.setattr("mlx_lm.utils.load_tokenizer", replaced)
    with pytest.raises(SetupError, match="have changed while they were read"):
        load_model(EngineConfig(str(folder)))


def test_context_and_name_can_be_set(llama_folder: Path) -> None:
    loaded = load_model(EngineConfig(str(llama_folder), served_name="mine", max_context=100, kv_limit_bytes=123_456))
    assert (loaded.card.name, loaded.card.context_length, loaded.kv_limit_bytes) == ("mine", 100, 123_456)


def test_a_card_says_what_part_of_its_kv_rows_never_share(tmp_path: Path) -> None:
    """One of two layers has a window, which each row holds by itself."""
    config = LLAMA | CONFIGS["gemma3_text"] | {"model_type": "gemma3_text", "tie_word_embeddings": True}
    card = load_model(EngineConfig(str(write_model(tmp_path, config)))).card
    assert card.kv_bytes_per_token == 2 * card.kv_unshared_bytes > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_decode_with_fp32_logprobs(llama_folder: Path, dtype: str) -> None:
    loaded = load_model(EngineConfig(str(llama_folder), dtype=dtype))
    assert loaded.card.dtype == dtype
    bench = Bench(loaded)
    bench.submit(spec("s", prompt_of(10), top_logprobs=3), spec("t", prompt_of(10), temperature=1.0))
    bench.run()
    total = sum(2.718281828**each.logprob for each in (bench.events["s"][0].top_logprobs or [[]])[0])
    assert 0 < total <= 1
    assert len(bench.tokens("t")) == 8


def test_an_unknown_dtype_is_refused(llama_folder: Path) -> None:
    with pytest.raises(SetupError, match="dtype 'int3'"):
        load_model(EngineConfig(str(llama_folder), dtype="int3"))


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_a_quantised_model_loads_and_decodes_alike_in_any_batch(tmp_path: Path, config: dict[str, object]) -> None:
    loaded = load_model(EngineConfig(str(write_model(tmp_path / "q4", config, bits=4))))
    assert loaded.card.quantization == "4 bits, groups of 32"
    assert loaded.card.modules["model.layers.0.self_attn.q_proj"] == (64, 64)
    specs = [spec(f"s{i}", prompt_of(10 + i), temperature=float(i % 2), seed=i) for i in range(6)]
    together = Bench(loaded)
    together.submit(*specs)
    together.run()
    for each in specs:
        alone = Bench(loaded)
        alone.submit(each)
        alone.run()
        assert together.tokens(each.id) == alone.tokens(each.id)


def test_sliding_window_caches_work_in_the_batch(llama: LoadedModel) -> None:
    """A model whose layers keep a window only: rotating caches are merged, forked and filtered too."""
    from mlx_lm.models.cache import RotatingKVCache

    class Windowed:
        layers = llama.model.layers

        def make_cache(self) -> list[RotatingKVCache]:
            return [RotatingKVCache(max_size=32) for _ in self.layers]

        def __call__(self, tokens: mx.array, cache: list[RotatingKVCache]) -> mx.array:
            logits: mx.array = llama.model(tokens, cache=cache)
            return logits

    loaded = replace(llama, model=Windowed())
    prompts = [prompt_of(length) for length in (5, 50, 50, 70)]
    bench = Bench(loaded)
    bench.submit(*(spec(f"s{i}", prompt) for i, prompt in enumerate(prompts)))
    bench.run()
    for index, prompt in enumerate(prompts):
        alone = Bench(loaded)
        alone.submit(spec("s", prompt))
        alone.run()
        assert bench.tokens(f"s{index}") == alone.tokens("s")
