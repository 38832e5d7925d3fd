"""A head as it learns: the network that `mlx_model/heads/` serves."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shared.heads import HeadSpec


class HeadNet(nn.Module):  # type: ignore[misc]
    """Linear, or with a hidden layer of gelu. Its last layer begins with zeros, so its first outputs are `start`."""

    def __init__(self, spec: HeadSpec, *, start: float, seed: int) -> None:
        super().__init__()
        if spec.hidden:
            drawn = np.random.default_rng(seed).uniform(-1, 1, (spec.hidden, spec.inputs)) / np.sqrt(spec.inputs)
            self.hidden = nn.Linear(spec.inputs, spec.hidden)
            self.hidden.weight, self.hidden.bias = mx.array(drawn.astype(np.float32)), mx.zeros(spec.hidden)
        self.weight = mx.zeros((spec.outputs, spec.hidden or spec.inputs))
        self.bias = mx.full((spec.outputs,), start)

    def __call__(self, states: mx.array) -> mx.array:
        """Outputs [..., O] for hidden states [..., H] in fp32."""
        inputs = nn.gelu(self.hidden(states)) if "hidden" in self else states
        return inputs @ self.weight.T + self.bias
