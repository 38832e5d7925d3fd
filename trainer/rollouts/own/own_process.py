"""`python -m trainer.rollouts.own.own_process`: runs a user's reward or environment (own_code.py starts it).

Calls run beside one another in an event loop, as they would in the trainer's. While one blocks the loop, no sign of
life is given: after the time of a call, a timer that needs neither the loop nor the interpreter writes down where it
hangs and ends the process. What runs is noted by the number of its call, so that the trainer knows whose fault it was.
"""

import asyncio
import faulthandler
import inspect
import math
import os
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

from shared.errors import SetupError
from shared.process.call_pipe import CallPipe
from trainer.rollouts.environments import (
    Environment,
    Outcome,
    is_observation,
    is_outcome,
    load_class,
    load_object,
)
from trainer.rollouts.own.own_messages import (
    CodeAnswer,
    CodeCall,
    CodeFailure,
    ResetCall,
    ScoreCall,
    Start,
    StepCall,
    decode_call,
    decode_start,
    encode,
    packed,
)

BEAT_S = 0.5
NOTE = struct.Struct("=Q")  # in front of the file that a blocked process writes its stack to


class ServedCode(Protocol):
    """The user's code as the process calls it."""

    name: str

    async def do(self, call: CodeCall) -> CodeAnswer:
        """Carry out a call and return its answer."""


def main(make: "Callable[[Start], ServedCode]") -> None:
    """Load the user's code and answer calls until the trainer has gone."""
    pipe, stack = CallPipe(), int(sys.argv[1])
    message = pipe.read()
    if message is None:
        return
    start = decode_start(message)
    try:
        code = make(start)
    except BaseException as error:  # also `sys.exit()`
        said = error.message if isinstance(error, SetupError) else f"{start.kind} {start.path!r}: {blamed(error)}"
        pipe.write(encode(CodeAnswer(failed=CodeFailure(said, "setup"))))
        return
    pipe.write(encode(CodeAnswer(name=code.name)))
    asyncio.run(_Server(pipe, code, start.timeout_s, stack).run())


class OwnObject:
    """The function or the environment."""

    def __init__(self, start: Start) -> None:
        self._options = unpacked(start.options)
        if start.kind == "reward":
            self.name = start.path
            self._function = load_object(start.path, "reward")
        else:
            self._environment: Environment = load_class(start.path, self._options)
            self.name = self._environment.name

    async def do(self, call: CodeCall) -> CodeAnswer:
        """Carry out a call and return its answer."""
        what = call.what
        if isinstance(what, ResetCall):
            observation = is_observation(self.name, await self._environment.reset(what.index))
            difficulty = None if observation.difficulty is None else float(observation.difficulty)
            plain = replace(observation, info=self._packed(observation.info), difficulty=difficulty)
            return CodeAnswer(call.number, observation=plain)
        if isinstance(what, ScoreCall):
            return CodeAnswer(call.number, outcome=await self._score(what))
        assert isinstance(what, StepCall), "what else there is goes to copies.py"
        info = None if what.observation.info is None else unpacked(what.observation.info)
        observation = replace(what.observation, info=info)
        outcome = is_outcome(self.name, await self._environment.step(observation, what.action))
        return CodeAnswer(call.number, outcome=self._plain(outcome))

    async def _score(self, what: ScoreCall) -> Outcome:
        result = self._function(what.completion, unpacked(what.reference), **self._options)
        if inspect.isawaitable(result):
            result = await result
        value, components = result if isinstance(result, tuple) else (result, {})
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the reward function gave {value!r}, not a finite number")
        return Outcome(float(value), components=_numbers(components))

    def _plain(self, outcome: Outcome) -> Outcome:
        reward = None if outcome.reward is None else float(outcome.reward)
        info = self._packed(outcome.info)
        components = _numbers(outcome.components)
        return Outcome(reward, bool(outcome.done), tuple(outcome.messages), info, components, outcome.question)

    def _packed(self, info: Any) -> bytes | None:
        try:
            return None if info is None else packed(info)
        except Exception as error:
            said = f"`info` has to travel between processes, and cannot be packed: {error}"
            raise SetupError(f"environment {self.name!r}: {said}") from error


class _Clock:
    """Time that a call has used itself: the time in which other calls had the event loop is not counted."""

    def __init__(self, busy_s: float) -> None:
        self.limit: asyncio.Timeout | None = None
        self._began_s = time.monotonic() - busy_s
        self.own_s = 0.0

    def had_s(self, busy_s: float) -> float:
        """Seconds so far; `busy_s`: for how long any call has had the loop."""
        return time.monotonic() - busy_s - self._began_s + self.own_s


class _Server:
    """Runs calls concurrently and writes their answers."""

    def __init__(self, pipe: CallPipe, code: ServedCode, timeout_s: float, stack: int) -> None:
        self._pipe, self._code, self._timeout_s, self._stack = pipe, code, timeout_s, stack
        self._calls: asyncio.Queue[CodeCall] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clocks: set[_Clock] = set()
        self._busy_s = 0.0
        self._sent_at = 0.0

    async def run(self) -> None:
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()
        beating = asyncio.create_task(self._beat())
        while not beating.done():
            call = await self._calls.get()
            task = asyncio.create_task(self._answer(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while (message := self._pipe.read()) is not None:
            loop.call_soon_threadsafe(self._calls.put_nowait, decode_call(message))
        os._exit(0)  # the trainer has gone

    async def _beat(self) -> None:
        while True:
            self._alive()
            for clock in self._clocks:
                if clock.limit is not None and clock.had_s(self._busy_s) > self._timeout_s:
                    clock.limit.reschedule(0)
            await asyncio.sleep(min(BEAT_S, self._timeout_s / 2))

    def _alive(self) -> None:
        """Start a turn in the event loop, with the time limit of a call from now on."""
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._stack)
        if time.monotonic() - self._sent_at >= BEAT_S / 2:
            self._send(CodeAnswer())

    def _send(self, answer: CodeAnswer) -> None:
        self._sent_at = time.monotonic()
        try:
            self._pipe.write(encode(answer))
        except OSError:
            os._exit(0)

    async def _answer(self, call: CodeCall) -> None:
        clock, since = _Clock(self._busy_s), 0.0

        def note(running: bool) -> None:
            nonlocal since
            os.pwrite(self._stack, NOTE.pack(call.number if running else 0), 0)
            self._alive()
            if running:
                since = time.monotonic()
            else:
                clock.own_s += time.monotonic() - since
                self._busy_s += time.monotonic() - since

        self._clocks.add(clock)
        answer = await noted(self._result(call, clock), note)
        self._clocks.discard(clock)
        try:
            self._send(answer)
        except (TypeError, ValueError, OverflowError) as error:  # messages that are none
            said = f"{self._code.name!r}: what it gave cannot travel between processes: {error}"
            self._send(CodeAnswer(call.number, failed=CodeFailure(said, "setup")))

    async def _result(self, call: CodeCall, clock: _Clock) -> CodeAnswer:
        try:
            async with asyncio.timeout(None) as clock.limit:
                return await self._code.do(call)
        except SetupError as error:
            failed = CodeFailure(error.message, "setup")
        except BaseException as error:  # whatever the user's code raises, `sys.exit()` too
            late = clock.limit is not None and clock.limit.expired()
            failed = (
                CodeFailure(f"no end after {self._timeout_s:g} s", "late")
                if late
                else CodeFailure(blamed(error), "raised")
            )
        return CodeAnswer(call.number, failed=failed)


@types.coroutine
def noted(work: Coroutine[Any, Any, CodeAnswer], note: Callable[[bool], None]) -> Generator[Any, Any, CodeAnswer]:
    """`work`, with a call of `note` each time that it gets the event loop or gives it back."""
    resume: Callable[[Any], Any] = work.send
    given: Any = None
    while True:
        note(True)
        try:
            awaited = resume(given)
        except StopIteration as stop:
            answer: CodeAnswer = stop.value
            return answer
        finally:
            note(False)
        try:
            given, resume = (yield awaited), work.send
        except BaseException as error:
            given, resume = error, work.throw


def blamed(error: BaseException) -> str:
    """The error, and the line of the user's own code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(place.filename).parent == Path(__file__).parent
    return f"{type(error).__name__}: {error}" + ("" if ours else f" ({Path(place.filename).name}:{place.lineno})")


def _numbers(components: Any) -> dict[str, float]:
    return {str(name): float(part) for name, part in components.items()}


def unpacked(value: bytes) -> Any:
    """Inverse of the trainer's `packed`."""
    return ForkingPickler.loads(value)


if __name__ == "__main__":
    main(OwnObject)
