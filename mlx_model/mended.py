"""Models of mlx-lm whose sequences cannot share a forward as it has them, and can with a little help.

A model that is loaded gets modules of classes of ours in the place of mlx-lm's, with the same weights; the library
itself is not changed. Gemma 2 lays out a batch's mask wrongly, GPT-BigCode wants one position for all rows, and Llama 4
keeps the KV of its chunks in a form of its own, of which there is no batched one: here it keeps all of it, and a mask
leaves out what other chunks have. Nemotron-H does not say how long each prompt is to the recurrence that could leave
the padding after it out of a row's state. Recurrent layers that read padding into the state are in `padded.py`.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma2, gpt_bigcode, llama4, nemotron_h
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.ssm import ssm_update

from mlx_model.kv.shared import SharedKVCache
from mlx_model.padded import leave_out_padding


def mend(model: Any) -> None:
    """Give a model what it lacks to run in a batch; most lack nothing."""
    leave_out_padding(model)
    if (mending := _MENDED.get(type(model))) is not None:
        mending(model)


class _Gemma2Attention(gemma2.Attention):  # type: ignore[misc]
    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if mask is not None and mask.ndim == 4 and self.repeats > 1:
            mask = mx.expand_dims(mask, 2)  # scores are [B, KV heads, heads of each, L, S]
        out: mx.array = super().__call__(x, mask, cache)
        return out


class _GPTBigCode(gpt_bigcode.GPTBigCodeModel):  # type: ignore[misc]
    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        cache = cache or [None] * len(self.h)
        h_BLD = self.wte(inputs)
        mask = create_attention_mask(h_BLD, cache[0])
        positions_BL = _positions(cache[0], inputs.shape[1])
        h_BLD = h_BLD + self.wpe(mx.maximum(positions_BL, 0))  # before a row's first token there is padding
        for layer, each in zip(self.h, cache, strict=True):
            h_BLD = layer(h_BLD, mask, cache=each)
        out: mx.array = self.ln_f(h_BLD)
        return out


class _Llama4Attention(llama4.Attention):  # type: ignore[misc]
    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        rows, count, _ = x.shape
        q, k, v = (
            product(x).reshape(rows, count, heads, -1).transpose(0, 2, 1, 3)
            for product, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        if self.use_rope:
            offset = 0 if cache is None else cache.offset
            q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if self.use_qk_norm:
            q, k = (mx.fast.rms_norm(each, weight=None, eps=1e-6) for each in (q, k))
        if self.attn_temperature_tuning and not self.use_rope:
            seen_BL = _positions(cache, count) + 1
            scales_BL = mx.log(mx.floor(seen_BL / self.floor_scale) + 1.0) * self.attn_scale + 1.0
            q = (q * scales_BL[:, None, :, None]).astype(q.dtype)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        attended: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, count, -1))
        return attended


class _Llama4(llama4.LlamaModel):  # type: ignore[misc]
    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h_BLD = self.embed_tokens(inputs)
        cache = cache or [None] * len(self.layers)
        whole = create_attention_mask(h_BLD, cache[0], return_array=True)
        chunked = self._in_chunks(whole, cache[0], inputs.shape[1])
        for at, (layer, each) in enumerate(zip(self.layers, cache, strict=True), 1):
            h_BLD = layer(h_BLD, chunked if at % 4 else whole, cache=each)
        out: mx.array = self.norm(h_BLD)
        return out

    def _in_chunks(self, whole: mx.array | None, cache: Any, count: int) -> mx.array:
        """Mask of what each token may read of its own chunk: [B, 1, L, S]. `whole`: of what it may read at all."""
        if isinstance(cache, SharedKVCache):
            raise NotImplementedError("chunks of positions that rows share")
        asking_BL = _positions(cache, count)
        length = count + (0 if cache is None else int(cache._idx if hasattr(cache, "_idx") else cache.offset))
        before_B1 = mx.array(getattr(cache, "left_padding", 0)).reshape(-1, 1)  # of each row's first token
        read_BS = mx.arange(length) - before_B1
        size = self.attention_chunk_size
        same: mx.array = (read_BS // size)[:, None, None, :] == (asking_BL // size)[:, None, :, None]
        return same if whole is None else same & whole


class _NemotronHMixer(nemotron_h.NemotronHMamba2Mixer):  # type: ignore[misc]
    def _ssm(
        self, hidden_states: mx.array, B: mx.array, C: mx.array, dt: mx.array, cache: Any, mask: mx.array | None
    ) -> mx.array:
        rows, count, _ = hidden_states.shape
        y, state = ssm_update(
            hidden_states.reshape(rows, count, self.num_heads, self.head_dim),
            self.A_log,
            B.reshape(rows, count, self.n_groups, self.ssm_state_size),
            C.reshape(rows, count, self.n_groups, self.ssm_state_size),
            self.D.astype(hidden_states.dtype),
            dt,
            self.dt_bias,
            cache[1] if cache else None,
            self.time_step_limit,
            mask,
            cache.lengths if cache else None,
        )
        if cache:
            cache[1] = state
        out: mx.array = y.reshape(rows, count, self.intermediate_size)
        return out


def _positions(cache: Any, count: int) -> mx.array:
    """Positions [B, L] of the tokens that come next; of rows that share them, [1, L]."""
    offset = mx.array(0 if cache is None else cache.offset).reshape(-1, 1)
    return offset + mx.arange(count)


def _mend_gemma2(model: Any) -> None:
    for layer in model.layers:
        layer.self_attn.__class__ = _Gemma2Attention


def _mend_gpt_bigcode(model: Any) -> None:
    model.transformer.__class__ = _GPTBigCode


def _mend_nemotron_h(model: Any) -> None:
    for layer in model.layers:
        if type(layer.mixer) is nemotron_h.NemotronHMamba2Mixer:
            layer.mixer.__class__ = _NemotronHMixer


def _mend_llama4(model: Any) -> None:
    inner = model.language_model.model
    inner.__class__ = _Llama4
    for layer in inner.layers:
        layer.self_attn.__class__ = _Llama4Attention
    model.make_cache = lambda: [KVCache() for _ in inner.layers]


_MENDED: dict[type[Any], Callable[[Any], None]] = {
    gemma2.Model: _mend_gemma2,
    gpt_bigcode.Model: _mend_gpt_bigcode,
    llama4.Model: _mend_llama4,
    nemotron_h.Model: _mend_nemotron_h,
}
