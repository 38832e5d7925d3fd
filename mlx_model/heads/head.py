"""One head: its weights, and what it makes of hidden states, in fp32 (mlx_model/networks/network.py:multiply)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_model.networks.network import ACTIVATIONS, multiply
from shared.errors import AdapterRejectedError
from shared.heads import HeadSpec

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class DenseLayer:
    """Weights [outputs, inputs], and a bias."""

    weight_OI: mx.array
    bias_O: mx.array | None

    def __call__(self, x_NI: mx.array) -> mx.array:
        y_NO = multiply(x_NI, self.weight_OI)
        return y_NO if self.bias_O is None else y_NO + self.bias_O

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)


@dataclass(frozen=True)
class Head:
    """A head's layers in memory, with evaluated weights."""

    spec: HeadSpec
    output: DenseLayer
    hidden: DenseLayer | None = None

    def __call__(self, states_NH: mx.array) -> npt.NDArray[np.float32]:
        """Outputs [N, outputs] for the hidden states of N texts: fp32, little-endian."""
        x_NI = states_NH.astype(mx.float32)
        if self.hidden is not None:
            x_NI = ACTIVATIONS[self.spec.activation](self.hidden(x_NI))
        return np.array(self.output(x_NI)).astype("<f4")

    @property
    def nbytes(self) -> int:
        return self.output.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


Heads = Mapping[str, Head]


def read_heads(owner: str, specs: Mapping[str, HeadSpec], file: Path, hidden_size: int) -> dict[str, Head]:
    """The heads in an adapter's file; AdapterRejectedError when this model's hidden states do not fit them."""
    tensors: Tensors = mx.load(str(file)) if specs else {}  # type: ignore[assignment]
    heads: dict[str, Head] = {}
    for name, spec in specs.items():
        if spec.inputs != hidden_size:
            states = f"hidden states of {hidden_size} numbers" if hidden_size else "no hidden states that it shows"
            raise AdapterRejectedError(f"{owner}: head {name!r} reads {spec.inputs} numbers; this model has {states}")
        hidden = layer(tensors, f"heads.{name}.hidden") if spec.hidden else None
        heads[name] = Head(spec, layer(tensors, f"heads.{name}"), hidden)
    return heads


def layer(tensors: Tensors, path: str) -> DenseLayer:
    """The tensors `PATH.weight` and, if there is one, `PATH.bias`, evaluated in fp32."""
    bias = tensors.get(f"{path}.bias")
    weight_OI = tensors[f"{path}.weight"].astype(mx.float32)
    bias_O = None if bias is None else bias.astype(mx.float32)
    mx.eval([weight_OI, *([] if bias_O is None else [bias_O])])
    return DenseLayer(weight_OI, bias_O)
