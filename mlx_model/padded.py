"""Recurrent layers of mlx-lm that read a row's padding into its state, and here do not.

Prompts of different lengths share a forward, the shorter ones with padding after them; their caches say how long each
is (`ArraysCache.lengths`). A layer whose state is all that it keeps may read its input in several pieces as well as in
one. So it reads up to where the shortest prompt ends, then to the next end, and each row keeps the state from its own.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import baichuan_m1, bailing_moe_linear, jamba, mamba, olmo_hybrid, recurrent_gemma, rwkv7
from mlx_lm.models.cache import ArraysCache


def leave_out_padding(model: nn.Module) -> None:
    """Give a model's recurrent layers of these families the classes below."""
    for _, module in model.named_modules():
        if (mended := _MENDED.get(type(module))) is not None:
            module.__class__ = mended


def _has_ends(cache: Any) -> bool:
    return cache is not None and cache.lengths is not None


def _in_pieces(cache: ArraysCache, count: int, read: Callable[[slice], Any]) -> list[Any]:
    """Call `read` with each piece of `count` positions; the cache then has each row's state at the row's own end."""
    assert cache.lengths is not None, "checked"
    ends_B = [min(max(each, 0), count) for each in cache.lengths.tolist()]
    begin, before = 0, list(cache.cache)
    ends, states, made = [0], [before], []
    for end in sorted({*ends_B, count} - {0}):
        made.append(read(slice(begin, end)))
        ends.append(end)
        states.append(list(cache.cache))
        begin = end
    places_B = mx.array([ends.index(end) for end in ends_B])
    rows_B = mx.arange(len(ends_B))
    for slot, latest in enumerate(states[-1]):
        each = [mx.zeros_like(latest) if state[slot] is None else state[slot] for state in states]
        cache[slot] = mx.stack(each)[places_B, rows_B]
    return made


class _Mamba(mamba.MambaBlock):  # type: ignore[misc]
    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        own: Callable[..., mx.array] = super().__call__
        if not _has_ends(cache):
            return own(x, cache)
        return mx.concatenate(_in_pieces(cache, x.shape[1], lambda of: own(x[:, of], cache)), axis=1)


class _Jamba(jamba.JambaMambaMixer):  # type: ignore[misc]
    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        own: Callable[..., mx.array] = super().__call__
        if not _has_ends(cache):
            return own(x, cache)
        return mx.concatenate(_in_pieces(cache, x.shape[1], lambda of: own(x[:, of], cache)), axis=1)


class _RecurrentGemma(recurrent_gemma.RecurrentBlock):  # type: ignore[misc]
    def __call__(self, x: mx.array, cache: Any = None, mask: Any = None) -> mx.array:
        own: Callable[..., mx.array] = super().__call__
        if not _has_ends(cache):
            return own(x, cache)
        return mx.concatenate(_in_pieces(cache, x.shape[1], lambda of: own(x[:, of], cache)), axis=1)


class _RecurrentGemmaUnit(recurrent_gemma.RGLRU):  # type: ignore[misc]
    """The first token of a row is not scaled; of a row that joins a batch before it has one, the state is zeros."""

    def __call__(self, x: mx.array, cache: mx.array | None = None) -> tuple[mx.array, mx.array]:
        gate_x, gate_a = (
            self._gate(x, *of)
            for of in (
                (self.input_gate_weight, self.input_gate_bias),
                (self.recurrent_gate_weight, self.recurrent_gate_bias),
            )
        )
        log_a = -8.0 * gate_a * nn.softplus(self.recurrent_param)
        scales = mx.sqrt(1 - mx.exp(2 * log_a))
        is_new = True if cache is None else mx.all(cache == 0, axis=-1, keepdims=True)
        scales[:, 0, :] = mx.where(is_new, 1.0, scales[:, 0, :])
        made: tuple[mx.array, mx.array] = recurrent_gemma.rnn_scan(
            x=x * gate_x * scales.astype(x.dtype), a=mx.exp(log_a), h0=cache
        )
        return made

    def _gate(self, x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        by_head = x.reshape((*x.shape[:2], self.num_heads, self.head_dim)).swapaxes(1, 2)
        return mx.sigmoid(((by_head @ weight).swapaxes(1, 2) + bias).flatten(2, 3))


class _Rwkv7(rwkv7.Rwkv7Layer):  # type: ignore[misc]
    def __call__(self, x: mx.array, v_first: mx.array | None, cache: Any) -> tuple[mx.array, mx.array]:
        own: Callable[..., tuple[mx.array, mx.array]] = super().__call__
        if not _has_ends(cache):
            return own(x, v_first, cache)
        made = _in_pieces(
            cache, x.shape[1], lambda of: own(x[:, of], None if v_first is None else v_first[:, of], cache)
        )
        outputs, firsts = (mx.concatenate(list(each), axis=1) for each in zip(*made, strict=True))
        return outputs, firsts


class _OlmoHybrid(olmo_hybrid.GatedDeltaNet):  # type: ignore[misc]
    """The recurrence leaves padding out in mlx-lm, too; the convolutions do not."""

    def _apply_conv1d(
        self, x: mx.array, conv: Any, conv_state: mx.array | None, cache_slot: Any, slot_idx: int
    ) -> mx.array:
        out: mx.array = super()._apply_conv1d(x, conv, conv_state, cache_slot, slot_idx)
        if _has_ends(cache_slot):
            keeps = self.conv_kernel_size - 1
            before = mx.zeros((x.shape[0], keeps, x.shape[2]), x.dtype) if conv_state is None else conv_state
            ends_B = mx.clip(cache_slot.lengths, 0, x.shape[1])
            places = (ends_B[:, None] + mx.arange(keeps))[..., None]
            cache_slot[slot_idx] = mx.take_along_axis(mx.concatenate([before, x], axis=1), places, axis=1)
        return out


class _Baichuan(baichuan_m1.Attention):  # type: ignore[misc]
    """Attention over keys and values that are mixed with those of the position before, which are its state."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        before = [] if cache is None or cache[0] is None else list(cache[0].cache)
        out: mx.array = super().__call__(x, mask, cache)
        if before and _has_ends(cache[0]):
            ends_B = mx.clip(cache[0].lengths, 0, x.shape[1])[:, None, None]
            last = mx.take_along_axis(x, mx.maximum(ends_B - 1, 0), axis=1)
            width = self.num_kv_heads * self.head_dim
            _, *keys_values = mx.split(self.W_pack(last), (x.shape[2], x.shape[2] + width), axis=-1)
            for slot, (new, old) in enumerate(zip(keys_values, before, strict=True)):
                by_head = new.reshape(-1, self.num_kv_heads, 1, self.head_dim)
                old = mx.zeros_like(by_head) if old is None else old
                cache[0][slot] = mx.where(ends_B[..., None] > 0, by_head, old)
        return out


class _LingLinear(bailing_moe_linear.LinearAttention):  # type: ignore[misc]
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, offset: Any = 0) -> mx.array:
        own: Callable[..., mx.array] = super().__call__
        if not _has_ends(cache):
            return own(x, mask, cache, offset)
        made = _in_pieces(cache, x.shape[1], lambda of: own(x[:, of], None, cache, offset + of.start))
        return mx.concatenate(made, axis=1)


_MENDED: dict[type, type] = {
    baichuan_m1.Attention: _Baichuan,
    bailing_moe_linear.LinearAttention: _LingLinear,
    jamba.JambaMambaMixer: _Jamba,
    mamba.MambaBlock: _Mamba,
    olmo_hybrid.GatedDeltaNet: _OlmoHybrid,
    recurrent_gemma.RecurrentBlock: _RecurrentGemma,
    recurrent_gemma.RGLRU: _RecurrentGemmaUnit,
    rwkv7.Rwkv7Layer: _Rwkv7,
}
