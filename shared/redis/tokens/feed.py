"""A feed: the events of some sequences for one reader, in order, without gap or repeat, until each one's finish.

A feed never trusts the live channel. What comes early, or does not come, makes a sequence *due*: the reader then offers
again what the frame stream and the log hold. Offering is safe to repeat, since a position is taken once.
A reader that does not keep up loses nothing either: its feed lets go of the live channel and is filled from the log
when it asks again.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from shared.errors import ServiceUnavailableError
from shared.frames import Finish, TokenEvent, is_fence
from shared.token_events import part

SILENCE_S = 1.0  # without a word, before the log is asked
PATIENCE_S = 4.0  # longest time between two questions about a silent sequence
GAP_S = 0.05  # between two questions about a gap; doubles up to SILENCE_S
EVENTS_HELD = 512  # per sequence, for a slow reader
LOST = "the request was lost when Redis was restarted; send it again"
EVENTS_BEYOND_GAP = 256  # per sequence; what else comes meanwhile is read from the log

Ready = list[tuple[int, TokenEvent]]


class SequenceCursor:
    """The position of a feed in one sequence."""

    __slots__ = (
        "attempt", "bare_seen", "due_at", "feed", "finished", "heard_at", "held", "in_gap", "index", "pause_s",
        "position", "seq",
    )  # fmt: skip

    def __init__(self, feed: "TokenFeed", index: int, seq: str, position: int, due_at: float, attempt: int = 0) -> None:
        self.feed = feed
        self.index = index
        self.seq = seq
        self.position = position  # next token wanted
        self.attempt = attempt  # newest in frames so far; events of older owners are dropped
        self.bare_seen = position > 0
        self.finished = False
        self.in_gap = False
        self.held: list[TokenEvent] = []  # beyond a gap
        self.heard_at = time.monotonic()
        self.due_at = due_at
        self.pause_s = SILENCE_S

    def offer(self, event: TokenEvent, now: float, *, live: bool, logged: bool = False) -> None:
        """Take what is new in an event; a full feed refuses `live` ones.

        What is `logged` counts whoever wrote it: the log was fenced when it was written.
        """
        if not logged:
            if event.attempt < self.attempt:
                return
            self.attempt = event.attempt
            if is_fence(event):
                return
        if self._take(event, now, live) and self.held:
            held, self.held = self.held, []
            for later in held:
                self._take(later, now, live=False)

    def _take(self, event: TokenEvent, now: float, live: bool) -> bool:
        if self.finished:
            return False
        position, end = event.position, event.end
        if event.finish is not None and end < self.position:
            return self._end_early(event, event.finish)
        if position > self.position:
            self._miss(event, now)
            return False
        if end == self.position and event.finish is None:
            if event.tokens or self.bare_seen:
                return False
            self.bare_seen = True
        elif end < self.position:
            return False
        if self.feed.overrun or (live and not self.feed.has_room()):
            return False
        if position < self.position:
            event = part(event, self.position, end)
        self.position = end
        self.heard_at = now
        self.in_gap = False
        self.due_at = now + SILENCE_S
        self.pause_s = SILENCE_S
        self.feed.ready.append((self.index, event))
        if event.finish is not None:
            self.finished = True
            self.feed.unfinished -= 1
        return True

    def _end_early(self, event: TokenEvent, finish: Finish) -> bool:
        """The sequence has ended with fewer tokens than its reader has: it was started anew. End it for the reader."""
        if finish.reason not in ("cancelled", "deadline", "error"):
            finish = Finish("error", error_code=ServiceUnavailableError.code or "", error_message=LOST)
        last = TokenEvent(event.seq, event.attempt, self.position, [], [], finish=finish)
        self.feed.ready.append((self.index, last))
        self.finished = True
        self.feed.unfinished -= 1
        return True

    def _miss(self, event: TokenEvent, now: float) -> None:
        """Buffer an event after a gap, and ask for the gap at once, then with growing pauses until it is filled."""
        if len(self.held) < EVENTS_BEYOND_GAP:
            self.held.append(event)
        if not self.in_gap:
            self.in_gap = True
            self.pause_s = GAP_S
            self.due_at = now
            self.feed.ask()

    def asked(self, now: float) -> None:
        """Set the time of the next question, when the log has just been read and had nothing new."""
        if self.due_at <= now:
            self.due_at = now + self.pause_s
            self.pause_s = min(2 * self.pause_s, SILENCE_S if self.in_gap else PATIENCE_S)


class TokenFeed:
    """The events of one request's sequences. `FrameReader.open` makes it; close it at the end."""

    def __init__(
        self,
        model: str,
        seq_ids: Sequence[str],
        start: Sequence[int] | None,
        attempts: Sequence[int] | None = None,
        *,
        ask: Callable[[], None],
        close: Callable[["TokenFeed"], None],
    ) -> None:
        self.model = model
        self.ready: Ready = []
        self.unfinished = len(seq_ids)
        self.overrun = False  # the reader was too slow: nothing is taken off the live channel until it asks
        self.ask = ask
        self.on_lost: Callable[[str, int], None] | None = None  # Redis has lost this sequence; the next token wanted
        self._close = close
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        # Sequences that run already have a past: ask for it at once.
        due_at = time.monotonic() + (SILENCE_S if start is None else 0.0)
        places = start or [0] * len(seq_ids)
        self.cursors = [
            SequenceCursor(self, i, seq, place, due_at, attempts[i] if attempts else 0)
            for i, (seq, place) in enumerate(zip(seq_ids, places, strict=True))
        ]
        self._room = EVENTS_HELD * max(1, len(self.cursors))
        if start is not None:
            ask()

    @property
    def done(self) -> bool:
        """True if every sequence has finished, and all events have been read."""
        return self.unfinished == 0 and not self.ready

    async def next(self) -> Ready:
        """Events that are ready, as (index of the sequence, event), at least one; [] when all sequences have ended.

        Raises the error that `fail` was given, after what is ready.
        """
        while not self.ready and self.unfinished:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            if self.overrun:
                self.overrun = False
                for cursor in self.cursors:
                    cursor.due_at = 0.0
                self.ask()
            await self._wake.wait()
        ready, self.ready = self.ready, []
        return ready

    def has_room(self) -> bool:
        """True if a live event may be buffered for the reader; if not, the feed is filled from the log later."""
        self.overrun = len(self.ready) >= self._room
        return not self.overrun

    def wake(self) -> None:
        """Wake the reader if there is something for it."""
        if self.ready or not self.unfinished:
            self._wake.set()

    def fail(self, error: Exception) -> None:
        """Let `next` raise this error: nothing more will come."""
        self._error = error
        self._wake.set()

    def close(self) -> None:
        """End the subscription to the sequences."""
        self._close(self)
