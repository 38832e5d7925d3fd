"""A host's worker processes: one for each model, and a spare that waits for one.

Each has the read end of a pipe of ours as its stdin and ends when it closes (shared/process/lifeline.py), so a host
that is killed leaves no worker. Each says through another pipe how far it is (shared/process/start_reports.py).
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping

import msgspec
import structlog

from shared.process import lifeline, start_reports
from shared.process.start_reports import StartReport
from worker.host import spare
from worker.host.describe import Answer

log = structlog.get_logger()

COMMAND = ("-m", "worker")
LONGEST_LINE = 256 << 20  # bytes: tokenizers have tens of megabytes
LAST_REPORTS_S = 1.0  # a worker that has ended: its grandchildren may hold the pipe


class WorkerChild:
    """One worker process. Made by `start`; it is given its model then, or later by `serve`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reports: asyncio.StreamReader, pipe: asyncio.ReadTransport
    ) -> None:
        self._process, self._reports, self._pipe = process, reports, pipe

    @classmethod
    async def start(cls, settings: Mapping[str, str] | None = None) -> "WorkerChild":
        """Start a worker with `PARALLM_*` settings; without them a spare."""
        reading, writing = os.pipe()
        reports = asyncio.StreamReader(LONGEST_LINE)
        try:  # the process last: who is cancelled here leaves none behind
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reading, "rb")
            )
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                env={
                    **os.environ,
                    **({spare.VARIABLE: "1"} if settings is None else settings),
                    lifeline.VARIABLE: "1",
                    start_reports.VARIABLE: str(writing),
                },
                pass_fds=(writing,),
                start_new_session=True,  # a Ctrl-C reaches us alone; we end the workers in order
            )
        finally:
            os.close(writing)
        return cls(process, reports, pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    async def describe(
        self, settings: Mapping[str, str], on_progress: Callable[[float], None] = lambda progress: None
    ) -> Answer:
        """Have a spare look at a model; one of the hub is fetched first, which has its progress."""
        await self._order("describe", settings)
        while line := await self._line():
            answer = msgspec.json.decode(line, type=Answer)
            if answer.described or answer.why:
                return answer
            on_progress(answer.progress)
        return Answer(why=await self._end())

    async def serve(self, settings: Mapping[str, str]) -> None:
        """Make a spare the worker of a model."""
        await self._order("serve", settings)

    async def started(self, on_progress: Callable[[float], None]) -> str:
        """Wait until the worker is ready; "" if it is, else why it cannot be."""
        while line := await self._line():
            report = msgspec.json.decode(line, type=StartReport)
            if report.worker or report.why:
                return report.why
            on_progress(report.progress)
        return await self._end()

    async def ended(self) -> int:
        """Wait for the process's end; its exit code."""
        code = await self._process.wait()
        self._pipe.close()
        return code

    async def stop(self, patience_s: float) -> None:
        """End it in order: rows may end, the rest goes back to the queue. Killed when that takes too long."""
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s):
                await self.ended()
        except TimeoutError:
            log.warning("host.worker_killed", pid=self.pid, after_s=patience_s)
            await self.kill()

    async def kill(self) -> None:
        self._send(signal.SIGKILL)
        ended = asyncio.ensure_future(self.ended())
        try:
            await asyncio.shield(ended)
        finally:
            await ended  # who is cancelled here leaves none behind, either, and it is soon

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _order(self, what: str, settings: Mapping[str, str]) -> None:
        """Write a line; one that has ended meanwhile is noticed by who waits for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(msgspec.json.encode({what: settings}) + b"\n")
            await self._process.stdin.drain()

    async def _line(self) -> bytes:
        """The next whole line of its reports; b"" when it has ended."""
        line, end = asyncio.ensure_future(self._reports.readline()), asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({line, end}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                await asyncio.wait({line}, timeout=LAST_REPORTS_S)
            return line.result() if line.done() and line.result().endswith(b"\n") else b""
        finally:
            line.cancel()
            end.cancel()

    async def _end(self) -> str:
        return f"its process has ended with exit code {await self.ended()}"
