"""Redis errors without the server's or redis-py's text: their code, and a description of ours.

redis-py puts a pipeline's command with all its arguments into the error, and a server repeats arguments of commands
that it does not know: prompts, completions and files, in our case. Invariant: the clients of `DiscreetRedis` raise no
error with such a text, so neither a log line, nor a traceback, nor an answer can hold one. Who tells a person of a
Redis error tells `reason(error)`.
"""

import os
import re
import socket
import ssl
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    ExecAbortError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
    WatchError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import ParallmError
from shared.machine.network import words_of

_REFUSED = {
    "OOM": "its memory is full: raise maxmemory or let keys expire",
    "NOREPLICAS": "fewer replicas are connected than min-replicas-to-write asks for",
    "MISCONF": "it cannot write its data to disk",
    "READONLY": "it is a replica and takes no writes",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "LOADING": "it is still loading its data",
    "BUSY": "a script keeps it busy",
    "CLUSTERDOWN": "its cluster is down",
    "NOAUTH": "it asks for a password",
    "WRONGPASS": "user or password is wrong",
    "NOPERM": "this process's user may not do that",
}
_OTHER_CODES = frozenset(
    {
        "NOGROUP",
        "BUSYGROUP",
        "NOSCRIPT",
        "WRONGTYPE",
        "EXECABORT",
        "CROSSSLOT",
        "MOVED",
        "ASK",
        "TRYAGAIN",
        "UNKILLABLE",
    }
)
_KINDS: tuple[tuple[type[RedisError], str], ...] = (  # of these redis-py keeps the code from us
    (OutOfMemoryError, "OOM"),
    (ReadOnlyError, "READONLY"),
    (BusyLoadingError, "LOADING"),
    (NoScriptError, "NOSCRIPT"),
    (NoPermissionError, "NOPERM"),
    (AuthenticationError, "WRONGPASS"),
    (ExecAbortError, "EXECABORT"),
    (MovedError, "MOVED"),
    (AskError, "ASK"),
    (TryAgainError, "TRYAGAIN"),
    (MasterDownError, "MASTERDOWN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (ClusterCrossSlotError, "CROSSSLOT"),
)
_HARMLESS = (  # parts of the server's texts that are more specific than ERR, and repeat no arguments
    "unknown command", "unknown subcommand", "syntax error", "wrong number of arguments", "requires the key to exist",
    "Invalid stream ID", "max number of clients reached", "DISABLED", "not an integer or out of range",
)  # fmt: skip
_LINE = re.compile(r"user_script:(\d+)")
_CODE = re.compile(r"-?([A-Z]{3,20})(?!\w)")
_INNER_CODE = re.compile(r" script[^-]*: -([A-Z]{3,20}) ")  # how servers before 7.0 report a script's command


class ClusterStateError(RedisConnectionError):
    """Why a cluster cannot be used now; its text is made of words that may be shown."""


def code_of(error: BaseException) -> str:
    """The code that the server's answer began with, such as OOM; '' when it was no answer of a server."""
    for kind, code in _KINDS:
        if isinstance(error, kind):
            return code
    if not isinstance(error, ResponseError):
        return ""
    text = str(error)[:300]  # redis-py takes ERR off, so the first word may be any
    for match in (_CODE.match(text), _INNER_CODE.search(text)):
        if match is not None and match[1] in _REFUSED.keys() | _OTHER_CODES:
            return match[1]
    return "ERR"


def is_refusal(error: BaseException) -> bool:
    """True if the server answers but refuses all commands at the moment."""
    return code_of(error) in _REFUSED


def reason(error: BaseException) -> str:
    """The reason in words that may be logged and sent to a client; takes an OSError and our own errors, too."""
    if isinstance(error, ParallmError):
        return error.message
    if code := code_of(error):
        return f"{code}: {_REFUSED.get(code) or _described(str(error))}"
    if isinstance(error, WatchError):
        return "a key that was watched has changed"
    for each in (error, error.__cause__, error.__context__):
        if isinstance(each, MasterNotFoundError | ClusterStateError):
            return str(each)  # the first is made of such words by shared/redis/connection/sentinel.py
        if isinstance(each, OSError) and (words := _of_system(each)):
            return words
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "no answer in time"
    return "the connection was closed" if isinstance(error, RedisConnectionError) else type(error).__name__


def _described(text: str) -> str:
    """The part of a server's text that repeats no arguments."""
    words = [part for part in _HARMLESS if part in text[:200]] or ["it refused a command"]
    line = _LINE.search(text)
    return words[0] + (f" (line {line[1]} of a script)" if line and "user_script" in text[:400] else "")


def _of_system(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or 'broken off'}"
    if isinstance(error, socket.gaierror):
        return "its address is not known"
    return words_of(error, os.strerror(error.errno)) if error.errno else ""


def hush(error: ResponseError, where: str = "") -> None:
    """Remove everything from an error except its code."""
    error.args = (f"{reason(error)}{where}",)


class DiscreetPipeline(Pipeline):
    """A pipeline whose errors name the failed command without its arguments."""

    def annotate_exception(self, exception: Exception, number: int, command: Iterable[object]) -> None:
        """Called by redis-py for the error of one command."""
        if isinstance(exception, ResponseError):
            name = next(iter(command), "")
            name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            hush(exception, f" (command {number} of a pipeline, {name})")


class DiscreetRedis(Redis):
    """A client whose pipelines are discreet; its connections become so by `make_discreet`."""

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """As in redis-py, with our pipeline class."""
        return DiscreetPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


def make_discreet(pool: ConnectionPool) -> None:
    """Let the pool make connections whose errors do not repeat the server's text."""
    pool.connection_class = type("DiscreetConnection", (_Discreet, pool.connection_class), {})


class _Discreet:
    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)  # type: ignore[misc]
        except ResponseError as error:
            hush(error)
            raise
