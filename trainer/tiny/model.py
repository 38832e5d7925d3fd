"""The tiny model's shape, and its files on disk."""

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer

from trainer.tiny.tokenizer import END_OF_TEXT, MAX_LENGTH, PAD, TURN_END, VOCABULARY, save_tokenizer

HIDDEN = 128
LAYERS = 3
HEADS = 4
KV_HEADS = 2
INTERMEDIATE = 384
_EMBEDDING_STD = 0.02


def new_model(tokenizer: Tokenizer, seed: int) -> llama.Model:
    """A Llama with fresh fp32 weights."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(model_config(tokenizer)))
    embedding = model.model.embed_tokens
    embedding.weight = mx.random.normal(embedding.weight.shape) * _EMBEDDING_STD
    mx.eval(model.parameters())
    return model


def model_config(tokenizer: Tokenizer) -> dict[str, object]:
    """Content of the model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": MAX_LENGTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "vocab_size": VOCABULARY,
    }


def parameter_count(model: llama.Model) -> int:
    """How many weights the model has."""
    return sum(int(value.size) for _, value in tree_flatten(model.parameters()))


def save_model(model: llama.Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the fp16 weights and everything that mlx-lm needs to load them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.float16) for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    save_tokenizer(tokenizer, folder)
    _write_json(folder / "config.json", model_config(tokenizer))
    generation = {
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
