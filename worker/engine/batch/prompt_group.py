"""Prompts that are fed in one forward, until they join the batch.

A group joins the batch as it is: its KV is appended in one piece per layer. Taken out of a larger batch row by row, as
mlx-lm's `BatchGenerator` does it, that is thousands of small operations.

A piece ends for each row at its next stop, where its states go into the prefix cache (prefixes/snapshots.py); the rows
that go on are fed in the same turn.

Invariants. Rows of a group that is fed over several turns have equal prompts; others are fed at once, padded to the
longest. The host knows each row's padding, so nothing waits for the device to compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_model.kv.kinds import copies, end_of, have_beginnings, keep_rows, shed
from worker.engine.batch.row import Row, RowTag
from worker.engine.batch.row_model import RowModel
from worker.engine.prefixes.slabs import KvRows


@dataclass(eq=False)
class Entry:
    """Rows that all feed `ids` next, after `kv` if there is any."""

    rows: list[Row]
    ids: list[int]
    kv: list[Any] | None = None
    past: int = 0  # ids in `kv`
    stops: list[int] = field(default_factory=list)  # ids read at which states are stored, `past` included; in order


@dataclass(eq=False)
class _Place:
    """Prompt ids of one row that are still to be fed."""

    row: Row
    ids: list[int]
    done: int  # ids read
    stops: list[int]

    def next_piece(self, chunk: int) -> list[int]:
        """At most `chunk` ids, up to the next stop, without the last one."""
        most = min(chunk, len(self.ids) - 1, *(stop - self.done for stop in self.stops[:1]))
        piece, self.ids = self.ids[:most], self.ids[most:]
        self.done += most
        return piece

    def pass_stop(self) -> bool:
        """True if the row has reached a stop, which is then removed."""
        passed = self.done in self.stops
        self.stops = [stop for stop in self.stops if stop > self.done]
        return passed


class PromptGroup:
    """KV of some rows while their prompts are fed; all but the last token of each."""

    def __init__(self, model: RowModel, entries: Sequence[Entry]) -> None:
        self._model = model
        self.is_one_prompt = len(entries) == 1  # whose KV is computed once for all rows
        self._places = [
            _Place(row, entry.ids, entry.past, entry.stops) for entry in entries for row in entry.rows
        ]  # in the order of the KV
        self._tag = RowTag(tuple(place.row for place in self._places))
        lengths = [end_of(entry.kv or ()) for entry in entries for _ in entry.rows]
        self.padding = [max(lengths) - length for length in lengths]  # positions before each row's first
        self.cache: list[Any] = [*_merged(model, entries), self._tag]
        self.fed_at = 0  # the turn in which it was fed last

    @property
    def rows(self) -> tuple[Row, ...]:
        """In the order of their KV."""
        return self._tag.rows

    @property
    def left(self) -> int:
        """Tokens that are still to be fed before the last ones."""
        return max(len(place.ids) for place in self._places) - 1

    @property
    def last_ids(self) -> list[int]:
        """Each row's last token, once nothing else is left."""
        assert self.left == 0, "a prompt that is not through"
        return [place.ids[0] for place in self._places]

    @property
    def state(self) -> list[Any]:
        """The arrays that the latest piece computes."""
        return [cache.state for cache in self.cache]

    def feed(self, chunk: int) -> tuple[int, int]:
        """Say what computes the next piece of each prompt (`state`), at most `chunk` wide; its rows and its width."""
        starts = [place.done for place in self._places]
        parts = [place.next_piece(chunk) for place in self._places]
        lengths = [len(part) for part in parts]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            for cache in self.cache:
                cache.prepare(lengths=lengths, right_padding=padding)
        padded = [part + [0] * pad for part, pad in zip(parts, padding, strict=True)]
        self._model.feed(parts if self._model.is_apart else padded, starts, self.cache)
        if any(padding):
            for cache in self.cache:
                cache.finalize()
            self.padding = [before + pad for before, pad in zip(self.padding, padding, strict=True)]
        shed(self.cache[:-1])
        return len(parts), longest

    def at_stops(self) -> tuple[list[Row], list[int]]:
        """Rows whose latest piece has ended at a stop, and how many ids each has read; returned once."""
        places = [place for place in self._places if place.pass_stop()]
        return [place.row for place in places], [place.done for place in places]

    @property
    def progress(self) -> tuple[list[Row], list[int]]:
        """The group's rows, and how many ids each has read."""
        return [place.row for place in self._places], [place.done for place in self._places]

    def stop_between(self, row: Row, low: int, high: int) -> bool:
        """Store a row's states there, too; False when it is past that, or others would have to stop with it."""
        place = next(place for place in self._places if place.row is row)
        if not self.is_one_prompt or high <= place.done or high >= place.done + len(place.ids):
            return False
        for each in self._places:
            each.stops = with_stop(each.stops, max(low, each.done + 1), high)
        return True

    def kv_of(self, rows: list[Row]) -> KvRows:
        """The KV of some rows."""
        return kv_in(self.cache, rows, self.padding)

    def become(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        """Let it hold these rows, each with the KV of the row at such a place; once nothing is left to be fed."""
        if list(places) != list(range(len(self.padding))):
            self.padding = keep_rows(self.cache, list(places), self.padding)
        self._tag.rows = tuple(rows)

    def remove(self, gone: set[Row]) -> None:
        """Forget some of the rows, not all."""
        keep = [at for at, row in enumerate(self.rows) if row not in gone]
        self._places = [self._places[at] for at in keep]
        self.padding = keep_rows(self.cache, keep, self.padding)


def with_stop(stops: list[int], low: int, high: int) -> list[int]:
    """These stops, of which one is in low..high."""
    return stops if any(low <= stop <= high for stop in stops) else sorted([*stops, high])


def extend(cache: Sequence[Any], padding: list[int], group: PromptGroup) -> list[int]:
    """Append a group's KV to that of a batch, tag included; the rows' padding after that."""
    ends = end_of(cache), end_of(group.cache)
    both = zip((padding, group.padding), ends, strict=True)
    for one, other in zip(cache, group.cache, strict=True):
        one.extend(other)
    return [before + max(ends) - end for each, end in both for before in each]


def kv_in(tagged: Sequence[Any], rows: list[Row], padding: list[int]) -> KvRows:
    """The KV of these rows, as it lies in batched caches, of which the last one is the tag."""
    *caches, tag = tagged
    places = {row: place for place, row in enumerate(tag.rows)}
    index = [places[row] for row in rows]
    return KvRows.of(caches, index, [padding[at] for at in index])


def _merged(model: RowModel, entries: Sequence[Entry]) -> list[Any]:
    """Batched caches, one per layer."""
    first, *others = entries
    if first.kv is not None and not others and have_beginnings(first.kv):
        keep_rows(first.kv, [0] * len(first.rows), [0])
        return list(first.kv)
    if others and any(entry.kv is not None for entry in entries):
        new = model.new_kv()
        each = [entry.kv or new for entry in entries for _ in entry.rows]
        return [layer[0].merge(layer) for layer in zip(*each, strict=True)]
    return copies(model.new_kv() if first.kv is None else first.kv, sum(len(entry.rows) for entry in entries))
