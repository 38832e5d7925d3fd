"""Which rows of a batch store the beginning of their KV once, and whether the batch does so at all.

Rows whose prompts are equal, or begin alike, and were computed with one version may share what is equal. A step then
reads it once, in more operations. So a batch changes to this form and back when rows join: where it is asked for, where
nothing else fits the memory (`is_needed`), or where it spares enough positions for the step to be no slower.

Invariants. A row's beginning is set when it joins and stays until the batch changes its form. While memory needs the
form, each row's beginning is its whole prompt but for the last id: as admission counts (scheduler.Reserved). Decisions
depend on rows only, so all ranks take the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_model.config import SharePrompts
from mlx_model.device import on_cpu, on_cuda
from mlx_model.kv.kinds import shared, whole
from worker.engine.batch.prompt_group import PromptGroup
from worker.engine.batch.row import Row

# Bytes of KV in a layer that a step must spare for each beginning, or it takes longer than over copies. On a CPU
# (2 cores, fp32) a product of its own takes as long as 256 KB of copies. On an H200, of 8 heads of 128 in bfloat16, 32
# rows over 8,192 positions spare 1.1 GB and take 0.8 of the time, over 2,048 they spare 0.27 GB and take twice as long.
LEAST_ON_CPU, LEAST_ON_CUDA = 512 << 10, 800 << 20
STAYS = 2  # times as much that a batch must spare to take the form than to stay in it: to change copies all KV
LIKE = 4  # a hit of all but a quarter of a prompt is no reason to let the rest be a row's own


@dataclass(frozen=True, eq=False)
class Beginning:
    """Ids that rows begin with, computed with one version."""

    ids: Sequence[int]
    version: str | None  # None: with several, so that no other row has the same

    def begins(self, ids: Sequence[int]) -> bool:
        """True if these ids begin with it."""
        count = len(self.ids)
        return count <= len(ids) and self.ids[-1] == ids[count - 1] and self.ids == ids[:count]


@dataclass(frozen=True)
class Sizes:
    """Positions of a batch's KV in both forms."""

    copied: int
    beginnings: int
    own: int
    count: int  # beginnings
    most: int  # rows of one beginning

    @classmethod
    def of(cls, rows: Collection[Row], beginnings: Sequence[tuple[Any, int]]) -> Sizes:
        """`beginnings` of these rows, as key and positions."""
        ends = [len(row.prompt) + row.position for row in rows]
        each = dict(beginnings)
        own = max(end - length for end, (_, length) in zip(ends, beginnings, strict=True))
        most = max(Counter(key for key, _ in beginnings).values())
        return cls(len(ends) * max(ends), sum(each.values()), len(ends) * own, len(each), most)

    @property
    def spared(self) -> int:
        """Positions that beginnings spare."""
        return self.copied - self.beginnings - self.own


class SharedPrompts:
    """For one batch. `layer_bytes` of a position in one layer."""

    def __init__(self, when: SharePrompts, layer_bytes: int = 0) -> None:
        self.when = when
        least = LEAST_ON_CPU if on_cpu() else LEAST_ON_CUDA if on_cuda() else None  # None: nobody has measured it
        self._least = None if least is None else -(-least // max(1, layer_bytes))
        self.is_needed = False  # copies of all rows do not fit the memory
        self._all_whole = False  # each beginning is its row's prompt
        self._of: dict[Row, Beginning | None] = {}  # while beginnings lie apart

    def spared(self, rows: Collection[Row]) -> int:
        """Positions that are not stored because beginnings are shared."""
        if not self._of or not rows:
            return 0
        each = [(row, 0) if (of := self._of[row]) is None else (of, len(of.ids)) for row in rows]
        return max(0, Sizes.of(rows, each).spared)

    def pays(self, rows: Collection[Row]) -> bool:
        """True if these rows, together, should share what they begin with."""
        if self.when == "off" or not rows:
            return False
        if self.when == "always" or self.is_needed:
            return True
        if self._least is None:
            return False
        each = [((row.spec.group or row, row.spec.adapter, len(row.prompt)), len(row.prompt) - 1) for row in rows]
        sizes = Sizes.of(rows, each)
        least = sizes.count * self._least
        return sizes.most > 1 and sizes.spared >= (least if self._of else STAYS * least)

    def join(
        self, cache: list[Any], padding: list[int], rows: Sequence[Row], group: PromptGroup
    ) -> tuple[list[Any], list[int]]:
        """Before rows of a group join: bring the batch's cache and the group's to one form; the batch's after that."""
        shares = self.pays([*rows, *group.rows])
        if cache and self._of and (not shares or (self.is_needed and not self._all_whole)):
            cache, padding = self._copied(cache, padding)
        if not cache or not self._of:
            self._of = {}
            self._all_whole = self.is_needed
        if not shares:
            return cache, padding
        if cache and not self._of:
            cache, padding = self._apart(cache, padding, rows)
        group.cache, group.padding = self._apart(group.cache, group.padding, group.rows)
        return cache, padding

    def clear(self) -> None:
        """Forget all rows: the batch has been given up."""
        self._of = {}

    def leave(self, gone: Collection[Row]) -> None:
        """Forget rows."""
        for row in gone:
            self._of.pop(row, None)

    def _copied(self, cache: Sequence[Any], padding: Sequence[int]) -> tuple[list[Any], list[int]]:
        self._of = {}
        caches, after = whole(cache[:-1], range(len(padding)), padding)
        return [*caches, cache[-1]], after

    def _apart(self, cache: Sequence[Any], padding: Sequence[int], rows: Sequence[Row]) -> tuple[list[Any], list[int]]:
        alike = Counter(tuple(row.prompt) for row in rows)
        for row in rows:
            self._of[row] = self._beginning(row, alone=alike[tuple(row.prompt)] == 1)
        each = [None if (of := self._of[row]) is None else (of, len(of.ids)) for row in rows]
        caches, after = shared(cache[:-1], each, padding)
        return [*caches, cache[-1]], after

    def _beginning(self, row: Row, *, alone: bool) -> Beginning | None:
        """The longest that others have, if it is nearly all; else what was found of it in the prefix cache, or all."""
        ids = tuple(row.prompt[:-1])
        version = next(iter(row.kv_versions)) if len(row.kv_versions) == 1 else None
        known = {of for of in self._of.values() if of is not None and of.version == version and of.begins(ids)}
        longest = max(known, key=lambda of: len(of.ids), default=None) if version is not None else None
        hit, length = row.cached_tokens, len(ids)
        if alone and not (self.is_needed or row.spec.group) and 0 < hit < length - length // LIKE:
            length = hit
        if longest is not None and (
            len(longest.ids) >= length or (not self.is_needed and 2 * len(longest.ids) >= length and not hit)
        ):
            return longest
        return Beginning(ids[:length], version) if length else None
