"""How much of a device's arithmetic a train step uses: operations that the step needs, over what the device can do.

Operations are counted as in PaLM (Chowdhery et al., arXiv 2204.02311, appendix B: 6 N + 12 L H Q T for each token that
is trained on, of N weights, L layers and H heads of Q numbers over T positions), with 4 N in place of 6 N: a LoRA needs
no gradients of the base's weights. Each prompt counts once for all of its samples, its output layer not at all, and
nothing that is computed again counts. So a step that repeats work, or fills shapes up, has a smaller utilisation.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

ROUNDS = 5


@dataclass(frozen=True)
class StepWork:
    """Prompts of a train step, and the samples of each; lengths in tokens."""

    groups: int
    samples: int
    prompt: int
    completion: int

    def operations(self, shape: Mapping[str, Any]) -> float:
        """Multiplications and additions that a Qwen3 of this shape needs for it."""
        hidden, layers, heads, size = (
            shape[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
        )
        attention = hidden * size * (2 * heads + 2 * shape["num_key_value_heads"])
        body = layers * (attention + 3 * hidden * shape["intermediate_size"])
        output = hidden * shape["vocab_size"]
        pairs = 12 * layers * heads * size  # for each position that a token sees
        of_prompt = self.prompt * (4 * body + pairs * self.prompt / 2)
        seen = self.prompt + self.completion / 2
        of_samples = self.samples * self.completion * (4 * (body + output) + pairs * seen)
        return float(self.groups * (of_prompt + of_samples))


def product_rate(dtype: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Operations a second of a large matrix product: what this device can do, as it is measured."""
    size = 1024 if mx.default_device() == mx.Device(mx.cpu) else 8192
    one, other = (mx.random.normal((size, size)).astype(getattr(mx, dtype)) for _ in range(2))
    mx.eval(one @ other)
    best = 0.0
    for _ in range(ROUNDS):
        began = clock()
        mx.eval(one @ other)
        best = max(best, 2 * size**3 / (clock() - began))
    return best
