"""Linears that read the same input (q, k, v; gate, up), as one product where few positions are fed.

A decode step on a GPU takes as long as the host needs to give its operations out. MLX asks cuBLAS anew for each product
and captures it as a graph of its own, so these cost the host most, next to sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import mlx.core as mx

_FEW = 64  # positions of a decode step; of more, taking a product's outputs apart costs more than further products


class JoinedLinears:
    """Several linears whose weights are views of one array.

    The part called first computes for all and hands the others theirs, if they are called with the very same array.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        """Their weights become these views."""
        self.product = copy(parts[0])
        self.widths = tuple(int(part["weight"].shape[0]) for part in parts)
        self._ends = list(accumulate(self.widths))
        self._x: mx.array | None = None
        self._ys: list[mx.array | None] = []
        for name in arrays_of(parts[0]):
            whole = mx.concatenate([part[name] for part in parts])
            mx.eval(whole)
            self.product[name] = whole
            for part, begin, end in zip(parts, [0, *self._ends], self._ends, strict=False):
                part[name] = whole[begin:end]
                mx.eval(part[name])
        for place, part in enumerate(parts):
            object.__setattr__(part, "joined", self)
            object.__setattr__(part, "place", place)

    def is_for(self, x: mx.array) -> bool:
        """True if x [..., in] has few positions."""
        return x.size <= _FEW * x.shape[-1]

    def output(self, place: int, x: mx.array) -> mx.array:
        """Output of the part at `place`."""
        if x is not self._x or (y := self._ys[place]) is None:
            self._x, self._ys = x, list(mx.split(self.product(x), self._ends[:-1], axis=-1))
            y = self._ys[place]
            assert y is not None, "just made"
        self._ys[place] = None
        if not any(each is not None for each in self._ys):
            self._x = None
        return y


def join(parts: Sequence[Any]) -> None:
    """Let linears of the same input be one product, if one can compute them."""
    if len(parts) > 1 and len({_alike(part) for part in parts}) == 1:
        JoinedLinears(parts)


JoinedWith = tuple[tuple[int, ...], tuple[int, ...]]
"""Widths of all that some linears are joined with, and their places among them; nothing where they are not."""


def joined_of(parts: Sequence[Any]) -> JoinedWith:
    """Widths and places of the linears within the one that joins them; empty if none does."""
    joined: JoinedLinears | None = getattr(parts[0], "joined", None)
    return ((), ()) if joined is None else (joined.widths, tuple(part.place for part in parts))


def arrays_of(part: Any) -> list[str]:
    """Names of a module's own arrays."""
    return [name for name, value in part.items() if isinstance(value, mx.array)]


def _alike(part: Any) -> tuple[Any, ...]:
    """Properties in which linears must agree to share one product."""
    arrays = [(name, part[name].dtype, part[name].shape[1:]) for name in sorted(arrays_of(part))]
    how = [getattr(part, name, None) for name in ("bits", "group_size", "mode")]
    return (type(part), *arrays, *how)
