"""Which caches a model's rows get: those that the model makes, or their plain leaves quantised or bounded.

What can be so is found out once, at start, by feeding the model a few tokens: leaves that hold plain keys and values
(kinds.py), of sizes that the groups divide; attention that is masked to the bound. Windows and recurrent states are
bounded as they are, and stay.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlx_model.device import on_cpu, on_metal
from mlx_model.kv import places
from mlx_model.kv.apart import ApartKVCache, ApartWindowKVCache
from mlx_model.kv.cuda import attention as cuda_attention
from mlx_model.kv.kinds import can_share, kind_of, leaves, mapped
from mlx_model.kv.metal import attention as metal_attention
from mlx_model.kv.quantised import Packing, QuantisedKVCache, Read, install_kernels
from mlx_model.kv.shared import Form, install
from shared.errors import SetupError

log = logging.getLogger(__name__)

_GROUP_SIZES = (32, 64, 128)
_TRIAL = [[1, 2, 3], [4]]  # token ids that are fed to try a layout: a piece of a prompt, and a decode step
_CLOSE = 0.02  # of the largest logit: how far two ways to read the same KV may be apart
_NOISE = 3  # times as far as without a bound: 16-bit models differ a little between the two ways in any case
_FAR = 0.15  # however much the model's own pieces of a prompt differ
_TRIAL_BOUND = 4  # positions, for a trial of a bound
_LONG_TRIAL = tuple(range(1, 4 * _TRIAL_BOUND))  # token ids


@dataclass(frozen=True)
class KvLayout:
    """Packing of each leaf of a model's caches; None: as the model creates it. () means None for all leaves."""

    packings: tuple[Packing | None, ...] = ()
    bound: int = 0  # positions that a plain leaf holds, the last ones; 0: all
    shares: Form | None = None  # in which form rows may share what they begin with; None: they may not
    apart: Form | None = None  # rows lie apart (apart.py), and in which form a model's attention reads them

    def new(self, model: Any) -> list[Any]:
        """Empty caches of one row."""
        if self.apart is not None:
            form = self.apart
            return mapped(replace(self, apart=None).new(model), lambda leaf: _lying_apart(leaf, form))
        caches: list[Any] = make_prompt_cache(model)
        if self.bound:
            return mapped(caches, lambda leaf: RotatingKVCache(self.bound) if type(leaf) is KVCache else leaf)
        if not self.packings:
            return caches
        packings = iter(self.packings)

        def leaf_of(leaf: Any) -> Any:
            packing = next(packings)
            return leaf if packing is None else QuantisedKVCache(packing)

        return mapped(caches, leaf_of)

    @property
    def name(self) -> str:
        """How KV is quantised, bounded or computed; stored KV of another name is of no use. "": as the model has it."""
        if self.apart is not None:
            return ", ".join(filter(None, (replace(self, apart=None).name, "batch-invariant")))
        if self.bound:
            return f"the last {self.bound} positions"
        used = [packing for packing in self.packings if packing is not None]
        if not used:
            return ""
        return f"{used[0].bits} bits, groups of {used[0].group_size}, {len(used)} of {len(self.packings)} caches"


def check_asked(bits: int, group_size: int, bound: int) -> None:
    """SetupError for a layout that no model's KV can have."""
    if bound and bits:
        raise SetupError(f"--max-kv-size {bound} with --kv-bits {bits}: bounded KV cannot be quantised; leave one out")
    if bits and group_size not in _GROUP_SIZES:
        raise SetupError(f"--kv-group-size {group_size}: MLX quantises in groups of 32, 64 or 128")


def layout_of(
    model: Any,
    bits: int,
    group_size: int,
    bound: int = 0,
    times: dict[str, float] | None = None,
    *,
    invariant: bool = False,
) -> KvLayout:
    """The layout that the settings ask for; SetupError if this model's KV cannot be so.

    `bound`: `--max-kv-size`; `times`: those of `packed_times` that were taken before; `invariant`: `--batch-invariant`.
    """
    check_asked(bits, group_size, bound)
    layout = _asked(model, bits, group_size, bound, times)
    if invariant:
        return _apart_of(model, layout)
    return replace(layout, shares=can_share(model, layout.new(model)))


def _asked(model: Any, bits: int, group_size: int, bound: int, times: dict[str, float] | None) -> KvLayout:
    if bound:
        return _bounded(model, bound)
    if not bits:
        return KvLayout()
    caches = make_prompt_cache(model)
    _fed(model, caches)
    layout = _packed(caches, bits, group_size)
    try:
        logits = _fed(model, layout.new(model))
    except Exception as error:
        raise SetupError(
            f"--kv-bits {bits}: this model's attention cannot read quantised KV ({type(error).__name__}: {error})"
        ) from error
    return _decoding_quantised(model, layout, logits, times)


def _lying_apart(leaf: Any, form: Form) -> Any:
    """A leaf of rows that lie apart, in the place of one that can be so."""
    if type(leaf) is RotatingKVCache:
        return ApartWindowKVCache(leaf.max_size)
    packing = getattr(leaf, "packing", None)
    return ApartKVCache(packing and replace(packing, read="unpacked"), form)


def _apart_of(model: Any, layout: KvLayout) -> KvLayout:
    """The layout with rows that lie apart; SetupError where the model cannot have it, or its rows depend on others."""
    known = (KVCache, QuantisedKVCache, RotatingKVCache)
    odd = [leaf for leaf in leaves(layout.new(model)) if type(leaf) not in known or not kind_of(leaf).is_known]
    if odd:
        names = ", ".join(sorted({type(leaf).__name__ for leaf in odd}))
        raise SetupError(
            f"--batch-invariant: this model keeps states in mlx-lm's {names}, which depend on how a prompt is cut into "
            "pieces; leave the flag out"
        )
    install()
    logits, reasons = _fed(model, layout.new(model)), list[str]()
    whole = model(mx.array([[*_TRIAL[0], *_TRIAL[1]]]), cache=layout.new(model))[:, -1].astype(mx.float32)
    close = min(max(_CLOSE, _NOISE * _difference(whole, logits)), _FAR)
    for form in ("keys", "latents"):
        apart = replace(layout, apart=form)
        try:
            found = _fed_apart(model, apart)
            if _difference(found, logits) < close:
                if reason := places.check(model, lambda apart=apart: apart.new(model)):  # type: ignore[misc]
                    raise SetupError(f"--batch-invariant: this machine cannot keep it for this model: {reason}")
                return apart
            reasons.append("its numbers differ")
        except SetupError:
            raise
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    raise SetupError(f"--batch-invariant: this model's attention cannot read rows one by one ({reasons[0]})")


def _fed_apart(model: Any, layout: KvLayout) -> mx.array:
    """The trial's last logits, in fp32, of rows that lie apart."""
    caches, logits = layout.new(model), mx.array(0.0)
    for ids in _TRIAL:
        logits = places.forward(model, mx.array(ids), [len(ids)], caches)[-1:].astype(mx.float32)
    return logits


def layout_asked(model: Any, bits: int, group_size: int, bound: int) -> KvLayout:
    """As `layout_of`, of a model whose weights are not read: nothing is tried, so only its name is of use."""
    check_asked(bits, group_size, bound)
    if bound or not bits:
        return KvLayout(bound=bound)
    caches = make_prompt_cache(model)
    model(mx.array([_TRIAL[0]]), cache=caches)
    return _packed(caches, bits, group_size)


def _packed(caches: list[Any], bits: int, group_size: int) -> KvLayout:
    """The layout of caches that have read something, quantised where they can be; SetupError where none can."""
    packings, reasons = [], Counter[str]()
    for leaf in leaves(caches):
        reason = _obstacle(leaf, group_size)
        packings.append(None if reason else Packing(bits, group_size, leaf.keys.dtype))
        reasons[reason] += 1
    if not any(packings):
        counts = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
        raise SetupError(f"--kv-bits {bits}: no layer of this model keeps KV that can be quantised: {counts}")
    return KvLayout(tuple(packings))


def _bounded(model: Any, bound: int) -> KvLayout:
    if reason := _unbounded(make_prompt_cache(model), bound):
        raise SetupError(f"--max-kv-size {bound}: {reason}")
    try:
        usual, bounded = (_apart(model, KvLayout(bound=each)) for each in (0, _TRIAL_BOUND))
    except Exception as error:
        raise SetupError(
            f"--max-kv-size {bound}: this model's attention cannot read bounded KV ({type(error).__name__}: {error})"
        ) from error
    if not bounded < max(_CLOSE, _NOISE * usual):
        raise SetupError(
            f"--max-kv-size {bound}: this model reads a prompt beyond the bound, so what it writes would depend on how "
            "the prompt is cut into pieces"
        )
    return KvLayout(bound=bound)


def _unbounded(caches: list[Any], bound: int) -> str:
    """Why plain leaves of such caches cannot be bounded; "" if they can, as far as caches show."""
    if odd := sorted({type(leaf).__name__ for leaf in leaves(caches) if not kind_of(leaf).is_known}):
        return f"it keeps KV in mlx-lm's {', '.join(odd)}, which cannot be bounded"
    if not any(kind_of(leaf).is_cut for leaf in leaves(caches)):
        return "no layer of this model keeps more than a window or a state, so its KV is bounded already"
    lists = [list(leaves(cache.caches)) for cache in caches if type(cache) is CacheList]
    if any(sum(kind_of(leaf).is_cut for leaf in each) > 1 for each in lists):
        return "a layer of this model keeps several caches of all positions, such as an index of what to attend to"
    widest = max((leaf.max_size for leaf in leaves(caches) if type(leaf) is RotatingKVCache), default=0)
    if widest > bound:
        return f"this model has windows of {widest} positions of its own; the bound cannot be less"
    return ""


def _apart(model: Any, layout: KvLayout) -> float:
    """How far rows that read a prompt token by token come from one that reads it as a whole."""
    whole = layout.new(model)
    logits = model(mx.array([_LONG_TRIAL]), cache=whole)[:, -1].astype(mx.float32)
    rows = [cache.merge([cache] * 2) for cache in layout.new(model)]
    found = logits
    for token in _LONG_TRIAL:
        found = model(mx.array([[token]] * 2), cache=rows)[:1, -1].astype(mx.float32)
        mx.eval(found, [cache.state for cache in rows])
    return _difference(found, logits)


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


def _decoding_quantised(model: Any, layout: KvLayout, logits: mx.array, times: dict[str, float] | None) -> KvLayout:
    """The layout with decode steps that read KV packed, where this device is better with it and the model can."""
    if not (on_cpu() or _has_kernels(model, layout, times)):
        return layout
    read: Read = "parts" if on_cpu() else "packed"
    packings = tuple(packing and replace(packing, read=read) for packing in layout.packings)
    quantised = KvLayout(packings)
    try:
        found = _fed(model, quantised.new(model))
    except Exception:  # attention sinks, MLA, attention of the model's own
        return layout
    return quantised if _difference(found, logits) < _CLOSE else layout


def packed_times(model: Any, bits: int, group_size: int = 64) -> dict[str, float]:
    """Seconds of a layer's attention over packed KV, by the way to read it; {} if this model's KV is not packed."""
    caches = make_prompt_cache(model)
    _fed(model, caches)
    leaf = next((each for each in leaves(caches) if not _obstacle(each, group_size)), None)
    if leaf is None:
        return {}
    _, heads, _, size = leaf.keys.shape
    shape = metal_attention.AttentionShape(heads, size, leaf.keys.dtype, bits, group_size)
    return metal_attention.timed(shape, Packing(bits, group_size, leaf.keys.dtype))


def _has_kernels(model: Any, layout: KvLayout, times: dict[str, float] | None) -> bool:
    """True if kernels of this GPU read packed KV, which are in place then: CUDA's, or Metal's if they are faster."""
    if on_metal():
        packing = next(each for each in layout.packings if each)
        if not times or ("packed" in times) != metal_attention.is_switched_on():
            times = packed_times(model, packing.bits, packing.group_size)
        log.info("kv.kernels %s", " ".join(f"{way}_us={seconds * 1e6:.0f}" for way, seconds in times.items()))
        if times.get("packed", inf) >= times["unpacked"]:
            return False
    elif not cuda_attention.install():
        return False
    install_kernels()
    return True


def _difference(one: mx.array, other: mx.array) -> float:
    """The largest one, as a part of the largest logit."""
    return cast(float, (mx.max(mx.abs(one - other)) / mx.max(mx.abs(other))).item())


def _fed(model: Any, caches: list[Any]) -> mx.array:
    """The trial's last logits, in fp32."""
    logits = mx.array(0.0)
    for ids in _TRIAL:
        logits = model(mx.array([ids]), cache=caches)[:, -1].astype(mx.float32)
        mx.eval(logits, [cache.state for cache in caches])
    return logits
