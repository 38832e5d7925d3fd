"""When a row's KV goes into the prefix cache: its prompt's, and that of what it has written.

Where all layers can be cut, a prompt is stored after its first token, and a burst's prompts over some steps: the copy
of 128 prompts' KV held the loop of a GPU for 88 ms. So between two decode steps about as many bytes are copied as the
engine's configuration says, and one row at least. A row that ends before its turn has no KV any more, and its prompt is
not kept. Other layers' states are stored when a prompt's forward ends at a stop (prefixes/snapshots.py), as they are
there.

A finished row is stored with its answer where a next turn may begin with both; a row that is set aside, as far as it
has come.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from worker.engine.batch.row import Row
from worker.engine.prefixes.prefix_cache import PrefixCache, Prompt
from worker.engine.prefixes.slabs import KvRows

log = logging.getLogger(__name__)

RowsKv = Callable[[list[Row]], KvRows]  # where rows lie in a batch


class Keeping:
    """Stores rows' KV in the prefix cache. Rows whose prompts are still to be stored are in order of first tokens."""

    def __init__(self, prefixes: PrefixCache, kv_bytes: Callable[[int], int], bytes_at_once: int) -> None:
        """`kv_bytes`: of a row of so many ids."""
        self._prefixes = prefixes
        self._kv_bytes = kv_bytes
        self._bytes_at_once = bytes_at_once
        self._rows: deque[Row] = deque()

    def prompts(self, started: Iterable[Row], kv: RowsKv) -> None:
        """After these have got their first tokens: store some prompts."""
        if self._prefixes.needs_snapshots:
            return
        self._rows.extend(started)
        rows: list[Row] = []
        left = self._bytes_at_once
        while self._rows and left > 0:
            row = self._rows.popleft()
            left -= self._kv_bytes(len(row.spec.prompt_ids))
            rows.append(row)
        self._store(rows, [row.prompt[:-1] for row in rows], kv, whole=True)

    def prompt(self, row: Row, length: int, kv: RowsKv) -> None:
        """A prompt that was fed alone, so many ids of it."""
        if not self._prefixes.needs_snapshots:
            self._store([row], [row.prompt[:length]], kv, whole=True)

    def at_stops(self, rows: list[Row], lengths: list[int], kv: RowsKv) -> None:
        """Rows whose prompts have been fed up to a stop, which is so many ids."""
        pairs = self._within_bytes(rows, lengths, self._state_bytes)
        self._store([row for row, _ in pairs], [row.context[:length] for row, length in pairs], kv, at_end=True)

    def twin(self) -> Keeping:
        """A `Keeping` with the same cache for the rows of another batch."""
        return Keeping(self._prefixes, self._kv_bytes, self._bytes_at_once)

    def answers(self, rows: list[Row], unfed: int, kv: RowsKv, undrawn: int = 0) -> None:
        """Rows that have finished; the KV of their last `unfed` tokens is not there.

        `undrawn`: of what they have been fed, so many draws are still to come.
        """
        kept = [row for row in rows if row.may_go_on and self._ends_with(row, unfed + undrawn)]
        lengths = [len(row.context) - unfed for row in kept]
        pairs = self._within_bytes(kept, lengths, lambda length: self._state_bytes(length) + self._kv_bytes(length))
        try:
            self._store([row for row, _ in pairs], [row.context[:length] for row, length in pairs], kv, at_end=True)
        except Exception:  # the answers are published by now, and others decode on
            log.exception("engine.answers_not_kept rows=%d", len(pairs))

    def set_aside(self, rows: list[Row], unfed: int, kv: RowsKv) -> None:
        """Store rows that continue later, here or in a worker that fetches their KV."""
        left = self._prefixes.limit_bytes
        for row in rows:
            left -= self._kv_bytes(len(row.context))
            if left > 0:  # else it would drive out what was kept just now
                self._store([row], [row.context[: len(row.context) - unfed]], kv, at_end=True)

    def _ends_with(self, row: Row, unfed: int) -> bool:
        """True if states have read no more than is stored; a stop string may end a row within a draft they read."""
        return not self._prefixes.needs_snapshots or row.position - 1 == len(row.tokens) - unfed

    def _within_bytes(
        self, rows: list[Row], lengths: list[int], bytes_of: Callable[[int], int]
    ) -> list[tuple[Row, int]]:
        """As many as may be copied at once, at least one."""
        pairs, total, widest = list[tuple[Row, int]](), 0, 0
        for row, length in zip(rows, lengths, strict=True):
            nbytes = bytes_of(length)
            padded = len(pairs) * max(widest, nbytes)  # states of several rows are as wide as the widest
            if (padded if self._prefixes.needs_snapshots else total) < self._bytes_at_once:
                pairs.append((row, length))
                total, widest = total + nbytes, max(widest, nbytes)
        return pairs

    def _state_bytes(self, length: int) -> int:
        """Bytes that are stored of a row in addition to blocks."""
        known = self._prefixes.state_bytes
        return known if self._prefixes.has_blocks else max(known, self._kv_bytes(length))

    def remove(self, rows: Iterable[Row]) -> None:
        """They have left, or compute their context again."""
        if self._rows:
            gone = set(rows)
            self._rows = deque(row for row in self._rows if row not in gone)

    def _store(
        self, rows: list[Row], ids: list[Sequence[int]], kv: RowsKv, *, at_end: bool = False, whole: bool = False
    ) -> None:
        """Store rows that may be cached and whose KV one version computed; mixed KV is never hit.

        `whole`: store prompts to their end.
        """
        pairs = [
            (row, prompt)
            for row, beginning in zip(rows, ids, strict=True)
            for version in row.kv_versions
            if row.spec.cache
            and len(row.kv_versions) == 1
            and self._prefixes.lacks(
                prompt := Prompt(beginning, version, row.spec.tenant if whole else None), at_end=at_end
            )
        ]
        if pairs:
            self._prefixes.store([prompt for _, prompt in pairs], kv([row for row, _ in pairs]), at_end=at_end)
