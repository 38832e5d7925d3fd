"""A head on the last hidden states of a body that learns with it or stands still."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trainer.heads.examples import Spread
from trainer.learn.head_net import HeadNet
from trainer.state import Arrays


class Net(nn.Module):  # type: ignore[misc]
    """Body and head in one tree, so that both have gradients; `states` makes hidden states [B, L, H] of ids."""

    def __init__(self, body: Any, head: HeadNet, states: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self._states = states

    def __call__(self, ids_BL: mx.array, last_B: mx.array) -> mx.array:
        """What the head says at the last token of each row, which is padded behind."""
        states_BLH = self._states(ids_BL)
        states_BH = states_BLH[mx.arange(ids_BL.shape[0]), last_B]
        outputs_BO: mx.array = self.head(states_BH.astype(mx.float32))
        return outputs_BO


def padded(rows: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
    """Ids [B, L], padded behind to few different widths, and the place of each row's last one."""
    longest = max(map(len, rows))
    width = -(-longest // 16) * 16
    ids = np.zeros((len(rows), width), np.int32)
    for row, each in zip(ids, rows, strict=True):
        row[: len(each)] = each
    return mx.array(ids), mx.array([len(each) - 1 for each in rows])


def arrays_of(head: HeadNet, name: str) -> Arrays:
    """Its tensors under the names that an adapter's file has them by."""
    parts = {f"heads.{name}.weight": head.weight, f"heads.{name}.bias": head.bias}
    if "hidden" in head:
        parts |= {f"heads.{name}.hidden.weight": head.hidden.weight, f"heads.{name}.hidden.bias": head.hidden.bias}
    return {key: np.array(value) for key, value in parts.items()}


def load_arrays(head: HeadNet, name: str, arrays: Arrays) -> None:
    """Replace them."""
    layers = {"": head, "hidden.": head.hidden} if "hidden" in head else {"": head}
    for place, layer in layers.items():
        layer.weight, layer.bias = (mx.array(arrays[f"heads.{name}.{place}{part}"]) for part in ("weight", "bias"))


def scaled(arrays: Arrays, name: str, spread: Spread | None, *, back: bool = False) -> Arrays:
    """A head's tensors for outputs in the unit of actions, or `back` for those in deviations."""
    if spread is None:
        return arrays
    weight, bias = (f"heads.{name}.{part}" for part in ("weight", "bias"))
    scale, shift = spread.scale, spread.shift
    if back:
        return arrays | {weight: arrays[weight] / scale[:, None], bias: (arrays[bias] - shift) / scale}
    return arrays | {weight: arrays[weight] * scale[:, None], bias: arrays[bias] * scale + shift}
