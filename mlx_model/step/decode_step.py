"""The forward of a decode step, of few operations: for Llama, Qwen2 and Qwen3, whose layers are alike.

On a GPU a decode step takes as long as the host needs to make its operations and to give them out, the more so where
ranks divide a model: a second GPU shortens neither. mlx-lm's layer of Qwen3 is 51 operations, 31 of them views: it
flattens what a product is fed and undoes that after it, transposes every weight, and moves the axis of heads over that
of the one position there is. Here all is [N, D], of N = rows x tokens a row, weights have been transposed once and for
all, heads are a reshape where a row has one token, and products of one input are joined: 24 operations are left, two
sums over ranks besides. On CUDA kernels of ours do several of them at once (mlx_model/cuda, collectives, kv): 9 are
left. Where drafts are checked a row has several tokens, and a layer moves the axis of heads once, or a kernel does. The
numbers are those of mlx-lm's forward (tests/engine/test_decode_step.py: bit by bit), but for the last bits where such
kernels sum up in another order or round less often.

What lies between the attention of one layer and that of the next, sums over ranks included, depends on the number of
rows and tokens alone. So it is compiled as one function, which all layers share, since weights are its arguments. MLX
then makes these operations without Python. Plain and packed KV are written and read in place on CUDA
(kv/cuda/place.py), and that is part of the function; other KV and attention are called as in any forward, so each kind
of KV is what it was. MLX finds what it has compiled by comparing the shapes of all arguments in turn with those of each
earlier call, so what has other shapes comes first, and each number of tokens a row, and each length of KV, has
functions of its own.

With adapters in a batch the same is done (`adapting.py`). Further families have a step whose layers are mlx-lm's,
compiled (`split_step.py`); others, and models that ranks hold layer by layer, have mlx-lm's forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, mistral3, qwen2, qwen3
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from mlx_model.device import on_cpu
from mlx_model.joined import join
from mlx_model.kv.cuda import place
from mlx_model.kv.cuda.attention import attention_in_place
from mlx_model.kv.cuda.beginnings import blocks_of
from mlx_model.kv.quantised import Packing
from mlx_model.kv.ragged import have_written, packing_of, with_room
from mlx_model.kv.shared import SharedKVCache
from mlx_model.sites import EMBEDDINGS, LINEARS, find_sites, shared_inputs
from mlx_model.step.adapting import AdaptedLayers, Adapting, Parts
from mlx_model.step.layer import Layer, Rows, bare, called, layer_of
from mlx_model.step.product import Arrays, Padding
from mlx_model.step.split_step import SplitStep, splits
from mlx_model.tuned import ModelTuning

LAYERS_AT_ONCE = 4  # that a GPU is given where it has nothing else to do: a check of 0.6B took 10 ms in place of 15
MOST_COMPILED = 24  # numbers of tokens and lengths of KV
_FAMILIES = (llama, qwen2, qwen3)
_PLAIN = (nn.Linear, nn.QuantizedLinear)
_INNER = (llama.LlamaModel, qwen2.Qwen2Model, qwen3.Qwen3Model)
_ROPES = (nn.RoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE)  # of mlx-lm's others one reads the positions on the host


class _Functions(NamedTuple):
    """Compiled functions for rows of the base."""

    begin: Callable[..., Any]  # to the first attention
    steps: list[Callable[..., Any]]  # from one attention to the next
    end: Callable[..., Any]


class _Compiled:
    """Functions compiled for one number of tokens per row, and for one KV length if KV is written in place."""

    def __init__(self, packing: Packing | None, slots: int) -> None:
        """`packing` of the KV that is written in place; None: plain. `slots`: of rows with beginnings in common."""
        self.packing, self.slots = packing, slots
        self.base: _Functions | None = None
        self.parts: dict[Any, Callable[..., Any]] = {}  # by what they compute
        self.latest: dict[int, tuple[Any, Callable[..., Any]]] = {}  # by place, of rows with adapters


class _Reads:
    """How the KV of a batch is read and written in a forward."""

    def __init__(self, caches: Sequence[Any], count: int, scale: float, mask: Any, shares: int, in_place: bool) -> None:
        """`shares`: query heads of a KV head."""
        self._caches, self._count, self._scale, self._mask = caches, count, scale, mask
        self._rows: Rows = (caches[0].offset, caches[0].left_padding) if in_place else ()
        self._kv: Sequence[Arrays] = with_room(caches, count) if in_place else [()] * len(caches)
        room = int(caches[0].keys.shape[2]) if in_place else 0
        self.sizes: tuple[int, ...] = (room,)  # all but the number of rows that functions are compiled for
        self.packing = packing_of(caches) if in_place else None
        self.slots = 0
        if in_place and isinstance(caches[0], SharedKVCache):
            self._kv = [(*kv, *cache.in_line()) for kv, cache in zip(self._kv, caches, strict=True)]
            blocks = blocks_of(caches[0], room, shares * count)
            padding_B = caches[0].left_padding - blocks.begun_B
            self._rows = (caches[0].offset, padding_B, blocks.begun_B, *blocks.arrays)
            self.slots = blocks.slots
            self.sizes += (self.slots, self._kv[0][2].shape[2], *(each.shape[0] for each in blocks.arrays))

    def rows(self, at: int) -> Rows:
        """Positions that they have read, as a layer has them."""
        return self._rows or (self._caches[at].offset,)

    def of(self, at: int) -> Arrays:
        """A layer's keys and values, which kernels write and read in place; (): its cache does."""
        return self._kv[at]

    def attended(self, at: int, qkv: Sequence[mx.array]) -> mx.array:
        """Attention output; where KV is written in place, attention comes later and only q is returned."""
        if self._rows:
            return qkv[0]
        q, k, v = qkv
        keys, values = self._caches[at].update_and_fetch(k, v)
        cache, mask = self._caches[at], self._mask
        return cast(mx.array, scaled_dot_product_attention(q, keys, values, cache=cache, scale=self._scale, mask=mask))

    def end(self) -> None:
        """All layers have been called."""
        if self._rows:
            have_written(self._caches, self._count)


class DecodeStep:
    """The decode step of one model, with the weights it has when this is created."""

    def __init__(self, model: Any, *, compiles: bool, padding: Padding = ()) -> None:
        """`compiles`: what lies between attention; on a CPU a compiler would run for seconds while rows wait."""
        self.model, self._text = model, _text(model)
        inner, embedding = self._text.model, bare(self._text.model.embed_tokens)
        self._compiles = compiles
        self._compiled = mx.compile if compiles else lambda of: of
        self._scale = inner.layers[0].self_attn.scale
        norms = [layer.input_layernorm for layer in inner.layers[1:]]
        layers = [layer_of(*each, padding) for each in zip(inner.layers, [*norms, inner.norm], strict=True)]
        self._layers = [layer for layer, _, _ in layers]
        self._before = [arrays for _, arrays, _ in layers]
        self._behind = [arrays for _, _, arrays in layers]
        self._adapted = AdaptedLayers(inner.layers)
        self._dtypes = {inner.norm.weight.dtype, *(each.dtype for _, norms in self._before for each in norms)}
        self._may_place = all(layer.may_place for layer in self._layers)
        # Of plain KV, in place.
        self.reads_beginnings = self._may_place and place.reads_beginnings(self._dtypes, self._layers[0].rotary)
        self._embedding = embedding
        tied = self._text.args.tie_word_embeddings
        self._head = embedding.as_linear if tied else called(bare(self._text.lm_head), padding)
        # By tokens of a row, sizes and packing; those of rows that have beginnings in common by themselves.
        self._each: tuple[OrderedDict[Any, _Compiled], ...] = (OrderedDict(), OrderedDict())

    def takes(self, caches: Sequence[Any]) -> bool:
        """True if these are caches of a batch, each with its rows' positions."""
        return len(caches) == len(self._layers) and all(isinstance(each.offset, mx.array) for each in caches)

    def may_be_in_place(self, caches: Sequence[Any], count: int) -> bool:
        """True if `count` tokens of each row may be written in place in these caches, wherever rows end."""
        return self._may_place and place.is_for(caches, count, self._dtypes, self._layers[0].rotary)

    def __call__(
        self, tokens_BL: mx.array, caches: Sequence[Any], *, in_place: bool = False, whole: bool = False
    ) -> mx.array:
        """Logits [B, L, V] of rows of the base. `in_place`: they are asked for before anything else reads the KV.

        `whole`: nothing is given out before all of it is.
        """
        rows, count = tokens_BL.shape
        kv = self._reads(tokens_BL, caches, in_place)
        compiled = self._compiled_for(count, kv)
        functions = compiled.base
        if functions is None:
            functions = compiled.base = self._made(compiled)
        h, *qkv = functions.begin(tokens_BL, kv.rows(0), kv.of(0), self._before[0])
        for at in range(len(caches) - 1):
            attended = kv.attended(at, qkv)
            arrays = self._behind[at], self._before[at + 1]
            h, *qkv = functions.steps[at](h, attended, kv.rows(at + 1), kv.of(at), kv.of(at + 1), *arrays)
            if not whole:
                self._give_out(count, at, h, qkv)
        last = len(caches) - 1
        attended = kv.attended(last, qkv)
        logits_NV: mx.array = functions.end(h, attended, kv.rows(last), kv.of(last), self._behind[-1])
        kv.end()
        return logits_NV.reshape(rows, count, -1)

    def adapted(
        self, tokens_BL: mx.array, caches: Sequence[Any], *, in_place: bool = False, whole: bool = False
    ) -> mx.array:
        """The same of rows with adapters, in the slots that are selected."""
        rows, count = tokens_BL.shape
        kv = self._reads(tokens_BL, caches, in_place)
        compiled = self._compiled_for(count, kv)
        inner = self._text.model
        adapted, slots_B = self._adapted()
        h = inner.embed_tokens(tokens_BL).reshape(rows * count, -1)
        x = inner.layers[0].input_layernorm(h)
        before, behind = adapted[0]
        first = self._known(compiled, -1, (before.parts,), partial(self._first, compiled))
        qkv = first(x, kv.rows(0), kv.of(0), self._before[0], before.held(slots_B))
        for at in range(len(caches) - 1):
            attended = kv.attended(at, qkv)
            one = behind
            other, behind = adapted[at + 1]
            make = partial(self._step, compiled, self._layers[at], self._layers[at + 1])
            step = self._known(compiled, at, (one.parts, other.parts), make)
            arrays = self._behind[at], self._before[at + 1]
            held = one.held(slots_B), other.held(slots_B)
            h, *qkv = step(
                h, attended, kv.rows(at + 1), kv.of(at), kv.of(at + 1), *arrays, *(held if any(held) else ())
            )
            if not whole:
                self._give_out(count, at, h, qkv)
        last = len(caches) - 1
        end = self._known(compiled, last, (behind.parts,), partial(self._last, compiled))
        attended = kv.attended(last, qkv)
        x_ND = end(h, attended, kv.rows(last), kv.of(last), self._behind[-1], behind.held(slots_B))
        kv.end()
        x_BLD = x_ND.reshape(rows, count, -1)
        tied = self._text.args.tie_word_embeddings
        return cast(mx.array, inner.embed_tokens.as_linear(x_BLD) if tied else self._text.lm_head(x_BLD))

    def _reads(self, tokens_BL: mx.array, caches: Sequence[Any], in_place: bool) -> _Reads:
        count = tokens_BL.shape[1]
        in_place = in_place and self.may_be_in_place(caches, count)
        mask = None if in_place else create_attention_mask(tokens_BL, caches[0])
        of_q, of_k, _ = self._layers[0].heads
        return _Reads(caches, count, self._scale, mask, of_q // of_k, in_place)

    def _give_out(self, count: int, at: int, h_ND: mx.array, qkv: Sequence[mx.array]) -> None:
        """Let a GPU begin with the first layers while the host makes the others: it idles before a check."""
        if count > 1 and at % LAYERS_AT_ONCE == 0 and self._compiles:
            mx.async_eval(h_ND, *qkv)  # type: ignore[no-untyped-call]

    def _compiled_for(self, count: int, kv: _Reads) -> _Compiled:
        each, key = self._each[kv.slots > 0], (count, kv.sizes, kv.packing)
        compiled = each.setdefault(key, _Compiled(kv.packing, kv.slots))
        each.move_to_end(key)
        if len(each) > MOST_COMPILED:
            each.popitem(last=False)
        return compiled

    def _made(self, compiled: _Compiled) -> _Functions:
        """For rows of the base."""
        first, last, norm = self._layers[0], self._layers[-1], self._text.model.layers[0].input_layernorm
        weight, eps = norm.weight, norm.eps

        def begin(tokens_BL: mx.array, rows: Rows, kv: Arrays, arrays: Any) -> Any:
            h_ND = self._embedding(tokens_BL.reshape(-1))
            x_ND = mx.fast.rms_norm(h_ND, weight, eps)
            return h_ND, *first.before(arrays, x_ND, rows, kv, packing=compiled.packing)

        def end(h_ND: mx.array, x: mx.array, rows: Rows, kv: Arrays, arrays: Any) -> mx.array:
            return self._head(last.behind(arrays, h_ND, self._attended(compiled, x, rows, kv))[1])

        pairs = zip(self._layers, self._layers[1:], strict=False)
        steps = [self._step(compiled, one, other) for one, other in pairs]
        return _Functions(self._compiled(begin), steps, self._compiled(end))

    def _attended(self, compiled: _Compiled, x: mx.array, rows: Rows, kv: Arrays) -> mx.array:
        """`x`: what attention has made; where KV is read in place, queries."""
        if not kv:
            return x
        packing = compiled.packing
        bits, group_size = (0, 0) if packing is None else (packing.bits, packing.group_size)
        return attention_in_place(x, kv, self._scale, rows, bits, group_size, compiled.slots)

    def _step(
        self, compiled: _Compiled, one: Layer, other: Layer, of_one: Parts = (), of_other: Parts = ()
    ) -> Callable[..., Any]:
        """From the attention of a layer to that of the next, with what adapters change in them."""

        def between(
            h_ND: mx.array, x: mx.array, rows: Rows, kv: Arrays, next_kv: Arrays, behind: Any, before: Any, *held: Any
        ) -> Any:
            held_one, held_other = held or ((), ())
            attended = self._attended(compiled, x, rows, kv)
            h_ND, x_ND = one.behind(behind, h_ND, attended, Adapting.of(of_one, held_one))
            adapt = Adapting.of(of_other, held_other)
            return h_ND, *other.before(before, x_ND, rows, next_kv, adapt, compiled.packing)

        return self._once(compiled, (one, other, of_one, of_other), between)

    def _first(self, compiled: _Compiled, parts: Parts) -> Callable[..., Any]:
        """The function up to the first attention."""
        layer = self._layers[0]

        def before(x_ND: mx.array, rows: Rows, kv: Arrays, arrays: Any, held: Any) -> Any:
            return layer.before(arrays, x_ND, rows, kv, Adapting.of(parts, held), compiled.packing)

        return self._once(compiled, (None, layer, parts), before)

    def _last(self, compiled: _Compiled, parts: Parts) -> Callable[..., Any]:
        """From the last attention to the last norm."""
        layer = self._layers[-1]

        def behind(h_ND: mx.array, x: mx.array, rows: Rows, kv: Arrays, arrays: Any, held: Any) -> Any:
            attended = self._attended(compiled, x, rows, kv)
            return layer.behind(arrays, h_ND, attended, Adapting.of(parts, held))[1]

        return self._once(compiled, (layer, None, parts), behind)

    @staticmethod
    def _known(compiled: _Compiled, at: int, parts: tuple[Parts, ...], make: Callable[..., Any]) -> Callable[..., Any]:
        """As in the step before, if the same is adapted: to find it by what it computes takes too long."""
        before, step = compiled.latest.get(at, ((), None))
        if step is None or before != parts:
            step = make(*parts)
        compiled.latest[at] = parts, step  # also if they are equal: the same ones are compared sooner
        return step

    def _once(self, compiled: _Compiled, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """It compiled, the first time that it is asked for."""
        if key not in compiled.parts:
            compiled.parts[key] = self._compiled(function)
        return compiled.parts[key]


def decode_step_of(model: Any, tuning: ModelTuning | None = None) -> DecodeStep | SplitStep | None:
    """For a model that is known here, or whose layers can be split where something compiles them."""
    if _is_known(model):
        padding = () if tuning is None else tuple(tuning.padding.items())
        return DecodeStep(model, compiles=not on_cpu(), padding=padding)
    step = SplitStep(model, compiles=True) if not on_cpu() and splits(model) else None
    return step if step is not None and step.agrees() else None


def join_products(model: Any) -> None:
    """Let linears that read the same input be one product, in a process that holds a whole model."""
    if not (_is_known(model) or splits(model)):
        return
    linears = {path: site for path, site in find_sites(model).items() if type(site.module) in _PLAIN}
    for paths in shared_inputs(model, linears):
        join([linears[path].module for path in paths])
        mx.clear_cache()  # of the parts, or all of them would be there twice


def _is_known(model: Any) -> bool:
    """True if all modules are mlx-lm's, sharded or with our adapters."""
    model = _text(model)
    family = next((each for each in _FAMILIES if type(model) is each.Model), None)
    if family is None or type(model.model) not in _INNER or "embed_tokens" not in model.model:
        return False
    parts = (family.TransformerBlock, family.Attention, family.MLP)
    heads = [model.lm_head] if "lm_head" in model else []
    linears = [*heads, *(linear for layer in model.layers for linear in _linears(layer))]
    return (
        all((type(layer), type(layer.self_attn), type(layer.mlp)) == parts for layer in model.layers)
        and not any(getattr(layer, "use_sliding", False) for layer in model.layers)
        and all(isinstance(layer.self_attn.rope, _ROPES) for layer in model.layers)
        and all(isinstance(bare(linear), LINEARS) for linear in linears)
        and isinstance(bare(model.model.embed_tokens), EMBEDDINGS)
    )


def _text(model: Any) -> Any:
    """The language side of Mistral 3, which may be a Llama; of others the model itself."""
    return model.language_model if type(model) is mistral3.Model else model


def _linears(layer: Any) -> Iterator[Any]:
    for part in (layer.self_attn, layer.mlp):
        yield from (module for name, module in part.items() if name.endswith("_proj"))
