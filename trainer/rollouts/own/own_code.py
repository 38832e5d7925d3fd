"""A reward or an environment of the user's own, in processes where it can be timed out and killed.

It cannot stop the trainer: not its signals, its status, its checkpoints. A call that takes longer than its time costs
its sample. Where it blocks the whole process, the process is ended and started again; the log names the code and the
line at which it hung, and what other calls had under way there is asked again. So `reset` and `step` may be called
twice for the same task: an environment is stateless (trainer/rollouts/environments.py). An alert tells each cause once.

All calls share one process until one of them blocks it. From then on calls are spread over several processes, few in
each, so that those that block wait at the same time and stop few others. Where it is not known which call has ended a
process, each of its calls is asked again in a process of its own: only a call that was alone counts as the cause. Code
that blocks in half of its calls ends the run.
"""

import asyncio
import contextlib
import itertools
import re
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import structlog

from shared.errors import SetupError
from shared.jobs import Message
from shared.process.call_process import CallProcess, LostProcessError
from shared.training import AlertKind
from trainer.rollouts.environments import Observation, Outcome, Scored
from trainer.rollouts.own.own_messages import (
    ActCall,
    CodeAnswer,
    CodeCall,
    CodeFailure,
    CopiesCall,
    Kind,
    Played,
    ResetCall,
    ScoreCall,
    Start,
    StepCall,
    What,
    decode_answer,
    encode,
    packed,
)
from trainer.rollouts.own.own_process import NOTE

log = structlog.get_logger()

START_S = 900.0  # for imports, and for what an environment loads when it is built
LATE_S = 5.0  # that a process may be silent beyond the time of a call
TRIES = 3  # of a call whose process ended while it was alone there
TOGETHER = 8  # calls in a process, once one of the last calls has blocked it
REMEMBERED = 512  # calls, of which is known whether they have blocked a process
GIVE_UP_AFTER = 24  # of them that have, if they are half of those remembered
MOST_CAUSES = 64  # alerts of a run
TELL_AGAIN_S = 5.0  # after an alert that could not be sent; also how long the end of a run waits for the last one
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)
_LINE_NUMBER = re.compile(r":\d+\)")
_LIBRARY = re.compile(r"[/\\](?:lib|Lib)[/\\]python|<frozen")


class OwnCodeError(Exception):
    """The user's code raised; the message names the error and the line."""


class LostEpisodesError(OwnCodeError):
    """The process was ended from outside, and its memory is lost."""


class BlockedError(OwnCodeError):
    """The user's code did not finish in its time, or ended its process."""


class OwnCode:
    """One object of the user's, and the process that it lives in."""

    kind: ClassVar[Kind]

    def __init__(self, path: str, options: Mapping[str, Any], timeout_s: float, processes: int = 1) -> None:
        self.title = f"{'reward' if self.kind == 'reward' else 'environment'} {path!r}"
        self._start = Start(self.kind, path, packed(dict(options)), timeout_s)
        self.places = [_Place() for _ in range(processes)]
        self._suspects = 0  # calls that wait for a process of their own
        self._left = asyncio.Event()  # a call has left its process
        self._ended: deque[bool] = deque(maxlen=REMEMBERED)  # the last calls: whether each has blocked a process
        self.name = ""
        self.on_block: Callable[[str], None] = lambda cause: None  # called for each call that did not come to an end

    async def __aenter__(self) -> Self:
        """Start the user's code; SetupError when there is no such object, or when it is not of the right kind."""
        await self._running(self.places[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        for place in self.places:
            if place.process is not None:
                await place.process.close()

    async def ask(self, what: What) -> CodeAnswer:
        """Carry a call out; OwnCodeError, or SetupError for what is wrong with the code as a whole."""
        try:
            return await self._result(what)
        except BlockedError as blocked:
            self.on_block(str(blocked))
            raise

    async def _result(self, what: What) -> CodeAnswer:
        named = str(what.__struct_config__.tag).lower()
        alone, tries = False, 0
        while True:
            async with self._place(alone) as place:
                try:
                    answer = await (await self._running(place)).ask(what)
                    break
                except _LostError as lost:
                    tries += lost.nobody and alone
                    if lost.at_fault or tries == TRIES:
                        reason = lost.reason if lost.at_fault else f"ended its process {TRIES} times"
                        raise self._blocked(f"`{named}` {reason}") from lost
                    alone = alone or lost.nobody
        self._ended.append(False)
        if answer.failed is not None:
            raise _error(answer.failed, f"{self.title}: `{named}`")
        return answer

    def _blocked(self, said: str) -> Exception:
        """The error of a call that has blocked its process; SetupError where that has become usual."""
        self._ended.append(True)
        blocked, calls = sum(self._ended), len(self._ended)
        if blocked < GIVE_UP_AFTER or 2 * blocked < calls:
            return BlockedError(f"{self.title}: {said}")
        return SetupError(
            f"{self.title} keeps blocking: {blocked} of its last {calls} calls did not end within "
            f"{self._start.timeout_s:g} s, the last one: {said}; mend it, or give it more time (--own-code-timeout-s)"
        )

    @contextlib.asynccontextmanager
    async def _place(self, alone: bool) -> AsyncIterator["_Place"]:
        """A place in one of the processes, held until the end of the block; `alone`: in a process without others."""
        self._suspects += alone
        try:
            while (place := self._free_place(alone)) is None:
                self._left.clear()
                await self._left.wait()
        finally:
            self._suspects -= alone
        place.calls += 1
        place.alone = alone
        try:
            yield place
        finally:
            place.calls -= 1
            place.alone = False
            self._left.set()

    def _free_place(self, alone: bool) -> "_Place | None":
        """The process with the fewest calls, if there is room; while suspects wait, the last process gets no
        other calls.
        """
        if not (alone or self._suspects or any(self._ended)):
            return None if self.places[0].alone else self.places[0]
        open_to_it = self.places[:-1] if self._suspects and not alone else self.places
        free = [place for place in open_to_it if not place.alone and place.calls < (1 if alone else TOGETHER)]
        return min(free, key=lambda place: (place.calls, place.process is None), default=None)

    async def _running(self, place: "_Place") -> "_OwnProcess":
        async with place.starting:
            if place.process is None or place.process.ended:
                if place.process is not None:
                    await place.process.close()
                place.process = await _OwnProcess.begin(self._start, self.title)
                self.name = place.process.name
            return place.process


class _Place:
    """A process that is started when it is needed, and the calls in it."""

    def __init__(self) -> None:
        self.process: _OwnProcess | None = None
        self.starting = asyncio.Lock()
        self.calls = 0
        self.alone = False  # its one call shares the process with no other


class _LostError(Exception):
    """The process has ended with calls in it."""

    def __init__(self, reason: str, at_fault: bool, nobody: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.at_fault, self.nobody = reason, at_fault, nobody


class _OwnProcess:
    """One life of the process."""

    def __init__(self, process: CallProcess, stack: Any, start: Start, title: str) -> None:
        self.process, self._stack, self._start, self._title = process, stack, start, title
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[CodeAnswer]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.ended = False
        self.name = ""

    @classmethod
    async def begin(cls, start: Start, title: str) -> "_OwnProcess":
        stack = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        stack.write(NOTE.pack(0))
        stack.flush()
        module = "copies" if start.kind == "copies" else "own_process"
        process = await CallProcess.start(f"trainer.rollouts.own.{module}", [str(stack.fileno())], [stack.fileno()])
        started = cls(process, stack, start, title)
        try:
            await process.send(encode(start))
            async with asyncio.timeout(START_S):
                answer = decode_answer(await process.receive())
            if answer.name is None:
                raise SetupError(answer.failed.error if answer.failed is not None else f"{title}: no answer")
        except (LostProcessError, TimeoutError) as error:
            await started.close()
            ended = "its process ended" if isinstance(error, LostProcessError) else f"not loaded within {START_S:g} s"
            raise SetupError(f"{title}: {ended} while it was loaded") from error
        except BaseException:
            await started.close()
            raise
        started.name = answer.name
        started._reading = asyncio.create_task(started._read())
        return started

    async def ask(self, what: What) -> CodeAnswer:
        number = next(self._numbers)
        future: asyncio.Future[CodeAnswer] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            if self.ended:
                raise _LostError("its process has ended", at_fault=False)
            with contextlib.suppress(LostProcessError):  # the reader reports it
                await self.process.send(encode(CodeCall(number, what)))
            return await future
        finally:
            self._calls.pop(number, None)

    async def close(self) -> None:
        self.ended = True
        self.process.kill()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._stack.close()

    async def _read(self) -> None:
        """Deliver answers until the process ends or falls silent."""
        silent_s = self._start.timeout_s + LATE_S
        try:
            while True:
                async with asyncio.timeout(silent_s):
                    self._receive(decode_answer(await self.process.receive()))
        except (LostProcessError, TimeoutError):
            self._lost()

    def _receive(self, answer: CodeAnswer) -> None:
        call = self._calls.get(answer.number)
        if call is not None and not call.done():
            call.set_result(answer)

    def _lost(self) -> None:
        self.ended = True
        self.process.kill()
        self._stack.seek(0)
        note = self._stack.read(NOTE.size)
        (culprit,) = NOTE.unpack(note)
        where = place(self._stack.read().decode(errors="replace"))
        reason = f"blocked for more than {self._start.timeout_s:g} s{where}" if where else "ended its process"
        log.error("own_code.lost", code=self._title, reason=reason, calls=len(self._calls))
        for number, call in self._calls.items():
            if not call.done():
                call.set_exception(_LostError(reason, at_fault=number == culprit, nobody=not culprit))


class OwnEnvironment(OwnCode):
    """An environment of the user's (trainer.rollouts.environments.Environment)."""

    kind = "environment"

    async def reset(self, index: int) -> Observation:
        """Task number `index`, from the user's process."""
        observation = (await self.ask(ResetCall(index))).observation
        assert observation is not None
        return observation

    async def step(self, observation: Observation, action: str) -> Outcome:
        """Judge what the model wrote."""
        outcome = (await self.ask(StepCall(observation, action))).outcome
        assert outcome is not None
        return outcome


class OwnFunction(OwnCode):
    """A reward function of the user's (trainer.rollouts.environments.Scorer)."""

    kind = "reward"

    async def __call__(self, completion: str, reference: Any, prompt: str | Sequence[Message] = "") -> Scored:
        """Score of a completion, from the user's function."""
        outcome = (await self.ask(ScoreCall(completion, packed(reference)))).outcome
        assert outcome is not None and outcome.reward is not None
        return outcome.reward, outcome.components


class OwnCopies(OwnCode):
    """Copies of an environment that a network acts in (trainer/rollouts/own/copies.py): these have a state."""

    kind = "copies"

    async def begin(self, name: str, copies: int, seed: Sequence[int], longest: int) -> Played:
        """Make a set of them."""
        played = (await self.ask(CopiesCall(name, copies, tuple(seed), longest))).played
        assert played is not None
        return played

    async def step(self, name: str, actions: list[Any]) -> Played:
        """A step of a set; LostEpisodesError when the process with it is no more."""
        played = (await self.ask(ActCall(name, actions))).played
        assert played is not None
        return played


@contextlib.asynccontextmanager
async def alerts_of(
    codes: Iterable[OwnCode], alert: Callable[[AlertKind, str], Awaitable[None]]
) -> AsyncIterator[None]:
    """Inside the block each cause by which one of them blocks sends one alert, however many samples it costs."""
    causes: asyncio.Queue[str | None] = asyncio.Queue()
    known: set[str] = set()

    def note(cause: str) -> None:
        place_less = _LINE_NUMBER.sub(")", cause)  # a loop hangs now at this line of it, now at that one
        if place_less not in known and len(known) < MOST_CAUSES:
            known.add(place_less)
            causes.put_nowait(cause)

    for code in codes:
        code.on_block = note
    forwarding = asyncio.create_task(_forward_alerts(causes, alert))
    try:
        yield
    finally:
        causes.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(forwarding, TELL_AGAIN_S)


async def _forward_alerts(
    causes: "asyncio.Queue[str | None]", alert: Callable[[AlertKind, str], Awaitable[None]]
) -> None:
    while (cause := await causes.get()) is not None:
        while True:
            try:
                await alert("own_code_blocked", f"{cause}; every such call costs its sample")
                break
            except Exception as error:  # the ring may be away: that ends no run
                log.warning("train.alert_lost", reason=type(error).__name__)
                await asyncio.sleep(TELL_AGAIN_S)


def place(stack: str) -> str:
    """Code line where the event loop's thread stood, from faulthandler's output; "" when it wrote nothing."""
    frames = _FRAME.findall(stack.rpartition("Thread ")[2])
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    if not frames:
        return ""
    file, line, function = (own or frames)[0]
    return f" in {function} ({file}:{line})"


def _error(failed: CodeFailure, said: str) -> Exception:
    if failed.kind == "setup":
        return SetupError(failed.error)
    if failed.kind == "lost":
        return LostEpisodesError(f"{said}: {failed.error}")
    return BlockedError(f"{said} came to {failed.error}") if failed.kind == "late" else OwnCodeError(failed.error)
