"""Token frames, the api's read side: one subscription a process, one feed a request.

A feed gives each sequence's events in order, without gap or repeat, until its finish. It never trusts the live channel:
a gap, a reader that was too slow, or a second of silence is repaired from the log and the frame stream.
"""

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.frames import TokenEvent, decode_frame
from shared.redis import keys
from shared.redis.client import connect
from shared.redis.token_frames import cut, read_tokens

log = structlog.get_logger()

SILENCE_S = 1.0
FEED_EVENTS = 4096  # held for a slow reader before it is sent to the log
HEARTBEAT_S = 10.0


class TokenFeed:
    """The events of some sequences of one model."""

    def __init__(self, reader: "FrameReader", model: str, seq_ids: Sequence[str], start: Sequence[int]) -> None:
        self._reader = reader
        self._model = model
        self.seq_ids = list(seq_ids)
        self._next = list(start)
        self._attempt = [0] * len(self.seq_ids)
        self._open = [True] * len(self.seq_ids)
        self._ready: list[tuple[int, TokenEvent]] = []
        self._gaps: set[int] = set()
        self._wake = asyncio.Event()
        self.heard_at = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether every sequence has given its finish, and all of it has been taken."""
        return not self._ready and not any(self._open)

    def unfinished(self) -> list[str]:
        """Ids of the sequences that have not ended."""
        return [seq for seq, is_open in zip(self.seq_ids, self._open, strict=True) if is_open]

    async def next(self) -> list[tuple[int, TokenEvent]]:
        """What is ready, at least one event; [] when all sequences have ended."""
        while True:
            if self._ready:
                ready, self._ready = self._ready, []
                return ready
            if self.done:
                return []
            if self._gaps:
                await self._repair()
                continue
            self._wake.clear()
            await self._wake.wait()

    def offer(self, index: int, event: TokenEvent) -> None:
        """Take an event off the live channel."""
        self.heard_at = time.monotonic()
        if not self._open[index] or event.attempt < self._attempt[index]:
            return
        piece = cut(event, self._next[index])
        if piece is None:
            if event.position > self._next[index]:
                self._suspect(index)
            return
        if len(self._ready) >= FEED_EVENTS:
            self._suspect(index)
            return
        self._accept(index, piece)
        self._wake.set()

    def check_silence(self, now: float) -> None:
        """After a second without a word, look into the log."""
        if not self.done and not self._ready and now - self.heard_at > SILENCE_S:
            self.heard_at = now
            self._gaps.update(i for i, is_open in enumerate(self._open) if is_open)
            self._wake.set()

    def close(self) -> None:
        """Stop listening."""
        self._reader.forget(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, index: int, event: TokenEvent) -> None:
        self._attempt[index] = max(self._attempt[index], event.attempt)
        self._next[index] = event.end
        if event.finish is not None:
            self._open[index] = False
        self._ready.append((index, event))

    def _suspect(self, index: int) -> None:
        self._gaps.add(index)
        self._wake.set()

    async def _repair(self) -> None:
        index = self._gaps.pop()
        if not self._open[index]:
            return
        try:
            events = await read_tokens(
                self._reader.redis, self._model, self.seq_ids[index], self._next[index], self._reader.api_id
            )
        except (RedisError, OSError) as error:
            log.warning("frames.repair_failed", sequence=self.seq_ids[index], error=str(error))
            await asyncio.sleep(0.2)
            self._gaps.add(index)
            return
        for event in events:
            piece = cut(event, self._next[index])
            if piece is not None and self._open[index]:
                self._accept(index, piece)


class FrameReader:
    """One api process's subscription to its frames."""

    def __init__(self, redis_url: str, api_id: str = "") -> None:
        self.api_id = api_id or uuid.uuid4().hex[:8]
        self.redis: Redis = connect(redis_url)
        self._listening: Redis = connect(redis_url, blocking=True)
        self._feeds: dict[str, tuple[TokenFeed, int]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._started_ms = time.time_ns() // 1_000_000

    async def start(self) -> None:
        """Subscribe; returns when frames sent from now on will arrive."""
        subscribed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._listen(subscribed)),
            asyncio.create_task(self._watch_silence()),
            asyncio.create_task(self._beat()),
        ]
        await subscribed.wait()

    async def stop(self) -> None:
        """Unsubscribe and forget this api."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self.redis.delete(keys.api(self.api_id), keys.frames(self.api_id))
        await self.redis.aclose()
        await self._listening.aclose()

    def open(self, model: str, seq_ids: Sequence[str], start: Sequence[int] | None = None) -> TokenFeed:
        """Listen to these sequences, from `start` on; to be called before they are enqueued."""
        feed = TokenFeed(self, model, seq_ids, start or [0] * len(seq_ids))
        for index, seq in enumerate(seq_ids):
            self._feeds[seq] = (feed, index)
        return feed

    def forget(self, feed: TokenFeed) -> None:
        """Stop dispatching to a feed."""
        for seq in feed.seq_ids:
            if self._feeds.get(seq, (None, 0))[0] is feed:
                del self._feeds[seq]

    @property
    def streams(self) -> int:
        """Sequences listened to."""
        return len(self._feeds)

    def dispatch(self, data: bytes) -> None:
        """Hand the events of one frame to their feeds."""
        try:
            frame = decode_frame(data)
        except msgspec.DecodeError as error:
            log.warning("frames.unreadable", error=str(error))
            return
        feeds = self._feeds
        for event in frame.events:
            found = feeds.get(event.seq)
            if found is not None:
                found[0].offer(found[1], event)

    async def _listen(self, subscribed: asyncio.Event) -> None:
        while True:
            try:
                async with self._listening.pubsub() as channel:
                    await channel.subscribe(keys.frame_channel(self.api_id))
                    async for message in channel.listen():
                        if message["type"] == "message":
                            self.dispatch(message["data"])
                        elif message["type"] == "subscribe":
                            if subscribed.is_set():
                                await self._catch_up()
                            subscribed.set()
            except (RedisError, OSError) as error:
                log.warning("frames.connection_lost", error=str(error))
                await asyncio.sleep(0.1)

    async def _catch_up(self) -> None:
        """After a lost subscription, what was published meanwhile is in the frame stream."""
        for _, fields in await self.redis.xrange(keys.frames(self.api_id)):
            self.dispatch(fields[b"d"])

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_S / 4)
            now = time.monotonic()
            for feed, _ in list(self._feeds.values()):
                feed.check_silence(now)

    async def _beat(self) -> None:
        key = keys.api(self.api_id)
        while True:
            with contextlib.suppress(RedisError, OSError):
                async with self.redis.pipeline() as pipe:
                    fields = {
                        "host": socket.gethostname(),
                        "pid": os.getpid(),
                        "started_ms": self._started_ms,
                        "streams": self.streams,
                        "heartbeat_ms": time.time_ns() // 1_000_000,
                    }
                    pipe.hset(key, mapping=fields)
                    pipe.expire(key, keys.API_TTL_S)
                    pipe.expire(keys.frames(self.api_id), keys.API_TTL_S)
                    await pipe.execute()
            await asyncio.sleep(HEARTBEAT_S)
