"""When a silent engine counts as stuck: worker/engine_watch.py, with an engine that is silent by a list."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.engine.thread import EngineThread
from worker.engine_watch import EngineWatch, processor_delays

LIMIT_S = 0.04  # it looks eight times as often


class Engine(EngineThread):
    """Its silences, one a look; the last one stays."""

    def __init__(self, *silences: float) -> None:
        self._silences: Iterator[float] = iter(silences)
        self._last = 0.0
        self.looks = 0

    @property
    def alive(self) -> bool:
        return True

    def silent_s(self) -> float:
        self.looks += 1
        self._last = next(self._silences, self._last)
        return self._last


async def stalled(engine: Engine, *delays: dict[str, float]) -> str:
    """What the watch says at last; `delays` of threads for each look, the last ones stay."""
    said: list[str] = []
    known = iter(delays)
    latest: dict[str, float] = {}

    def now() -> dict[str, float]:
        latest.update(next(known, {}))
        return dict(latest)

    await EngineWatch(engine, LIMIT_S, said.append, now).run()
    (reason,) = said
    return reason


async def test_an_engine_that_is_silent_beyond_the_limit_is_stuck() -> None:
    engine = Engine(0, 0.03, 0, 0.03, 0.05)
    assert await stalled(engine) == "the engine has been silent for 0.1 s over its work"
    assert engine.looks == 5


async def test_time_without_a_processor_is_no_silence() -> None:
    engine = Engine(0, 0.03, 0.06, 0.09, 0.12, 0.15)
    waits = [{"a": 5.0}, {"a": 5.0}, {"a": 5.02}, {"a": 5.04, "b": 0.01}, {"a": 5.06}, {"a": 5.09}]
    await stalled(engine, *waits)
    assert engine.looks == 6, "it had a processor for 0.06 s at the sixth look"


async def test_what_a_thread_waited_before_the_turn_does_not_count() -> None:
    engine = Engine(0.03, 0.0, 0.05)
    await stalled(engine, {"a": 0.0}, {"a": 0.0}, {"a": 90.0}, {"a": 90.0})
    assert engine.looks == 3


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not say it")
def test_the_system_says_how_long_threads_had_no_processor() -> None:
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        delays = processor_delays()
        assert str(other.native_id) in delays and str(threading.get_native_id()) not in delays
        assert all(0 <= delay < math.inf for delay in delays.values())
    finally:
        ended.set()
        other.join()
