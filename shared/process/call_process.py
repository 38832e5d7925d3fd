"""A process of ours that gets calls over a socket, and that can be killed whatever it hangs in.

For code whose time nobody knows: rewards, patterns, functions and environments of users. Whoever starts it decides how
long it waits for an answer; the process ends when its socket does, so it does not outlive us for longer than what it is
doing. It has a process group of its own, and what it has started goes with it.

Invariant. A descriptor has one owner. uvloop closes what `connect_read_pipe` was given, and so does the file object
(MagicStack/uvloop#763): the second one may meet what has been opened under that number since, and libuv ends a process
whose descriptors are gone (SIGABRT). Sockets it takes over whole, also from a caller that is cancelled meanwhile.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from shared.errors import ServiceUnavailableError
from shared.process.call_pipe import HEAD_BYTES, head_of, length_of

PART_BYTES = 1 << 20


class LostProcessError(Exception):
    """The process has ended and will not answer."""


class CallProcess:
    """One process, for one caller at a time."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._killed = False

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()) -> "CallProcess":
        """Start `python -m module`, which finds the packages that we find; ServiceUnavailableError if it cannot be."""
        try:
            process, ours = _started([sys.executable, "-P", "-m", module, *arguments], pass_fds)
        except OSError as error:
            raise ServiceUnavailableError(f"no process can be started on this machine: {error.strerror}") from error
        try:
            return cls(process, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            _end(process)
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process may still answer."""
        return not self._killed and self._process.poll() is None

    async def send(self, message: bytes) -> None:
        """Hand it a message; a long one in parts, since an event loop that writes copies what it writes."""
        try:
            self._writer.write(head_of(message))
            for at in range(0, len(message), PART_BYTES):
                self._writer.write(memoryview(message)[at : at + PART_BYTES])
                await self._writer.drain()
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise LostProcessError from error

    async def receive(self) -> bytes:
        """The next message from the process; LostProcessError when it has ended."""
        try:
            return await self._reader.readexactly(length_of(await self._reader.readexactly(HEAD_BYTES)))
        except (asyncio.IncompleteReadError, OSError, RuntimeError) as error:
            raise LostProcessError from error

    def kill(self) -> None:
        """End it and all that it has started, now; safe to repeat."""
        if self._killed:
            return
        self._killed = True
        _end(self._process)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._writer.transport.abort()


def _started(command: list[str], pass_fds: Sequence[int]) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """The process and our end of the socket that is its standard input and output."""
    path = os.pathsep.join(each for each in sys.path if each)
    with contextlib.ExitStack() as opened:
        ours, theirs = socket.socketpair()
        opened.enter_context(ours)
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
                pass_fds=pass_fds,
            )
        opened.pop_all()
    return process, ours


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
