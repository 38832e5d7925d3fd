"""The seam for adapters: who computes with which adapter, and which version a token carries.

The engine asks an `Adapters` object and knows nothing of slots or LoRA. `NoAdapters` serves the base model only;
`AdapterSlots` (worker/engine/adapter_slots.py) serves versions from the store.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from mlx_model.heads.head import Heads
from mlx_model.networks.network import Network
from shared.errors import UnknownAdapterError
from worker.engine.batch.row import Row


@dataclass(frozen=True)
class AdapterStats:
    """A snapshot of the engine's adapters: plain data for other threads."""

    loaded: dict[str, int] = field(default_factory=dict)  # version -> rows that use it
    serving: dict[str, str] = field(default_factory=dict)  # name -> version that following rows use
    waited_for: frozenset[str] = frozenset()  # versions that rows wait for
    failed: dict[str, str] = field(default_factory=dict)  # version -> why this worker cannot use it
    bytes: int = 0  # of all stacks
    swaps: int = 0  # versions loaded into a slot since start
    swap_s: float = 0.0  # that took in all, each from the first slice written to the remap


class Adapters(Protocol):
    """Slots of the adapters on this worker. Called in the engine's thread."""

    def admit(self, row: Row) -> None:
        """Resolve the row's adapter; `UnknownAdapterError` when it is not known here."""

    def ready(self, row: Row) -> bool:
        """Hold the row's slot, or have its adapter loaded meanwhile; an error of ours when that has failed."""

    def prefill_key(self, row: Row) -> str:
        """Rows of equal keys compute the same KV from the same ids."""

    def version(self, row: Row) -> str:
        """The version that a forward would compute the row with now."""

    def heads(self, row: Row) -> Heads:
        """Those of the version that `version` says."""

    def network(self, row: Row) -> Network | None:
        """The network of the row's version, None if the version adapts a language model."""

    def release(self, row: Row) -> None:
        """The row has left: its slot may be reused."""

    def select(self, rows: tuple[Row, ...]) -> tuple[str, ...]:
        """Called at the dispatch of every forward: set the rows' slots; the version that each row computes with."""

    def work(self, budget_s: float) -> bool:
        """Load what is waiting, between two decode steps; True when the engine should take another turn."""

    def take_moved(self) -> list[Row]:
        """Rows that have changed their version since the last call and want their KV computed again."""

    def take_read(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Among several ranks: versions that have been read since the last call; those that could not be, and why."""

    def agree(self, read: Iterable[str], unreadable: Iterable[tuple[str, str]]) -> None:
        """Among several ranks: all have read these, or some could not."""

    def close(self) -> None:
        """Stop the threads of the adapters."""


class NoAdapters:
    """Every row computes with the base model, version ""."""

    def __init__(self) -> None:
        self._rows: tuple[Row, ...] = ()
        self._versions: tuple[str, ...] = ()

    def admit(self, row: Row) -> None:
        """Only the base is here."""
        if row.spec.adapter:
            raise UnknownAdapterError(f"adapter {row.spec.adapter!r} is not loaded on this worker")

    def ready(self, row: Row) -> bool:
        """The base is always here."""
        return True

    def prefill_key(self, row: Row) -> str:
        return ""

    def version(self, row: Row) -> str:
        return ""

    def heads(self, row: Row) -> Heads:
        """The base's own are not an adapter's."""
        return {}

    def network(self, row: Row) -> Network | None:
        return None

    def release(self, row: Row) -> None:
        pass

    def select(self, rows: tuple[Row, ...]) -> tuple[str, ...]:
        if rows is not self._rows:
            self._rows, self._versions = rows, ("",) * len(rows)
        return self._versions

    def work(self, budget_s: float) -> bool:
        return False

    def take_moved(self) -> list[Row]:
        return []

    def take_read(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        return (), ()

    def agree(self, read: Iterable[str], unreadable: Iterable[tuple[str, str]]) -> None:
        pass

    def close(self) -> None:
        pass
