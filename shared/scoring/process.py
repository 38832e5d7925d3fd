"""`python -m shared.scoring.process`: one process of the reward pool (shared/scoring/pool.py starts and kills it).

A sample's time is bounded here by a timer signal: regular expressions and sympy look for signals, and the process
stays. Where even that fails, the pool kills the process. Each reward is sent as soon as it is there, so that the pool
knows at which sample a process was lost.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from shared.errors import InvalidRequestError
from shared.jobs import RewardSpec
from shared.process.call_pipe import CallPipe
from shared.rewards.functions import Scorer, load
from shared.rewards.kinds import Options, check, wrong_with
from shared.trajectories import Reward

LATE = "timed out after"  # how the error of a sample that ran out of time begins


class Slice(msgspec.Struct, frozen=True, tag=True):
    """Samples to be scored: text, and the reference as JSON. Answered with a `Reward` each, and an empty message."""

    spec: RewardSpec
    samples: list[tuple[str, bytes]]
    timeout_s: float  # for a sample
    slice_s: float  # after which no other sample is begun
    limit_s: float  # after which the process ends itself


class Trial(msgspec.Struct, frozen=True, tag=True):
    """Patterns to be compiled within a time. Answered with what is wrong, or with an empty message."""

    spec: RewardSpec
    timeout_s: float


_call = msgspec.json.Decoder(Slice | Trial)


class _OutOfTime(BaseException):
    """The sample's time is over; no `except Exception` of a library swallows it."""


_ticking = False


def main() -> None:
    """Answer questions until the pipe is closed."""
    pipe = CallPipe()
    prepare()
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        while (message := pipe.read()) is not None:
            call = _call.decode(message)
            if isinstance(call, Trial):
                pipe.write(try_patterns(call).encode())
                continue
            faulthandler.dump_traceback_later(call.limit_s, exit=True, file=nowhere)  # should the pool be no more
            for reward in scored(call):
                pipe.write(msgspec.json.encode(reward))
            faulthandler.cancel_dump_traceback_later()
            pipe.write(b"")


def prepare() -> None:
    """Make the timer's signal end a sample."""
    signal.signal(signal.SIGALRM, _on_alarm)


def try_patterns(trial: Trial) -> str:
    """Reason why the reward's patterns cannot be compiled in time; "" when they can."""
    try:
        with _time_limit(trial.timeout_s):
            check(trial.spec).compile()
    except _OutOfTime:
        return f"the pattern takes longer than {trial.timeout_s:g} s to compile: make it simpler"
    except InvalidRequestError as error:
        return error.message.encode(errors="replace").decode()
    return ""


def scored(call: Slice) -> Iterator[Reward]:
    """Rewards of the first samples: all of them, or those begun within `slice_s`."""
    scorer = load(call.spec.name)
    options = check(call.spec).options
    until = time.monotonic() + call.slice_s
    for text, reference in call.samples:
        yield _score_one(scorer, call.spec, options, text, reference, call.timeout_s)
        if time.monotonic() > until:
            break


def _score_one(
    scorer: Scorer, spec: RewardSpec, options: Options, text: str, reference: bytes, timeout_s: float
) -> Reward:
    try:
        with _time_limit(timeout_s):
            score = scorer(text, msgspec.json.decode(reference), options)
    except _OutOfTime:
        return _failed(spec, f"{LATE} {timeout_s:g} s")
    except Exception as error:  # whatever a reward raises is that sample's error
        return _failed(spec, f"{type(error).__name__}: {error}"[:500])
    if wrong := wrong_with(score.value):
        return _failed(spec, wrong)
    return Reward(spec.name, float(score.value), score.components)


@contextlib.contextmanager
def _time_limit(timeout_s: float) -> Iterator[None]:
    global _ticking
    _ticking = True
    # Again every 0.1 s: an exception raised inside a destructor or a C callback is lost.
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 0.1)
    try:
        yield
    finally:
        _ticking = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    if _ticking:
        raise _OutOfTime


def _failed(spec: RewardSpec, error: str) -> Reward:
    return Reward(spec.name, None, error=error.encode(errors="replace").decode())


if __name__ == "__main__":
    main()
