"""LoRA that learns: on a whole model, and on one that ranks divide.

Of the latter parameters are whole on every rank, under mlx-lm's names, and each rank computes with its part of them: so
what is optimised, saved and published is what one process has. Of a parameter's gradient a rank has what its part of
the layer makes of it, so that the gradient is the sum over ranks (`Gradients.whole`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.distributed import sum_gradients
from mlx.utils import tree_map_with_path
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from mlx_model.device import on_cpu
from mlx_model.sharding import sum_gradients_of
from mlx_model.sites import Site, Whole, find_sites, partial_sums, replace_modules, summed
from shared.errors import SetupError


class LearningLoRA(LoRALinear):  # type: ignore[misc]
    """LoRA on a linear: mlx-lm's, but in bfloat16 on a GPU.

    There parameters are rounded to bfloat16 for the products, whose sums are fp32, as workers do. In fp32 inputs and
    outputs would be copied into twice the bytes several times, which takes as long as the linear's own products.
    """

    @classmethod
    def from_base(cls, linear: Any, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> LearningLoRA:
        layer = LoRALinear.from_base(linear, r=r, dropout=dropout, scale=scale)
        layer.__class__ = cls
        return cast(LearningLoRA, layer)

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.bfloat16 or on_cpu():
            return cast(mx.array, super().__call__(x))
        y = self.linear(x)
        return mx.addmm(y, x @ self.lora_a.astype(y.dtype), (self.scale * self.lora_b).astype(y.dtype))


class DividedLoRA(LoRALinear):  # type: ignore[misc]
    """LoRA for a rank's part of a linear."""

    def __init__(self, site: Site, rank: int, scale: float) -> None:
        super().__init__(site.inputs, site.outputs, r=rank, scale=scale)
        self.linear = site.module
        object.__setattr__(self, "_site", site)
        # The input's gradient is summed here once for both the linear and the LoRA, or by its reader.
        self._sums = getattr(site.module, "sums_gradients", False)
        object.__setattr__(site.module, "sums_gradients", False)

    def __call__(self, x: mx.array) -> mx.array:
        """As mlx-lm's; the sum over ranks, where there is one, is of both parts."""
        site: Site = self._site
        if self._sums:
            x = sum_gradients(self.linear.group)(x)
        a, b = site.held(self.lora_a, self.lora_b)
        y = partial_sums(self.linear, x)
        y = y + (self.scale * ((x @ a) @ b)).astype(y.dtype)
        return summed(self.linear, y)


class DividedLoRASwitch(LoRASwitchLinear):  # type: ignore[misc]
    """LoRA for a rank's part of the experts' linears; the mixture sums over ranks, both ways."""

    def __init__(self, site: Site, rank: int, scale: float) -> None:
        super().__init__(site.inputs, site.outputs, site.experts, r=rank, scale=scale)
        self.linear = site.module
        object.__setattr__(self, "_site", site)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        site: Site = self._site
        a, b = site.held(self.lora_a.swapaxes(-1, -2), self.lora_b.swapaxes(-1, -2))
        y: mx.array = self.linear(x, indices, sorted_indices=sorted_indices)
        z = mx.gather_mm(x, a, rhs_indices=indices, sorted_indices=sorted_indices)
        z = mx.gather_mm(z, b, rhs_indices=indices, sorted_indices=sorted_indices)
        adapted: mx.array = y + (self.scale * z).astype(x.dtype)
        return adapted


class Gradients:
    """Sums gradients over ranks for a model with layers of the two kinds above."""

    def __init__(self, whole: Whole, divided: Iterable[str], partial: Iterable[str]) -> None:
        self._ranks = whole.ranks
        self.divided = frozenset(divided)  # paths of these layers
        self._partial = self.divided.union(partial)  # and of others of which a rank has not all of the gradient

    def whole(self, gradient: Any) -> Any:
        """A rank's gradient, by parameter, as one process would have it; called by all ranks."""

        def summed_over_ranks(path: str, part: mx.array) -> mx.array:
            if path.rpartition(".")[0] not in self._partial:
                return part  # of what all ranks compute alike
            return mx.distributed.all_sum(part, group=self._ranks.group)

        return tree_map_with_path(summed_over_ranks, gradient)


def attach_divided(model: Any, whole: Whole, paths: Iterable[str], rank: int, scale: float) -> Gradients:
    """Let a model of which this is a rank's part learn LoRA at these linears; SetupError where it cannot.

    `model`: a tree of modules that nothing else uses. At other places than the divided ones, what learns is put by the
    caller.
    """
    if whole.by_layers:
        raise SetupError("a model that ranks hold by layers cannot learn: leave --distributed-sharding pipeline out")
    sum_gradients_of(model)
    sites = find_sites(model, whole)
    if unknown := sorted(path for path in paths if path not in sites):
        raise SetupError(f"among several ranks {unknown[0]} cannot learn: a rank has no part of it that lies together")
    divided = {path: sites[path] for path in paths if sites[path].cut is not None}
    replace_modules(model, {path: _layer(site, rank, scale) for path, site in divided.items()})
    return Gradients(whole, divided, [path for path in paths if _weighs_parts(model, path)])


def _weighs_parts(model: Any, path: str) -> bool:
    """True if the module is a mixture's router, which is whole on every rank and precedes the sum over ranks."""
    parent = model
    for name in path.split(".")[:-1]:
        parent = parent[int(name)] if isinstance(parent, list) else parent[name]
    return getattr(parent, "sharding_group", None) is not None


def _layer(site: Site, rank: int, scale: float) -> Any:
    kind = DividedLoRASwitch if site.kind == "switch" else DividedLoRA
    return kind(site, rank, scale)
