"""A queue and a thread that bring the figures of a run to one package.

Invariants.
- Nothing here delays a train step: figures are put into a queue of KEPT train steps, and what finds it full is dropped
  and counted. metrics.jsonl has all of them in any case.
- Whatever the package raises ends in the log, never in the run: opening is tried again for as long as the run lasts,
  writing WRITE_TRIES times.
- The end is waited for by whoever asks for it, for a bounded time; the thread is a daemon, so it holds up no exit.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from trainer.loggers.tracked_run import Ending, Samples, TrackedRun, Tracker, TrackerKind

log = structlog.get_logger()

KEPT = 1000  # train steps that wait for a package at most
WRITE_TRIES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between two tries
_CREDENTIALS = re.compile(r"//[^/\s@]*@")

Point = tuple[int, Mapping[str, float], Samples]  # of a train step


class Sender:
    """The way of a run's figures into one package."""

    def __init__(self, name: str, kind: TrackerKind, run: TrackedRun, ended: Callable[[], None]) -> None:
        self.name = name
        self.dropped = 0
        self._kind, self._run, self._ended = kind, run, ended
        self._points: deque[Point] = deque()
        self._news = threading.Condition()
        self._ending: Ending | None = None
        threading.Thread(target=self._work, name=f"logger-{name}", daemon=True).start()

    def put(self, point: Point) -> None:
        """Queue the figures of a train step, or drop them when too many wait; returns at once."""
        with self._news:
            full = len(self._points) >= KEPT
            if not full:
                self._points.append(point)
                self._news.notify()
        if full:
            self._drop("too many train steps wait for it")

    def end(self, ending: Ending) -> None:
        """No more comes: write what waits, close the run, and call `ended`. Returns at once."""
        with self._news:
            self._ending = self._ending or ending
            self._news.notify()

    @property
    def waiting(self) -> int:
        """Train steps that have not been handed on."""
        return len(self._points)

    # -- in the thread

    def _work(self) -> None:
        try:
            tracker = self._opened()
            if tracker is None:
                return
            while (point := self._next()) is not None:
                self._write(tracker, point)
                self._points.popleft()
            assert self._ending is not None, "the queue ends with the run"
            tracker.end(self._ending)
            log.info("train.logger_closed", logger=self.name, state=self._ending, dropped=self.dropped)
        except Exception as error:  # of `end`: what it has not handed on is lost
            log.warning("train.logger_failed", logger=self.name, at="end", reason=_reason(error))
        finally:
            self._ended()

    def _opened(self) -> Tracker | None:
        """The open run; None when the run has ended before it could be opened."""
        pause_s = FIRST_PAUSE_S
        while True:
            last = self._ending is not None
            try:
                tracker = self._kind(self._run)
            except Exception as error:
                log.warning("train.logger_failed", logger=self.name, at="start", reason=_reason(error))
            else:
                log.info("train.logger_open", logger=self.name, project=self._run.project, run=self._run.known_id)
                return tracker
            if last:
                log.error("train.logger_lost", logger=self.name, train_steps=self.waiting + self.dropped)
                return None
            pause_s = self._pause(pause_s)

    def _next(self) -> Point | None:
        """The next figures, which stay in the queue until they are written; None: that was all."""
        with self._news:
            self._news.wait_for(lambda: self._points or self._ending is not None)
            return self._points[0] if self._points else None

    def _write(self, tracker: Tracker, point: Point) -> None:
        pause_s = FIRST_PAUSE_S
        for tries in range(1, WRITE_TRIES + 1):
            last = tries == WRITE_TRIES or self._ending is not None
            try:
                tracker.write(*point)
                return
            except Exception as error:
                reason = _reason(error)
            if last:
                break
            pause_s = self._pause(pause_s)
        self._drop(reason)

    def _pause(self, seconds: float) -> float:
        """Wait, unless the run ends; how long to wait the next time."""
        with self._news:
            self._news.wait_for(lambda: self._ending is not None, seconds)
        return min(LONGEST_PAUSE_S, 2 * seconds)

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        if self.dropped.bit_count() == 1:  # the first, then ever more seldom: a line for each would flood the log
            log.warning("train.logger_dropped", logger=self.name, train_steps=self.dropped, reason=reason)


def _reason(error: Exception) -> str:
    """Description of an error, without the passwords that addresses may contain."""
    return _CREDENTIALS.sub("//***@", f"{type(error).__name__}: {error}")[:500]
