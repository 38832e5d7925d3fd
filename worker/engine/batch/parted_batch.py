"""The rows of a batch in as many parts as a model has stages, so that ranks that hold layers compute at the same time.

Each turn is one part's. It draws what its latest forward has come to, and begins the next one; meanwhile the forwards
of the other parts are in other stages. A row stays in its part. Parts are batches of their own; what they decide
depends on rows and turns only, so all ranks part alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from shared.frames import TokenEvent
from shared.sequences import SequenceClass
from worker.engine.batch.prompt_group import Entry
from worker.engine.batch.row import Row
from worker.engine.batch.running_batch import RunningBatch

FEWEST = 4  # rows of a part before another one is begun: two rows apart took longer than together on a busy CPU


class PartedBatch:
    """In place of one `RunningBatch`, whose methods these are."""

    def __init__(self, parts: Sequence[RunningBatch]) -> None:
        self.parts = list(parts)
        self._at = 0  # whose turn it is

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def give_up(self) -> list[Row]:
        """After a failed forward: all rows. The batch is not to be used again."""
        return [row for part in self.parts for row in part.give_up()]

    @property
    def prefilling_rows(self) -> Collection[Row]:
        """Rows that have no first token yet."""
        return [row for part in self.parts for row in part.prefilling_rows]

    @property
    def waiting(self) -> set[SequenceClass]:
        """Classes of the prompts that are not through."""
        return set[SequenceClass]().union(*(part.waiting for part in self.parts))

    def has_begun(self, of: SequenceClass) -> bool:
        """True if prompts of a class are being computed."""
        return any(part.has_begun(of) for part in self.parts)

    @property
    def decoding(self) -> int:
        """Rows that have a first token."""
        return sum(part.decoding for part in self.parts)

    @property
    def has_decoded(self) -> bool:
        """True if the latest step fed rows that decode."""
        return self.parts[self._at].has_decoded

    @property
    def spared(self) -> int:
        """Positions of KV that are not stored because rows share what they begin with."""
        return sum(part.spared for part in self.parts)

    @property
    def stream(self) -> Any:
        """The stream that all compute on."""
        return self.parts[0].stream

    def insert(self, entry: Entry) -> None:
        """Add rows to a part that has too few, else to the one that has fewest."""
        small = [part for part in self.parts if 0 < len(part) < FEWEST]
        (small[0] if small else min(self.parts, key=len)).insert(entry)

    def begun(self, row: Row, kv: Sequence[Any]) -> None:
        """None: parts share no prompts."""

    def stop_between(self, row: Row, low: int, high: int) -> bool:
        """Store the states of a row's prompt somewhere between these positions; False when it is past them."""
        return any(part.stop_between(row, low, high) for part in self.parts)

    def remove(self, rows: Iterable[Row]) -> None:
        """Free these rows' places and KV."""
        gone = list(rows)
        for part in self.parts:
            part.remove(gone)

    def step(self, prefill_tokens: int, of: SequenceClass = "interactive") -> None:
        """One decode step of the part whose turn it is; each of its rows' new token is news."""
        after = [*range(self._at + 1, len(self.parts)), *range(self._at + 1)]
        self._at = next((at for at in after if len(self.parts[at])), self._at)
        self.parts[self._at].step(prefill_tokens, of)

    def news(self) -> list[TokenEvent]:
        """Events since the last call, including those of a step that failed."""
        return [event for part in self.parts for event in part.news()]

    def keep_answers(self, ended: Sequence[Row]) -> None:
        """Store what these have written; they leave next."""
        for part in self.parts:
            if ours := [row for row in ended if row in part]:
                part.keep_answers(ours)

    def stop_ahead(self) -> None:
        """Report what has been drawn, and do not feed it: each row's KV ends before its last token."""
        for part in self.parts:
            part.stop_ahead()

    def set_aside(self, rows: Iterable[Row]) -> None:
        """Keep the KV of rows that are about to leave and go on later, or elsewhere."""
        gone = list(rows)
        for part in self.parts:
            part.set_aside(gone)
