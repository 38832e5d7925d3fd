"""Which caches a model's rows get: those that the model makes, or their plain leaves quantised.

What can be quantised is found out once, at start, by feeding the model a few tokens: leaves that hold plain keys and
values (kinds.py), of sizes that the groups divide. Windows and recurrent states are bounded as they are, and stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from shared.errors import SetupError
from worker.engine.kv.kinds import leaves, mapped
from worker.engine.kv.quantised import Packing, QuantisedKVCache, Read, install_cuda

_GROUP_SIZES = (32, 64, 128)
_TRIAL = [[1, 2, 3], [4]]  # token ids that are fed to try a layout: a piece of a prompt, and a decode step
_CLOSE = 0.02  # of the largest logit: how far two ways to read the same KV may be apart


@dataclass(frozen=True)
class KvLayout:
    """Of one model: how each leaf of its caches is packed, None as the model makes it; () is all None."""

    packings: tuple[Packing | None, ...] = ()

    def new(self, model: Any) -> list[Any]:
        """Empty caches of one row."""
        caches: list[Any] = make_prompt_cache(model)
        if not self.packings:
            return caches
        packings = iter(self.packings)

        def leaf_of(leaf: Any) -> Any:
            packing = next(packings)
            return leaf if packing is None else QuantisedKVCache(packing)

        return mapped(caches, leaf_of)

    @property
    def name(self) -> str:
        """How KV is quantised; stored KV of another name is of no use. "": it is not."""
        used = [packing for packing in self.packings if packing is not None]
        if not used:
            return ""
        return f"{used[0].bits} bits, groups of {used[0].group_size}, {len(used)} of {len(self.packings)} caches"


def layout_of(model: Any, bits: int, group_size: int) -> KvLayout:
    """The layout that `--kv-bits` and `--kv-group-size` ask for; SetupError if nothing of this model's KV can be so."""
    if not bits:
        return KvLayout()
    if group_size not in _GROUP_SIZES:
        raise SetupError(f"--kv-group-size {group_size}: MLX quantises in groups of 32, 64 or 128")
    caches = make_prompt_cache(model)
    _fed(model, caches)
    packings, reasons = [], Counter[str]()
    for leaf in leaves(caches):
        reason = _obstacle(leaf, group_size)
        packings.append(None if reason else Packing(bits, group_size, leaf.keys.dtype))
        reasons[reason] += 1
    if not any(packings):
        told = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
        raise SetupError(f"--kv-bits {bits}: no layer of this model keeps KV that can be quantised: {told}")
    layout = KvLayout(tuple(packings))
    try:
        logits = _fed(model, layout.new(model))
    except Exception as error:
        raise SetupError(
            f"--kv-bits {bits}: this model's attention cannot read quantised KV ({type(error).__name__}: {error})"
        ) from error
    return _decoding_quantised(model, layout, logits)


def _obstacle(leaf: Any, group_size: int) -> str:
    """Why a leaf that has read something is not quantised; "" if it can be."""
    if type(leaf) is not KVCache:
        return f"{type(leaf).__name__}, of bounded size"
    if leaf.keys is None:
        return "a cache that nothing is written to"
    sizes = sorted({leaf.keys.shape[-1], leaf.values.shape[-1]})
    if not sizes[0] or any(size % group_size for size in sizes):
        several = " and ".join(map(str, sizes))
        return f"heads of {several} numbers, which --kv-group-size {group_size} does not divide"
    return ""


def _decoding_quantised(model: Any, layout: KvLayout, logits: mx.array) -> KvLayout:
    """The layout with decode steps that read KV packed, where this device is better with it and the model can."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if not on_cpu and not install_cuda():
        return layout
    read: Read = "parts" if on_cpu else "packed"
    packings = tuple(packing and replace(packing, read=read) for packing in layout.packings)
    quantised = KvLayout(packings)
    try:
        found = _fed(model, quantised.new(model))
    except Exception:  # attention sinks, MLA, attention of the model's own
        return layout
    is_close = mx.all(mx.abs(found - logits) < _CLOSE * mx.max(mx.abs(logits)))
    return quantised if is_close else layout


def _fed(model: Any, caches: list[Any]) -> mx.array:
    """The trial's last logits, in fp32."""
    logits = mx.array(0.0)
    for ids in _TRIAL:
        logits = model(mx.array([ids]), cache=caches)[:, -1].astype(mx.float32)
        mx.eval(logits, [cache.state for cache in caches])
    return logits
