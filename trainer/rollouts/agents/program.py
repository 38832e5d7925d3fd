"""Programs of agents: one process for each episode, or one process that plays all episodes.

A program gets its model by `OPENAI_BASE_URL` and `OPENAI_API_KEY`, its task's number by `PARALLM_TASK`, and the task's
line of a data set by `PARALLM_TASK_JSON`. It works in an empty folder of its own. What it came to is its verdict:
feedback that it posted to the endpoint, else a check command's, else what it said or its exit code.

A program that serves is started once and reads a line of JSON for each episode: `{"episode", "task", "line",
"base_url", "api_key"}`. It writes a line for each that has ended: `{"episode", "reward", "components"}` or
`{"episode", "error"}`; lines that are no JSON object go to the log.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trainer.rollouts.agents.endpoint import Feedback

Rewarding = Literal["exit", "output"]
_LONGEST_LINE = 1 << 22
_SHOWN = 2000  # characters of an error that a program has written


@dataclass(frozen=True)
class ProgramEpisode:
    """Place of an episode, as a program gets it."""

    task: int
    line: Any  # of a data set; None: there is none
    base_url: str
    key: str


class AgentError(Exception):
    """The program failed without a verdict; costs the sample."""


class Program(Protocol):
    """A program of the user's that plays episodes by asking a model."""

    async def close(self) -> None:
        """End what outlives an episode."""

    async def play(self, episode: ProgramEpisode) -> Feedback:
        """Play an episode to its end, and return the program's verdict. AgentError when it has none.

        Cancelling it ends what plays.
        """


@dataclass(frozen=True)
class OncePerEpisode:
    """A process for each episode."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    reward: Rewarding = "exit"
    check: Sequence[str] = ()  # run after it, in its folder

    async def close(self) -> None:
        return

    async def play(self, episode: ProgramEpisode) -> Feedback:
        folder = tempfile.mkdtemp(prefix="episode-")
        try:
            code, said, error = await self._run(self.command, episode, folder)
            if self.check:
                code, said, error = await self._run(self.check, episode, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if self.reward == "exit":
            return Feedback(float(code == 0), {}, error[-_SHOWN:].strip())
        lines = said.split()
        try:
            return Feedback(float(lines[-1]), {})
        except (ValueError, IndexError):
            raise AgentError(f"the program's last word is no number (exit code {code}): {error[-_SHOWN:]}") from None

    async def _run(self, command: Sequence[str], episode: ProgramEpisode, folder: str) -> tuple[int, str, str]:
        variables = {
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.key,
            "PARALLM_TASK": str(episode.task),
            "PARALLM_TASK_JSON": json.dumps(episode.line),
        }
        process = await _started(command, folder, {**self.variables, **variables}, stdin=asyncio.subprocess.DEVNULL)
        try:
            out, error = await process.communicate()
        finally:
            _end(process)
        return process.returncode or 0, out.decode(errors="replace"), error.decode(errors="replace")


class ServingProgram:
    """One process that plays all episodes; another one is started when it has ended."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._command, self._variables = command, variables
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ends: dict[str, asyncio.Future[Feedback]] = {}

    async def play(self, episode: ProgramEpisode) -> Feedback:
        async with self._starting:
            process = await self._running()
        end = self._ends[episode.key] = asyncio.get_running_loop().create_future()
        line = {"episode": episode.key, "task": episode.task, "line": episode.line, "base_url": episode.base_url}
        assert process.stdin is not None, "it was started with a pipe"
        try:
            process.stdin.write(json.dumps(line | {"api_key": episode.key}).encode() + b"\n")
            await process.stdin.drain()
            verdict: Feedback = await end
            return verdict
        except OSError as error:
            raise AgentError(f"the program {self._command[0]!r} has ended: {error}") from error
        finally:
            del self._ends[episode.key]

    async def close(self) -> None:
        if self._process is not None and self._reading is not None:
            _end(self._process)
            await self._reading

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await _started(self._command, None, self._variables, stdin=asyncio.subprocess.PIPE)
            self._reading = asyncio.create_task(self._read(self._process))
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None, "it was started with pipes"
        tail = asyncio.create_task(_tail(process.stderr))
        with contextlib.suppress(ValueError):  # a line that is too long
            async for line in process.stdout:
                self._take(line)
        _end(process)
        code, error = await process.wait(), await tail
        for end in self._ends.values():
            if not end.done():
                end.set_exception(AgentError(f"the program {self._command[0]!r} ended with {code}: {error}"))

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            end = self._ends.get(said["episode"])
        except (ValueError, KeyError, TypeError):
            return  # what it prints for people
        if end is None or end.done():
            return
        try:
            if "error" in said:
                raise AgentError(str(said["error"])[:_SHOWN])
            components = {str(name): float(value) for name, value in (said.get("components") or {}).items()}
            end.set_result(Feedback(float(said["reward"]), components))
        except AgentError as error:
            end.set_exception(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            end.set_exception(AgentError(f"the program's end of an episode is malformed: {error!r}"))


async def _started(
    command: Sequence[str], folder: str | None, variables: Mapping[str, str], *, stdin: int
) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command, cwd=folder, env={**os.environ, **variables}, stdin=stdin, stdout=pipe, stderr=pipe,
            start_new_session=True, limit=_LONGEST_LINE,
        )  # fmt: skip
    except OSError as error:
        raise AgentError(f"the program {command[0]!r} does not start: {error}") from error


async def _tail(stream: asyncio.StreamReader) -> str:
    """The end of what a program writes for people."""
    tail = b""
    while part := await stream.read(4096):
        tail = (tail + part)[-_SHOWN:]
    return tail.decode(errors="replace").strip()


def _end(process: asyncio.subprocess.Process) -> None:
    """End a program with what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
