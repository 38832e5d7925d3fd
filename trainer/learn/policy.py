"""The policy that learns: LoRA or DoRA layers on a second module tree over the base model's arrays.

Invariants.
- The base arrays are shared, never copied and never written: `Policy.base` and `Policy.model` hold the same buffers.
- Adapter parameters are fp32 whatever the base's dtype (bf16, 4 bits). The adapter's part is computed in fp32 and
  rounded, or, of a base in bfloat16 on a GPU, by products in bfloat16, as workers compute it (mlx_model/learning.py).
- The reference policy is what the run began with: the base tree, which is the same weights with the adapter off, or
  the model with the adapter `origin` (`--start-from`).
- Gradient checkpointing changes the class of *our* layer instances only; the generator's layers stay as they are.
"""

import copy
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlx_model.device import on_cpu
from mlx_model.kv import padded
from mlx_model.kv.kinds import can_share
from mlx_model.learning import Gradients, LearningLoRA, attach_divided
from mlx_model.routing import Replay
from mlx_model.sites import Whole
from shared.adapter_files.config import mlx_config
from shared.heads import VALUE, HeadSpec
from trainer.learn.adam import all_finite
from trainer.learn.logprobs import Learns, TokenScores, can_share_prompts, row_scores, shared_scores
from trainer.learn.options import AdapterShape
from trainer.learn.peers import Peers
from trainer.learn.picture_places import held
from trainer.learn.routes import replay_of
from trainer.rollouts.sight import Sight
from trainer.state import Arrays

_LINEARS = (nn.Linear, nn.QuantizedLinear, ShardedToAllLinear, QuantizedShardedToAllLinear)
_SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
LARGEST_ARRAY = (1 << 31) - 1  # numbers in one dimension
_LESS = 16  # by which a loss is scaled less when its gradient was not finite


class Policy:
    """The learning model over the frozen base. Belongs to one thread."""

    def __init__(
        self,
        model: Any,
        shape: AdapterShape | None,
        *,
        seed: int = 0,
        checkpoint_layers: bool = False,
        value: HeadSpec | None = None,
        sight: Sight | None = None,
        whole: Whole | None = None,
    ) -> None:
        """`shape`: None: the value head learns alone; `value`: options of a value head; None: there is none.

        `sight`: what it sees images with, None: it sees none. `whole`: what a model was that ranks divide, or each
        have, and which all have this policy then.
        """
        self.sight = sight
        self.shape = shape
        self.checkpoint_layers = checkpoint_layers
        self.base: Any = share_tree(model)
        self.base.freeze()
        self.base.eval()
        self.origin: Arrays | None = None  # the adapter that the run began with; None: the base
        self.model: Any = share_tree(model)
        self.model.freeze()
        self._copied: dict[str, mx.array] = {}  # what `_copy` is a copy of
        self._copy: Arrays = {}
        self._scale = math.inf  # of the latest loss
        self._is_half = any(array.dtype == mx.float16 for _, array in tree_flatten(self.base.parameters()))
        self.peers = Peers(whole)
        divided = None if whole is None or whole.by_data else whole
        self._ranks = None if divided is None else divided.ranks
        self._gradients: Gradients | None = None  # where ranks divide the model
        self.modules = [] if shape is None else self._attach(shape, divided)
        self.value: HeadNet | None = None
        if value is not None and "heads" in self.model:
            raise ValueError("this model has an attribute `heads` of its own, so it takes no value head")
        if value is not None:  # where the names of its tensors are those of the adapter's file
            self.value = HeadNet(value, start=0.0, seed=seed)
            self.model.heads = {VALUE: self.value}
        self._heads = {} if value is None else {VALUE: value}
        if checkpoint_layers:
            for layer in self.model.layers:
                checkpoint_instance(layer)
        self.model.train()
        self.load(_fresh(self.arrays(), seed))
        if whole is not None and whole.by_data:
            self.agree()  # each rank has computed DoRA's norms itself

    @property
    def learns(self) -> Learns:
        """Scores that have gradients where the loss has no entropy; among ranks all have, for a head may be divided."""
        return "logp" if self._ranks is None else "all"

    @property
    def scores(self) -> Callable[..., TokenScores]:
        """How log-probabilities are computed: each prompt once for all of its samples, or by rows.

        Ranks that divide a model try nothing. Prompts are read where they are on a CPU, where that was measured; on
        CUDA attention is MLX's fused one.
        """
        if self.checkpoint_layers or not can_share_prompts(self.base, tries=self._ranks is None):
            return row_scores
        if self._ranks is not None or not (on_cpu() or padded.is_right()):
            return shared_scores
        form = can_share(self.base, make_prompt_cache(self.base))
        return partial(shared_scores, reads=form if on_cpu() else "fused" if form == "keys" else None)

    def value_and_grad(self, loss: Callable[..., Any], terms: int, *inputs: Any) -> tuple[Any, Any]:
        """Value and gradient of `loss(model, *inputs)`, which is a mean over so many terms, or begins with one.

        A part of such a gradient is too small for a base that computes in float16. There the loss is multiplied by a
        power of two, and the gradient, which is fp32, divided by it (Micikevicius et al., arXiv 1710.03740, section
        3.2). Where a product is too large for float16 then, it is computed again with less, and the next ones begin
        with twice as much as that; ranks that divide a model compute once.
        """
        if not self._is_half:
            found: tuple[Any, Any] = nn.value_and_grad(self.model, loss)(self.model, *inputs)
            return found
        scale = min(2.0 ** round(math.log2(max(1, terms))), 2 * self._scale)
        while True:
            value, gradient = self._scaled(loss, scale, inputs)
            if scale <= 1 or self._ranks is not None or all_finite(gradient):
                self._scale = scale
                return value, gradient
            scale = max(1.0, scale / _LESS)

    def _scaled(self, loss: Callable[..., Any], scale: float, inputs: Sequence[Any]) -> tuple[Any, Any]:
        def scaled(*inputs: Any) -> Any:
            value = loss(*inputs)
            return (value[0] if isinstance(value, tuple) else value) * scale, value

        (_, value), gradient = nn.value_and_grad(self.model, scaled)(self.model, *inputs)
        return value, tree_map(lambda part: part / scale, gradient)

    def replay_routes(self) -> None:
        """Compute with the experts that samples name from now on; UnsupportedModelError where that cannot be."""
        for each in (self.base, self.model):
            Replay(each)

    def whole(self, gradient: Any) -> Any:
        """The gradient of a batch, which all ranks have computed a part of if there are several: summed over them."""
        if self._gradients is None:
            return self.peers.gradient(gradient)
        summed = self._gradients.whole(gradient)
        mx.eval(summed)  # in this order on all ranks, whatever is asked of it later
        return summed

    def nothing(self) -> Any:
        """The gradient of no sample."""
        return tree_map(mx.zeros_like, self.model.trainable_parameters())

    def same(self, *values: float) -> tuple[float, ...]:
        """Rank 0's values, where ranks divide the model: what they do together may not depend on one rank's clock."""
        if self._ranks is None:
            return values
        told: list[float] = np.array(self._ranks.same(mx.array(values, mx.float32))).tolist()
        return tuple(told)

    def agree(self) -> None:
        """Copy rank 0's parameters to all ranks after an update, since machines of different kinds round
        differently.
        """
        if self._ranks is not None:
            self.model.update(tree_map(self._ranks.same, self.model.trainable_parameters()))
            mx.eval(self.model.trainable_parameters())
        else:
            self.model.update(self.peers.same(self.model.trainable_parameters()))

    def digest(self) -> int:
        """A sum over the bits of all parameters, by which ranks see that they have the same ones."""
        sums = [value.view(mx.uint32).sum() for value in self.arrays().values()]
        return int(np.array(mx.stack(sums)).sum())

    def _attach(self, shape: AdapterShape, whole: Whole | None) -> list[str]:
        """Put adapter layers in place of the targeted linears; their paths."""
        chosen = _chosen(self.model, shape)
        if whole is not None:
            if shape.kind == "dora":
                raise ValueError("DoRA does not learn where ranks divide the model; use lora")
            self._gradients = attach_divided(self.model, whole, chosen, shape.rank, shape.scale)
        done = frozenset() if self._gradients is None else self._gradients.divided
        rest = [(path, _adapter_layer(path, each, shape)) for path, each in chosen.items() if path not in done]
        self.model.update_modules(tree_unflatten(rest))
        return list(chosen)

    def arrays(self) -> dict[str, mx.array]:
        """The adapter's parameters under mlx-lm's names."""
        return dict(tree_flatten(self.model.trainable_parameters()))

    def weights(self) -> Arrays:
        """A copy of the adapter as plain data, for other threads and for disk. Nothing can write to it: it is the
        same one until something has computed a gradient or changed the adapter.
        """
        arrays = self.arrays()
        if len(arrays) != len(self._copied) or any(
            value is not self._copied.get(name) for name, value in arrays.items()
        ):
            self._copied, self._copy = arrays, _on_host(arrays)
        return dict(self._copy)

    def load(self, weights: Mapping[str, mx.array | npt.NDArray[np.float32]]) -> None:
        """Replace the adapter; ValueError when names or shapes differ. Arrays of MLX are not copied."""
        mine = {name: value.shape for name, value in self.arrays().items()}
        given = {name: value.shape for name, value in weights.items()}
        if mine != given:
            wrong = sorted(name for name in mine.keys() | given.keys() if mine.get(name) != given.get(name))
            raise ValueError(f"the adapter does not fit this policy: {', '.join(wrong[:3])}")
        arrays = [(name, value if isinstance(value, mx.array) else mx.array(value)) for name, value in weights.items()]
        self.model.update(tree_unflatten(arrays))
        mx.eval(self.model.trainable_parameters())

    def config(self) -> bytes:
        """`adapter_config.json` of this adapter, as mlx-lm reads it."""
        if self.shape is None:
            return mlx_config("head", 0, 0.0, (), self._heads)
        return mlx_config(self.shape.kind, self.shape.rank, self.shape.scale, tuple(self.modules), self._heads)


def _on_host(arrays: Mapping[str, mx.array]) -> Arrays:
    """Copies that nothing can write to, in one transfer: CUDA takes as long for a small array as for a large one, and
    MLX moves what a host reads out of the GPU's memory.
    """
    sizes = [value.size for value in arrays.values()]
    if not 0 < sum(sizes) <= LARGEST_ARRAY:
        copies = {name: np.array(value) for name, value in arrays.items()}
    else:
        flat = np.array(mx.concatenate([value.reshape(-1) for value in arrays.values()]))
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        copies = {name: part.reshape(value.shape) for (name, value), part in zip(arrays.items(), parts, strict=True)}
    for each in copies.values():
        each.flags.writeable = False
    return copies


def share_tree(module: Any) -> Any:
    """A second module tree over the same arrays: modules are new, arrays are not.

    An adapter layer that wraps a linear or an embedding (the engine's, when the trainer is hosted in a worker) is left
    out: what it wraps takes its place.
    """
    return _share(module, {})


def checkpoint_instance(layer: Any) -> None:
    """Recompute this layer's activations in the backward pass, to save memory.

    mlx-lm's `grad_checkpoint` patches the layer's class, and with it the generator's layers; this one gives the
    instance a class of its own.
    """
    cls = type(layer)
    forward: Callable[..., Any] = cls.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        placed, replay = held(self), replay_of(self)
        replayed = nullcontext if replay is None else replay.held()

        def inner(parameters: Any, *inputs: Any) -> Any:
            self.update(parameters)
            with placed(), replayed():
                return forward(self, *inputs, **kwargs)

        return mx.checkpoint(inner)(self.trainable_parameters(), *args)

    layer.__class__ = type(f"Checkpointed{cls.__name__}", (cls,), {"__call__": call})


def _share(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        if id(value) not in seen:
            seen[id(value)] = _share_module(value, seen)
        return seen[id(value)]
    if isinstance(value, dict):
        return {key: _share(item, seen) for key, item in value.items()}
    if isinstance(value, list):
        return [_share(item, seen) for item in value]
    if isinstance(value, tuple):
        return tuple(_share(item, seen) for item in value)
    return value


def _share_module(module: Any, seen: dict[int, Any]) -> Any:
    for key in ("linear", "embedding"):
        if isinstance(module.get(key), _LINEARS + _SWITCHES + _EMBEDDINGS):
            return _share(module[key], seen)
    twin = copy.copy(module)
    twin._no_grad = set(module._no_grad)  # copy.copy shares it, and freezing one would freeze both
    for key, child in module.items():
        twin[key] = _share(child, seen)
    return twin


def _chosen(model: Any, shape: AdapterShape) -> dict[str, Any]:
    """The targeted linears, by path and in its order."""
    chosen = {
        path: module
        for path, module in model.named_modules()
        if "layers." in path and isinstance(module, _LINEARS + _SWITCHES) and _targeted(path, shape.targets)
    }
    if not chosen:
        raise ValueError(f"no linear layer matches {shape.targets or 'the model'}")
    return dict(sorted(chosen.items()))


def _fresh(arrays: Mapping[str, mx.array], seed: int) -> Arrays:
    """mlx-lm's starting values, drawn from the seed and the name alone: A uniform within 1 / sqrt(in), B zero."""
    weights = {name: np.array(value) for name, value in arrays.items()}
    for name, value in weights.items():
        if name.endswith(".lora_a"):
            rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
            inputs = value.shape[-1] if value.ndim == 3 else value.shape[0]
            weights[name] = (rng.uniform(-1, 1, value.shape) / math.sqrt(inputs)).astype(np.float32)
    return weights


def _targeted(path: str, targets: tuple[str, ...]) -> bool:
    return not targets or any(path == target or path.endswith(f".{target}") for target in targets)


def _adapter_layer(path: str, module: Any, shape: AdapterShape) -> Any:
    if isinstance(module, _SWITCHES):
        if shape.kind == "dora":
            raise ValueError(f"{path}: DoRA on a mixture of experts is not supported; use lora")
        return LoRASwitchLinear.from_base(module, r=shape.rank, scale=shape.scale)
    layer: Any = DoRALinear if shape.kind == "dora" else LearningLoRA
    return layer.from_base(module, r=shape.rank, scale=shape.scale)


class HeadNet(nn.Module):  # type: ignore[misc]
    """A head as it learns, which `mlx_model/heads/` serves: linear, or with a hidden layer of gelu.

    Its last layer begins with zeros, so its first outputs are `start`.
    """

    def __init__(self, spec: HeadSpec, *, start: float, seed: int) -> None:
        super().__init__()
        if spec.hidden:
            drawn = np.random.default_rng(seed).uniform(-1, 1, (spec.hidden, spec.inputs)) / np.sqrt(spec.inputs)
            self.hidden = nn.Linear(spec.inputs, spec.hidden)
            self.hidden.weight, self.hidden.bias = mx.array(drawn.astype(np.float32)), mx.zeros(spec.hidden)
        self.weight = mx.zeros((spec.outputs, spec.hidden or spec.inputs))
        self.bias = mx.full((spec.outputs,), start)

    def __call__(self, states: mx.array) -> mx.array:
        """Outputs [..., O] for hidden states [..., H] in fp32."""
        inputs = nn.gelu(self.hidden(states)) if "hidden" in self else states
        return inputs @ self.weight.T + self.bias
