"""Memory that a model needs on this machine, part by part, from its config.json and its tensors' sizes.

Estimates where MLX decides: KV is exact for layers of plain attention, and 0 where the layers are of another kind.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.fit.weights import SIXTEEN_BITS, TensorHeader

WORKING_BYTES = 256 << 20  # activations of a piece of prompts, logits, freed memory that MLX keeps
ADAPTER_RANK = 8  # by which slots count: memory is taken for the ranks in use, and most adapters have small ones
# Of an adapter's numbers in 32 bits: weights, gradients, two moments, the last good ones twice, publishing.
LEARNER_COPIES = 7
LEAST_POSITIONS = 512  # of a train step's microbatch
LIVE_ARRAYS = 12  # activations of a layer that a backward pass keeps, each as wide as the hidden state
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.\d+\.")


@dataclass(frozen=True)
class Need:
    """One part of what a process holds in memory."""

    name: str
    bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model that decide how much memory it takes."""

    tensors: tuple[TensorHeader, ...]
    config: Mapping[str, Any]  # config.json
    float_bytes: int = 0  # that a number of the weights is cast to; 0: as in the files
    kv_number_bytes: int = 2  # of a number of KV that is not quantised
    ranks: int = 1  # that divide the model among them
    sees: bool = True

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of config.json about the language model."""
        inner = self.config.get("text_config")
        return {**self.config, **inner} if isinstance(inner, dict) else self.config

    @property
    def hidden(self) -> int:
        """Width of the hidden state; 0: unknown."""
        return _number(self.text, "hidden_size", "n_embd", "dim")

    @property
    def layers(self) -> int:
        """Number of layers; 0: unknown."""
        return _number(self.text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")

    def kv_bytes_per_token(self, bits: int = 0, group: int = 64) -> int:
        """KV of one position in all layers; 0 where the layers are of a kind that config.json does not describe."""
        heads = _number(self.text, "num_attention_heads", "n_head")
        kinds = self.text.get("layer_types")
        layers = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds) if kinds else self.layers
        if latent := _number(self.text, "kv_lora_rank"):
            numbers = layers * (latent + _number(self.text, "qk_rope_head_dim"))
        elif heads and self.hidden:
            size = _number(self.text, "head_dim") or self.hidden // heads
            numbers = 2 * layers * (_number(self.text, "num_key_value_heads") or heads) * size
        else:
            return 0
        each = bits / 8 + 2 * self.kv_number_bytes / group if bits else self.kv_number_bytes
        return int(numbers * each) // self.ranks

    def weights(self) -> list[Need]:
        """The language model's weights, and the tower's."""
        text = sum(tensor.in_memory(self.float_bytes) for tensor in self.tensors if not tensor.is_vision)
        tower = sum(tensor.in_memory(self.float_bytes) for tensor in self.tensors if tensor.is_vision)
        needs = [Need("weights", text // self.ranks)]
        return [*needs, Need("vision tower", tower)] if tower and self.sees else needs

    def in_bits(self, bits: int) -> int:
        """Bytes of the language model's weights if they were quantised in groups of 64; 0: they are that small."""
        wide = [t for t in self.tensors if not t.is_vision and t.dtype in (*SIXTEEN_BITS, "F32")]
        packed = [t for t in self.tensors if not t.is_vision and t.dtype == "U32"]
        if packed:
            return 0  # quantised already: another conversion starts from the original
        return sum(int(t.nbytes // (4 if t.dtype == "F32" else 2) * (bits + 0.5) / 8) for t in wide) // self.ranks

    def adapter_numbers(self, rank: int) -> int:
        """Numbers of a LoRA of this rank on every linear inside a layer."""
        bits = int((self.config.get("quantization") or {}).get("bits") or 0)
        count = 0
        for tensor in self.tensors:
            if len(tensor.shape) != 2 or tensor.is_vision or not tensor.name.endswith(".weight"):
                continue
            if not _LAYER.search(tensor.name):
                continue
            columns = tensor.shape[1] * 32 // bits if tensor.dtype == "U32" and bits else tensor.shape[1]
            count += rank * (tensor.shape[0] + columns)
        return count // self.ranks

    def adapters(self, slots: int) -> list[Need]:
        """Adapter slots of a worker."""
        return [Need(f"{slots} adapter slots", slots * self.adapter_numbers(ADAPTER_RANK) * self.kv_number_bytes)]

    def learner(self, rank: int, positions: int = LEAST_POSITIONS) -> list[Need]:
        """An adapter that learns, with its optimizer, and one backward pass over so many positions."""
        state = self.adapter_numbers(rank) * 4 * LEARNER_COPIES
        activations = positions * self.hidden * self.layers * LIVE_ARRAYS * self.kv_number_bytes // self.ranks
        return [
            Need(f"learner of rank {rank}", state),
            Need(f"backward pass of {positions} positions", activations),
        ]


def total(needs: Sequence[Need]) -> int:
    """Bytes of all parts together."""
    return sum(need.bytes for need in needs)


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((int(value) for name in names if isinstance(value := config.get(name), int | float)), 0)
