"""A process of ours that is told what to do over its pipes, and that can be killed whatever it hangs in.

For code whose time nobody knows: rewards, patterns, functions and environments of users. Whoever starts it decides how
long it waits for an answer; the process ends when its pipe does, so it does not outlive us for longer than what it is
doing. It has a process group of its own, and what it has started goes with it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from shared.errors import ServiceUnavailableError
from shared.process.call_pipe import HEAD_BYTES, length_of, packed


class LostProcessError(Exception):
    """The process has ended."""


class CallProcess:
    """One process, for one caller at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._killed = False

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str] = (), pass_fds: Sequence[int] = ()) -> "CallProcess":
        """Start `python -m module`, which finds the packages that we find; ServiceUnavailableError if it cannot be."""
        path = os.pathsep.join(each for each in sys.path if each)
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - as asyncio does; its own waits for the end in a thread
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except OSError as error:
            raise ServiceUnavailableError(f"no process can be started on this machine: {error.strerror}") from error
        started = cls(process)
        try:
            await started._connect()
        except BaseException:
            started.kill()
            raise
        return started

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it may still answer."""
        return not self._killed and self._process.poll() is None

    async def send(self, message: bytes) -> None:
        """Hand it a message."""
        try:
            self._writer.write(packed(message))
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise LostProcessError from error

    async def receive(self) -> bytes:
        """Its next message."""
        try:
            return await self._reader.readexactly(length_of(await self._reader.readexactly(HEAD_BYTES)))
        except (asyncio.IncompleteReadError, OSError, RuntimeError) as error:
            raise LostProcessError from error

    def kill(self) -> None:
        """End it and all that it has started, now; safe to repeat."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for transport in (getattr(self, "_writer", None), getattr(self, "_incoming", None)):
            if transport is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    transport.close()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._reader = asyncio.StreamReader()
        self._incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self._process.stdout
        )
        outgoing, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop=loop), self._process.stdin
        )
        self._writer = asyncio.StreamWriter(outgoing, protocol, None, loop)
