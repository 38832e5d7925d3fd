"""The model as the running batch sees it: knows the rows of every forward.

The last element of `cache` is the batch's `RowTag`; the model itself gets the rest. What the sampler needs of the
latest one-token forward is left here: rows, the versions they computed with, input ids and raw logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_model.collectives.ranks import Ranks
from mlx_model.heads.head import Head, Heads
from mlx_model.kv import places
from mlx_model.kv.cuda import few_shapes
from mlx_model.kv.layout import KvLayout
from mlx_model.networks.network import Network
from mlx_model.pooling import hidden_states
from mlx_model.routing import NotedRoutes
from mlx_model.step.decode_step import DecodeStep, decode_step_of
from mlx_model.step.split_step import SplitStep
from mlx_model.tuned import ModelTuning
from mlx_model.vision.features import ImageFeatures, embeddings, with_images
from mlx_model.vision.language import row_positions_of
from shared.errors import UnsupportedModelError
from shared.sequences import SequenceSpec
from worker.engine.batch.adapters import Adapters, NoAdapters
from worker.engine.batch.row import Row, RowTag


class RowModel:
    """Wraps a loaded mlx-lm model."""

    def __init__(
        self,
        model: Any,
        adapters: Adapters | None,
        kv: KvLayout,
        heads: Heads = MappingProxyType({}),
        ranks: Ranks | None = None,
        *,
        quick: bool = True,
        tuning: ModelTuning | None = None,
    ) -> None:
        """`heads`: of the model itself; `ranks`: that hold the model together. `quick`: False until `quicken`."""
        self.model, self.tuning = model, tuning
        self._kv = kv
        self._heads = heads
        self._ranks = ranks
        self.adapters: Adapters = adapters or NoAdapters()
        self._row_positions = row_positions_of(model)
        self.is_apart = kv.apart is not None  # each row's bits depend on the row alone
        self._decode_step = decode_step_of(model, tuning) if quick and not self.is_apart else None
        self._is_quick = quick
        self._twins: list[RowModel] = []
        self._shift_B: mx.array | None = None  # of the positions of these rows, after their prompts
        self.rows: tuple[Row, ...] = ()
        self.versions: tuple[str, ...] = ()
        self.tokens_B1: mx.array | None = None
        self.logits_B1V: mx.array | None = None
        self._routes: NotedRoutes | None = None  # of a model whose experts a row has asked for
        self._notes_routes = False  # a row of this forward asks for them
        self._routes_BW: mx.array | None = None  # of the latest one-token forward

    def new_kv(self) -> list[Any]:
        """Empty KV of one row, one cache per layer."""
        return self._kv.new(self.model)

    def hidden(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        """Hidden states [B, L, H] after the last norm; only of models that have them (`check`)."""
        assert self._hidden is not None, "a model without hidden states"
        self._enter(cache[-1])
        if self.is_apart:
            return self._in_places(self._hidden, tokens_BL, cache).reshape(*tokens_BL.shape, -1)
        with self._moved(), few_shapes.applied():
            hidden_BLH: mx.array = self._hidden(tokens_BL, cache=cache[:-1])
        return hidden_BLH

    def head(self, row: Row) -> Head:
        """The head that a row asks for: its adapter version's, else the model's; UnsupportedModelError for neither."""
        head = {**self._heads, **self.adapters.heads(row)}.get(row.spec.head)
        if head is None:
            owner = self.adapters.version(row) or "this model"
            raise UnsupportedModelError(f"{owner} has no head {row.spec.head!r}", param="head")
        return head

    def network(self, row: Row) -> Network:
        """The network that a row asks for; UnsupportedModelError when its version is none."""
        network = self.adapters.network(row)
        if network is None:
            raise UnsupportedModelError(f"{self.adapters.version(row) or 'this model'} is no network", param="model")
        return network

    def check(self, spec: SequenceSpec) -> None:
        """UnsupportedModelError for a sequence that needs hidden states, where the model shows none."""
        if self.is_apart and (spec.kind == "network" or spec.sampling.return_routed_experts):
            what = "computes no networks" if spec.kind == "network" else "reports no experts"
            raise UnsupportedModelError(f"a worker with --batch-invariant {what}", param="model")
        if spec.kind in ("embed", "head") and self._hidden is None:
            raise UnsupportedModelError("this model shows no hidden states: no embeddings, no heads", param="model")
        if spec.sampling.return_routed_experts and self._routes is None:
            self._routes = self._noted_routes()

    def _noted_routes(self) -> NotedRoutes:
        if self.stages > 1:
            raise UnsupportedModelError(
                "a worker whose ranks hold layers one after another reports no experts", param="return_routed_experts"
            )
        self.adapters.select(())  # a trial has rows of the base; each forward selects its own
        return NotedRoutes(self.model)

    def take_routes(self) -> mx.array | None:
        """Experts [B, W] of the latest one-token forward, once; None where no row asks for them."""
        routes_BW, self._routes_BW = self._routes_BW, None
        return routes_BW

    @property
    def stages(self) -> int:
        """That compute one after another, and could do so for several batches at a time."""
        return self._ranks.size if self._ranks is not None and self._ranks.overlaps else 1

    def twin(self) -> RowModel:
        """The same model for another batch."""
        quick, tuning = self._is_quick, self.tuning
        twin = RowModel(self.model, self.adapters, self._kv, self._heads, self._ranks, quick=quick, tuning=tuning)
        self._twins.append(twin)
        return twin

    def quicken(self) -> None:
        """Let steps have the forward that is made for them, whose kernels are compiled and tried by this."""
        self.adapters.select(())  # a trial has rows of the base; each forward selects its own
        self._decode_step = None if self.is_apart else decode_step_of(self.model, self.tuning)
        self._is_quick = True
        for twin in self._twins:
            twin.quicken()

    def keep(self, keep: list[int], rows: tuple[Row, ...]) -> None:
        """Keep the latest forward's logits for the rows at the indices `keep`, which are still to be drawn."""
        assert self.logits_B1V is not None and self.tokens_B1 is not None, "a one-token forward"
        index = mx.array(keep)
        self.logits_B1V, self.tokens_B1 = self.logits_B1V[index], self.tokens_B1[index]
        self.rows, self.versions = rows, tuple(self.versions[at] for at in keep)
        self._place()

    @property
    def is_divided(self) -> bool:
        """True if several ranks compute together, none of which may decide anything by its own clock."""
        return self._ranks is not None

    @property
    def same(self) -> Callable[[mx.array], mx.array] | None:
        """Makes drawn tokens those of the leading rank; None where there is one only."""
        return None if self._ranks is None else self._ranks.same

    @property
    def _hidden(self) -> Callable[..., mx.array] | None:
        return hidden_states(self.model)

    def _quick(self, caches: list[Any]) -> DecodeStep | SplitStep | None:
        """The decode step for these caches; not in place of another module that has been put in the model's."""
        quick = self._decode_step
        return quick if quick is not None and quick.model is self.model and quick.takes(caches) else None

    def draws_in_place(self, cache: list[Any]) -> bool:
        """True if a decode step writes KV in place, so that rows of different lengths cost nothing extra."""
        quick = self._quick(cache[:-1])
        return quick is not None and quick.may_be_in_place(cache[:-1], 1)

    def reads_beginnings(self) -> bool:
        """True if a decode step reads what rows begin with in as few operations as copies (kv/cuda/beginnings.py).

        False of several ranks: each tries the kernel by itself, and all must share the same beginnings.
        """
        step = self._decode_step
        return step is not None and step.reads_beginnings and not self._kv.packings and self._ranks is None

    def __call__(self, tokens_BL: mx.array, cache: list[Any], *, draws: bool = False, whole: bool = False) -> mx.array:
        """Logits [B, L, V], as the model rounds them.

        `draws`: the rows' next inputs, and drafts after them. The logits are asked for before anything else reads what
        this writes, so that it may be written in place (mlx_model/kv/cuda/place.py). `whole`: nothing of it is given
        out yet.
        """
        self._enter(cache[-1])
        # A prefill's logits are never computed, and must not be kept: they hold its whole graph.
        is_one_token = tokens_BL.shape[1] == 1
        quick = self._quick(cache[:-1]) if (is_one_token or draws) and not self._notes_routes else None
        with nullcontext() if is_one_token else few_shapes.applied():
            if quick is not None:
                forward = quick.adapted if any(self.versions) else quick
                logits_BLV = forward(tokens_BL, cache[:-1], in_place=draws, whole=whole)
            elif self.is_apart:
                logits_BLV = self._in_places(self.model, tokens_BL, cache).reshape(*tokens_BL.shape, -1)
            else:
                with self._moved():
                    logits_BLV = self.model(tokens_BL, cache=cache[:-1])
        self.tokens_B1 = tokens_BL if is_one_token else None
        self.logits_B1V = logits_BLV if is_one_token else None
        self._routes_BW = None
        if self._notes_routes and self._routes is not None:
            self._routes_BW = self._routes.take(*tokens_BL.shape)[:, 0] if is_one_token else None
            self._routes.drop()
        return logits_BLV

    def feed(self, ids_BL: list[list[int]], starts_B: Sequence[int], cache: list[Any]) -> mx.array:
        """Logits [B, L, V] in fp32 of pieces of the rows' contexts, each from its place on; ids of images are read as
        their features. With bf16 logits a trainer's log-probabilities would differ by up to 6e-2. Of rows that lie
        apart pieces may have any lengths, and logits are [1, N, V], row by row."""
        rows = cast(RowTag, cache[-1]).rows
        if self.is_apart:
            self._enter(cache[-1])
            self.tokens_B1 = self.logits_B1V = None
            return self._in_places(self.model, ids_BL, cache)[None].astype(mx.float32)
        if all(row.viewing is None for row in rows):
            return self(mx.array(ids_BL), cache=cache).astype(mx.float32)
        self._enter(cache[-1])
        tokens_BL = mx.array([[max(0, each) for each in ids] for ids in ids_BL])
        features_B = [None if row.viewing is None else row.viewing.features for row in rows]
        seen_BLH, deep = with_images(embeddings(self.model)(tokens_BL), ids_BL, starts_B, features_B)
        with self._spread(ids_BL, starts_B, features_B, deep), few_shapes.applied():
            logits_BLV: mx.array = self.model(tokens_BL, cache=cache[:-1], input_embeddings=seen_BLH).astype(mx.float32)
        self.tokens_B1 = self.logits_B1V = None
        return logits_BLV

    def _in_places(self, call: places.Forward, ids_BL: mx.array | list[list[int]], cache: Sequence[Any]) -> mx.array:
        """Output of `call` at each of the ids [N, ...], row by row, each computed whatever the others are."""
        rows = cast(RowTag, cache[-1]).rows
        if isinstance(ids_BL, mx.array):
            lengths, ids_N = [ids_BL.shape[1]] * ids_BL.shape[0], ids_BL.reshape(-1)
        else:
            lengths, ids_N = [len(ids) for ids in ids_BL], mx.array([each for ids in ids_BL for each in ids])
        return places.forward(
            call, ids_N, lengths, cache[:-1], lambda at: self.adapters.select(tuple([rows[row] for row in at]))
        )

    def _enter(self, tag: RowTag) -> None:
        """Compute with the adapters of these rows from now on."""
        versions = self.adapters.select(tag.rows)
        are_others = tag.rows is not self.rows
        if are_others or versions is not self.versions:
            for row, version in zip(tag.rows, versions, strict=True):
                row.kv_versions.add(version)
        self.rows, self.versions = tag.rows, versions
        if are_others:
            self._notes_routes = any(row.sampling.return_routed_experts for row in tag.rows)
            self._place()

    def _place(self) -> None:
        """Where our rows go on after their images."""
        if self._row_positions is not None:
            spots = [row.viewing and row.viewing.features and row.viewing.features.spots for row in self.rows]
            shifts = [each.shift if each else 0 for each in spots]
            self._shift_B = mx.array(shifts) if any(shifts) else None

    def _moved(self) -> AbstractContextManager[None]:
        """A forward of what comes after the prompts of rows with images."""
        return nullcontext() if self._row_positions is None else self._row_positions.moved(self._shift_B)

    def _spread(
        self,
        ids_BL: Sequence[Sequence[int]],
        starts_B: Sequence[int],
        features_B: Sequence[ImageFeatures | None],
        deep: Sequence[mx.array],
    ) -> AbstractContextManager[None]:
        """A forward of pieces of prompts, some of them with images."""
        if self._row_positions is None:
            return nullcontext()
        length = len(ids_BL[0])
        pieces = [
            np.tile(np.arange(start, start + length, dtype=np.int32), (3, 1))
            if features is None or features.spots is None
            else features.spots.piece(start, length)
            for start, features in zip(starts_B, features_B, strict=True)
        ]
        positions_3BL = np.stack(pieces, axis=1)
        if min(map(min, ids_BL)) < 0:
            return self._row_positions.spread(mx.array(positions_3BL), deep)
        return self._row_positions.moved(mx.array(positions_3BL[0, :, 0] - np.array(starts_B, np.int32)))
