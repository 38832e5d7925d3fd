"""The forward of a decode step, of few operations: for Llama, Qwen2 and Qwen3, whose layers are alike.

On a GPU a decode step takes as long as the host needs to make its operations and to give them out, the more so where
ranks divide a model: a second GPU shortens neither. mlx-lm's layer of Qwen3 is 51 operations, 31 of them views: it
flattens what a product is fed and undoes that behind it, transposes every weight, and moves the axis of heads over that
of the one position there is. Here all is [N, D], of N = rows x tokens a row, weights have been transposed once and for
all, heads are a reshape where a row has one token, and products of one input are joined: 24 operations are left, two
sums over ranks besides. On CUDA kernels of ours do several of them at once (model/cuda, ranks/cuda): 17, of a rank 15.
Where drafts are checked a row has several tokens, and a layer moves the axis of heads once. The numbers are those of
mlx-lm's forward (tests/engine/test_decode_step.py: bit by bit), but for the last bits where such kernels sum up in
another order or round less often.

What lies between the attention of one layer and that of the next, sums over ranks included, depends on the number of
rows and tokens alone. So it is compiled as one function, which all layers share, since weights are its arguments. MLX
then makes these operations without Python. KV and attention are called as in any forward, so each kind of KV is what it
was. MLX finds what it has compiled by comparing the shapes of all arguments in turn with those of each earlier call, so
what has other shapes comes first, and each number of tokens a row has functions of its own.

With adapters in a batch the same is done (`adapting.py`). Other families, and models that ranks hold layer by layer,
have mlx-lm's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from worker.engine.model.adapting import BEFORE, BEHIND, Adapting, Parts, adapted_parts
from worker.engine.model.cuda.rotary import Rotary
from worker.engine.model.joined import Joined, arrays_of, join
from worker.engine.model.product import Arrays, Product
from worker.engine.model.sites import EMBEDDINGS, LINEARS

_FAMILIES = (llama, qwen2, qwen3)
_INNER = (llama.LlamaModel, qwen2.Qwen2Model, qwen3.Qwen3Model)
_ROPES = (nn.RoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE)  # of mlx-lm's others one reads the positions on the host


@dataclass(frozen=True)
class Layer:
    """What a layer does, but for its arrays: layers that are equal in it share what is compiled."""

    heads: tuple[int, int, int]  # of q, k, v on this rank
    inputs: tuple[Product, ...]  # of q, k and v; one, where they are joined
    output: Product
    gate_up: tuple[Product, ...]
    down: Product
    eps: tuple[float, ...]  # of the norms: behind attention, behind the layer, of q and k
    rope: Any = field(compare=False)  # the same in all layers
    rotary: Rotary | None = field(compare=False)  # the same by a kernel, with the norms before it

    def before(
        self, arrays: Any, x_ND: mx.array, offset_B: mx.array, adapt: Adapting | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """q, k, v [B, heads, L, size] of the rows' tokens, of what the layer was fed, behind its norm."""
        products, norms = arrays
        ys = _outputs("inputs", self.inputs, products, x_ND, self.heads, _if_changed(adapt, "inputs"))
        if len(ys) == 1:
            return self._taken_apart(norms, ys[0], offset_B)
        rows = offset_B.shape[0]
        q, k, v = (_by_heads(y, rows, heads) for y, heads in zip(ys, self.heads, strict=True))
        if norms:
            q, k = (mx.fast.rms_norm(each, norm, self.eps[2]) for each, norm in zip((q, k), norms[-2:], strict=True))
        return self.rope(q, offset=offset_B), self.rope(k, offset=offset_B), v

    def _taken_apart(self, norms: Arrays, ys: mx.array, offset_B: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """q, k, v of [N, all heads * size]: q and k have their norm and their positions together.

        The norm is that of all heads as they lie, since a part of them would be copied first. It rounds before it is
        weighted, so weighting it by itself gives the same numbers.
        """
        if self.rotary is not None and self.rotary.takes(ys, norms, offset_B):
            return self.rotary(ys, self.heads, norms[1:], self.eps[-1], offset_B)
        qkv = _by_heads(ys, offset_B.shape[0], sum(self.heads))
        of_q, of_k, _ = self.heads
        qk = qkv[:, : of_q + of_k]
        if norms:
            qk = mx.fast.rms_norm(qkv, None, self.eps[2])[:, : of_q + of_k] * norms[0]
        q, k = mx.split(self.rope(qk, offset=offset_B), [of_q], axis=1)
        return q, k, qkv[:, of_q + of_k :]

    def behind(
        self, arrays: Any, h_ND: mx.array, attended: mx.array, adapt: Adapting | None = None
    ) -> tuple[mx.array, mx.array]:
        """The layer's output [N, D] and its norm, of what it was fed and what attention [B, heads, L, size] makes."""
        output, norm, gate_up, down, norm_behind = arrays
        if attended.shape[2] > 1:
            attended = attended.swapaxes(1, 2)
        h_ND, x_ND = self._added("output", self.output, output, attended.reshape(h_ND.shape[0], -1), h_ND, adapt, norm)
        own = _if_changed(adapt, "gate_up")
        if own is None and len(self.gate_up) == 1:
            x_NI = self.gate_up[0].gated(gate_up[0], x_ND)
        else:
            ys = _outputs("gate_up", self.gate_up, gate_up, x_ND, (1, 1), own)
            x_NI = swiglu(*(ys if len(ys) == 2 else mx.split(ys[0], 2, axis=-1)))
        return self._added("down", self.down, down, x_NI, h_ND, adapt, norm_behind)

    def _added(
        self,
        which: str,
        product: Product,
        arrays: Arrays,
        x_NI: mx.array,
        h_ND: mx.array,
        adapt: Adapting | None,
        norm: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """h and what a linear, with adapters, makes of x; and the norm of that."""
        eps, own = self.eps[which == "down"], _if_changed(adapt, which)
        y_ND = product.partial(arrays, x_NI)
        if own is not None:
            if not own.ends_with_sum(which):
                h_ND = h_ND + own(which, x_NI, [y_ND])[0]
                return h_ND, mx.fast.rms_norm(h_ND, norm, eps)
            y_ND = own.part(which, x_NI, y_ND)
        return product.added_and_normed(arrays, y_ND, h_ND, norm, eps)


def _by_heads(y_NO: mx.array, rows: int, heads: int) -> mx.array:
    """[B, heads, L, size]."""
    if y_NO.shape[0] == rows:
        return y_NO.reshape(rows, heads, 1, -1)
    return y_NO.reshape(rows, y_NO.shape[0] // rows, heads, -1).swapaxes(1, 2)


def _if_changed(adapt: Adapting | None, which: str) -> Adapting | None:
    return adapt if adapt is not None and adapt.changes(which) else None


def _outputs(
    which: str,
    products: Sequence[Product],
    arrays: Sequence[Arrays],
    x_NI: mx.array,
    widths: Sequence[int],
    adapt: Adapting | None,
) -> list[mx.array]:
    """Of linears that read x; of joined ones one output, unless adapters need them apart.

    `widths`: how theirs are to each other.
    """
    if adapt is None:
        return [product(each, x_NI) for product, each in zip(products, arrays, strict=True)]
    ys = [product.partial(each, x_NI) for product, each in zip(products, arrays, strict=True)]
    if len(ys) < len(widths):
        if (whole := adapt.joined(which, x_NI, ys[0])) is not None:
            return [whole]
        ends = list(accumulate(width * ys[0].shape[-1] // sum(widths) for width in widths))
        ys = list(mx.split(ys[0], ends[:-1], axis=-1))
    return adapt(which, x_NI, ys)


class _Functions(NamedTuple):
    """Of rows of the base with equally many tokens."""

    begin: Callable[..., Any]  # to the first attention
    steps: list[Callable[..., Any]]  # from one attention to the next
    end: Callable[..., Any]


class DecodeStep:
    """Of one model: its weights are as they are when this is made."""

    def __init__(self, model: Any, *, compiles: bool) -> None:
        """`compiles`: what lies between attention; on a CPU a compiler would run for seconds while rows wait."""
        self.model, inner, embedding = model, model.model, _bare(model.model.embed_tokens)
        self._compiled = mx.compile if compiles else lambda of: of
        self._scale = inner.layers[0].self_attn.scale
        norms = [layer.input_layernorm for layer in inner.layers[1:]]
        layers = [_layer(*each) for each in zip(inner.layers, [*norms, inner.norm], strict=True)]
        self._layers = [layer for layer, _, _ in layers]
        self._before = [arrays for _, arrays, _ in layers]
        self._behind = [arrays for _, _, arrays in layers]
        self._embedding = embedding
        self._head = embedding.as_linear if model.args.tie_word_embeddings else _called(_bare(model.lm_head))
        self._of_base: dict[int, _Functions] = {}  # by the tokens of a row
        self._parts: dict[Any, Callable[..., Any]] = {}  # by what they compute
        self._latest: dict[Any, tuple[Any, Callable[..., Any]]] = {}  # by tokens and place, of rows with adapters

    def takes(self, caches: Sequence[Any]) -> bool:
        """Whether these are caches of a batch, each with its rows' positions."""
        return len(caches) == len(self._layers) and all(isinstance(each.offset, mx.array) for each in caches)

    def __call__(self, tokens_BL: mx.array, caches: Sequence[Any]) -> mx.array:
        """Logits [B, L, V] of rows of the base."""
        (rows, count), mask = tokens_BL.shape, create_attention_mask(tokens_BL, caches[0])
        functions = self._of_base.get(count)
        if functions is None:
            functions = self._of_base[count] = self._made(count)
        h, q, k, v = functions.begin(tokens_BL, caches[0].offset, self._before[0])
        for at, cache in enumerate(caches):
            attended = self._attended(q, k, v, cache, mask)
            if at + 1 < len(caches):
                arrays = self._behind[at], self._before[at + 1]
                h, q, k, v = functions.steps[at](h, attended, caches[at + 1].offset, *arrays)
        logits_NV: mx.array = functions.end(h, attended, self._behind[-1])
        return logits_NV.reshape(rows, count, -1)

    def adapted(self, tokens_BL: mx.array, caches: Sequence[Any]) -> mx.array:
        """The same of rows with adapters, in the slots that are selected."""
        (rows, count), mask = tokens_BL.shape, create_attention_mask(tokens_BL, caches[0])
        inner = self.model.model
        before = [adapted_parts(layer, BEFORE) for layer in inner.layers]
        behind = [adapted_parts(layer, BEHIND) for layer in inner.layers]
        h = inner.embed_tokens(tokens_BL).reshape(rows * count, -1)
        x = inner.layers[0].input_layernorm(h)
        first = self._known(count, -1, (before[0].parts,), self._first)
        q, k, v = first(x, caches[0].offset, self._before[0], before[0].held)
        for at, cache in enumerate(caches):
            attended = self._attended(q, k, v, cache, mask)
            if at + 1 < len(caches):
                one, other = behind[at], before[at + 1]
                make = partial(self._step, self._layers[at], self._layers[at + 1])
                step = self._known(count, at, (one.parts, other.parts), make)
                arrays = self._behind[at], self._before[at + 1]
                held = (one.held, other.held) if one.parts or other.parts else ()  # or what rows of the base have
                h, q, k, v = step(h, attended, caches[at + 1].offset, *arrays, *held)
        last = self._known(count, len(caches), (behind[-1].parts,), self._last)
        x_BLD = last(h, attended, self._behind[-1], behind[-1].held).reshape(rows, count, -1)
        tied = self.model.args.tie_word_embeddings
        return cast(mx.array, inner.embed_tokens.as_linear(x_BLD) if tied else self.model.lm_head(x_BLD))

    def _attended(self, q: mx.array, k: mx.array, v: mx.array, cache: Any, mask: Any) -> mx.array:
        keys, values = cache.update_and_fetch(k, v)
        attended = scaled_dot_product_attention(q, keys, values, cache=cache, scale=self._scale, mask=mask)
        return cast(mx.array, attended)

    def _made(self, count: int) -> _Functions:
        """For rows of the base with so many tokens each."""
        first, last, norm = self._layers[0], self._layers[-1], self.model.model.layers[0].input_layernorm
        weight, eps = norm.weight, norm.eps

        def begin(tokens_BL: mx.array, offset_B: mx.array, arrays: Any) -> Any:
            h_ND = self._embedding(tokens_BL.reshape(-1))
            return h_ND, *first.before(arrays, mx.fast.rms_norm(h_ND, weight, eps), offset_B)

        def end(h_ND: mx.array, attended: mx.array, arrays: Any) -> mx.array:
            return self._head(last.behind(arrays, h_ND, attended)[1])

        pairs = zip(self._layers, self._layers[1:], strict=False)
        steps = [self._step(one, other, count) for one, other in pairs]
        return _Functions(self._compiled(begin), steps, self._compiled(end))

    def _step(
        self, one: Layer, other: Layer, count: int, of_one: Parts = (), of_other: Parts = ()
    ) -> Callable[..., Any]:
        """From the attention of a layer to that of the next, with what adapters change in them."""

        def between(
            h_ND: mx.array, attended: mx.array, offset_B: mx.array, behind: Any, before: Any, *held: Any
        ) -> Any:
            held_one, held_other = held or ((), ())
            h_ND, x_ND = one.behind(behind, h_ND, attended, Adapting.of(of_one, held_one))
            return h_ND, *other.before(before, x_ND, offset_B, Adapting.of(of_other, held_other))

        return self._once((one, other, count, of_one, of_other), between)

    def _first(self, count: int, parts: Parts) -> Callable[..., Any]:
        """To the first attention."""
        layer = self._layers[0]

        def before(x_ND: mx.array, offset_B: mx.array, arrays: Any, held: Any) -> Any:
            return layer.before(arrays, x_ND, offset_B, Adapting.of(parts, held))

        return self._once((None, layer, count, parts), before)

    def _last(self, count: int, parts: Parts) -> Callable[..., Any]:
        """From the last attention to the last norm."""
        layer = self._layers[-1]

        def behind(h_ND: mx.array, attended: mx.array, arrays: Any, held: Any) -> Any:
            return layer.behind(arrays, h_ND, attended, Adapting.of(parts, held))[1]

        return self._once((layer, None, count, parts), behind)

    def _known(self, count: int, place: int, parts: tuple[Parts, ...], make: Callable[..., Any]) -> Callable[..., Any]:
        """As in the step before, if the same is adapted: to find it by what it computes takes too long."""
        before, step = self._latest.get((count, place), ((), None))
        if step is None or before != parts:
            step = make(count, *parts)
        self._latest[count, place] = parts, step  # also if they are equal: the same ones are compared sooner
        return step

    def _once(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """It compiled, the first time that it is asked for."""
        if key not in self._parts:
            self._parts[key] = self._compiled(function)
        return self._parts[key]


def decode_step_of(model: Any) -> DecodeStep | None:
    """For a model that is known here."""
    return DecodeStep(model, compiles=mx.default_device() != mx.Device(mx.cpu)) if _is_known(model) else None


def join_products(model: Any) -> None:
    """Let q, k, v and gate, up be one product each, in a process that holds a whole model."""
    if not _is_known(model):
        return
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        join([attention.q_proj, attention.k_proj, attention.v_proj])
        join([mlp.gate_proj, mlp.up_proj])
        mx.clear_cache()  # of the parts, or all of them would be there twice


def _is_known(model: Any) -> bool:
    """Whether all of it is what mlx-lm makes, sharded or with our adapters."""
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
        and all(isinstance(_bare(linear), LINEARS) for linear in linears)
        and isinstance(_bare(model.model.embed_tokens), EMBEDDINGS)
    )


def _linears(layer: Any) -> Iterator[Any]:
    for part in (layer.self_attn, layer.mlp):
        yield from (module for name, module in part.items() if name.endswith("_proj"))


def _layer(layer: Any, norm_behind: Any) -> tuple[Layer, Any, Any]:
    """What it does, and its arrays before and behind attention. `norm_behind`: of the next layer, or the last one."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs, of_inputs = _products([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, of_gate_up = _products([mlp.gate_proj, mlp.up_proj])
    output, of_output = Product.of(_bare(attention.o_proj))
    down, of_down = Product.of(_bare(mlp.down_proj))
    norms = [attention.q_norm, attention.k_norm] if "q_norm" in attention else []
    norm = layer.post_attention_layernorm
    heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
    eps = tuple(each.eps for each in (norm, norm_behind, *norms[:1]))
    size = _bare(attention.q_proj)["weight"].shape[0] // attention.n_heads
    how = Layer(heads, inputs, output, gate_up, down, eps, attention.rope, Rotary.of(attention.rope, size))
    weights = tuple(each.weight for each in norms)
    if norms and len(inputs) == 1:
        weights = (_of_heads(weights, heads), *weights)
    mx.eval([attention.rope[name] for name in arrays_of(attention.rope)])
    return how, (of_inputs, weights), (of_output, norm.weight, of_gate_up, of_down, norm_behind.weight)


def _of_heads(weights: Arrays, heads: Sequence[int]) -> mx.array:
    """Weights [size] of the norms of q and k, for each of their heads [q and k heads, 1, size]."""
    parts = [mx.broadcast_to(each, (count, 1, each.size)) for each, count in zip(weights, heads, strict=False)]
    whole = mx.concatenate(parts)
    mx.eval(whole)
    return whole


def _products(parts: Sequence[Any]) -> tuple[tuple[Product, ...], tuple[Arrays, ...]]:
    """Of linears that read the same input."""
    bare = [_bare(part) for part in parts]
    joined: Joined | None = getattr(bare[0], "joined", None)
    whole = bare if joined is None else [joined.product]
    hows, arrays = zip(*(Product.of(each) for each in whole), strict=True)
    return hows, arrays


def _bare(module: Any) -> Any:
    """The model's own, which our adapters may have been put around."""
    return getattr(module, "bare", module)


def _called(linear: Any) -> Callable[[mx.array], mx.array]:
    how, arrays = Product.of(linear)
    return lambda x_NI: how(arrays, x_NI)
