"""A rank's layers of a model, where ranks hold whole layers one after another (`--distributed-sharding pipeline`).

A stage is a contiguous range of layers. In the places of all others stand modules that pass through what they are fed;
the one before a stage's first layer waits for what the rank before has made, the one after its last layer hands it on.
After the model's last norm all ranks get what the last one has made, and go on alike: each has the output layer, draws
for itself and sees what a row needs. That costs each rank the output layer's weights, and saves the way back of logits,
which are many times as large as hidden states. Embeddings that are not the output layer too are on the first rank.

Of what is not needed, nothing is computed: the hidden states of a prompt's piece do not come back, so a rank begins the
next piece while others still compute this one. What comes back of a decode step is waited for on a stream of its own,
while the rank computes for another part of the batch (worker/engine/batch/parted_batch.py).

Whatever a rank hands on is on its way when the layer is called, and not when a result is asked for: so all ranks
exchange in the order of their forwards.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_model.batching import family
from mlx_model.chain import TRIAL, Chain, bytes_of, chain_of, plan
from mlx_model.collectives.ranks import Ranks
from shared.errors import SetupError


@dataclass
class Stage:
    """The layers of a model that this rank computes."""

    ranks: Ranks
    layers: range
    stand_ins: list[int]  # by layer: which of the caches here has read as much as that layer's, and is of its kind
    shares: tuple[int, ...]  # by cache: layers whose KV it stands for where bytes are counted, alike on all ranks
    is_trial: bool = field(default=True)  # nothing is exchanged yet

    def caches(self, held: list[Any]) -> list[Any]:
        """One for every layer of the model. Masks are made of them, some of others' layers."""
        return [held[at] for at in self.stand_ins]

    def received(self, like: mx.array) -> mx.array:
        """Output of the previous rank, with the shape and dtype of `like`."""
        return like if self.is_trial else self.ranks.received(like)

    def handed_on(self, x: mx.array) -> mx.array:
        """It goes to the next rank."""
        return x if self.is_trial else self.ranks.handed_on(x)

    def from_last(self, x: mx.array) -> mx.array:
        """Output of the last rank, on every rank."""
        return x if self.is_trial else self.ranks.from_last(x)


def cut(model: Any, ranks: Ranks) -> Stage:
    """Keep this rank's layers of a model whose weights are lazy; SetupError if it cannot be cut between layers."""
    name = family(model)
    try:
        chain = chain_of(model)
        embedding = _embedding(model, chain)
        stage = _stage(model, chain, embedding, ranks)
        _keep(model, chain, embedding, stage)
        model(mx.array(TRIAL), cache=model.make_cache())
        model(mx.array(TRIAL))
    except Exception as error:
        reason = str(error) if isinstance(error, SetupError) else f"{type(error).__name__}: {error}"
        raise SetupError(f"mlx-lm's {name} cannot be divided by layers among {ranks.size} ranks: {reason}") from error
    stage.is_trial = False
    return stage


def _stage(model: Any, chain: Chain, embedding: str, ranks: Ranks) -> Stage:
    besides = bytes_of(model) - sum(chain.nbytes)
    of_first = bytes_of(chain.inner[embedding]) if embedding else 0
    extra = [besides - (of_first if rank else 0) for rank in range(ranks.size)]
    ranges = plan(chain.nbytes, chain.kinds, extra)
    ours = ranges[ranks.rank]
    kinds = [chain.kinds[at] for at in ours]
    most: Counter[str] = Counter()
    for each in ranges:
        most |= Counter(chain.kinds[at] for at in each)
    shares = [most[kind] if kind not in kinds[:at] else 0 for at, kind in enumerate(kinds)]
    stand_ins = [at - ours.start if at in ours else kinds.index(kind) for at, kind in enumerate(chain.kinds)]
    return Stage(ranks, ours, stand_ins, tuple(shares))


def _embedding(model: Any, chain: Chain) -> str:
    """The name of the embedding in the inner module; "" if there is none that only the first layer needs."""
    found = {name: each for name, each in chain.inner.items() if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)}
    if not found:
        return ""
    name: str = max(found, key=lambda each: bytes_of(found[each]))
    whole = found[name]
    try:
        chain.inner[name] = _NoEmbedding(whole)
        model(mx.array(TRIAL))
    except Exception:  # it is the output layer, too
        return ""
    finally:
        chain.inner[name] = whole
    return name


def _keep(model: Any, chain: Chain, embedding: str, stage: Stage) -> None:
    first, end, count = stage.layers.start, stage.layers.stop, len(chain.layers)
    kept = [layer if at in stage.layers else _Elsewhere(layer) for at, layer in enumerate(chain.layers)]
    if first > 0:
        kept[first - 1] = _Before(chain.layers[first - 1], stage)
        if embedding:
            chain.inner[embedding] = _NoEmbedding(chain.inner[embedding])
    if end < count:
        kept[end] = _Behind(chain.layers[end], stage)
    chain.inner[chain.name] = kept
    make = getattr(model, "make_cache", None) or (lambda: [KVCache() for _ in range(count)])
    object.__setattr__(model, "make_cache", lambda: list(make())[first:end])
    of = type(chain.inner)
    names = list(inspect.signature(of.__call__).parameters)
    if "cache" not in names:
        raise SetupError("it does not hand caches to its layers by that name")
    chain.inner.__class__ = type(of.__name__, (_Staged, of), {"__module__": of.__module__})
    object.__setattr__(chain.inner, "stage", stage)
    object.__setattr__(chain.inner, "place_of_caches", names.index("cache") - 1)


class _Staged:
    """The inner module: it finds a cache for every layer, and gives what the last rank makes."""

    stage: Stage
    place_of_caches: int

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """Compute hidden states, with the caches of this stage."""
        at = self.place_of_caches
        if len(args) > at and args[at] is not None:
            args = (*args[:at], self.stage.caches(args[at]), *args[at + 1 :])
        elif kwargs.get("cache") is not None:
            kwargs["cache"] = self.stage.caches(kwargs["cache"])
        hidden: mx.array = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self.stage.from_last(hidden)


class _Elsewhere(nn.Module):  # type: ignore[misc]
    """Stands for a layer that another rank has; shows the plain facts that a model asks its layers for."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                object.__setattr__(self, name, value)

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return x


class _Before(_Elsewhere):
    """Stand-in for the layer directly before a stage: receives its input from the previous rank."""

    def __init__(self, layer: Any, stage: Stage) -> None:
        super().__init__(layer)
        object.__setattr__(self, "stage", stage)

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        received: mx.array = self.stage.received(x)
        return received


class _Behind(_Before):
    """Stand-in for the layer directly after a stage: hands its output to the next rank."""

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        handed_on: mx.array = self.stage.handed_on(x)
        return handed_on


class _NoEmbedding(nn.Module):  # type: ignore[misc]
    """Stands for another rank's embedding: gives the shape and dtype of what comes from there."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        like = embedding(mx.zeros((1, 1), mx.int32))
        self.width = like.shape[-1]
        self.like = mx.zeros((1,), like.dtype)  # cast with the model's weights

    def __call__(self, ids: mx.array) -> mx.array:
        return mx.zeros((*ids.shape, self.width), self.like.dtype)
