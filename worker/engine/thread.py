"""Thread G: the only thread that touches MLX. Others hand it plain data and get plain data back.

Commands are closures over plain data; the loop runs them between two turns of the engine and sleeps on a condition
when there is nothing to do, so a submit wakes it at once.

Invariants. The thread that loads the model is the one that uses and drops it. It ends with `mx.synchronize()` and
`mx.clear_streams()`: a process whose MLX thread just stops aborts at exit. After `stop` returns no callback comes.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

import mlx.core as mx

from shared.errors import SetupError
from worker.engine.adapters import Adapters
from worker.engine.engine import Engine
from worker.engine.loader import LoadedModel, load_model
from worker.engine.messages import (
    BetweenSteps,
    EngineConfig,
    EngineStats,
    OnDeath,
    OnStep,
    RowRequest,
    StepOutput,
)

__all__ = ["EngineConfig", "EngineStats", "EngineThread", "LoadedModel", "RowRequest", "StepOutput"]

log = logging.getLogger(__name__)

Command = Callable[[Engine], None]


class EngineThread:
    """Starts thread G, passes commands in and step outputs out. All methods may be called from any thread.

    `on_step` is called in thread G after every turn that brought events and must be quick; `on_death` when an
    error ended the loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_step: OnStep,
        on_death: OnDeath,
        make_adapters: Callable[[LoadedModel], Adapters] | None = None,
    ) -> None:
        self._config = config
        self._on_step = on_step
        self._on_death = on_death
        self._make_adapters = make_adapters
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._idle = False
        self._stats = EngineStats()
        self._thread: threading.Thread | None = None

    def start(self) -> LoadedModel:
        """Load the model; returns when it is ready, `SetupError` when it cannot be loaded."""
        assert self._thread is None, "an engine thread starts once"
        ready: Future[LoadedModel] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        return ready.result()

    def submit(self, requests: list[RowRequest]) -> None:
        """Decode these sequences; those of one group with equal prompts share their prefill."""
        self._command(lambda engine: engine.submit(requests))

    def cancel(self, seq_id: str, reason: Literal["cancelled", "deadline"] = "cancelled") -> None:
        """End a sequence before its next token."""
        self._command(lambda engine: engine.cancel(seq_id, reason))

    def add_between_steps(self, hook: BetweenSteps) -> None:
        """Let `hook` work in thread G between decode steps."""
        self._command(lambda engine: engine.add_between_steps(hook))

    def stats(self) -> EngineStats:
        """The latest snapshot."""
        if self._idle:
            return replace(self._stats, last_step_ms=time.monotonic_ns() // 1_000_000)
        return self._stats

    def stop(self, timeout: float = 10.0) -> bool:
        """End the thread, rows or not; whether it ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _command(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # -- in thread G

    def _run(self, ready: Future[LoadedModel]) -> None:
        try:
            self._serve(ready)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, SetupError) else _cannot_start(error))
            else:
                log.exception("engine.died")
                self._on_death(error)
        finally:
            gc.collect()  # arrays of this thread go while its streams live
            mx.synchronize()
            mx.clear_streams()

    def _serve(self, ready: Future[LoadedModel]) -> None:
        loaded = load_model(self._config)
        adapters = None if self._make_adapters is None else self._make_adapters(loaded)
        engine = Engine(loaded, self._config, adapters)
        self._stats = engine.stats()
        ready.set_result(loaded)
        while self._next_commands(engine):
            output = engine.turn()
            self._stats = engine.stats()
            if output.events:
                self._on_step(output)

    def _next_commands(self, engine: Engine) -> bool:
        """Run what was asked for, after waiting for something to do; False when it is time to stop."""
        with self._wake:
            self._idle = not engine.busy
            while not (self._commands or self._stopping or engine.busy):
                self._wake.wait()
            self._idle = False
            if self._stopping:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command(engine)
        return True


def _cannot_start(error: BaseException) -> SetupError:
    cause = SetupError(f"the engine cannot start: {type(error).__name__}: {error}")
    cause.__cause__ = error
    return cause
