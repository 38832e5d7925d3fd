"""The running batch: mlx-lm's `BatchGenerator`, unpatched and behind this file.

Its three hooks are the row tag (rows.py), the row model (row_model.py) and one shared sampler (sampler.py). It looks
one step ahead: when a token comes out, the forward after it is already under way.

Invariants. Limits, stop tokens and finish reasons are ours, so BatchGenerator never ends a row by itself. A row is in
`_rows` from insert to remove.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from worker.engine.kv_slabs import KvRows
from worker.engine.messages import EngineConfig
from worker.engine.row_model import RowModel
from worker.engine.rows import Row, RowTag
from worker.engine.sampler import RowSampler
from worker.engine.scheduler import feed_together

_NEVER = 1 << 60


class RunningBatch:
    """The rows that prefill and decode together."""

    def __init__(self, model: RowModel, config: EngineConfig) -> None:
        self._model = model
        sampler = RowSampler(model, config.top_candidates)
        self._generator = BatchGenerator(
            model,
            sampler=sampler,
            completion_batch_size=config.max_rows,
            prefill_batch_size=config.prefill_rows,
            prefill_step_size=config.prefill_chunk,
        )
        self._rows: dict[int, Row] = {}
        self._prefilling: dict[int, int] = {}  # prompt tokens that are still to be fed, in order of arrival
        self._prefill_rows = config.prefill_rows
        self.started: list[Row] = []  # got their first token in the latest step

    def __len__(self) -> int:
        return len(self._rows)

    def give_up(self) -> list[Row]:
        """After a failed forward: the rows, which hold nothing here any more. The batch is not to be used again."""
        rows = list(self._rows.values())
        for row in rows:
            row.uid = None
        self._rows.clear()
        self._generator.close()
        return rows

    @property
    def prefilling_rows(self) -> list[Row]:
        """Rows that have no first token yet."""
        return [self._rows[uid] for uid in self._prefilling]

    @property
    def prefilling(self) -> int:
        """Rows that have no first token yet."""
        return len(self._prefilling)

    @property
    def decoding(self) -> int:
        """Rows that get a token in every step."""
        return len(self._rows) - len(self._prefilling)

    @property
    def stream(self) -> Any:
        """The stream that the batch computes on."""
        return self._generator.stream

    def insert(self, rows: list[Row], tokens: list[int], kv: list[Any] | None = None) -> None:
        """Add rows that all feed `tokens` next; after `kv`, which is copied for each of them."""
        caches = [[*(self._model.new_kv() if kv is None else kv), RowTag((row,))] for row in rows]
        uids = self._generator.insert([list(tokens) for _ in rows], [_NEVER] * len(rows), caches=caches)
        for uid, row in zip(uids, rows, strict=True):
            row.uid = uid
            self._rows[uid] = row
        self._prefilling.update(dict.fromkeys(uids, len(tokens)))

    def remove(self, rows: Iterable[Row]) -> None:
        """Free these rows' places and KV."""
        inside = [row for row in rows if row.uid is not None]
        if inside:
            with mx.stream(self.stream):
                self._generator.remove([row.uid for row in inside])
        for row in inside:
            assert row.uid is not None
            del self._rows[row.uid]
            self._prefilling.pop(row.uid, None)
            row.uid = None

    def step(self, prefill_tokens: int) -> list[tuple[Row, int]]:
        """One decode step and one chunk of prompts, about `prefill_tokens` in all; each row's new token."""
        if self._prefilling:
            together = feed_together(self._prefilling.values(), prefill_tokens, self._prefill_rows)
            self._generator.prefill_batch_size = together.prompts
            self._generator.prefill_step_size = together.chunk
        prompts, responses = self._generator.next()
        rows = self._rows
        tokens = [(rows[response.uid], response.token) for response in responses]
        self.started = []
        if self._prefilling:
            for prompt in prompts:
                fed, length = prompt.progress
                self._prefilling[prompt.uid] = length - fed
            self.started = [rows[response.uid] for response in responses if response.uid in self._prefilling]
            for response in responses:
                self._prefilling.pop(response.uid, None)
        return tokens

    def kv_of(self, rows: list[Row]) -> KvRows:
        """The KV of rows that decode, as it lies in the batch."""
        batch = self._generator._generation_batch  # `extract_cache` would copy row by row
        places = {uid: place for place, uid in enumerate(batch.uids)}
        index = [places[row.uid] for row in rows]
        *caches, _ = batch.prompt_cache
        with mx.stream(self.stream):
            padding = caches[0].left_padding.tolist()
        return KvRows([(cache.keys, cache.values) for cache in caches], index, [padding[at] for at in index])
