"""A sequence's tokens as they stand in Redis: its log, and beyond the log the frame stream of the api that reads it.

What stands in the log stays: its chunks are fenced by the attempt (log.lua), and a later attempt goes on behind them.
Frames are fenced by their order: behind an event of a newer attempt none of an older one counts (`fenced`).
"""

import structlog
from redis.asyncio import Redis

from shared.errors import UnreadableMessageError
from shared.frames import TokenEvent, decode_events, decode_frame
from shared.redis import keys
from shared.redis.connection.client import ask_all
from shared.token_events import fenced, splice

log = structlog.get_logger()


async def read_tokens(redis: "Redis", model: str, seq: str, start: int, api: str = "") -> list[TokenEvent]:
    """Consecutive events of a sequence from position `start`, up to the first gap or the finish.

    With `api` the log is completed from that api's frame stream.
    """
    commands = [("XRANGE", keys.sequence_log(model, seq), "-", "+"), ("HGET", keys.sequence(model, seq), "began")]
    chunks, began = await ask_all(redis, commands)
    logged = [event for _, fields in chunks for event in events_of_chunk(fields, seq)]
    if not api or (logged and logged[-1].finish is not None):
        return splice(logged, [], start)
    # Frames of the same tokens were written with or after the chunk before, so older frames hold nothing new.
    since = chunks[-1][0] if chunks else began or b"-"
    frames = await redis.xrange(keys.frames(api), since, "+")
    live = [event for _, fields in frames for event in events_of_frame(fields.get(b"d", b"")) if event.seq == seq]
    return splice(logged, fenced(live), start)


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
