"""Train steps without end on one batch, in the engine's thread, to be switched on and off."""

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from tests.bench.local_ring import LocalRing
from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.compute import Work
from trainer.learners.policy import PolicyLearner, Trained

SETTLE_S = 120.0  # at most
SETTLE_SIZE_S, STEADY_S = 45.0, 8.0


@dataclass
class Training:
    """Train steps on one fixed batch, one after another, in the engine's thread."""

    ring: LocalRing
    learner: PolicyLearner | None
    groups: list[SampleGroup]
    tokens: int = 0
    peak_bytes: int = 0
    on: bool = False
    ended: list[float] = field(default_factory=list)  # when each train step did
    times: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # by size: seconds and completion tokens
    error: Exception | None = None
    _work: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert self.learner is not None
        self.size = self.learner.optimizer._size
        took = self.size.took

        def count(asked: int, positions: int, tokens: int, seconds: float, nbytes: int = 0, **how: Any) -> None:
            self.tokens += tokens
            self.times.setdefault(asked, []).append((seconds, tokens))
            self.peak_bytes = max(self.peak_bytes, mx.get_peak_memory())  # which every microbatch measures anew
            took(asked, positions, tokens, seconds, nbytes, **how)

        self.size.took = count  # type: ignore[method-assign]

    @property
    def steps(self) -> int:
        """Train steps that have ended."""
        return len(self.ended)

    def start(self) -> None:
        self.on = True
        self._next()

    def settle(self) -> None:
        """Until kernels are compiled and the size of a microbatch is found: two train steps."""
        self._run_until(lambda: self.steps >= 2)

    def _run_until(self, done: Callable[[], bool]) -> None:
        self.start()
        until = time.monotonic() + SETTLE_S
        while not done() and not self.error and time.monotonic() < until:
            time.sleep(0.1)
        self.stop()

    def settle_size(self) -> None:
        """Until no other size of a microbatch is tried, each of which is compiled first."""
        self.start()
        until, known, since = time.monotonic() + SETTLE_SIZE_S, 0, time.monotonic()
        while time.monotonic() < min(until, since + STEADY_S) and not self.error:
            time.sleep(0.1)
            if (now := len(self.times)) != known:
                known, since = now, time.monotonic()
        self.stop()

    def stop(self) -> None:
        """End in the middle of a train step; what it has accumulated is thrown away."""
        self.on = False
        self._work.cancel()
        self.ring.call(lambda: None)  # the unit that ran has ended

    def _next(self) -> None:
        if not self.on:
            return
        learner, step = self.learner, self.steps
        assert learner is not None
        self._work = self.ring.engine.run_between_steps(lambda: accepted(learner, self.groups, step))
        self._work.add_done_callback(self._done)

    def _done(self, work: Any) -> None:
        try:
            report = work.result().report
        except CancelledError:
            return
        except Exception as error:  # told by the next look at it: this runs in a future's callback
            self.error = error
            return
        assert report.updated, report
        self.ended.append(time.perf_counter())
        self._next()

    def steady_rate(self, steps: int) -> float:
        """Tokens a second of the median train step, once the size of a microbatch is found."""
        self.settle_size()
        first = self.steps
        self._run_until(lambda: self.steps > first + steps)
        if self.error:
            raise self.error
        ended = self.ended[first : first + steps + 1]
        if len(ended) < 2:
            raise RuntimeError(f"no two train steps ended within {SETTLE_S:.0f} s")
        return float(tokens_of(self.groups) / np.median(np.diff(ended)))


def accepted(learner: PolicyLearner, groups: list[SampleGroup], step: int) -> Work[Trained]:
    """A train step whose version passes the gate."""
    trained = yield from learner.train(groups, step, step, [(1, 2, 3)])
    learner.accept()
    return trained


def tokens_of(groups: list[SampleGroup]) -> int:
    """Completion tokens of a train step."""
    return sum(len(sample.mask) for group in groups for sample in group.samples)


def random_groups(groups: int, samples: int, prompt: int, completion: int, vocab: int) -> list[SampleGroup]:
    """A batch of the real shape; rewards by chance."""
    draw = np.random.default_rng(1)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in draw.integers(3, vocab, n))

    def sample() -> Sample:
        n = completion
        return Sample(ids(n), (-float(np.log(vocab)),) * n, (True,) * n, (0,) * n, float(draw.normal()))

    return [SampleGroup(str(at), ids(prompt), tuple(sample() for _ in range(samples))) for at in range(groups)]
