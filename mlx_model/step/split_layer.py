"""A layer of mlx-lm as two compiled functions: up to its attention, and from there on.

The layer's own code is traced, twice. The first time ends where it calls attention, the second one takes attention's
output as an argument; what it computes before that nothing asks for, and MLX leaves it out. Outputs of linears before
attention are handed from the first function to the second, since a gate may read them after it. KV and attention are
called in between as in any forward, so each kind of KV is what it was. A layer that keeps a state of fixed size has no
attention and is one function.

Invariants. Weights are arguments, so layers that are alike share what is compiled. Between `update_and_fetch` and
attention the layer's code may not touch keys, values or mask: a class of layers is named in `split_step.py` when a test
has shown that it does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache

from mlx_model.joined import JoinedLinears
from mlx_model.sites import LINEARS
from mlx_model.step.layer import bare

_ATTENTION = "scaled_dot_product_attention"
_MASK, _KEYS, _VALUES = object(), object(), object()  # stand for what only attention reads
_AT = "_at"  # the argument that says how much a cache has read
_NOT_ALIKE = frozenset(
    {"layer_idx", "_no_grad", "joined"}
)  # attributes in which layers that compute the same may differ


class _ReachedError(Exception):
    """The layer that is traced calls attention."""

    def __init__(self, arrays: dict[str, mx.array], scale: float) -> None:
        super().__init__()
        self.arrays, self.scale = arrays, scale


class _Trace:
    """State that the modules of a layer share while it is traced."""

    def __init__(self) -> None:
        self.attended: mx.array | None = None
        self.is_before = False  # attention
        self.joints: dict[int, _Joint] = {}  # by what joins them
        self.made: list[mx.array] = []  # by linears before attention: written in the first trace, read in the second

    def linear(self, linear: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        if not self.is_before:
            return linear(x)
        if self.attended is not None:
            return self.made.pop(0)
        self.made.append(linear(x))
        return self.made[-1]

    def attention(
        self, q: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        assert keys is _KEYS and values is _VALUES and mask is _MASK, "untouched"
        if self.attended is not None:
            self.is_before = False
            return self.attended
        raise _ReachedError({"q": q} if sinks is None else {"q": q, "sinks": sinks}, scale)


class _Linear(nn.Module):  # type: ignore[misc]
    """Stands for a linear while it is traced; of joined ones the first holds the product of all."""

    def __init__(self, linear: Any, trace: _Trace) -> None:
        super().__init__()
        self.linear = linear
        object.__setattr__(self, "trace", trace)

    def __call__(self, x: mx.array) -> Any:
        return self.trace.linear(self.linear, x)


class _Joint:
    """Stands for several linears that a product joins; whichever is called first computes for all."""

    def __init__(self, joined: JoinedLinears, trace: _Trace) -> None:
        self.whole = _Linear(copy(joined.product), trace)
        self._ends = list(accumulate(joined.widths))[:-1]
        self._x: mx.array | None = None
        self._ys: list[mx.array] = []

    def output(self, place: int, x: mx.array) -> mx.array:
        if x is not self._x:
            self._x, self._ys = x, list(mx.split(self.whole(x), self._ends, axis=-1))
        return self._ys[place]


class _Part(nn.Module):  # type: ignore[misc]
    """One of these linears; the first has the weights of all."""

    def __init__(self, joint: _Joint, place: int) -> None:
        super().__init__()
        if place == 0:
            self.whole = joint.whole
        object.__setattr__(self, "joint", joint)
        object.__setattr__(self, "place", place)

    def __call__(self, x: mx.array) -> Any:
        return self.joint.output(self.place, x)


class _Cache:
    """Stands for a layer's KV while it is traced."""

    def __init__(self, offset: mx.array) -> None:
        self.offset = offset
        self.written: dict[str, mx.array] = {}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self.written = {"keys": keys, "values": values}
        return _KEYS, _VALUES


class _Form:
    """Compiled functions of layers that are alike."""

    def __init__(self, layer: Any, compiled: Callable[..., Any]) -> None:
        self.signature = _signature(layer)
        self.names = [name for name in inspect.signature(type(layer).__call__).parameters if name != "self"]
        self.scale = 0.0
        self.shape: Any = None  # of what the layer returns, with the names of arrays in place of them
        self._trace = _Trace()
        self._layer = _twin(layer, self._trace)
        self._held = list(_arrays(self._layer))
        self.before = compiled(self._before)
        self.behind = compiled(self._behind)
        self.stateful = compiled(self._stateful)

    def _before(self, given: dict[str, mx.array], weights: Sequence[mx.array]) -> dict[str, Any]:
        trace = self._trace
        trace.attended, trace.is_before, trace.made = None, True, []
        arguments, cache = self._arguments(given)
        try:
            self._call(weights, arguments)
        except _ReachedError as reached:
            self.scale = reached.scale
            return {**reached.arrays, **({} if cache is None else cache.written), "made": trace.made}
        raise TypeError(f"{type(self._layer).__name__} calls no attention")

    def _behind(
        self, given: dict[str, mx.array], attended: mx.array, made: Sequence[mx.array], weights: Sequence[mx.array]
    ) -> list[mx.array]:
        trace = self._trace
        trace.attended, trace.is_before, trace.made = attended, True, list(made)
        found: list[mx.array] = []
        self.shape = _taken_apart(self._call(weights, self._arguments(given)[0]), found)
        trace.attended = None
        return found

    def _stateful(self, given: dict[str, mx.array], states: Sequence[mx.array], weights: Sequence[mx.array]) -> Any:
        self._trace.is_before = False
        cache = ArraysCache(len(states))
        cache.cache = list(states)
        output = self._call(weights, {"mask": None, **given, "cache": cache})
        return output, cache.cache

    def _arguments(self, given: dict[str, mx.array]) -> tuple[dict[str, Any], _Cache | None]:
        """A call's arguments; of two ways to have KV it has a cache, or an earlier layer's keys and values."""
        arguments: dict[str, Any] = {"mask": _MASK, **given}
        if (at := arguments.pop(_AT, None)) is None:
            return {**arguments, "cache": None, "shared_kv": (_KEYS, _VALUES)}, None
        cache = _Cache(at)
        return {**arguments, "cache": cache}, cache

    def _call(self, weights: Sequence[mx.array], arguments: dict[str, Any]) -> Any:
        before = [module[name] for module, name in self._held]
        try:
            for (module, name), weight in zip(self._held, weights, strict=True):
                module[name] = weight
            return self._layer(**arguments)
        finally:
            for (module, name), weight in zip(self._held, before, strict=True):
                module[name] = weight


class Forms:
    """Compiled functions of a model's layers; those that are alike have the same ones."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        """`compiled`: MLX's compile, or the identity."""
        self._compiled = compiled
        self._each: list[_Form] = []

    def of(self, layer: Any) -> _Form:
        """The functions for this layer's structure."""
        signature = _signature(layer)
        known = next((form for form in self._each if form.signature == signature), None)
        if known is None:
            known = _Form(layer, self._compiled)
            self._each.append(known)
        return known


class SplitLayer:
    """Called as mlx-lm's layer is, for rows of the base."""

    def __init__(self, layer: Any, forms: Forms) -> None:
        self._layer = layer
        self._form = forms.of(layer)
        self._weights = [module[name] for module, name in _arrays(layer)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The layer's output; mlx-lm computes it where the cache is in no state to be compiled."""
        given = dict(zip(self._form.names, args, strict=False)) | named
        cache, mask, shared = given.get("cache"), given.get("mask"), given.get("shared_kv")
        arrays = {name: value for name, value in given.items() if isinstance(value, mx.array) and name != "mask"}
        if isinstance(cache, ArraysCache):
            if cache.lengths is None and cache.left_padding is None and all(each is not None for each in cache.cache):
                return self._stateful(arrays if mask is None else arrays | {"mask": mask}, cache)
        elif cache is None and shared is not None:
            return self._attending(arrays, None, mask, shared)
        elif cache is not None and isinstance(cache.offset, mx.array):
            return self._attending(arrays | {_AT: cache.offset}, cache, mask, None)
        return self._layer(*args, **named)

    def _stateful(self, arrays: dict[str, mx.array], cache: ArraysCache) -> mx.array:
        output: mx.array
        output, states = self._form.stateful(arrays, cache.cache, self._weights)
        cache.cache = list(states)
        return output

    def _attending(self, arrays: dict[str, mx.array], cache: Any, mask: Any, shared: Any) -> Any:
        form = self._form
        made = form.before(arrays, self._weights)
        keys, values = shared if cache is None else cache.update_and_fetch(made["keys"], made["values"])
        attended = scaled_dot_product_attention(
            made["q"], keys, values, cache=cache, scale=form.scale, mask=mask, sinks=made.get("sinks")
        )
        outputs = form.behind(arrays, attended, made["made"], self._weights)
        return outputs[0] if form.shape is None else _put_together(form.shape, {_KEYS: keys, _VALUES: values}, outputs)


def _signature(part: Any) -> Any:
    """Everything but the weights; layers that agree in it are computed by the same functions."""
    part = bare(part)
    if isinstance(part, mx.array):
        return part.shape, part.dtype
    if isinstance(part, nn.Module):
        own = {name: value for name, value in vars(part).items() if name not in _NOT_ALIKE}
        return type(part), own, {name: _signature(each) for name, each in part.items()}
    return [_signature(each) for each in part] if isinstance(part, list | tuple) else part


def _arrays(module: Any) -> Iterator[tuple[Any, str]]:
    """Modules and the names of their arrays, in an order that a layer and its twin share."""
    module = bare(module)
    if (joined := getattr(module, "joined", None)) is not None:
        module = joined.product if module.place == 0 else {}
    for name, part in module.items():
        if isinstance(part, mx.array):
            yield module, name
        else:
            for each in part if isinstance(part, list | tuple) else [part]:
                if isinstance(each, nn.Module):
                    yield from _arrays(each)


def _twin(module: Any, trace: _Trace) -> Any:
    """A layer that is traced: the same arrays, with linears and attention that the trace knows of."""
    twin = copy(bare(module))
    if isinstance(twin, LINEARS):
        return _Linear(twin, trace)
    for name, part in twin.items():
        if (joined := getattr(bare(part), "joined", None)) is not None:
            joint = trace.joints.setdefault(id(joined), _Joint(joined, trace))
            dict.__setitem__(twin, name, _Part(joint, bare(part).place))
        elif isinstance(part, nn.Module):
            dict.__setitem__(twin, name, _twin(part, trace))
        elif isinstance(part, list | tuple) and all(isinstance(each, nn.Module) for each in part):
            dict.__setitem__(twin, name, [_twin(each, trace) for each in part])
    call = type(twin).__call__
    if _ATTENTION in call.__code__.co_names:
        names = {**call.__globals__, _ATTENTION: trace.attention}
        own = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
        twin.__class__ = type(type(twin).__name__, (type(twin),), {"__call__": own})
    return twin


def _taken_apart(output: Any, arrays: list[mx.array]) -> Any:
    """The shape of a layer's output: None for an array, which is added to `arrays`."""
    if isinstance(output, mx.array):
        arrays.append(output)
        return None
    return tuple(_taken_apart(each, arrays) for each in output) if isinstance(output, tuple) else output


def _put_together(shape: Any, read: dict[Any, Any], arrays: list[mx.array]) -> Any:
    """The output of a shape; `read`: what attention has read."""
    if shape is None:
        return arrays.pop(0)
    if isinstance(shape, tuple):
        return tuple(_put_together(each, read, arrays) for each in shape)
    return read[shape]
