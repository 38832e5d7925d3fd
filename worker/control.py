"""Orders to a running worker: cancel this, send that to another api, look at the pause, forget cached KV. It
also cancels rows whose reader died.

Orders come over the worker's control channel; one that was missed stands in the sequence's hash as well, and is read
there after every (re)connection.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
import structlog
from redis.asyncio import Redis

from shared.redis import keys
from worker.rows import ClaimedRow, ClaimedRows

log = structlog.get_logger()

EARLY_KEPT = 256

Cancel = Callable[[str, Literal["cancelled"]], None]


class ControlChannel:
    """The control channel of one worker."""

    def __init__(
        self,
        redis: Redis,
        listening: Redis,
        model: str,
        worker_id: str,
        rows: ClaimedRows,
        cancel: Cancel,
        flush_log: Callable[[str], None],
        look_at_pause: Callable[[], None],
        reset_cache: Callable[[str, bool], None] = lambda order, rows: None,
    ) -> None:
        self._redis = redis
        self._listening = listening
        self._model = model
        self._channel = keys.control_channel(worker_id)
        self._rows = rows
        self._cancel = cancel
        self._flush_log = flush_log
        self._look_at_pause = look_at_pause
        self._reset_cache = reset_cache
        self._early: dict[str, tuple[str, ...]] = {}  # of sequences that we do not know, or not yet

    async def listen(self) -> None:
        """Obey until the connection breaks or we are cancelled."""
        async with self._listening.pubsub() as channel:
            await channel.subscribe(self._channel)
            async for message in channel.listen():
                if message["type"] == "message":
                    self.obey(message["data"])
                elif message["type"] == "subscribe":  # the first time, and whenever redis-py has connected again
                    self._look_at_pause()
                    await self.reread(list(self._rows))

    def welcome(self, seq: str) -> None:
        """Obey what was said of a sequence after Redis gave it to us and before we knew."""
        order = self._early.pop(seq, None)
        if order is not None:
            self._follow(order)

    def obey(self, data: bytes) -> None:
        try:
            order = msgspec.msgpack.decode(data, type=tuple[str, ...])
        except msgspec.DecodeError:
            log.warning("worker.bad_control_message", data=data[:80])
            return
        self._follow(order)

    def _follow(self, order: tuple[str, ...]) -> None:
        match order:
            case ("cancel", seq) | ("route", seq, _) if seq not in self._rows:
                self._early[seq] = order
                while len(self._early) > EARLY_KEPT:
                    self._early.pop(next(iter(self._early)))
            case ("cancel", seq):
                self._cancel(seq, "cancelled")
            case ("route", seq, api):
                self._route(seq, api)
            case ("pause",):
                self._look_at_pause()
            case ("reset-cache", asked, rows):
                self._reset_cache(asked, bool(rows))
            case _:
                log.warning("worker.unknown_control_message", order=order)

    def _route(self, seq: str, api: str) -> None:
        row = self._rows.get(seq)
        if row is not None:
            row.api = api
            self._flush_log(seq)  # the new reader finds in the log what the old one had in its frames

    async def reread(self, rows: list[ClaimedRow]) -> None:
        """Obey orders in the rows' hashes: they were missed, or came before the engine knew the row."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for row in rows:
                pipe.hmget(keys.sequence(self._model, row.id), ["cancel", "api"])
            found = await pipe.execute()
        for row, (cancel, api) in zip(rows, found, strict=True):
            if cancel:
                self._cancel(row.id, "cancelled")
            if api is not None and api.decode() != row.api:
                self._route(row.id, api.decode())

    async def end_orphans(self) -> None:
        """Cancel interactive rows whose api has been dead for its heartbeat's time to live: they have no reader.

        Looks after orders as well: a connection that died without a word brought none.
        """
        await self.reread(list(self._rows))
        rows = [r for r in self._rows if r.api and r.claim.spec.sequence_class == "interactive"]
        dead = {api for api in {row.api for row in rows} if not await self._redis.exists(keys.api(api))}
        for row in rows:
            if row.api in dead:
                log.info("worker.orphan_cancelled", sequence=row.id, api=row.api)
                self._cancel(row.id, "cancelled")
