"""The seam for adapters: who computes with which adapter, and which version a token carries.

The engine asks an `Adapters` object and knows nothing of slots or LoRA. `NoAdapters` serves the base model only.
"""

from typing import Protocol

from shared.errors import UnknownAdapterError
from worker.engine.rows import Row


class Adapters(Protocol):
    """Slots of the adapters on this worker."""

    def admit(self, row: Row) -> None:
        """Resolve the row's adapter and hold its slot; `UnknownAdapterError` when it is not here."""

    def release(self, row: Row) -> None:
        """The row has left: its slot may be reused."""

    def select(self, rows: tuple[Row, ...]) -> tuple[str, ...]:
        """Called at the dispatch of every forward: set the rows' slots; the version that each row computes with."""


class NoAdapters:
    """Every row computes with the base model, version ""."""

    def __init__(self) -> None:
        self._rows: tuple[Row, ...] = ()
        self._versions: tuple[str, ...] = ()

    def admit(self, row: Row) -> None:
        """Only the base is here."""
        if row.spec.adapter:
            raise UnknownAdapterError(f"adapter {row.spec.adapter!r} is not loaded on this worker")

    def release(self, row: Row) -> None:
        """Nothing is held."""

    def select(self, rows: tuple[Row, ...]) -> tuple[str, ...]:
        """The base for everyone."""
        if rows is not self._rows:
            self._rows, self._versions = rows, ("",) * len(rows)
        return self._versions
