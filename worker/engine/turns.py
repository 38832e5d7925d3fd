"""What a turn of the engine takes from outside its messages, so that all ranks do the same in it. Plain data.

Each rank's `Engine.seen` says what it has seen since its last turn. The leading rank hands these to its `Consent`, and
what `Consent.facts` makes of them goes to all ranks with the messages of the next turn: `Engine.turn(facts)`. The clock
is the leading rank's; an adapter version is written into its slot once every rank has read its part of it. Images are
seen by the leading rank's tower alone, and what it has made of them comes to all ranks, piece by piece: so they compute
with the same bits, and rows with images begin in the same turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from mlx_model.config import EngineConfig


def now_ms() -> int:
    """Unix time in milliseconds, from this machine's clock."""
    return time.time_ns() // 1_000_000


class ImagePiece(msgspec.Struct, frozen=True, array_like=True):
    """Some of an image's vectors [T, H], or why there are none."""

    key: bytes  # of the image
    start: int = 0  # vectors of it that came before
    total: int = 0  # T
    width: int = 0  # H
    dtype: str = ""  # as safetensors calls it
    vectors: bytes = b""  # from `start` on, in C order
    rows: int = 0  # of the image's grid; 0: its positions go by none
    columns: int = 0
    fault: str = ""  # why the tower has failed


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """By one rank, since its last turn."""

    now_ms: int  # Unix time
    took_s: float = 0.0  # what the latest turn that computed has taken
    read: tuple[str, ...] = ()  # adapter versions that it has read
    unreadable: tuple[tuple[str, str], ...] = ()  # versions that it could not read, and why
    images: tuple[ImagePiece, ...] = ()  # what its tower has made, which all ranks are to have

    @property
    def is_news(self) -> bool:
        """True if the leading rank needs this report even if nothing is computed."""
        return bool(self.read or self.unreadable)


class TurnFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of one turn, the same on all ranks."""

    now_ms: int
    took_s: float = 0.0
    read: tuple[str, ...] = ()  # adapter versions that all ranks have read by now
    unreadable: tuple[tuple[str, str], ...] = ()  # versions that some rank could not read, and why
    images: tuple[ImagePiece, ...] = ()  # what the leading rank's tower has made


class Consent:
    """The leading rank's: what all ranks have seen."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._read: dict[str, set[int]] = {}  # version -> ranks that are through with it
        self._failed: dict[str, str] = {}

    def hear(self, rank: int, read: Iterable[str], unreadable: Iterable[tuple[str, str]]) -> None:
        """Note versions that a rank has read, or failed to read."""
        for version in read:
            self._read.setdefault(version, set()).add(rank)
        for version, reason in unreadable:
            self._read.setdefault(version, set()).add(rank)
            self._failed.setdefault(version, f"rank {rank}: {reason}")

    def facts(self, own: RankReport) -> TurnFacts:
        """Facts of the next turn, with the versions that all ranks have finished. `own` has been passed to `hear`."""
        through = [version for version, ranks in self._read.items() if len(ranks) == self._size]
        for version in through:
            del self._read[version]
        failed = tuple((version, self._failed.pop(version)) for version in through if version in self._failed)
        gone = {version for version, _ in failed}
        read = tuple(each for each in through if each not in gone)
        return TurnFacts(own.now_ms, own.took_s, read, failed, own.images)


def in_lockstep(config: EngineConfig) -> EngineConfig:
    """The configuration, with no decision left to the clock of a rank."""
    speculation = config.speculation and replace(config.speculation, adapts_to_time=False, reads_beside=False)
    return replace(config, lane_s=math.inf, speculation=speculation)
