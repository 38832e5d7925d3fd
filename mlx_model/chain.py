"""Models that are a chain of layers, which may be cut anywhere, and where several ranks cut it.

Seen by tracing one forward that is never computed: each layer is fed what the one before it made, unchanged, and
beside it nothing but masks and its own cache. So no architecture is named here. What goes another way between layers
(KV that several share, inputs of each layer's own) could not be handed on, and the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_model.kv.kinds import leaves
from shared.errors import SetupError

TRIAL = [[0, 0]]  # token ids of a forward that is traced
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Chain:
    """The layers of a model. Layers of one `kind` keep KV of one shape."""

    inner: Any  # the module that calls them
    name: str  # of the list in it
    layers: list[Any]
    kinds: list[str]
    nbytes: list[int]  # of each one's weights


@dataclass
class _Call:
    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def chain_of(model: Any) -> Chain:
    """SetupError that says why it is none. Of a model whose weights are lazy, none is read."""
    inner, name = _holder(model)
    layers = list(getattr(inner, name))
    caches = make_prompt_cache(model)
    if len(caches) != len(layers):
        raise SetupError(f"its {len(layers)} layers keep {len(caches)} caches: some share theirs")
    calls: list[_Call] = []
    with _watched(layers, calls):
        model(mx.array(TRIAL), cache=caches)
    _check(calls, layers, caches)
    return Chain(inner, name, layers, [_kind(cache) for cache in caches], [bytes_of(layer) for layer in layers])


def bytes_of(module: Any) -> int:
    """Bytes of a module's weights."""
    return sum(each.nbytes for _, each in tree_flatten(module.parameters()))


def _holder(model: Any) -> tuple[Any, str]:
    layers = list(getattr(model, "layers", None) or ())
    for _, module in model.named_modules():
        for name, child in module.items():
            if isinstance(child, list) and layers and [id(each) for each in child] == [id(each) for each in layers]:
                return module, name
    raise SetupError("it shows no list of layers")


@contextmanager
def _watched(layers: Sequence[Any], calls: list[_Call]) -> Iterator[None]:
    classes = [type(layer) for layer in layers]
    watching = {each: _watching(each, calls) for each in classes}
    try:
        for layer, of in zip(layers, classes, strict=True):
            layer.__class__ = watching[of]
        yield
    finally:
        for layer, of in zip(layers, classes, strict=True):
            layer.__class__ = of


def _watching(of: type, calls: list[_Call]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = of.__call__(self, *args, **kwargs)
        calls.append(_Call(self, args, kwargs, output))
        return output

    return type(of.__name__, (of,), {"__call__": call, "__module__": of.__module__})


def _check(calls: Sequence[_Call], layers: Sequence[Any], caches: Sequence[Any]) -> None:
    if [id(call.layer) for call in calls] != [id(layer) for layer in layers]:
        raise SetupError("its layers are not called once each, in order")
    before = None
    for at, (call, cache) in enumerate(zip(calls, caches, strict=True)):
        given, *others = call.args or (None,)
        if not isinstance(given, mx.array) or (before is not None and given is not before):
            raise SetupError(f"layer {at} is not fed what the layer before it makes, as it is")
        if not isinstance(call.output, mx.array) or (call.output.shape, call.output.dtype) != (
            given.shape,
            given.dtype,
        ):
            raise SetupError(f"layer {at} makes something else than what it is fed")
        for each in _parts([*others, *call.kwargs.values()]):
            if isinstance(each, mx.array) and each.dtype in _FLOATS:
                raise SetupError(f"layer {at} takes other arrays than the output of the layer before it")
            if not isinstance(each, (mx.array, *_PLAIN)) and each is not cache:
                raise SetupError(f"layer {at} is fed a {type(each).__name__} that is not its own cache")
        before = call.output


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, tuple | list):
            yield from _parts(each)
        else:
            yield each


def _kind(cache: Any) -> str:
    """By what it keeps of a trial that was traced: caches of one kind take as many bytes of a row."""
    kinds = []
    for leaf in leaves([cache]):
        held = [(each.shape, str(each.dtype)) for each in _held(leaf)]
        kinds.append(f"{type(leaf).__name__} {getattr(leaf, 'max_size', '')} {held}")
    return "; ".join(kinds)


def _held(leaf: Any) -> list[mx.array]:
    found = leaf.cache if hasattr(leaf, "cache") else [getattr(leaf, "keys", None), getattr(leaf, "values", None)]
    return [each for each in found if isinstance(each, mx.array)]


def plan(nbytes: Sequence[int], kinds: Sequence[str], extra: Sequence[int]) -> list[range]:
    """The layers of each rank, so that the largest has least bytes; `extra`: what each rank holds besides.

    Each rank has a layer of every kind: so ranks keep KV alike, and all see what a row needs.
    """
    count, all_kinds = len(extra), len(set(kinds))
    if count > len(nbytes):
        raise SetupError(f"{count} ranks cannot hold {len(nbytes)} layers: each needs one")
    # best[end]: of so many ranks that hold the layers before `end`: the largest's bytes, and where each begins
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}
    for rank in range(count):
        following: dict[int, tuple[float, list[int]]] = {}
        for begin, (largest, begins) in best.items():
            held, seen = extra[rank], set[str]()
            for end in range(begin + 1, len(nbytes) + 1):
                held += nbytes[end - 1]
                seen.add(kinds[end - 1])
                bound = max(largest, held)
                if len(seen) == all_kinds and bound < following.get(end, (inf,))[0]:
                    following[end] = (bound, [*begins, begin])
        best = following
    if len(nbytes) not in best:
        raise SetupError(
            f"{count} ranks are too many: each needs a layer of each of the {all_kinds} kinds that this model has, "
            "side by side"
        )
    begins = [*best[len(nbytes)][1], len(nbytes)]
    return [range(begin, end) for begin, end in pairwise(begins)]
