"""Work of guests in thread G, such as a trainer's microbatches: what may run between two decode steps.

**work** a generator; it yields when everything it made is evaluated and something else may run · **unit** what lies
between two yields; it is never interrupted, so its owner keeps it short.

Invariants.
- At most one unit runs between two decode steps, so a row never waits for more than one.
- While rows decode, a unit runs once decoding has paid for it: about `share / (1 - share)` seconds for each second that
  it has had. What a unit costs more than expected is paid before the next one. Decoding keeps `1 - share` of its speed.
- While no row decodes, units follow one another. Work that is for an idle engine waits until no row is there at all,
  and others pass it meanwhile.
- An error of a unit goes to the future of its work, and nowhere else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.errors import EngineError
from worker.engine.messages import GuestStats

T = TypeVar("T")
Work = Generator[None, None, T]

RECENT_UNIT = 0.5  # weight of the latest unit in what the next one is expected to cost
RECENT_TURN = 0.1
LOOK_AFTER = 8  # turns in a row that follow a unit
UNSEEN = 0.9  # part of the share: turns between units are 2 to 3% slower, too, than without a trainer


class TimeShare:
    """Decides whether a unit of guest work may run now: plain numbers, in seconds.

    What a unit costs is what decoding loses by it: its own time, and by how much the turn after it is longer than usual
    (cold caches) or shorter (the look-ahead step ran meanwhile). So the share adapts until decoding keeps its part.
    """

    def __init__(self, share: float) -> None:
        assert 0 <= share < 1, "decoding needs some of its thread's time"
        self._price = UNSEEN * share / (1 - share)  # what a second of decoding pays
        self._closed = share == 0
        self._credit = 0.0
        self._expected = 0.0  # cost of a unit
        self._usual = 0.0  # turn of the engine that follows no unit
        self._last = 0.0  # unit before the next turn; 0: none
        self._in_a_row = 0

    def decoded(self, seconds: float) -> None:
        """Rows have decoded for a turn; credit for more than two units is not kept, or units would come in bursts."""
        usual = seconds
        if self._last:
            usual = self._usual or seconds
            self._credit -= max(-self._last, min(seconds - usual, self._last))
            self._in_a_row += 1
        else:
            self._usual = _recent(self._usual, seconds, RECENT_TURN)
            self._in_a_row = 0
        self._last = 0.0
        self._credit = min(self._credit + usual * self._price, 2 * self._expected)

    def worked(self, seconds: float) -> None:
        """A unit has run while there were rows."""
        self._expected = _recent(self._expected, seconds, RECENT_UNIT)
        self._credit -= seconds
        self._last = seconds

    def idled(self, seconds: float) -> None:
        """A unit has run while there was no row: it costs nothing."""
        self._expected = _recent(self._expected, seconds, RECENT_UNIT)
        self._credit = self._last = 0.0

    @property
    def may_work(self) -> bool:
        """True if the next unit is paid for; now and then a turn runs without one, to measure the usual time."""
        return not self._closed and self._credit >= self._expected and self._in_a_row < LOOK_AFTER


def _recent(before: float, now: float, weight: float) -> float:
    """A running mean that begins with the first value."""
    return weight * now + (1 - weight) * before if before else now


@dataclass(eq=False)
class _Piece:
    start: Callable[[], Work[Any]]
    future: Future[Any]
    when_idle: bool
    work: Work[Any] | None = None


class Guests:
    """Pieces of work, in order of arrival. Belongs to thread G, but for `add` and `stats`."""

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = TimeShare(share)
        self._clock = clock
        self._pieces: deque[_Piece] = deque()
        self._closed = False
        self.held = False  # no unit begins
        self.stats = GuestStats()

    def waits(self, is_idle: bool) -> bool:
        """True if a unit can run now or between decode steps. `is_idle`: the engine has no rows."""
        return not self.held and any(is_idle or not piece.when_idle for piece in self._pieces)

    def add(self, start: Callable[[], Work[T]], future: Future[T], *, when_idle: bool = False) -> None:
        """Take a piece of work, from any thread; cancelling the future ends it after the unit that runs.

        `when_idle`: it is for an idle engine only.
        """
        if self._closed:
            future.set_exception(EngineError("the engine has stopped"))
        else:
            self._pieces.append(_Piece(start, future, when_idle))

    def between_steps(self, *, decoding: bool, decode_s: float, is_idle: bool = False) -> None:
        """Run one unit if it is time; `decode_s` is what the turn of the engine before has taken."""
        if decoding:
            self._share.decoded(decode_s)
        for piece in tuple(self._pieces):  # `add` may be called meanwhile
            if piece.future.cancelled():
                self._pieces.remove(piece)
                self._end(piece)
        may_run = [each for each in tuple(self._pieces) if is_idle or not each.when_idle]
        if self.held or not may_run or (decoding and not self._share.may_work):
            return
        began = self._clock()
        self._advance(may_run[0])
        self._count(self._clock() - began, decoding)

    def close(self) -> None:
        """End everything that is left, in this thread; `add` must not be called at the same time."""
        self._closed = True
        while self._pieces:
            piece = self._pieces.popleft()
            self._end(piece)
            if piece.future.set_running_or_notify_cancel():
                piece.future.set_exception(EngineError("the engine has stopped"))

    def _advance(self, piece: _Piece) -> None:
        # A future stays pending until its work is done: a running one could not be cancelled any more.
        try:
            piece.work = piece.work or piece.start()
            next(piece.work)
            return
        except StopIteration as end:
            self._pieces.remove(piece)
            if piece.future.set_running_or_notify_cancel():
                piece.future.set_result(end.value)
        except Exception as error:
            self._pieces.remove(piece)
            if piece.future.set_running_or_notify_cancel():
                piece.future.set_exception(error)
        piece.work = None

    def _end(self, piece: _Piece) -> None:
        if piece.work is not None:
            piece.work.close()
            piece.work = None

    def _count(self, seconds: float, decoding: bool) -> None:
        if decoding:
            self._share.worked(seconds)
        else:
            self._share.idled(seconds)
        was = self.stats
        self.stats = GuestStats(
            was.units + 1,
            was.seconds + seconds,
            was.units_beside_rows + decoding,
            was.seconds_beside_rows + (seconds if decoding else 0.0),
            max(was.longest_s, seconds) if decoding else was.longest_s,
        )
