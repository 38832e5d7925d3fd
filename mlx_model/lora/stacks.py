"""A loaded model with room for adapters: which stacks exist, how a slot is filled, which rows use which slot.

Nothing is allocated or wrapped before an adapter needs it: a model without adapters is the model that was loaded. A
stack covers the sites that any adapter has adapted so far, at the largest rank seen so far; a new site or a larger
rank makes it anew with everything that it holds.

Invariants. Belongs to the engine's thread, but for `prepare_kernels`, which touches no stack. A slot that rows use is
never filled (worker/engine/adapter_slots.py sees to that); stacks are changed between two forwards, one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_model.cuda import passes
from mlx_model.device import computes_on_cpu, on_metal
from mlx_model.joined import JoinedWith, joined_of
from mlx_model.lora.deltas import Kernel, deltas_of
from mlx_model.lora.kernels import (
    METAL_SWITCH,
    are_gate_and_up,
    fits_metal,
    gates,
    leave_endings,
    may_end,
    norms,
    one_pass,
    one_pass_gated,
    one_pass_joined,
    one_pass_normed,
)
from mlx_model.lora.layers import (
    LinearGroup,
    MultiLoRAEmbedding,
    MultiLoRALinear,
    MultiLoRASwitch,
    RowSlots,
    SiteWeights,
    Stack,
    best_kernel,
    padded_rank,
)
from mlx_model.routing import Routing, follow_routing
from mlx_model.sites import Site, Whole, find_sites, group_of, mixtures, replace_modules, shared_inputs
from mlx_model.step.cuda.products import parts_of_many
from mlx_model.tuned import ModelTuning

log = logging.getLogger(__name__)

TIMED_ROWS, TIMED_ROUNDS, TIMED_CALLS = 8, 5, 8
CLOSE = 0.02  # of the largest output: how far a kernel of ours may be from MLX's operations

AdapterWeights = Mapping[str, SiteWeights]
"""One adapter version, by site."""


class AdaptedModel:
    """The stacks of one model; `slots` counts the base's."""

    def __init__(
        self,
        model: Any,
        slots: int,
        dtype: mx.Dtype,
        whole: Whole | None = None,
        tuning: ModelTuning | None = None,
        fixed_rank: int = 0,
    ) -> None:
        """`fixed_rank`: of all stacks, which then cover all sites of their groups from the first adapter on, and are
        read by MLX's own operations: what a row computes does not depend on other adapters."""
        self.sites = find_sites(model, whole)
        self.elsewhere = frozenset[str]() if whole is None else whole.elsewhere(self.sites.keys())
        self.rows = RowSlots()
        self.dtype = dtype
        self._model = model
        self._slots = slots
        self._tuning = tuning
        self._fixed_rank = fixed_rank
        kernel = best_kernel(dtype)
        if fixed_rank and kernel != "take":
            kernel = "gather"
        self._kernel_is_known = kernel is not None
        self.rows.kernel = kernel or "take"
        others = [[path] for path, site in self.sites.items() if site.kind != "linear"]
        self._groups = [*shared_inputs(model, self.sites), *others]
        self._stacks: dict[str, Stack] = {}  # by the group's first path
        self._routings = mixtures(model)
        norms_of_layers = (module for _, module in model.named_modules() if isinstance(module, nn.RMSNorm))
        self._eps = {module.eps for module in norms_of_layers}
        self._prepared: set[tuple[tuple[int, ...], JoinedWith]] = set()

    def select(self, slots: list[int], dora: bool) -> None:
        """The slots of the next forward's rows."""
        self.rows.slots_B = mx.array(slots, mx.uint32) if any(slots) else None
        self.rows.dora = dora

    def fill(self, slot: int, weights: AdapterWeights) -> Iterator[list[mx.array]]:
        """Fill a slot stack by stack; after each, the arrays to evaluate. Nothing given: zeros."""
        for group in self._groups:
            given = {path: weights[path] for path in group if path in weights}
            stack = self._stacks.get(group[0])
            if stack is None and not given:
                continue
            stack = self._covering(group, given, stack)
            if stack.write(slot, [given.get(site.path) for site in stack.sites]):
                yield stack.arrays()

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self._stacks.values())

    def prepare_kernels(self, weights: AdapterWeights) -> None:
        """Compile or choose the kernels that these weights will need; off the hot path, in any thread."""
        for group in self._groups:
            sites = [self.sites[path] for path in group if path in weights]
            if not sites or sites[0].kind != "linear":
                continue
            rank = padded_rank(max(weights[site.path].rank for site in sites))
            if not self._kernel_is_known:
                self.rows.kernel, self._kernel_is_known = _faster(sites, rank, self.dtype, self._tuning), True
            if self.rows.kernel == "fused":
                self._compile(sites, rank)

    def _compile(self, sites: list[Site], rank: int) -> None:
        shape = (rank, sites[0].held_inputs, *(site.held_outputs for site in sites))
        widths, places = joined = joined_of([site.module for site in sites])
        if (shape, joined) in self._prepared or any(width % 8 for width in shape):
            return
        self._prepared.add((shape, joined))
        a, bs, x = _zeros(sites, rank, self.dtype, rows=1)
        ys = [mx.zeros((1, 1, site.held_outputs), self.dtype) for site in sites]
        slots = mx.array([1], mx.uint32)
        try:
            mx.eval(one_pass(x, a, bs, ys, slots))
            trial = _Trial(Shape(shape[1], shape[2:], rank, self.dtype), TIMED_ROWS)
            if on_metal() and not passes("lora_kernel", METAL_SWITCH, trial.compared):
                self.rows.kernel = "take"
            joins = bool(widths) and not any(width % 8 for width in widths)
            y = mx.zeros((1, sum(widths) or shape[2]), self.dtype)
            if joins:
                mx.eval(one_pass_joined(x, a, bs, y, slots, widths, places))
        except Exception:
            log.exception("lora.fused_kernel_failed shape=%s", shape)
            self.rows.kernel = "take"
            return
        if not may_end() or any(group_of(site.module) for site in sites):
            return
        try:
            forms = [y, *self._parts(sites[0], y)]
            if are_gate_and_up(widths, places) and gates(widths[0], rank):
                mx.eval([one_pass_gated(x, a, bs, each, slots) for each in forms])
            elif joins:
                mx.eval([one_pass_joined(x, a, bs, each, slots, widths, places) for each in forms[1:]])
            elif not widths and len(sites) == 1 and norms(shape[2]):
                with_eps = [(each, eps) for each in forms for eps in self._eps]
                mx.eval([one_pass_normed(x, a, bs[0], each, slots, y, y[0], eps) for each, eps in with_eps])
        except Exception:
            log.exception("lora.ending_kernel_failed shape=%s: no adapter's kernel does what follows it", shape)
            leave_endings()

    def _parts(self, site: Site, y: mx.array) -> list[mx.array]:
        """Parts that such a product has if it is one of many rows, and of a kernel of ours."""
        if "scales" in site.module or "bias" in site.module:
            return []
        count = parts_of_many(y.shape[1], site.held_inputs, self.dtype)
        return [mx.zeros((count, *y.shape))] if count > 1 else []

    def _covering(self, group: list[str], given: AdapterWeights, old: Stack | None) -> Stack:
        """The group's stack, made anew when it lacks a site that is given."""
        known = {site.path for site in old.sites} if old else set()
        if old is not None and given.keys() <= known:
            return old
        sites = [self.sites[path] for path in group if path in known or path in given or self._fixed_rank]
        kind = LinearGroup if sites[0].kind == "linear" else Stack
        stack = kind(sites, self.rows, self._slots, self.dtype)
        if old is not None:
            stack.reserve(old.rank)
            for slot in old.written:
                held = dict(zip((site.path for site in old.sites), old.read(slot), strict=True))
                stack.write(slot, [held.get(site.path) for site in sites])
        stack.reserve(max(self._fixed_rank, *(weights.rank for weights in given.values())))
        self._wrap(stack)
        self._stacks[group[0]] = stack
        return stack

    def _wrap(self, stack: Stack) -> None:
        """Put our layers in place of the model's, or hand them their new stack."""
        replace_modules(
            self._model, {site.path: self._layer(site, stack, index) for index, site in enumerate(stack.sites)}
        )

    def _layer(self, site: Site, stack: Stack, index: int) -> Any:
        if isinstance(stack, LinearGroup):
            return MultiLoRALinear(site.module, stack, index)
        if site.kind == "embedding":
            return MultiLoRAEmbedding(site.module, stack)
        routing: Routing = follow_routing(self._routings[id(site.module)])
        return MultiLoRASwitch(site.module, stack, routing)


class Shape(NamedTuple):
    """Arrays that linears which read one input need of a kernel."""

    inputs: int
    outputs: tuple[int, ...]
    rank: int
    dtype: mx.Dtype


class _Trial:
    """Numbers of some rows, of which the first one is the base's, to compare and time ways to compute deltas."""

    def __init__(self, shape: Shape, rows: int) -> None:
        inputs, outputs, rank, dtype = shape

        def draw(*sizes: int) -> mx.array:
            return (mx.random.normal(sizes, key=mx.random.key(len(sizes))) * 0.1).astype(dtype)

        self.x, self._a = draw(rows, 1, inputs), draw(rows, inputs, len(outputs) * rank)
        self._a[0] = 0
        self._bs, self._ys = [draw(rows, rank, each) for each in outputs], [draw(rows, 1, each) for each in outputs]
        self._slots_B = mx.arange(rows).astype(mx.uint32)

    def outputs(self, kernel: Kernel, x: mx.array) -> list[mx.array]:
        """Outputs with their deltas added."""
        if kernel == "fused":
            return one_pass(x, self._a, self._bs, self._ys, self._slots_B)
        deltas = deltas_of(x, self._a, self._bs, self._slots_B, kernel)
        return [y + delta for y, delta in zip(self._ys, deltas, strict=True)]

    def compared(self) -> Iterator[tuple[str, bool]]:
        """For each output, True if our kernel's numbers are those of MLX's operations."""
        pairs = zip(self.outputs("fused", self.x), self.outputs("take", self.x), strict=True)
        for at, (one, other) in enumerate([each.astype(mx.float32) for each in pair] for pair in pairs):
            apart, largest = mx.max(mx.abs(one - other)), mx.max(mx.abs(other))
            yield f"output {at}", bool((apart <= CLOSE * largest).item())

    def seconds(self, kernel: Kernel) -> float:
        """Time of one call, of several of which each one waits for the one before it, as layers do."""
        x, began = self.x, time.perf_counter()
        for _ in range(TIMED_CALLS):
            x = x + 0 * self.outputs(kernel, x)[0][..., :1]
        mx.eval(x)
        return (time.perf_counter() - began) / TIMED_CALLS


def timed_kernels(shape: Shape, rows: int = TIMED_ROWS) -> dict[Kernel, float]:
    """Seconds for one token of each row by each way to compute deltas, with the outputs that they are added to.

    A kernel of ours is among them if it is for this shape, and its numbers are those of MLX's operations.
    """
    trial, ways = _Trial(shape, rows), _ways(shape)
    if "fused" in ways and not passes("lora_kernel", METAL_SWITCH, trial.compared):
        ways.remove("fused")
    return {way: min(trial.seconds(way) for _ in range(TIMED_ROUNDS)) for way in ways}


def _ways(shape: Shape) -> list[Kernel]:
    """Ways to compute deltas that there are for this shape."""
    ways: list[Kernel] = ["take"]
    if shape.dtype == mx.float32 or not computes_on_cpu():  # gather_mm on a CPU takes fp32 only
        ways.append("gather")
    if fits_metal(shape.rank, (shape.inputs, *shape.outputs)):
        ways.append("fused")
    return ways


def _faster(sites: list[Site], rank: int, dtype: mx.Dtype, tuning: ModelTuning | None) -> Kernel:
    """The fastest way to compute one token per row, as measured before, or by the clock."""
    shape = Shape(sites[0].held_inputs, tuple(site.held_outputs for site in sites), rank, dtype)
    ways = _ways(shape)
    if tuning is not None and (known := tuning.lora_way(*ways)) is not None:
        return next(way for way in ways if way == known)
    times = timed_kernels(shape)
    chosen = min(times, key=times.__getitem__)
    taken = " ".join(f"{kernel}_us={seconds * 1e6:.0f}" for kernel, seconds in times.items())
    log.info("lora.kernel_chosen kernel=%s %s", chosen, taken)
    return chosen


def _zeros(sites: list[Site], rank: int, dtype: mx.Dtype, rows: int) -> tuple[mx.array, list[mx.array], mx.array]:
    """A, the Bs and x of a group's shapes, two slots."""
    inputs = sites[0].held_inputs
    a = mx.zeros((2, inputs, len(sites) * rank), dtype)
    return a, [mx.zeros((2, rank, site.held_outputs), dtype) for site in sites], mx.zeros((rows, 1, inputs), dtype)
