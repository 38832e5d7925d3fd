"""Threads and places for work whose time depends on what a client sent: bounded, and shared fairly between keys.

The rule (docs/operate/operations.md): on an event loop runs only what is bounded by a constant. What grows with a
request goes through `aside` when it is large: into a few threads, for code that releases the interpreter's lock
(tokenizers) or that runs as Python, which gives it back every few milliseconds (templates, long replies). What may run
for minutes or crash goes into a process that can be killed (api/checks/grammars.py), which takes its places from a
`FairPool`, too.

Invariants. No key holds all places of a pool, and keys take turns. A client that leaves gives up its turn at once, and
its process is killed; a thread's place is free again when the thread is, even if its client has left.
"""

import asyncio
import contextlib
import functools
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from api.callers.caller import asking, while_wanted
from shared.errors import RateLimitedError

P = ParamSpec("P")
T = TypeVar("T")

LARGE_CHARS = 8192  # of text to tokenize: from here on it takes milliseconds
LARGE_COUNT = 64  # messages, calls, tools of a chat
PLACES = max(2, min(4, os.cpu_count() or 1))
MOST_WAITING = 1024  # pieces of work of one key in one pool


class FairPool:
    """A few places, in which keys take turns."""

    def __init__(self, places: int = PLACES, most_waiting: int = MOST_WAITING) -> None:
        self._places = places
        self._share = max(1, places - 1)  # of one key
        self._most_waiting = most_waiting
        self.busy: Counter[str] = Counter()
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}  # who waits, the next key first

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Around a piece of work, in its turn; RateLimitedError when too much of the key waits already."""
        who = asking()
        await self.enter(who)
        try:
            yield
        finally:
            self.leave(who)

    async def enter(self, who: str) -> None:
        """Wait for a place, which `leave` gives back."""
        turns = self._turns.setdefault(who, deque())
        if len(turns) >= self._most_waiting:
            raise RateLimitedError(
                f"{len(turns)} long pieces of work of this key wait already; try again shortly", retry_after_s=1
            )
        turn = asyncio.get_running_loop().create_future()
        turns.append(turn)
        self._call_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(who, turn)
            else:  # it was our turn in the moment in which we left
                self.leave(who)
            raise

    def leave(self, who: str) -> None:
        """Give back a place that `enter` took."""
        self.busy[who] -= 1
        if not self.busy[who]:
            del self.busy[who]
        self._call_next()

    def _call_next(self) -> None:
        """Give free places to callers that wait, and to none that has left."""
        while self.busy.total() < self._places:
            who = next((who for who in self._turns if self.busy[who] < self._share), None)
            if who is None:
                return
            turns = self._turns.pop(who)
            turn = turns.popleft()
            if turns:
                self._turns[who] = turns  # after all others
            if turn.cancelled():  # who waited has left, and has not run yet to say so
                continue
            self.busy[who] += 1
            turn.set_result(None)

    def _forget(self, who: str, turn: "asyncio.Future[None]") -> None:
        turns = self._turns.get(who, deque())
        with contextlib.suppress(ValueError):  # it was called in the meantime, and passed over
            turns.remove(turn)
        if not turns:
            self._turns.pop(who, None)


_threads = ThreadPoolExecutor(PLACES, "aside")
_pool = FairPool()


async def aside(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run `work` in one of this process's threads, in the turn of the key that this task acts for."""
    return await while_wanted(_in_thread(asking(), functools.partial(work, *arguments, **named)))


async def _in_thread(who: str, work: Callable[[], T]) -> T:
    await _pool.enter(who)
    running = asyncio.get_running_loop().run_in_executor(_threads, work)
    running.add_done_callback(lambda done: _ended(who, done))
    return await asyncio.shield(running)  # the place stays taken for as long as the thread works


def _ended(who: str, done: "asyncio.Future[T]") -> None:
    _pool.leave(who)
    if not done.cancelled():
        done.exception()  # looked at, though who asked may have left
