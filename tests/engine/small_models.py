"""Small models with random weights, written to disk as mlx-lm model folders, with a byte-level tokenizer."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 256, 257  # ids below are the bytes themselves
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}
TINY_SHAPE = LLAMA | {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 384, "vocab_size": 448}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}
QWEN3_BENCH = QWEN3 | {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "head_dim": 64}


def write_model(folder: Path, config: dict[str, object], *, seed: int = 0, bits: int | None = None) -> Path:
    """Random weights in fp32, sharpened so that distributions are not flat; optionally quantised."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    text = getattr(model, "language_model", model)
    head = text.model.embed_tokens if config.get("tie_word_embeddings") else text.lm_head
    head.weight = head.weight * 4
    if bits:
        model, config = quantize_model(model, dict(config), group_size=32, bits=bits)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes 0-255, then <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_of(character: str) -> int:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(character)
    if code in printable:
        return code
    return [byte for byte in range(256) if byte not in printable][code - 256]


def dense_logits(model: nn.Module, ids: list[int]) -> mx.array:
    """Logits [L, V] fp32 of a plain full forward."""
    return model(mx.array(ids)[None])[0].astype(mx.float32)
