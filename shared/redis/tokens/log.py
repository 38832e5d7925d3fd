"""A sequence's tokens as they stand in Redis: its log, and beyond the log the frame stream of the api that reads it.

What stands in the log stays: its chunks are fenced by the attempt (log.lua), and a later attempt goes on behind them.
Frames are fenced by their order: behind an event of a newer attempt none of an older one counts (`fenced`).
"""

from collections.abc import Sequence

import structlog
from redis.asyncio import Redis

from shared.errors import UnreadableMessageError
from shared.frames import TokenEvent, decode_events, decode_frame, is_fence
from shared.redis import keys

log = structlog.get_logger()


async def read_tokens(redis: "Redis", model: str, seq: str, start: int, api: str = "") -> list[TokenEvent]:
    """Consecutive events of a sequence from position `start`, up to the first gap or the finish.

    With `api` the log is completed from that api's frame stream.
    """
    async with redis.pipeline(transaction=False) as pipe:
        pipe.execute_command("XRANGE", keys.sequence_log(model, seq), "-", "+")
        pipe.hget(keys.sequence(model, seq), "began")
        chunks, began = await pipe.execute()
    logged = [event for _, fields in chunks for event in events_of_chunk(fields, seq)]
    if not api or (logged and logged[-1].finish is not None):
        return splice(logged, [], start)
    # Frames of the same tokens were written with or after the chunk before, so older frames hold nothing new.
    since = chunks[-1][0] if chunks else began or b"-"
    frames = await redis.xrange(keys.frames(api), since, "+")
    live = [event for _, fields in frames for event in events_of_frame(fields.get(b"d", b"")) if event.seq == seq]
    return splice(logged, fenced(live), start)


def fenced(live: Sequence[TokenEvent]) -> list[TokenEvent]:
    """The events of a frame stream that count, in its order: those that no newer attempt stands before."""
    kept: list[TokenEvent] = []
    newest = 0
    for event in live:
        newest = max(newest, event.attempt)
        if event.attempt == newest and not is_fence(event):
            kept.append(event)
    return kept


def splice(logged: Sequence[TokenEvent], live: Sequence[TokenEvent], start: int) -> list[TokenEvent]:
    """One run of events without gap or repeat from position `start`, out of pieces that overlap."""
    token_at, finish_at = _index(logged, live, start)
    out: list[TokenEvent] = []
    if start == 0:
        out += [e for e in [*logged, *live] if e.position == 0 and _is_bare(e)][:1]
    position, attempt = start, 0
    while (event := token_at.get(position)) is not None and event.attempt >= attempt:
        first, attempt = position, event.attempt
        while token_at.get(position) is event:
            position += 1
        out.append(part(event, first, position))
        if out[-1].finish is not None:
            return out
    ending = finish_at.get(position)
    if ending is not None and ending.attempt >= attempt:
        out.append(part(ending, position, position))
    return out


def _index(
    logged: Sequence[TokenEvent], live: Sequence[TokenEvent], start: int
) -> tuple[dict[int, TokenEvent], dict[int, TokenEvent]]:
    """Which event gives the token at each position, and the finish behind it."""
    token_at: dict[int, TokenEvent] = {}
    finish_at: dict[int, TokenEvent] = {}
    for event in logged:
        for position in range(max(start, event.position), event.end):
            token_at.setdefault(position, event)
        if event.finish is not None:
            finish_at.setdefault(event.end, event)
    in_log = set(token_at)
    for event in live:
        for position in range(max(start, event.position), event.end):
            known = token_at.get(position)
            if known is None or (position not in in_log and known.attempt < event.attempt):
                token_at[position] = event
        if event.finish is not None:
            finish_at.setdefault(event.end, event)
    return token_at, finish_at


def part(event: TokenEvent, start: int, end: int) -> TokenEvent:
    """The tokens of an event at positions [start, end), with what belongs to its first or last one.

    Text cannot be divided; it goes with the last token. (Events with text are never joined in the log, so a reader that
    has seen whole decode steps never asks for a part of one.)
    """
    if start <= event.position and end >= event.end:
        return event
    cut = slice(start - event.position, end - event.position)
    is_first, is_last = start <= event.position, end >= event.end
    return TokenEvent(
        event.seq,
        event.attempt,
        start,
        event.tokens[cut],
        event.logprobs[cut],
        None if event.top_logprobs is None else event.top_logprobs[cut],
        event.text if is_last else None,
        event.version,
        event.finish if is_last else None,
        event.prompt_logprobs if is_first else None,
        event.score_logprobs if is_last else None,
        event.prompt_top_logprobs if is_first else None,
    )


def _is_bare(event: TokenEvent) -> bool:
    """Whether an event carries prompt logprobs alone."""
    return not event.tokens and event.finish is None


def events_of_chunk(fields: dict[bytes, bytes], seq: str) -> list[TokenEvent]:
    """The events of a log entry; none, and a line in our log, when they cannot be read."""
    try:
        return decode_events(fields[b"d"])
    except (UnreadableMessageError, KeyError) as error:
        log.warning("frames.unreadable_log", sequence=seq, error=str(error))
        return []


def events_of_frame(data: bytes) -> list[TokenEvent]:
    """The events of a frame; none, and a line in our log, when it cannot be read."""
    try:
        return decode_frame(data).events
    except UnreadableMessageError as error:
        log.warning("frames.unreadable", error=str(error))
        return []
