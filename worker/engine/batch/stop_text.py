"""Text of a row with stop strings: finds them across token borders and never shows a part of one.

Only rows with stop strings have text in the engine; for all others ids travel and the reader decodes. Text that
could be the beginning of a stop string, and bytes that are not yet a whole character, are held back until it is
clear what they are. What was shown never changes.
"""

from shared.sequences import SamplingParams
from shared.text.codec import TextCodec


class StopMatcher:
    """Passes text through until one of `stops` appears in it."""

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""  # not shown: may be the beginning of a stop string

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """New text; returns what may be shown and the stop string found, earliest first.

        With `may_stop` false no stop string that ends within `text` counts (min_tokens).
        """
        if not text:
            return "", None
        old = len(self._held)
        held = self._held + text
        match = self._first_match(held, old) if may_stop else None
        if match is None:
            keep = self._may_begin(held)
            self._held = held[len(held) - keep :]
            return held[: len(held) - keep], None
        self._held = ""
        start, stop = match
        return held[: start + len(stop) if self._include_stop else start], stop

    def flush(self) -> str:
        """Return the text that was held back, when the sequence ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """The earliest stop string in `text` that ends beyond its first `old` characters."""
        hits = ((text.find(stop, max(0, old + 1 - len(stop))), stop) for stop in self._stops)
        return min((hit for hit in hits if hit[0] >= 0), key=lambda hit: hit[0], default=None)

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class RowText:
    """Tokens in, visible text out."""

    def __init__(self, codec: TextCodec, sampling: SamplingParams) -> None:
        self._stream = codec.stream(sampling.shown_tokens)
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str)
        self._owed = ""  # text that an earlier attempt had to show and did not
        self._ended = False

    def push(self, token: int, may_stop: bool) -> tuple[str, str | None]:
        """The visible text that `token` adds, and the stop string that it completes."""
        shown, match = self._matcher.push(self._stream.push([token]), may_stop)
        self._ended = match is not None
        shown, self._owed = self._owed + shown, ""
        return shown, match

    def flush(self) -> str:
        """All text held back, at the end of the sequence."""
        owed, self._owed = self._owed, ""
        if self._ended:
            return owed
        self._ended = True
        shown, match = self._matcher.push(self._stream.flush())
        return owed + shown + ("" if match is not None else self._matcher.flush())

    def replay(self, tokens: list[int], min_tokens: int, seen: int) -> str | None:
        """Take the tokens of earlier attempts, of whose text the reader has `seen` characters.

        Returns the stop string that they already contain.
        """
        visible, match = "", None
        for position, token in enumerate(tokens):
            shown, match = self.push(token, position >= min_tokens)
            visible += shown
            if match is not None:
                break
        self._owed = visible[seen:]
        return match
