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
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.loader import LoadedModel
from shared.errors import SetupError
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.batch.adapters import AdapterStats
from worker.engine.between_steps import Guests, T, Work
from worker.engine.build import OnAdapters, OtherRanks, build
from worker.engine.messages import EngineStats, OnDeath, OnStep
from worker.engine.orders import EngineParts, Order, Rehearse, SetAside
from worker.engine.prefixes.sharing import SharedCache
from worker.engine.turns import TurnFacts

log = logging.getLogger(__name__)

Command = tuple[Callable[[EngineParts], None], Order | None]  # what to do here, and on the other ranks of a group

REHEARSE = Rehearse()
DEADLINE_CHECK_S = 0.05  # while all rows wait for adapters
CALM_S = 1.0  # without work, until a piece of the warm-up comes: a model is often loaded for a request that waits


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
        adapters: SlotConfig | None = None,
        on_adapters: OnAdapters = lambda stats: None,
        lead: OtherRanks | None = None,
    ) -> None:
        """`lead`: of the group of ranks that the model is split over."""
        self._lead = lead
        self._facts: TurnFacts | None = None  # of the turn that begins, where there are other ranks
        self._config = config
        self._on_step = on_step
        self._on_death = on_death
        self._adapter_config = adapters
        self._on_adapters = on_adapters
        self._slots: AdapterSlots | None = None
        self._guests = Guests(config.guest_share)
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._turn_began: float | None = None  # monotonic; None while there is nothing to do
        self._stats = EngineStats()
        self._warms_up = True
        self._worked = 0.0  # monotonic, when there was something to do, or the model was loaded
        self._thread: threading.Thread | None = None

    def start(self) -> LoadedModel:
        """Load the model; returns when it is ready, `SetupError` when it cannot be loaded."""
        return self.begin().result()

    def begin(self) -> Future[LoadedModel]:
        """Start loading the model, without waiting for it."""
        assert self._thread is None, "an engine thread starts once"
        ready: Future[LoadedModel] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        return ready

    def send(self, order: Order, done: Callable[[], None] | None = None) -> None:
        """Carry out an order before the next turn, on every rank of a group; `done` is called after it in thread G."""
        self._command(order.carry_out, order)
        if done is not None:
            self._command(lambda parts: done())

    def set_aside(self, seq_ids: list[str]) -> Future[None]:
        """Remove rows and store their KV; done once everything that was computed of them has gone to `on_step`."""
        future: Future[None] = Future()

        def run(parts: EngineParts) -> None:
            try:
                order.carry_out(parts)
            except Exception as error:
                future.set_exception(error)
            else:
                self._command(lambda parts: future.set_result(None))  # after this turn's events

        order = SetAside(seq_ids)
        future.set_running_or_notify_cancel()
        self._command(run, order)
        return future

    def on_kv(self, call: Callable[[SharedCache], T]) -> Future[T]:
        """Call with the cache of prefixes, in thread G between two turns; the future holds the result or the error."""
        future: Future[T] = Future()

        def run(parts: EngineParts) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with mx.stream(generation_stream):
                    future.set_result(call(parts.engine.prefixes))
            except Exception as error:
                future.set_exception(error)

        self._command(run)
        return future

    def run_between_steps(self, start: Callable[[], Work[T]], *, when_idle: bool = False) -> Future[T]:
        """Call `start` in thread G and advance what it gives by units between decode steps (between_steps.py).

        Cancelling the future ends the work after the unit that runs. `when_idle`: only while no row is there and the
        engine is warm.
        """
        future: Future[T] = Future()
        with self._wake:
            self._guests.add(start, future, when_idle=when_idle)
            self._wake.notify()
        return future

    def hold_guests(self, hold: bool) -> None:
        """Begin no further unit of guests' work until this is taken back; the one that runs ends."""
        if self._guests.held != hold:
            with self._wake:
                self._guests.held = hold
                self._wake.notify()

    def adapter_stats(self) -> AdapterStats:
        """The latest snapshot of the adapter slots."""
        return AdapterStats() if self._slots is None else self._slots.stats

    def stats(self) -> EngineStats:
        """The latest snapshot of the engine."""
        stats = replace(self._stats, guests=self._guests.stats, warms_up=self._warms_up)
        if self._turn_began is None:
            return replace(stats, last_step_ms=time.monotonic_ns() // 1_000_000)
        return stats

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def silent_s(self) -> float:
        """Seconds since the turn that is under way began; 0 when there is nothing to do."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

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

    def _command(self, run: Callable[[EngineParts], None], order: Order | None = None) -> None:
        with self._wake:
            self._commands.append((run, order))
            if self._turn_began is None:
                self._turn_began = time.monotonic()  # it waits from now on, if only for a piece of the warm-up
            self._wake.notify()

    def wake_up(self) -> None:
        """Let the loop take a turn."""
        self._command(lambda parts: None)

    # -- in thread G

    def _run(self, ready: Future[LoadedModel]) -> None:
        failure: SetupError | None = None
        try:
            self._serve(ready)
        except BaseException as error:
            if not ready.done():
                traceback.clear_frames(error.__traceback__)  # they hold arrays
                failure = error if isinstance(error, SetupError) else _cannot_start(error)
            else:
                log.exception("engine.died")
                self._on_death(error)
        finally:
            gc.collect()  # arrays of this thread go while its streams live
            mx.synchronize()
            mx.clear_streams()
        if failure is not None:  # only now: who hears of it may end the process, which must not find streams here
            ready.set_exception(failure)

    def _serve(self, ready: Future[LoadedModel]) -> None:
        group = None if self._lead is None else self._lead.join()
        parts = build(self._config, self._adapter_config, group, self.wake_up, self._on_adapters)
        loaded, engine, warm_up = parts.loaded, parts.engine, parts.warm_up
        if self._lead is not None:
            self._lead.ready(loaded)
        self._slots = parts.slots
        self._warms_up = not warm_up.is_over
        self._stats, self._worked = engine.stats(), time.monotonic()
        ready.set_result(loaded)
        in_order = False
        try:
            while self._run_commands(parts):
                began = time.perf_counter()
                output = engine.turn(self._facts)
                decode_s = time.perf_counter() - began
                if self._lead is not None:
                    self._lead.turned(output.events)
                self._stats = engine.stats()
                if output.events:
                    self._on_step(output)  # a token waits neither for a prompt nor for a guest
                engine.settle()
                is_idle = engine.is_idle and not self._warms_up
                self._guests.between_steps(decoding=engine.decoding, decode_s=decode_s, is_idle=is_idle)
            in_order = True
        finally:
            with self._wake:
                self._guests.close()
            warm_up.close()
            engine.close(keep=in_order)
            if self._slots is not None:
                self._slots.close()

    def _run_commands(self, parts: EngineParts) -> bool:
        """Run what was asked for, after waiting for something to do; False when it is time to stop.

        While there are neither commands nor rows, or when it is due, a piece of the warm-up comes first.
        """
        engine, warm_up = parts.engine, parts.warm_up
        with self._wake:
            idles = not self._commands and engine.is_idle
            if not idles:
                self._worked = time.monotonic()
            calm_in = self._worked + CALM_S - time.monotonic()
            rehearses = not warm_up.is_over and (calm_in <= 0 if idles else engine.decoding and warm_up.is_due)
            if not (self._commands or self._stopping or engine.busy or rehearses or self._guests.waits(engine.is_idle)):
                self._turn_began = None
                warms_up_in = max(0.0, calm_in) if idles and not warm_up.is_over else None
                self._wake.wait(DEADLINE_CHECK_S if engine.has_rows else warms_up_in)
            self._turn_began = None if idles and rehearses else time.monotonic()
            if self._stopping:
                return False
            commands, self._commands = self._commands, deque()
        if rehearses:
            commands.append((REHEARSE.carry_out, REHEARSE))
        if self._lead is not None:
            orders = [order for _, order in commands if order is not None]
            self._facts = self._lead.turn(orders, engine.seen())
        for run, _ in commands:
            run(parts)
        self._warms_up = not warm_up.is_over
        return True


def _cannot_start(error: BaseException) -> SetupError:
    cause = SetupError(f"the engine cannot start: {type(error).__name__}: {error}")
    cause.__cause__ = error
    return cause
