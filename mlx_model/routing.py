"""The experts that each token goes to in a mixture of experts: noted as a model is served, replayed as it learns.

A router that is computed twice, by other kernels or in another data type, chooses other experts where two of them score
alike, and log-probabilities of sampler and trainer differ by far more than rounding. Rollout routing replay (R3, Ma et
al., arXiv 2510.11370, section 4) lets the trainer compute with the experts I that the sampler chose, weighted by its
own router's scores s: g_i = exp(s_i) / sum_{j in I} exp(s_j) for i in I, and 0 for all others. So gradients still reach
the router. Here the scores of experts outside of I become -inf before the model's own softmax and choice, which is the
same formula where a model's weights are normalised over the chosen experts, and no part of its forward is repeated.
`Replay` tries whether that is so for a model, and refuses it if not.

Routes are integers [B, L, W]: of each token the experts of all mixtures, one mixture after another in the order of the
layers. As bytes they are uint8 for fewer than 256 experts, else little-endian uint16; a token whose bytes are all 0xff
is routed by the model itself.

Shape suffixes: B rows, L positions, W experts of a token in all mixtures, K those of one mixture, E experts of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from shared.errors import UnsupportedModelError

UNKNOWN = 0xFF  # each byte of a token that no experts are known of
_ROUTERS = ("gate", "router")  # what mlx-lm's blocks call the linear that scores experts
_TRIAL = [[1, 2, 3], [3, 1, 0]]  # token ids
_CLOSE = 1e-3  # of the largest logit


@dataclass
class Routing:
    """The experts that the mixture under way has chosen, before it sorts its tokens by them."""

    indices: mx.array | None = None  # [B, L, K], or [B * L, K]


def follow_routing(experts: Any) -> Routing:
    """Let a SwitchGLU or SwitchMLP note the experts that it is called with: this instance gets a class of its own."""
    if not hasattr(experts, "routing"):
        plain: Any = type(experts)

        def noting(self: Any, x: mx.array, indices: mx.array) -> mx.array:
            self.routing.indices = indices
            y: mx.array = plain.__call__(self, x, indices)
            return y

        experts.routing = Routing()
        methods = {"__call__": noting, "__module__": plain.__module__}
        experts.__class__ = type(f"Noting{plain.__name__}", (plain,), methods)
    routing: Routing = experts.routing
    return routing


class NotedRoutes:
    """Takes the routes of each forward of a model."""

    def __init__(self, model: Any) -> None:
        """UnsupportedModelError for a model whose experts cannot be told by token."""
        mixtures = _mixtures(model)
        self._followed = [follow_routing(experts) for _, experts in mixtures]
        self.dtype = dtype_of(model)
        try:
            if mixtures:
                model(mx.array(_TRIAL))
                self.counts = tuple(self._of(each, 2, 3).shape[-1] for each in self._followed)
        except Exception as error:
            raise UnsupportedModelError(f"{_family(model)} has no list of experts for each token: {error}") from error
        if not mixtures:
            raise UnsupportedModelError("this model is no mixture of experts")

    def take(self, rows: int, length: int) -> mx.array:
        """Routes [B, L, W] of the forward before, once."""
        routes = [self._of(each, rows, length) for each in self._followed]
        self.drop()
        return mx.concatenate(routes, axis=-1).astype(self.dtype)

    def drop(self) -> None:
        """Hold no array of the forward before: its graph would stay with it."""
        for each in self._followed:
            each.indices = None

    @staticmethod
    def _of(routing: Routing, rows: int, length: int) -> mx.array:
        indices = routing.indices
        if indices is None or indices.size % (rows * length):
            raise ValueError("a mixture was not called, or not with one list of experts for each token")
        return indices.reshape(rows, length, -1)


class Replay:
    """Lets a model compute with given routes in place of its router's choice."""

    def __init__(self, model: Any) -> None:
        """UnsupportedModelError for a model whose router's choice cannot be replayed; its modules are shared then."""
        self._routes_BLW: mx.array | None = None
        self.dtype = np.dtype(np.uint8) if dtype_of(model) == mx.uint8 else np.dtype("<u2")
        noted = NotedRoutes(model)
        self.width = sum(noted.counts)
        start = 0
        for (block, experts), count in zip(_mixtures(model), noted.counts, strict=True):
            self._place(block, _experts_in(experts), start, count)
            start += count
        self._try(model, noted)
        for module in (model, *model.layers):
            module.routes_replay = self

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's routes."""
        return self.width * self.dtype.itemsize

    def read(self, routes_BLN: npt.NDArray[np.uint8]) -> mx.array:
        """Routes [B, L, W] of the bytes of each token, int32; -1 where they are unknown."""
        if routes_BLN.shape[-1] != self.token_bytes:
            raise ValueError(
                f"samples name their experts in {routes_BLN.shape[-1]} bytes a token, and this model in "
                f"{self.token_bytes}: they are of another model"
            )
        is_known_BL1 = (routes_BLN != UNKNOWN).any(axis=-1, keepdims=True)
        numbers_BLW = np.ascontiguousarray(routes_BLN).view(self.dtype).astype(np.int32)
        return mx.array(np.where(is_known_BL1, numbers_BLW, -1))

    @contextmanager
    def of(self, routes_BLW: mx.array | None) -> Iterator[None]:
        """One forward of positions [B, L] with these routes; None: with the model's own."""
        before, self._routes_BLW = self._routes_BLW, routes_BLW
        try:
            yield
        finally:
            self._routes_BLW = before

    def held(self) -> Callable[[], AbstractContextManager[None]]:
        """The routes that a layer computes with now, for when it computes the same again in the backward pass."""
        routes_BLW = self._routes_BLW
        return lambda: self.of(routes_BLW)

    def _place(self, block: Any, experts: int, start: int, count: int) -> None:
        """Let the router of a mixture score no experts but the given ones."""
        name = next((name for name in _ROUTERS if callable(block.get(name))), None)
        if name is None:
            raise UnsupportedModelError(f"{_family(block)} has no router of its own, so its choice cannot be replayed")
        router = block[name]
        plain: Any = type(router)

        def scored(module: Any, *args: Any, **kwargs: Any) -> Any:
            scores = plain.__call__(module, *args, **kwargs)
            routes_BLW = self._routes_BLW
            if routes_BLW is None:
                return scores
            if not isinstance(scores, mx.array) or scores.shape[-1] != experts:
                raise UnsupportedModelError(f"{_family(block)} chooses experts in its router: it cannot be replayed")
            routes_NK = routes_BLW[..., start : start + count].reshape(*scores.shape[:-1], count)
            is_open = mx.zeros(scores.shape, mx.bool_)
            is_open = mx.put_along_axis(is_open, mx.maximum(routes_NK, 0), mx.array(True), axis=-1)
            return mx.where(is_open | (routes_NK[..., :1] < 0), scores, -mx.inf)

        router.__class__ = type(f"Replaying{plain.__name__}", (plain,), {"__call__": scored})

    def _try(self, model: Any, noted: NotedRoutes) -> None:
        """UnsupportedModelError unless replaying the model's own choice changes nothing, and another one is taken."""
        tokens_BL = mx.array(_TRIAL)
        plain = model(tokens_BL).astype(mx.float32)
        own_BLW = noted.take(*tokens_BL.shape).astype(mx.int32)
        with self.of(own_BLW):
            again = model(tokens_BL).astype(mx.float32)
        close = mx.max(mx.abs(again - plain)) <= _CLOSE * mx.max(mx.abs(plain))
        other_BLW = own_BLW[::-1]
        with self.of(other_BLW):
            mx.eval(model(tokens_BL))
        taken_BLW = noted.take(*tokens_BL.shape).astype(mx.int32)
        ends = np.cumsum(noted.counts)[:-1].tolist()
        same = all(
            mx.array_equal(mx.sort(one, axis=-1), mx.sort(other, axis=-1)).item()
            for one, other in zip(mx.split(taken_BLW, ends, axis=-1), mx.split(other_BLW, ends, axis=-1), strict=True)
        )
        if not (close.item() and same):
            raise UnsupportedModelError(
                f"{_family(model)} weights or chooses its experts in a way that replaying does not reproduce"
            )


def dtype_of(model: Any) -> mx.Dtype:
    """The data type of a model's routes."""
    most = max((_experts_in(experts) for _, experts in _mixtures(model)), default=0)
    return mx.uint8 if most <= UNKNOWN else mx.uint16


def _experts_in(experts: Any) -> int:
    linears = (getattr(linear, "linear", linear) for linear in experts.children().values())  # without their adapters
    return max(getattr(linear, "num_experts", 0) for linear in linears)


def _mixtures(model: Any) -> Sequence[tuple[Any, Any]]:
    """Blocks and their experts, in the order of the layers."""
    found = [
        (path, block, child)
        for path, block in model.named_modules()
        for child in block.values()
        if isinstance(child, SwitchGLU | SwitchMLP)
    ]
    found.sort(
        key=lambda each: [(part.isdigit(), int(part) if part.isdigit() else part) for part in each[0].split(".")]
    )
    return [(block, experts) for _, block, experts in found]


def _family(module: Any) -> str:
    return "mlx-lm's " + type(module).__module__.rpartition(".")[2]
