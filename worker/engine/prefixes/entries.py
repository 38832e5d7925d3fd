"""What a prefix cache holds, and what a row waits for that is to come into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.engine.prefixes.slabs import SlabCut, State


class Promotion:
    """KV that is on its way to memory, and that a row waits for; this one is of nothing."""

    @property
    def waits(self) -> bool:
        """True if the row should wait for it."""
        return False

    def cancel(self) -> None:
        """Stop waiting: the row has left the engine."""


UNASKED, NOTHING = Promotion(), Promotion()  # of a row not looked up yet; of one without any


@dataclass
class Prefix:
    """KV of a prompt's first `length` ids, one cache per layer; `kv` is empty when nothing is cached."""

    length: int = 0
    kv: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Segment:
    """Blocks that were stored together."""

    keys: list[bytes]  # of its blocks
    cut: SlabCut
    version: str


@dataclass(eq=False)
class StateSnapshot:
    """State at one position that must be restored in addition to the blocks before it."""

    key: bytes  # of the last whole block before it
    tail: tuple[int, ...]  # ids between that block and the position
    length: int  # ids in all
    state: State
    rest: SlabCut | None  # of the tail
    version: str


def go_on_with(ids: Sequence[int], tail: tuple[int, ...], length: int) -> bool:
    """True if these ids have the snapshot's tail directly before its position."""
    return tuple(ids[length - len(tail) : length]) == tail
