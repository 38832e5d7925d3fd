"""Token frames, the api's read side: one subscription a process, one feed a request.

The live path is pub/sub: one message per decode step, dispatched to the feeds. Beside it one task repairs for all feeds
together: what is due is looked for in our frame stream (one read for all) and then in the logs (one pipeline).
"""

import asyncio
import contextlib
import math
import os
import socket
import time
import uuid
from collections.abc import Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError

from shared.errors import ServiceUnavailableError
from shared.redis import keys
from shared.redis.connection.client import connect, server_time_ms
from shared.redis.connection.faults import is_refusal, reason
from shared.redis.tokens.feed import SequenceCursor, TokenFeed
from shared.redis.tokens.log import events_of_chunk, events_of_frame

log = structlog.get_logger()

LOOK_EVERY_S = 0.25  # for silent sequences
HEARTBEAT_S = 10.0
PROBE_S = 1.0  # between two heartbeats while sequences are silent
REFUSED_S = 5.0  # of writes; readers without an event for this long are notified
PING_EVERY_S = 5.0  # on a silent subscription: a connection that died without a word is found
SLACK_MS = 2_000  # between our clock and Redis'
PAGE = 256  # frames decoded without a pause
LOGS_AT_ONCE = 64  # sequences: two answers of each are read without a pause, in 50 us each


class FrameReader:
    """One api process's subscription to its frames."""

    def __init__(self, url: str, api_id: str = "") -> None:
        self.api_id = api_id or uuid.uuid4().hex[:8]
        self.redis = connect(url)
        self._cursors: dict[str, list[SequenceCursor]] = {}
        self._feeds: set[TokenFeed] = set()
        self._asked = asyncio.Event()
        self._known = "0-0"  # our frame stream has been read up to here
        self._clock_ms = 0.0  # Redis' time minus our monotonic time
        self._reconnected = False
        self._silent = asyncio.Event()  # sequences are: does Redis still take what is written?
        self._refused_at = math.inf  # monotonic time since when it does not
        self.refusal = ""  # why
        self._tasks: list[asyncio.Task[None]] = []
        self._started_ms = time.time_ns() // 1_000_000

    async def start(self) -> None:
        """Subscribe; returns when frames sent from now on will arrive."""
        subscribed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen(subscribed))]
        await subscribed.wait()
        self._clock_ms = await server_time_ms(self.redis, keys.frames(self.api_id)) - time.monotonic() * 1000
        newest = await self.redis.xrevrange(keys.frames(self.api_id), count=1)
        if newest:
            self._known = newest[0][0].decode()
        self._tasks += [asyncio.create_task(self._repair()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        """Unsubscribe. The heartbeat is the last one: it stays while clients resume their streams elsewhere."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
            async with asyncio.timeout(1):
                await self.redis.expire(keys.api(self.api_id), keys.API_LEFT_S)
        await self.redis.aclose()

    def open(
        self,
        model: str,
        seq_ids: Sequence[str],
        start: Sequence[int] | None = None,
        attempts: Sequence[int] | None = None,
    ) -> TokenFeed:
        """Listen to these sequences, from `start` on; to be called before they are enqueued.

        `attempts`: whose tokens the reader has already; frames of older owners do not count.
        """
        feed = TokenFeed(model, seq_ids, start, attempts, ask=self._asked.set, close=self._forget)
        self._feeds.add(feed)
        for cursor in feed.cursors:
            self._cursors.setdefault(cursor.seq, []).append(cursor)
        return feed

    @property
    def streams(self) -> int:
        """Number of sequences that feeds listen to."""
        return len(self._cursors)

    def fail(self, error: Exception) -> None:
        """Let all feeds raise this error: nothing more will come."""
        for feed in self._feeds:
            feed.fail(error)

    def dispatch(self, data: bytes, *, live: bool = True) -> None:
        """Pass the events of one frame to their feeds."""
        now = time.monotonic()
        cursors = self._cursors.get
        touched: set[TokenFeed] = set()
        for event in events_of_frame(data):
            for cursor in cursors(event.seq, ()):
                cursor.offer(event, now, live=live)
                touched.add(cursor.feed)
        for feed in touched:
            feed.wake()

    def _forget(self, feed: TokenFeed) -> None:
        self._feeds.discard(feed)
        for cursor in feed.cursors:
            others = [other for other in self._cursors.get(cursor.seq, []) if other.feed is not feed]
            if others:
                self._cursors[cursor.seq] = others
            else:
                self._cursors.pop(cursor.seq, None)

    # -- the live channel

    async def _listen(self, subscribed: asyncio.Event) -> None:
        while True:
            try:
                async with self.redis.pubsub() as channel:
                    await channel.subscribe(keys.frame_channel(self.api_id))
                    await self._dispatch_all(channel, subscribed)
            except (RedisError, OSError) as error:
                log.warning("frames.connection_lost", error=reason(error))
            await asyncio.sleep(0.1)

    async def _dispatch_all(self, channel: Any, subscribed: asyncio.Event) -> None:
        silent = 0
        while True:
            # The raw answer: redis-py's message dicts cost more than our dispatch.
            message = await channel.parse_response(block=False, timeout=PING_EVERY_S)
            if message is None:
                silent += 1
                if silent > 1:
                    raise TimeoutError("the subscription is silent, even to a ping")
                await channel.ping()
                continue
            silent = 0
            if message[0] == b"message":
                self.dispatch(message[2])
            elif message[0] == b"subscribe":
                # Also after redis-py has connected again by itself: what was published meanwhile is in our stream.
                self._reconnected = subscribed.is_set()
                subscribed.set()
                self._asked.set()

    # -- repair

    async def _repair(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_look_s()):
                    await self._asked.wait()
            self._asked.clear()
            try:
                await self._repair_once()
            except (RedisError, OSError) as error:
                log.warning("frames.repair_failed", error=reason(error))
                await asyncio.sleep(LOOK_EVERY_S)

    def _next_look_s(self) -> float:
        gaps = [cursor.due_at for cursor in self._open_cursors() if cursor.in_gap]
        return max(0.01, min(LOOK_EVERY_S, min(gaps, default=math.inf) - time.monotonic()))

    def _open_cursors(self) -> list[SequenceCursor]:
        feeds = [feed for feed in self._feeds if feed.unfinished and not feed.overrun]
        return [cursor for feed in feeds for cursor in feed.cursors if not cursor.finished]

    async def _repair_once(self) -> None:
        now = time.monotonic()
        reconnected, self._reconnected = self._reconnected, False
        due = [cursor for cursor in self._open_cursors() if reconnected or cursor.due_at <= now]
        if not due:
            return
        await self._read_frames(min(cursor.heard_at for cursor in due))
        due = [cursor for cursor in due if reconnected or cursor.due_at <= now]
        if due:
            self._silent.set()
            await self._read_logs(due)
            for cursor in due:
                cursor.asked(now)

    async def _read_frames(self, since: float) -> None:
        """Offer again what our frame stream got since then (monotonic time), beyond what has been offered already."""
        since_ms = max(0, int(self._clock_ms + since * 1000) - SLACK_MS)
        if since_ms > int(self._known.split("-")[0]):
            self._known = f"{since_ms}-0"
        while True:
            page = await self.redis.xrange(keys.frames(self.api_id), f"({self._known}", "+", count=PAGE)
            for entry, fields in page:
                self.dispatch(fields.get(b"d", b""), live=False)
                self._known = entry.decode()
            if len(page) < PAGE:
                return
            await asyncio.sleep(0)

    async def _read_logs(self, due: list[SequenceCursor]) -> None:
        for first in range(0, len(due), LOGS_AT_ONCE):
            some = due[first : first + LOGS_AT_ONCE]
            async with self.redis.pipeline(transaction=False) as pipe:
                for cursor in some:
                    pipe.execute_command("XRANGE", keys.sequence_log(cursor.feed.model, cursor.seq), "-", "+")
                    pipe.execute_command("EXISTS", keys.sequence(cursor.feed.model, cursor.seq))
                answers = await pipe.execute()
            now = time.monotonic()
            for cursor, chunks, exists in zip(some, answers[::2], answers[1::2], strict=True):
                if not exists and not chunks and cursor.feed.on_lost is not None:
                    cursor.attempt = 0  # attempts are counted anew, too
                    cursor.feed.on_lost(cursor.seq, cursor.position)
                for _, fields in chunks:
                    for event in events_of_chunk(fields, cursor.seq):
                        cursor.offer(event, now, live=False, logged=True)
                cursor.feed.wake()
            await asyncio.sleep(0)

    # -- heartbeat

    async def announce(self) -> None:
        """Write this api process's heartbeat."""
        key = keys.api(self.api_id)
        fields = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_ms": self._started_ms,
            "streams": self.streams,
            "heartbeat_ms": time.time_ns() // 1_000_000,
        }
        async with self.redis.pipeline() as pipe:
            pipe.hset(key, mapping=fields)
            pipe.expire(key, keys.API_TTL_S)
            pipe.expire(keys.frames(self.api_id), keys.API_TTL_S)
            await pipe.execute()

    async def _beat(self) -> None:
        while True:
            try:
                await self.announce()
                self._refused_at, self.refusal = math.inf, ""
            except (RedisError, OSError) as error:
                if is_refusal(error):
                    self._log_refusal(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._silent.wait()
            self._silent.clear()
            await asyncio.sleep(min(PROBE_S, REFUSED_S / 2))

    def _log_refusal(self, refusal: Exception) -> None:
        """Fail feeds without events before their deadline, because Redis refuses workers' writes, too."""
        now = time.monotonic()
        self._refused_at, self.refusal = min(self._refused_at, now), reason(refusal)
        log.warning("frames.writes_refused", error=self.refusal, since_s=round(now - self._refused_at, 1))
        if now - self._refused_at < REFUSED_S:
            return
        error = ServiceUnavailableError(f"Redis refuses to work ({self.refusal}); send the request again later")
        for feed in self._feeds:
            if all(cursor.heard_at < now - REFUSED_S for cursor in feed.cursors):
                feed.fail(error)
