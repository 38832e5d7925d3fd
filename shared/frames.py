"""Token events and the frames that carry them: one frame per decode step and api process.

Invariants. `position` counts completion tokens from 0, without gaps within an attempt. A reader that has seen position
p never sees another token for p: it drops what it has, and repairs a gap from the frame stream and the sequence's
log. A frame's event of an older attempt than one before it in the stream is dropped: whoever takes a sequence over
writes a fence (`fence`) into the stream first and reads what stands before it, so what a stopped owner still
sends when it wakes is seen by nobody. The last event of a sequence carries `finish`, and nothing follows it.

Structs are msgpack arrays (`array_like`): new fields go at the end, with a default.
"""

from typing import Literal

import msgspec

from shared.errors import EngineError, IncompatibleVersionError, ParallmError, UnreadableMessageError

SCHEMA = 1  # of frames

FinishReason = Literal["stop", "length", "abort", "cancelled", "deadline", "error"]  # abort: by POST /pause


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A token and its fp32 log-probability."""

    token: int
    logprob: float


TokenLogprobs = tuple[TokenLogprob, ...]  # of one place; unlike a list, a tuple of them is not looked at in collections


class VersionSpan(msgspec.Struct, array_like=True, frozen=True):
    """Completion positions [start, end) were computed with adapter version `version` ("" is the base)."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct, array_like=True, frozen=True):
    """End of a sequence: its reason, and the stop or the error that caused it."""

    reason: FinishReason
    stop_match: str | int | None = None  # the stop string or stop token id that ended it
    error_code: str = ""  # of shared.errors, when reason is "error"
    error_message: str = ""
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    accepted_prediction_tokens: int = 0  # of the client's prediction, drafted and drawn by the model, too
    rejected_prediction_tokens: int = 0  # drafted in vain

    @classmethod
    def failed(cls, error: ParallmError) -> "Finish":
        """By an error of ours."""
        return cls("error", error_code=error.code or "", error_message=error.message)

    @property
    def failure(self) -> str:
        """Error code and message; "" unless an error ended the sequence."""
        return f"{self.error_code or EngineError.code}: {self.error_message}" if self.reason == "error" else ""


class TokenEvent(msgspec.Struct, array_like=True, gc=False):  # slow readers leave many, and it is in no cycle
    """New tokens of one sequence: one decode step's, or several in a log chunk.

    `tokens` and `logprobs` have equal length, which is 0 in an event that carries only prompt logprobs or the
    finish. `text` is the visible text delta, only of rows with stop strings (they hold text back); for all
    others the reader decodes `tokens`.
    """

    seq: str
    attempt: int
    position: int  # of tokens[0]
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TokenLogprobs] | None = None  # one list per token
    text: str | None = None
    version: str = ""  # adapter version of all tokens in this event
    finish: Finish | None = None
    prompt_logprobs: list[float | None] | None = None  # with the first event, when asked for
    score_logprobs: list[float] | None = None  # kind "score": with the finish
    prompt_top_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None  # what a head or kind "embed" gives, fp32 LE, or a network: tensors; with the finish
    prompt_others: list[TokenLogprobs] | None = None  # of each prompt token: those named there, then those drawn
    routes: bytes | None = None  # experts that each token was computed with, equally many bytes for each of the tokens
    # (mlx_model/routing.py): those of the position that was fed to draw it

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + len(self.tokens)

    @property
    def size(self) -> int:
        """Number of tokens in the event, alternatives and those of the prompt included."""
        told = len(self.tokens) + len(self.routes or b"") // 8  # a token and its log-probability take about as much
        if self.top_logprobs is not None:
            told += sum(map(len, self.top_logprobs))
        if self.prompt_logprobs is not None:
            told += len(self.prompt_logprobs) + sum(map(len, self.prompt_top_logprobs or ()))
            told += sum(map(len, self.prompt_others or ()))
        return told


class Frame(msgspec.Struct, array_like=True):
    """All events of one decode step for one api process."""

    worker: str
    sent_ms: int  # Unix time
    events: list[TokenEvent]
    schema: int = SCHEMA


_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_events_decoder = msgspec.msgpack.Decoder(list[TokenEvent])


def fence(seq: str, attempt: int) -> TokenEvent:
    """Event that a new owner writes before it reads, so that later frames of older attempts do not count."""
    return TokenEvent(seq, attempt, 0, [], [])


def is_fence(event: TokenEvent) -> bool:
    """True if the event only states which attempt owns the sequence."""
    return not event.tokens and event.finish is None and event.prompt_logprobs is None and event.text is None


def encode_frame(frame: Frame) -> bytes:
    """msgpack bytes of a frame."""
    return _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """Read a frame; UnreadableMessageError when it is malformed, IncompatibleVersionError when of another version."""
    try:
        frame = _frame_decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableMessageError(f"unreadable frame: {error}") from error
    if frame.schema != SCHEMA:
        raise IncompatibleVersionError(f"the frame has schema {frame.schema} and this process reads {SCHEMA}")
    _check(frame.events)
    return frame


def encode_events(events: list[TokenEvent]) -> bytes:
    """msgpack bytes of a log chunk."""
    return _encoder.encode(events)


def decode_events(data: bytes) -> list[TokenEvent]:
    """Read a log chunk; errors as in `decode_frame`."""
    try:
        events = _events_decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableMessageError(f"unreadable log: {error}") from error
    _check(events)
    return events


def _check(events: list[TokenEvent]) -> None:
    """Check relations between fields that a decoder does not see; UnreadableMessageError."""
    for event in events:
        uneven = event.routes is not None and len(event.routes) % max(1, len(event.tokens)) > 0
        if len(event.tokens) != len(event.logprobs) or uneven or event.position < 0 or event.attempt < 1:
            raise UnreadableMessageError(f"an impossible event of sequence {event.seq!r} at {event.position}")


def spans_of(events: list[TokenEvent], start: int = 0) -> tuple[VersionSpan, ...]:
    """Version spans over the tokens of consecutive events; they cover every position from `start` exactly once."""
    spans: list[VersionSpan] = []
    for event in events:
        if event.end <= start or not event.tokens:
            continue
        position = max(event.position, start)
        if spans and spans[-1].version == event.version and spans[-1].end == position:
            spans[-1] = VersionSpan(event.version, spans[-1].start, event.end)
        else:
            spans.append(VersionSpan(event.version, position, event.end))
    return tuple(spans)
