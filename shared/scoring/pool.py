"""Rewards computed in processes of their own, so that no completion can stall or crash the caller.

A sample whose reward raises or takes longer than `timeout_s` gets a `Reward` with `error`; its job goes on unharmed.
The limit is a timer signal inside the process: regular expressions and sympy check for signals. Where even
that fails, the parent kills the processes and starts new ones. Samples that were lost with a process then run one at a
time in a process of their own, so that only the sample at fault is marked.
"""

import asyncio
import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import Any, NamedTuple

from shared import scoring
from shared.jobs import Prompt, RewardSpec
from shared.rewards import Options, check
from shared.trajectories import Reward

CHUNK = 16  # samples a call
GRACE_S = 15.0  # beyond the samples' own time: starting a process and importing math-verify


class RewardSample(NamedTuple):
    """What a reward looks at."""

    completion: str
    reference: Any
    prompt: Prompt | None = None  # where a served model is asked
    model: str = ""  # whose token ids a prompt of ids has


class RewardPool:
    """A few processes that compute rewards; they start when first needed."""

    def __init__(self, processes: int = 0, timeout_s: float = 5.0, *, grace_s: float = GRACE_S) -> None:
        longest_s = 2 * timeout_s + grace_s
        self._timeout_s = timeout_s
        self._many = _Processes(processes or min(4, os.cpu_count() or 1), longest_s)
        self._suspects = _Processes(1, longest_s)

    async def score(self, spec: RewardSpec, samples: Sequence[RewardSample]) -> list[Reward]:
        """One reward per sample, in order."""
        chunks = [samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)]
        scored = await asyncio.gather(*(self._chunk(spec, chunk) for chunk in chunks))
        return [reward for chunk in scored for reward in chunk]

    def close(self) -> None:
        """End the processes."""
        self._many.close()
        self._suspects.close()

    async def _chunk(self, spec: RewardSpec, samples: Sequence[RewardSample]) -> list[Reward]:
        done: list[Reward] = []
        while len(done) < len(samples):
            more = await self._many.score(spec, samples[len(done) :], self._timeout_s)
            if more is None:
                return done + [await self._suspect(spec, sample) for sample in samples[len(done) :]]
            done += more
        return done

    async def _suspect(self, spec: RewardSpec, sample: RewardSample) -> Reward:
        alone = await self._suspects.score(spec, [sample], self._timeout_s)
        return _failed(spec, "the reward hung or ended its process") if alone is None else alone[0]


class _Processes:
    """A process pool that is thrown away when one of its processes dies or hangs."""

    def __init__(self, count: int, longest_s: float) -> None:
        self._count = count
        self._longest_s = longest_s
        self._free = asyncio.Semaphore(count)  # a call that waits for a process must not count as hanging
        self._executor: ProcessPoolExecutor | None = None

    async def score(self, spec: RewardSpec, samples: Sequence[RewardSample], timeout_s: float) -> list[Reward] | None:
        """Rewards of the first samples, one at least; None when the call was lost with its process."""
        async with self._free:
            executor = self._started()
            try:
                future = executor.submit(
                    score_samples, spec, [each._replace(prompt=None) for each in samples], timeout_s
                )
                async with asyncio.timeout(self._longest_s):
                    return await asyncio.wrap_future(future)
            except (TimeoutError, BrokenProcessPool, OSError):  # OSError: its queue was closed as it broke
                self._discard(executor)
                return None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return None  # the pool was discarded with this call in it

    def close(self) -> None:
        if self._executor is not None:
            self._discard(self._executor)

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self._count, multiprocessing.get_context("spawn"), initializer=_prepare_process
            )
        return self._executor

    def _discard(self, executor: ProcessPoolExecutor) -> None:
        if executor is self._executor:
            self._executor = None
        for process in list((executor._processes or {}).values()):
            process.kill()
        executor.shutdown(wait=False, cancel_futures=True)


# -- inside a pool process


class _OutOfTime(BaseException):
    """The sample's time is over; no `except Exception` of a library swallows it."""


_ticking = False


def score_samples(spec: RewardSpec, samples: Sequence[RewardSample], timeout_s: float) -> list[Reward]:
    """Rewards of the first samples: all of them, or those begun within `timeout_s`."""
    scorer = scoring.load(spec.name)
    options = check(spec)
    until = time.monotonic() + timeout_s
    scored: list[Reward] = []
    for sample in samples:
        scored.append(_score_one(scorer, spec, options, sample, timeout_s))
        if time.monotonic() > until:
            break
    return scored


def _score_one(
    scorer: scoring.Scorer, spec: RewardSpec, options: Options, sample: RewardSample, timeout_s: float
) -> Reward:
    try:
        with _time_limit(timeout_s):
            score = scorer(sample.completion, sample.reference, options)
    except _OutOfTime:
        return _failed(spec, f"timed out after {timeout_s:g} s")
    except Exception as error:  # whatever a reward raises is that sample's error
        return _failed(spec, f"{type(error).__name__}: {error}"[:500])
    if not math.isfinite(score.value):
        return _failed(spec, f"the reward is {score.value}")
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


def _prepare_process() -> None:
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _failed(spec: RewardSpec, error: str) -> Reward:
    return Reward(spec.name, None, error=error)
