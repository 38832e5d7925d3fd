"""Who the work of a task is for: the key and the client of its request, and whether that client still listens.

Both stand in context variables, so that work far below a route knows its caller without being handed it. Tasks of our
own, such as those that read batches, have no client; they act for the tenant whose thing they work on.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from limits import RateLimitItem
from starlette.types import Receive

from shared.errors import InvalidRequestError, RequestCancelledError
from shared.owners import ADMINS, ANYBODY, Asker
from shared.sequences import SequenceClass

T = TypeVar("T")

NO_CACHE = "x-parallm-no-cache"
LEARN = "x-parallm-learn"
SESSION_HEADERS = (  # of clients, the surest first; each carries the id of one conversation
    "x-session-id",
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-session-affinity",
    "session_id",  # Codex
    "session-id",
    "conversation_id",
    "x-task-id",  # Cline
    "x-litellm-session-id",
)


@dataclass(frozen=True)
class ApiKey:
    """One key's digest, and what its owner may do."""

    name: str
    digest: bytes
    sequence_class: SequenceClass = "interactive"
    rate: RateLimitItem | None = None  # of requests that begin work; None: the server's own
    concurrent: int = 0  # such requests at a time in one api process; 0: the server's own
    tenant: str = ""  # who owns what it makes; "": there are no tenants, or it is an admin's
    admin: bool = False
    feedback: bool = True  # whether answers to it may be kept for feedback
    learn: bool = False  # whether the messages that follow these answers may be judged and learned from
    each_agrees: bool = False  # only requests whose header says that their user agrees are stored at all

    @property
    def apart(self) -> bool:
        """True if the server has tenants, and this key is of one of them or of an admin."""
        return bool(self.tenant) or self.admin

    @property
    def asker(self) -> Asker:
        """Owner in whose name a request with this key acts."""
        return Asker(ADMINS if self.admin else self.tenant, limited=bool(self.tenant))


calling: ContextVar[ApiKey | None] = ContextVar("calling", default=None)
"""The key of the request whose task this is."""


def asker() -> Asker:
    """Who sent the request whose task this is; what runs without one, or on a server without tenants, sees all."""
    key = calling.get()
    return ANYBODY if key is None else key.asker


@contextlib.contextmanager
def acting_for(tenant: str, key: str) -> Iterator[None]:
    """Around work for a tenant's thing while no request is there: it can name only what the tenant sees, and waits in
    the turn of the key that made the thing.
    """
    bounds = tenant if tenant != ADMINS else ""
    before = calling.set(ApiKey(key or f"tenant:{tenant}", b"", "batch", tenant=bounds))
    try:
        yield
    finally:
        calling.reset(before)


def key_name() -> str:
    """The name of that key; "" when the server wants none."""
    key = calling.get()
    return "" if key is None else key.name


class Client(NamedTuple):
    """Who sent the request of a task."""

    host: str
    receive: Receive  # reports, once the body has been read, that the client has left


client: ContextVar[Client | None] = ContextVar("client", default=None)
"""None in tasks of our own, such as those that read batches."""


no_cache: ContextVar[str] = ContextVar("no_cache", default="")
"""The request's header of this name; "" without one."""


may_learn: ContextVar[str] = ContextVar("may_learn", default="")
"""The header by which a request's user agrees to be learned from, or does not; "" without one."""


named_session: ContextVar[str] = ContextVar("named_session", default="")
"""The session that a header of the request names; "" without one."""


def session_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The session that the surest of SESSION_HEADERS names, cut to what an id may have."""
    found = {name: value for name, value in headers if name in _SESSION_HEADERS}
    value = next((found[name] for name in _SESSION_HEADERS if found.get(name)), b"")
    return value[:512].decode("latin-1").strip()


_SESSION_HEADERS = tuple(name.encode() for name in SESSION_HEADERS)


def may_cache() -> bool:
    """False if the request's header asks that nothing of it be cached; InvalidRequestError for an unknown value."""
    asked = no_cache.get().strip().lower()
    if asked not in ("", "0", "false", "1", "true"):
        raise InvalidRequestError(f"header '{NO_CACHE}': 1 or 0, not '{asked[:32]}'", param=NO_CACHE)
    return asked not in ("1", "true")


def may_record() -> bool:
    """False if this task's request has a key whose answers may not be stored, or a user who does not agree to it.

    InvalidRequestError for an unknown value of the header.
    """
    key, agrees = calling.get(), may_learn.get().strip().lower()
    if agrees not in ("", "no", "0", "false", "yes", "1", "true"):
        raise InvalidRequestError(f"header '{LEARN}': yes or no, not '{agrees[:32]}'", param=LEARN)
    if agrees in ("no", "0", "false"):
        return False
    return key is None or (key.feedback and (bool(agrees) or not key.each_agrees))


def may_judge() -> bool:
    """True if the messages after this task's answers may be judged: the key says so, or the server has no keys."""
    key = calling.get()
    return key is None or key.learn


def asking() -> str:
    """Who the work of this task is for: a key by its name, without keys a client by its address."""
    key, sender = calling.get(), client.get()
    return key.name if key is not None else f"host:{sender.host if sender is not None else ''}"


async def while_wanted(work: Awaitable[T]) -> T:
    """The result of work that ends, cancelled, when the client of this task's request leaves."""
    sender = client.get()
    if sender is None:
        return await work
    done = await until_disconnected(_boxed(work), sender.receive)
    if done is None:
        raise RequestCancelledError("the client has left")
    return done[0]


async def _boxed(work: Awaitable[T]) -> tuple[T]:
    return (await work,)


async def until_disconnected(work: Awaitable[T], receive: Receive) -> T | None:
    """The result of `work`; None when the client left first, and then `work` has been cancelled and has ended."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        watching.cancel()
        while not working.done():  # redis-py may lose a cancellation that meets its look at an idle connection
            working.cancel()
            await asyncio.wait({working}, timeout=0.5)
        if not working.cancelled():
            working.exception()  # looked at, whether or not somebody waits for it


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
