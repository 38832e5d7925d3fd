"""The inner end of what lies between us and a process of ours (the outer one: shared/process/call_process.py).

A message is its length in four bytes and its bytes. Our standard output is the socket to the other end, so whatever
else writes there (a `print` of somebody's code) goes to standard error.
"""

import os
import signal
import struct

_LENGTH = struct.Struct("!I")
HEAD_BYTES = _LENGTH.size


class CallPipe:
    """Messages from and to the process that started this one."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who has started us
        self._read = os.fdopen(os.dup(0), "rb")
        self._write = os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)

    def read(self) -> bytes | None:
        """The next message; None when the other process has ended."""
        try:
            head = self._read.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            body = self._read.read(length)
        except ConnectionResetError:  # it has ended without reading all of the message
            return None
        return body if len(body) == length else None

    def write(self, message: bytes) -> None:
        """Send a message; OSError when the other process has ended."""
        self._write.write(head_of(message))
        self._write.write(message)
        self._write.flush()


def head_of(message: bytes) -> bytes:
    """Header of a message on a pipe: its length in bytes."""
    return _LENGTH.pack(len(message))


def length_of(head: bytes) -> int:
    """The length of a message, from the bytes before it."""
    length: int = _LENGTH.unpack(head)[0]
    return length
