"""Where a model may be adapted, and which of those places read the same input.

A site is what mlx-lm's tuner adapts (mlx_lm/tuner/utils.py): a linear, an embedding, or the experts' linear of a
mixture (SwitchLinear), each plain or quantised. Sites that read one array (q, k, v; gate, up) form a group, because
their deltas can share operations. Groups are found by tracing one forward, so no architecture is named here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_model.collectives.ranks import Ranks

SiteKind = Literal["linear", "switch", "embedding"]

REDUCING = (ShardedToAllLinear, QuantizedShardedToAllLinear)
LINEARS = (nn.Linear, nn.QuantizedLinear, *REDUCING)
_SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear, QuantizedShardedToAllLinear)
_INTERLEAVED = ("in_proj_qkv", "qkvg_proj", "qkv_proj")  # of their outputs, a rank has parts that do not lie together

Shapes = dict[str, tuple[int, int]]
"""(in, out) of every site by path: what an adapter may adapt."""


@dataclass(frozen=True)
class Whole:
    """A model's shapes and ranks as they were before it was divided."""

    ranks: Ranks
    shapes: Shapes
    by_layers: bool = False  # each has some layers, and not a part of each
    by_data: bool = False  # each has all of it, and they learn of different samples
    shares: tuple[int, ...] = ()  # by cache: layers whose KV it stands for where bytes are counted (pipeline.py)

    def elsewhere(self, held: Collection[str]) -> frozenset[str]:
        """Sites that other ranks have, and this one has no part of."""
        return frozenset(self.shapes.keys() - held) if self.by_layers else frozenset()


@dataclass(frozen=True)
class RankCut:
    """Which part of a site's weights a rank has."""

    ranks: Ranks
    by: Literal["inputs", "outputs"]  # by inputs, ranks have partial sums of all outputs

    def part(self, array: mx.array, axis: int) -> mx.array:
        """This rank's, along an axis that counts what is cut."""
        return mx.split(array, self.ranks.size, axis=axis)[self.ranks.rank]


@dataclass(frozen=True)
class Site:
    """One module that adapters may adapt."""

    path: str  # as in an adapter file: "model.layers.0.self_attn.q_proj"
    kind: SiteKind
    inputs: int  # of an embedding: ids
    outputs: int
    module: Any  # the base module
    experts: int = 0  # of a switch
    cut: RankCut | None = None  # that this rank has a part of; shapes above are of the whole

    @property
    def held_inputs(self) -> int:
        """Number of inputs in this rank's part."""
        return self._held("inputs", self.inputs)

    @property
    def held_outputs(self) -> int:
        """Number of outputs in this rank's part."""
        return self._held("outputs", self.outputs)

    def held(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """This rank's part of an adapter's A [..., in, r] and B [..., r, out]."""
        if self.cut is None:
            return a, b
        return (self.cut.part(a, -2), b) if self.cut.by == "inputs" else (a, self.cut.part(b, -1))

    def _held(self, by: str, whole: int) -> int:
        return whole if self.cut is None or self.cut.by != by else whole // self.cut.ranks.size

    @property
    def is_quantized(self) -> bool:
        """True if the weights are packed."""
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


def find_sites(model: Any, whole: Whole | None = None) -> dict[str, Site]:
    """All sites by path, in the model's order. `whole`: of a model that is divided among ranks.

    There, a module of which a rank has neither all nor an equal part in one piece is no site.
    """
    switches = mixtures(model).keys()
    found = (_site(path, module, switches) for path, module in model.named_modules())
    sites = [site for site in found if site is not None]
    if whole is not None:
        sites = [cut for site in sites if (cut := _cut(site, whole)) is not None]
    return {site.path: site for site in sites}


def module_shapes(model: Any, whole: Whole | None = None) -> Shapes:
    """Those of the model's sites."""
    return {path: (site.inputs, site.outputs) for path, site in find_sites(model, whole).items()}


def _cut(held: Site, whole: Whole) -> Site | None:
    ranks = whole.ranks
    inputs, outputs = whole.shapes[held.path]
    if (held.inputs, held.outputs) == (inputs, outputs):
        return held
    if (held.inputs, held.outputs * ranks.size) == (inputs, outputs) and not held.path.endswith(_INTERLEAVED):
        return replace(held, outputs=outputs, cut=RankCut(ranks, "outputs"))
    if (held.inputs * ranks.size, held.outputs) == (inputs, outputs):
        return replace(held, inputs=inputs, cut=RankCut(ranks, "inputs"))
    return None


def partial_sums(linear: Any, x: mx.array) -> mx.array:
    """Output of a linear for x, without the sum over ranks and the bias that follows it."""
    if not isinstance(linear, REDUCING):
        y: mx.array = linear(x)
        return y
    if not isinstance(linear, _QUANTIZED):
        product: mx.array = x @ linear["weight"].T
        return product
    return quantized_product(x, linear, linear)


def quantized_product(x: mx.array, arrays: Mapping[str, mx.array], how: Any) -> mx.array:
    """x [..., in] times quantised weights, [..., out]; `how` has their bits, group size and mode."""
    return mx.quantized_matmul(
        x,
        arrays["weight"],
        scales=arrays["scales"],
        biases=arrays.get("biases"),
        transpose=True,
        group_size=how.group_size,
        bits=how.bits,
        mode=how.mode,
    )


def group_of(linear: Any) -> Any:
    """The group of ranks over which a linear's outputs are summed; None if they are whole."""
    return linear.group if isinstance(linear, REDUCING) else None


def summed(linear: Any, y: mx.array) -> mx.array:
    """Complete `partial_sums`, with gradients, which the sums of decode steps (ranks/cuda) do not have."""
    group = group_of(linear)
    if group is None:
        return y
    y = mx.distributed.all_sum(y, group=group)
    return y + linear["bias"] if "bias" in linear else y


def _site(path: str, module: Any, switches: Collection[int]) -> Site | None:
    if isinstance(module, _SWITCHES):
        if id(module) not in switches:
            return None  # called in a way that hides which row a token belongs to
        return Site(path, "switch", module.input_dims, module.output_dims, module, module.num_experts)
    if not isinstance(module, LINEARS + EMBEDDINGS) or module.weight.ndim != 2:
        return None
    rows, width = module.weight.shape
    width = width * 32 // module.bits if isinstance(module, _QUANTIZED) else width
    if isinstance(module, EMBEDDINGS):
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
