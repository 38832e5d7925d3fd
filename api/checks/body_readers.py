"""Reads long bodies in processes of their own: a decoder holds the interpreter's lock for as long as its input takes.

What reads a body is a `Reader`, a function of a module. A short body is read in a thread (`aside`). A long one is sent
to a process once (api/checks/body_process.py), whose functions are then called one after the other, so that a route can
look up what the body names before all of it is read.

Invariants. Keys take turns at the processes. A process is killed when its client leaves and when it takes more
computing than the limit; else it stays for the next body.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec

from api.callers.caller import asking, while_wanted
from api.callers.fair_pool import FairPool, aside
from api.checks.body_process import ReaderCall, ReaderOutcome
from shared import errors
from shared.errors import InvalidRequestError, ServiceUnavailableError
from shared.process.call_process import CallProcess, LostProcessError

Reader = Callable[[bytes, bytes], bytes]
"""Reads of a body what the second argument asks for; both it and the result are msgpack."""

PLACES = 2
SHORT_BYTES = 128 << 10  # the worst JSON of so many bytes is decoded and checked in some 10 ms
COMPUTING_S = 20.0  # that one body may take
LONGEST_S = 120.0  # the start of the process included, on a machine with no time to spare

_outcome = msgspec.msgpack.Decoder(ReaderOutcome)


class Reading:
    """One body, in the hands of one process, or of none when it is short."""

    def __init__(self, body: bytes, process: CallProcess | None) -> None:
        self._body, self._process = body, process
        self._sent = False
        self.under_way = False

    async def call(self, reader: Reader, asked: object) -> bytes:
        """The reader's result for the body; raises the errors that the reader raises."""
        context = msgspec.msgpack.encode(asked)
        if self._process is None:
            return await aside(reader, self._body, context)
        return await while_wanted(self._called(self._process, reader, context))

    async def _called(self, process: CallProcess, reader: Reader, context: bytes) -> bytes:
        self.under_way = True
        try:
            async with asyncio.timeout(LONGEST_S):
                call = ReaderCall(f"{reader.__module__}:{reader.__qualname__}", context, not self._sent)
                await process.send(msgspec.msgpack.encode(call))
                if not self._sent:
                    await process.send(self._body)
                    self._sent = True
                outcome = _outcome.decode(await process.receive())
                result = await process.receive()
        except TimeoutError:
            raise ServiceUnavailableError("reading long bodies takes too long at the moment") from None
        except LostProcessError:
            reason = "to read the body takes too much computing, or too much memory: send less at a time"
            raise InvalidRequestError(reason) from None
        self.under_way = False
        if outcome.error:
            raise getattr(errors, outcome.error)(outcome.message, param=outcome.param)
        return result


class BodyReaders:
    """The processes of one api process."""

    def __init__(self, short_bytes: int = SHORT_BYTES, computing_s: float = COMPUTING_S) -> None:
        self._short_bytes, self._computing_s = short_bytes, computing_s
        self._pool = FairPool(PLACES)
        self._idle: list[CallProcess] = []

    @contextlib.asynccontextmanager
    async def reading(self, body: bytes) -> AsyncIterator[Reading]:
        """Around what is asked of a body, in the turn of its key."""
        if len(body) <= self._short_bytes:
            yield Reading(body, None)
            return
        who = asking()
        await while_wanted(self._pool.enter(who))
        try:
            process = await self._process()
            reading = Reading(body, process)
            try:
                yield reading
            finally:
                if reading.under_way:
                    process.kill()
                else:
                    self._idle.append(process)
        finally:
            self._pool.leave(who)

    async def _process(self) -> CallProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.kill()
        return await CallProcess.start("api.checks.body_process", [str(self._computing_s)])

    def close(self) -> None:
        """End the reading processes at shutdown."""
        while self._idle:
            self._idle.pop().kill()
