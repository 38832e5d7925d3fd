"""The thread: plain data in from anywhere, plain data out, a clean end."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_model.config import EngineConfig
from shared.errors import SetupError
from shared.frames import TokenEvent
from tests.engine.conftest import prompt_of, spec
from tests.waiting import HANG_S
from worker.engine.messages import RowRequest, StepOutput
from worker.engine.orders import Cancel, Submit
from worker.engine.thread import EngineThread

ROOT = Path(__file__).parents[2]


class Outbox:
    """Collects what the thread says; waits for conditions with a deadline."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.death: BaseException | None = None
        self._changed = threading.Condition()
        self.threads: set[str] = set()

    def on_step(self, output: StepOutput) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.events += output.events
            self._changed.notify_all()

    def on_death(self, error: BaseException) -> None:
        with self._changed:
            self.death = error
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, HANG_S), "the condition never came"

    def finished(self, seq: str) -> bool:
        return any(event.seq == seq and event.finish is not None for event in self.events)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def engine(llama_folder: Path, outbox: Outbox) -> Iterator[EngineThread]:
    thread = EngineThread(EngineConfig(str(llama_folder), max_rows=4), outbox.on_step, outbox.on_death)
    thread.start()
    yield thread
    assert thread.stop()


def test_it_decodes_what_other_threads_submit(engine: EngineThread, outbox: Outbox) -> None:
    def submit(name: str) -> None:
        engine.send(Submit([RowRequest(spec(f"{name}{i}", prompt_of(5))) for i in range(5)]))

    threads = [threading.Thread(target=submit, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    outbox.wait(lambda: sum(event.finish is not None for event in outbox.events) == 15)
    assert outbox.threads == {"engine"}
    for thread in threads:
        thread.join()
    assert len({tuple(t for e in outbox.events if e.seq == f"a{i}" for t in e.tokens) for i in range(5)}) == 1


def test_cancel_reaches_a_running_sequence(engine: EngineThread, outbox: Outbox) -> None:
    engine.send(Submit([RowRequest(spec("s", prompt_of(5), max_tokens=900))]))
    outbox.wait(lambda: bool(outbox.events))
    engine.send(Cancel("s"))
    outbox.wait(lambda: outbox.finished("s"))
    assert outbox.events[-1].finish is not None and outbox.events[-1].finish.reason == "cancelled"


def test_stats_stay_fresh_while_it_idles(engine: EngineThread, outbox: Outbox) -> None:
    engine.send(Submit([RowRequest(spec("s", prompt_of(5)))]))
    outbox.wait(lambda: outbox.finished("s"))
    deadline = time.monotonic() + HANG_S
    while engine.stats().rows and time.monotonic() < deadline:
        pass
    stats = engine.stats()
    assert (stats.rows, stats.waiting, stats.tokens, stats.kv_bytes) == (0, 0, 8, 0)
    assert stats.kv_limit_bytes > 0
    asked_ms = time.monotonic_ns() // 1_000_000
    deadline = time.monotonic() + HANG_S
    while engine.stats().last_step_ms < asked_ms:
        assert time.monotonic() < deadline, "an idle engine says nothing of itself"


def test_an_idle_engine_sleeps_and_wakes(engine: EngineThread, outbox: Outbox) -> None:
    engine.send(Submit([RowRequest(spec("warm", [1]))]))
    outbox.wait(lambda: outbox.finished("warm"))
    before = time.thread_time(), time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - before[1] < 0.15, "no busy wait"
    engine.send(Submit([RowRequest(spec("s", [1], max_tokens=1))]))
    outbox.wait(lambda: outbox.finished("s"))


def test_an_error_in_the_loop_is_reported_as_death(llama_folder: Path, outbox: Outbox) -> None:
    def broken(output: StepOutput) -> None:
        raise ValueError("publisher broke")

    engine = EngineThread(EngineConfig(str(llama_folder)), broken, outbox.on_death)
    engine.start()
    engine.send(Submit([RowRequest(spec("s", [1]))]))
    outbox.wait(lambda: outbox.death is not None)
    assert str(outbox.death) == "publisher broke"
    assert engine.stop()


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (EngineConfig("/no/such/folder"), "/no/such/folder"),
        (EngineConfig("no-such-folder"), "name on the hub"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(config: EngineConfig, word: str, outbox: Outbox) -> None:
    engine = EngineThread(config, outbox.on_step, outbox.on_death)
    with pytest.raises(SetupError, match=word):
        engine.start()
    assert engine.stop()
    assert outbox.death is None


def test_a_folder_without_a_model_says_so(tmp_path: Path, outbox: Outbox) -> None:
    with pytest.raises(SetupError, match="cannot load the model"):
        EngineThread(EngineConfig(str(tmp_path)), outbox.on_step, outbox.on_death).start()


PROGRAM = """
import sys, threading
from mlx_model import fast_blas
fast_blas.install()
from shared.sequences import SamplingParams, SequenceSpec
from mlx_model.config import EngineConfig
from worker.engine.messages import RowRequest
from worker.engine.orders import Submit
from worker.engine.thread import EngineThread
some = threading.Event()
engine = EngineThread(EngineConfig(sys.argv[1]), lambda output: some.set(), lambda error: print("death", error))
engine.start()
sampling = SamplingParams(max_tokens=900, seed=1, ignore_eos=True)
engine.send(Submit([RowRequest(SequenceSpec(str(i), "m", (1, 2, 3), sampling)) for i in range(4)]))
assert some.wait()
if sys.argv[2] == "stop":
    assert engine.stop()
print("end of program")
"""


def test_a_process_that_stops_in_mid_generation_exits_cleanly(llama_folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(llama_folder), "stop"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert (run.returncode, run.stdout) == (0, "end of program\n"), run.stderr
