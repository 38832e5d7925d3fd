"""Random-weight models for measurements: real shapes, no download."""

import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

QWEN3_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
}
QWEN3_0_6B: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
QWEN3_4B: dict[str, Any] = {
    **QWEN3_0_6B,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
}
SHAPES = {"small": QWEN3_SMALL, "qwen3-0.6b": QWEN3_0_6B, "qwen3-4b": QWEN3_4B}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def random_qwen3(path: Path, shape: dict[str, Any], dtype: str = "float32", seed: int = 0) -> Path:
    """Write a Qwen3 of this shape with random weights and a tokenizer of its vocabulary; returns the folder."""
    return random_folder(path, {**QWEN3, **shape}, dtype, seed)


def random_folder(
    path: Path,
    config: dict[str, Any],
    dtype: str = "float32",
    seed: int = 0,
    template: str = CHAT_TEMPLATE,
    text: Sequence[str] = (),
) -> Path:
    """Write a model of mlx-lm with random weights; its tokenizer is trained on `text`, or on words of no meaning."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: p.astype(getattr(mx, dtype)), model.parameters()))
    mx.eval(model.parameters())
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_tokenizer(path, config["vocab_size"], template, text)
    return path


def _write_tokenizer(path: Path, vocab_size: int, template: str, text: Sequence[str]) -> None:
    """A byte-level BPE; ids that training on a small text leaves unused are words that it never makes."""
    draw = random.Random(0)
    text = text or [
        " ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(40)) for _ in range(300)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 4096),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(text, trainer)
    whole = json.loads(tokenizer.to_str())
    known = whole["model"]["vocab"]
    known |= {f"Ġw{at:x}": at for at in range(len(known), vocab_size)}  # as added tokens they load for most of a minute
    (path / "tokenizer.json").write_text(json.dumps(whole))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "unk_token": None,
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
