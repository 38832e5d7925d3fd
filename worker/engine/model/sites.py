"""Where a model may be adapted, and which of those places read the same input.

A site is what mlx-lm's tuner adapts (mlx_lm/tuner/utils.py): a linear, an embedding, or the experts' linear of a
mixture (SwitchLinear), each plain or quantised. Sites that read one array (q, k, v; gate, up) form a group, because
their deltas can share operations. Groups are found by tracing one forward, so no architecture is named here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

SiteKind = Literal["linear", "switch", "embedding"]

_LINEARS = (nn.Linear, nn.QuantizedLinear)
_SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


@dataclass(frozen=True)
class Site:
    """One module that adapters may adapt."""

    path: str  # as in an adapter file: "model.layers.0.self_attn.q_proj"
    kind: SiteKind
    inputs: int  # of an embedding: ids
    outputs: int
    module: Any  # the base module
    experts: int = 0  # of a switch

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are packed."""
        return isinstance(self.module, _QUANTIZED)

    def dense_weight(self) -> mx.array:
        """The base weights, unpacked: [out, in], of an embedding [ids, dims]."""
        module = self.module
        if not self.is_quantized:
            weight: mx.array = module.weight
            return weight
        return mx.dequantize(
            module.weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )


def find_sites(model: Any) -> dict[str, Site]:
    """All sites by path, in the model's order."""
    switches = mixtures(model).keys()
    found = (_site(path, module, switches) for path, module in model.named_modules())
    return {site.path: site for site in found if site is not None}


def module_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """(in, out) of every site by path: what an adapter may adapt."""
    return {path: (site.inputs, site.outputs) for path, site in find_sites(model).items()}


def _site(path: str, module: Any, switches: Collection[int]) -> Site | None:
    if isinstance(module, _SWITCHES):
        if id(module) not in switches:
            return None  # called in a way that hides which row a token belongs to
        return Site(path, "switch", module.input_dims, module.output_dims, module, module.num_experts)
    if not isinstance(module, _LINEARS + _EMBEDDINGS) or module.weight.ndim != 2:
        return None
    rows, width = module.weight.shape
    width = width * 32 // module.bits if isinstance(module, _QUANTIZED) else width
    if isinstance(module, _EMBEDDINGS):
        return Site(path, "embedding", rows, width, module)
    return Site(path, "linear", width, rows, module)


def mixtures(model: Any) -> dict[int, Any]:
    """By the id of a switch, the module that sorts tokens by expert and calls it; `MultiLoRASwitch` retraces those."""
    parents = [module for _, module in model.named_modules() if isinstance(module, SwitchGLU | SwitchMLP)]
    return {id(child): parent for parent in parents for child in parent.values()}


def shared_inputs(model: Any, sites: dict[str, Site]) -> list[list[str]]:
    """The linear sites in groups that read one array, found by tracing a forward that is never computed."""
    traced: list[tuple[str, mx.array]] = []
    linears = {path: site.module for path, site in sites.items() if site.kind == "linear"}
    replace_modules(model, {path: _Traced(path, module, traced) for path, module in linears.items()})
    try:
        model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    finally:
        replace_modules(model, linears)
    groups: dict[int, list[str]] = {}
    for path, x in traced:  # `traced` keeps every x alive, so ids are not reused
        members = groups.setdefault(id(x), [])
        if path not in members:
            members.append(path)
    grouped = {path for members in groups.values() for path in members}
    return [*groups.values(), *([path] for path in linears if path not in grouped)]


def replace_modules(model: Any, modules: dict[str, Any]) -> None:
    """Put modules in place of those at these paths."""
    if modules:
        model.update_modules(tree_unflatten(list(modules.items())))


class _Traced(nn.Module):  # type: ignore[misc]
    """Notes what a linear is called with."""

    def __init__(self, path: str, linear: Any, calls: list[tuple[str, mx.array]]) -> None:
        super().__init__()
        self.linear = linear
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_calls", calls)

    def __call__(self, x: mx.array) -> mx.array:
        self._calls.append((self._path, x))
        y: mx.array = self.linear(x)
        return y
