"""Child processes that live as long as we do: started, watched, restarted, stopped in order.

Each child holds the read end of a pipe from us (its stdin) and ends when it closes (shared/process/lifeline.py), so a
`kill -9` of this process leaves no process. Exit code 2 means "wrong settings". When a child ends with it at its
first start, everything ends. A child that has run before is started again, as after any other death, while the others
serve; but not a rank of a strict group (exit code 3), with which everything ends, too.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from shared.process.group_settings import LOST_EXIT_CODE
from shared.redis.processes.child_troubles import ChildTrouble

log = structlog.get_logger()

SETUP_EXIT_CODE = 2
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
LONGEST_SETUP_DELAY_S = 60.0  # while somebody has to change something first
STEADY_AFTER_S = 60.0
WELL_AFTER_S = 15.0  # from then on a restarted child is no trouble any more


@dataclass(frozen=True)
class ChildSpec:
    """How to start a child: a Python module, its settings as environment, inherited file descriptors."""

    name: str
    module: str
    environment: dict[str, str]
    arguments: tuple[str, ...] = ()
    pass_fds: tuple[int, ...] = ()
    stop_timeout_s: float = 15.0
    ends: bool = False  # exit code 0 says that its work is done


@dataclass
class Child:
    """A started child and the task that watches it."""

    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    watch: "asyncio.Task[None] | None" = None
    restarts: int = 0
    exit_code: int = 0  # of its last death
    deaths: int = 0  # in a row
    began: float = 0.0  # monotonic
    stopping: bool = False
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Starts children and keeps them running."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self.failed: asyncio.Future[ChildSpec] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[ChildSpec] = asyncio.get_running_loop().create_future()

    async def start(self, spec: ChildSpec) -> Child:
        """Start one child and watch it from now on."""
        child = Child(spec)
        self._children.append(child)
        await self._spawn(child)
        child.watch = asyncio.create_task(self._watch(child))
        return child

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop the children one by one, first started last; each may finish what it has under way.

        `at_once`: all together, when nothing that they have under way can be finished.
        """
        if at_once:
            for child in self._children:
                child.stopping = True
            await asyncio.gather(*map(self._stop_child, self._children))
            return
        for child in reversed(self._children):
            child.stopping = True
            await self._stop_child(child)

    def alive(self) -> bool:
        return all(child.runs for child in self._children)

    def troubles(self) -> list[ChildTrouble]:
        """Children that have died of late, and are not well again."""
        now, host = time.monotonic(), socket.gethostname().split(".")[0]
        return [
            ChildTrouble(child.spec.name, host, child.exit_code, child.deaths)
            for child in self._children
            if child.deaths and not child.stopping and not (child.runs and now - child.began > WELL_AFTER_S)
        ]

    async def _spawn(self, child: Child) -> None:
        spec = child.spec
        child.began = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            spec.module,
            *spec.arguments,
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **spec.environment, "PARALLM_PARENT_PIPE": "1"},
            pass_fds=spec.pass_fds,
            start_new_session=True,  # a Ctrl-C reaches us alone; we stop the children in order
        )
        log.debug("serve.started", child=spec.name, pid=child.process.pid)

    async def _watch(self, child: Child) -> None:
        delay = FIRST_DELAY_S
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if child.stopping:
                child.exited.set()
                return
            wrong = code == SETUP_EXIT_CODE and (child.spec.ends or not child.restarts)
            wrong |= code == LOST_EXIT_CODE
            if wrong or (code == 0 and child.spec.ends):
                future = self.failed if code else self.ended
                if not future.done():
                    future.set_result(child.spec)
                child.exited.set()
                return
            steady = time.monotonic() - child.began > STEADY_AFTER_S
            longest = LONGEST_SETUP_DELAY_S if code == SETUP_EXIT_CODE else LONGEST_DELAY_S
            delay = FIRST_DELAY_S if steady else min(longest, delay * 2)
            child.exit_code, child.deaths = code, 1 if steady else child.deaths + 1
            log.warning("serve.child_died", child=child.spec.name, exit_code=code, restart_in_s=delay)
            await asyncio.sleep(delay)
            if child.stopping:
                child.exited.set()
                return
            child.restarts += 1
            await self._spawn(child)

    async def _stop_child(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            if child.watch is not None:
                child.watch.cancel()
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), child.spec.stop_timeout_s)
        except TimeoutError:
            log.warning("serve.child_killed", child=child.spec.name, after_s=child.spec.stop_timeout_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def wait_for(condition: Callable[[], Awaitable[bool]], timeout_s: float, every_s: float = 0.1) -> bool:
    """Poll an asynchronous condition until it holds or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if await condition():
            return True
        await asyncio.sleep(every_s)
    return False
