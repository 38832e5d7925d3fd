"""Changes by adapters in a decode step of few operations (`decode_step.py`), apart from the arrays they do it with.

So a step with adapters is compiled as one without: layers whose linears are adapted alike share what is compiled, and
the arrays, which a hot load replaces, are its arguments. The layers of adapters provide both (`lora/layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_model.sites import LINEARS

Parts = tuple[tuple[str, tuple[int, ...], Any], ...]
"""Linears of a layer that read one input: which, the places of those with adapters, and how deltas are computed."""

Held = tuple[Any, ...]
"""The rows' slots, then the arrays of each part; () where nothing is changed."""

Arrays = tuple[Any, ...]
"""Those of each part."""

_LINEARS = {
    "inputs": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
BEFORE, BEHIND = ("inputs",), ("output", "gate_up", "down")  # attention


class Adapting:
    """A layer's adapters in a forward."""

    def __init__(self, parts: Parts, held: Held) -> None:
        self._slots_B, *arrays = held
        self._parts = {which: (*how, of_it) for (which, *how), of_it in zip(parts, arrays, strict=True)}

    @classmethod
    def of(cls, parts: Parts, held: Held) -> Adapting | None:
        """None where nothing is changed."""
        return cls(parts, held) if parts else None

    def changes(self, which: str) -> bool:
        """True if any of these linears has adapters."""
        return which in self._parts

    def __call__(self, which: str, x_NI: mx.array, ys: Sequence[mx.array]) -> list[mx.array]:
        """Outputs of these linears, of what each makes of x by itself."""
        places, deltas, held = self._parts[which]
        out = list(ys)
        for at, y in zip(places, deltas.added(held, self._slots_B, x_NI, [ys[at] for at in places]), strict=True):
            out[at] = y
        return out

    def joined(self, which: str, x_NI: mx.array, y_NO: mx.array) -> mx.array | None:
        """The same where linears are one product; None: they have to be taken apart."""
        _, deltas, held = self._parts[which]
        y: mx.array | None = deltas.joined(held, self._slots_B, x_NI, y_NO)
        return y

    def gated(self, which: str, x_NI: mx.array, y_NO: mx.array) -> mx.array | None:
        """SwiGLU of these two linears, which are one product; None: they have to be taken apart."""
        _, deltas, held = self._parts[which]
        y: mx.array | None = deltas.gated(held, self._slots_B, x_NI, y_NO)
        return y

    def added_and_normed(
        self, which: str, x_NI: mx.array, y_NO: mx.array, h_NO: mx.array, norm: mx.array, eps: float
    ) -> tuple[mx.array, mx.array] | None:
        """h and this linear's output, and the norm of that; None: they have to be computed one by one."""
        _, deltas, held = self._parts[which]
        both: tuple[mx.array, mx.array] | None
        both = deltas.added_and_normed(held, self._slots_B, x_NI, y_NO, h_NO, norm, eps)
        return both

    def ends_with_sum(self, which: str) -> bool:
        """True if an output is the sum of `part` over ranks, with the bias added after that."""
        ends: bool = self._parts[which][1].ends_with_sum
        return ends

    def part(self, which: str, x_NI: mx.array, y_NO: mx.array) -> mx.array:
        """Before sums over ranks, of a linear that no other shares its input with."""
        _, deltas, held = self._parts[which]
        (y,) = deltas.parts(held, self._slots_B, x_NI, [y_NO])
        return cast(mx.array, y)


class Adapted(NamedTuple):
    """Changes that adapters make in some linears of a layer, and their arrays."""

    parts: Parts
    arrays: Arrays

    def held(self, slots_B: mx.array | None) -> Held:
        """In a forward of rows in these slots."""
        return (slots_B, *self.arrays) if self.parts else ()


class AdaptedLayers:
    """A step has little time, so what adapters change in all layers is worked out only when it has changed."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._rows: Any = None  # the slots (lora/layers.py:RowSlots) of the linear that was found first
        self._first: tuple[Any, str, Any] = {}, "", None  # its place, and itself

    def __call__(self) -> tuple[list[tuple[Adapted, Adapted]], mx.array | None]:
        """Before and behind each layer's attention, in the forward that is being built, and its rows' slots."""
        owner, name, linear = self._first
        if self._rows is None or owner[name] is not linear:
            return self._searched()
        rows, key = self._rows, (self._rows.kernel, self._rows.dora)
        found = rows.found.get(key)
        if found is None:
            found, _ = self._searched()
            rows.found[key] = found
        return found, rows.slots_B

    def _searched(self) -> tuple[list[tuple[Adapted, Adapted]], mx.array | None]:
        self._rows = None
        found = [(self._in(layer, BEFORE), self._in(layer, BEHIND)) for layer in self._layers]
        return found, None if self._rows is None else self._rows.slots_B

    def _in(self, layer: Any, of: Sequence[str]) -> Adapted:
        parts: list[tuple[str, tuple[int, ...], Any]] = []
        arrays: list[Any] = []
        for which in of:
            owner = layer.self_attn if which in ("inputs", "output") else layer.mlp
            linears = [owner[name] for name in _LINEARS[which]]
            places = tuple(at for at, linear in enumerate(linears) if not isinstance(linear, LINEARS))
            if places:
                first = linears[places[0]]
                group, _ = first.member  # all of one group, in its order
                if self._rows is None:
                    self._rows, self._first = group.rows, (owner, _LINEARS[which][places[0]], first)
                parts.append((which, places, group.deltas))
                arrays.append(group.held())
        return Adapted(tuple(parts), tuple(arrays))
