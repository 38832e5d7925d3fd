"""Work of others between decode steps: its share, its pauses, its errors, and rows that do not notice it."""

import gc
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.loader import LoadedModel, load_model
from shared.errors import EngineError
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.small_models import QWEN3, write_model
from tests.engine.test_thread import Outbox
from tests.waiting import HANG_S
from trainer.hosted import rehearse
from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.gate import GateLimits
from trainer.learn.options import AdapterShape, OptimizeOptions, Schedule
from trainer.learners.policy import PolicyLearner
from trainer.settings import TrainSettings
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.between_steps import Guests
from worker.engine.messages import RowRequest
from worker.engine.orders import Submit
from worker.engine.thread import EngineThread

Work = Generator[None, None, Any]


class Clock:
    """Time that moves only when a unit works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Labour:
    """Units that take their time by the clock."""

    def __init__(self, clock: Clock, unit_s: float, units: int = 1_000_000) -> None:
        self.done = 0
        self.closed = False
        self._clock, self._unit_s, self._units = clock, unit_s, units

    def __call__(self) -> Work:
        try:
            while self.done < self._units:
                self.done += 1
                self._clock.now += self._unit_s
                yield
        finally:
            self.closed = True
        return self.done


def hosting(share: float, unit_s: float, units: int = 1_000_000) -> tuple[Guests, Labour, "Future[Any]"]:
    clock, future = Clock(), Future[Any]()
    guests, labour = Guests(share, clock), Labour(clock, unit_s, units)
    guests.add(labour, future)
    return guests, labour, future


@pytest.mark.parametrize(("share", "unit_s", "units"), [(0.2, 1.0, 22), (0.2, 4.0, 5), (0.5, 1.0, 89), (0.5, 10.0, 9)])
def test_while_rows_decode_units_get_their_share(share: float, unit_s: float, units: int) -> None:
    guests, labour, _ = hosting(share, unit_s)
    for _ in range(100):
        guests.between_steps(decoding=True, decode_s=1.0)
    assert units - 2 <= labour.done <= units + 1


def test_no_more_than_one_unit_between_two_decode_steps() -> None:
    guests, labour, _ = hosting(0.9, 0.01)
    for _ in range(40):
        before = labour.done
        guests.between_steps(decoding=True, decode_s=5.0)
        assert labour.done <= before + 1
    assert labour.done >= 34, "a turn now and then goes without one"


def test_an_expensive_unit_is_paid_before_the_next_one() -> None:
    clock = Clock()
    guests = Guests(0.5, clock)
    costs = iter([1.0, 30.0, 1.0, 1.0, 1.0, 1.0])
    ran: list[int] = []

    def work() -> Work:
        for cost in costs:
            clock.now += cost
            ran.append(step)
            yield

    guests.add(work, Future())
    for step in range(60):  # noqa: B007 - read by work
        guests.between_steps(decoding=True, decode_s=1.0)
    assert ran[1] - ran[0] <= 3
    assert 30 <= ran[2] - ran[1] <= 51, "its cost, and that of the next one"


@pytest.mark.parametrize(("after_a_unit", "units"), [(3.0, 11), (2.0, 14), (1.0, 22), (0.5, 29)])
def test_what_a_unit_does_to_the_turn_after_it_counts_too(after_a_unit: float, units: int) -> None:
    guests, labour, _ = hosting(0.5, 2.0)
    lost, turns, turn_s = 0.0, 50, 1.0
    for _ in range(turns):
        before = labour.done
        guests.between_steps(decoding=True, decode_s=turn_s)
        lost += turn_s - 1.0 + 2.0 * (labour.done - before)
        turn_s = after_a_unit if labour.done > before else 1.0
    assert abs(labour.done - units) <= 2
    assert turns / (turns + lost) >= 0.48, "decoding keeps its half"


def test_an_idle_worker_gives_all_its_time_and_owes_nothing_afterwards() -> None:
    guests, labour, _ = hosting(0.2, 1.0)
    for _ in range(50):
        guests.between_steps(decoding=False, decode_s=0.0)
    assert labour.done == 50
    for _ in range(40):
        guests.between_steps(decoding=True, decode_s=1.0)
    assert 58 <= labour.done <= 61


def test_time_without_guests_is_not_saved_up_for_a_burst() -> None:
    guests, _, future = hosting(0.2, 1.0, units=3)
    for _ in range(1000):
        guests.between_steps(decoding=True, decode_s=1.0)
    assert future.result(0) == 3
    later = Labour(guests._clock, 1.0)  # type: ignore[arg-type]
    guests.add(later, Future())
    for _ in range(40):
        guests.between_steps(decoding=True, decode_s=1.0)
    assert later.done <= 12


def test_work_for_an_idle_engine_waits_until_no_row_is_there_and_others_pass_it() -> None:
    clock = Clock()
    guests, patient, other = Guests(0.5, clock), Labour(clock, 1.0, units=3), Labour(clock, 1.0, units=5)
    guests.add(patient, when := Future[Any](), when_idle=True)
    for decoding in (True, False):  # rows decode, or wait for an adapter
        for _ in range(10):
            guests.between_steps(decoding=decoding, decode_s=1.0)
    assert patient.done == 0 and not guests.waits(is_idle=False) and guests.waits(is_idle=True)
    guests.add(other, Future())
    for _ in range(20):
        guests.between_steps(decoding=True, decode_s=1.0)
    assert (patient.done, other.done) == (0, 5)
    guests.between_steps(decoding=False, decode_s=0.0, is_idle=True)
    guests.between_steps(decoding=True, decode_s=1.0)
    assert patient.done == 1, "it gives way to the row that has come"
    while guests.waits(is_idle=True):
        guests.between_steps(decoding=False, decode_s=0.0, is_idle=True)
    assert when.result(0) == 3


def test_a_share_of_nothing_works_on_an_idle_engine_only() -> None:
    guests, labour, _ = hosting(0.0, 1.0)
    for _ in range(50):
        guests.between_steps(decoding=True, decode_s=1.0)
    assert labour.done == 0
    guests.between_steps(decoding=False, decode_s=0.0)
    assert labour.done == 1


def test_pieces_run_in_order_and_an_error_concerns_its_owner_alone() -> None:
    guests, _, first = hosting(0.2, 1.0, units=2)
    broken, last = Future[Any](), Future[Any]()

    def fails() -> Work:
        yield
        raise RuntimeError("out of memory")

    guests.add(fails, broken)
    guests.add(Labour(Clock(), 1.0, units=1), last)
    while guests.waits(False):
        guests.between_steps(decoding=False, decode_s=0.0)
    assert first.result(0) == 2 and last.result(0) == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.result(0)


def test_cancelled_work_is_closed_after_the_unit_that_ran() -> None:
    guests, labour, future = hosting(0.2, 1.0)
    guests.between_steps(decoding=False, decode_s=0.0)
    assert future.cancel() and not labour.closed
    guests.between_steps(decoding=False, decode_s=0.0)
    assert labour.closed and labour.done == 1 and not guests.waits(False)


def test_work_that_a_stopped_engine_did_not_finish_fails(llama_folder: Path) -> None:
    outbox = Outbox()
    engine = EngineThread(EngineConfig(str(llama_folder)), outbox.on_step, outbox.on_death)
    engine.start()
    begun = threading.Event()

    def endless() -> Work:
        while True:
            begun.set()
            yield

    futures = [engine.run_between_steps(endless), engine.run_between_steps(endless)]
    assert begun.wait(HANG_S)
    assert engine.stop()
    for future in (*futures, engine.run_between_steps(endless)):
        with pytest.raises(EngineError, match="stopped"):
            future.result(HANG_S)


def test_units_run_in_the_engines_thread_while_it_has_nothing_else_to_do(llama_folder: Path) -> None:
    outbox = Outbox()
    engine = EngineThread(EngineConfig(str(llama_folder)), outbox.on_step, outbox.on_death)
    engine.start()

    def where() -> Work:
        yield
        return threading.current_thread().name

    assert engine.run_between_steps(where).result(HANG_S) == "engine"
    assert engine.stats().guests.units == 2
    assert engine.stop()


# -- a real learner


@pytest.fixture(scope="module", params=[None, 4], ids=["dense", "4-bit"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_model(tmp_path_factory.mktemp("guests") / "model", QWEN3, bits=request.param)
    loaded = load_model(EngineConfig(str(folder)))
    AdapterSlots(loaded, SlotConfig(), lambda: None).close()  # as a worker serves it: wrapped linears
    return loaded


def learner(loaded: LoadedModel, **options: Any) -> PolicyLearner:
    made = OptimizeOptions(schedule=Schedule("constant", 1e-2, 0, 100, 1.0), **options)
    return PolicyLearner(loaded.model, AdapterShape(rank=4), made, GateLimits(1.0, 10.0))


def batch() -> list[SampleGroup]:
    draw = np.random.default_rng(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in draw.integers(0, 256, n))

    def sample(advantage: float) -> Sample:
        return Sample(ids(6), (-8.0,) * 6, (True,) * 6, (0,) * 6, advantage)

    return [SampleGroup(str(i), ids(7), (sample(1.0), sample(-1.0), sample(0.5), sample(-0.5))) for i in range(4)]


def decode(loaded: LoadedModel, between: Callable[[Bench], None]) -> dict[str, list[int]]:
    bench = Bench(loaded)
    for i in range(6):
        bench.submit(spec(f"s{i}", prompt_of(5 + 3 * i, seed=i), max_tokens=30, temperature=i % 2, seed=i))
    while bench.engine.busy:
        bench.turn()
        between(bench)
    return {seq: bench.tokens(seq) for seq in bench.events}


@pytest.mark.long
def test_rows_are_the_same_token_for_token_while_training_runs(served: LoadedModel) -> None:
    undisturbed = decode(served, lambda bench: None)
    student, guests, losses = learner(served), Guests(0.5), list[Any]()

    def train(bench: Bench) -> None:
        if not guests.waits(False):
            step = len(losses)
            losses.append(Future[Any]())
            guests.add(lambda: student.train(batch(), step, step, [(1, 2, 3)]), losses[-1])
        guests.between_steps(decoding=bench.engine.decoding, decode_s=10.0)

    assert decode(served, train) == undisturbed
    reports = [future.result(0).report for future in losses if future.done()]
    assert len(reports) >= 2 and all(report.updated for report in reports), "gradients came through the served base"
    assert reports[-1].loss < reports[0].loss, "and taught something"


def test_training_shares_the_served_base(served: LoadedModel) -> None:
    gc.collect()  # what tests before have left in cycles may go at any moment
    mx.synchronize()
    before = mx.get_active_memory()
    student = learner(served)
    state = student.snapshot()
    own = sum(value.nbytes for part in (state.adapter, state.optimizer) for value in part.values())
    assert own * 0.9 < mx.get_active_memory() - before < own * 1.3, "small arrays are rounded up; a copy would be more"
    del student


@pytest.mark.long
def test_a_worker_that_trains_holds_one_base_and_the_trainers_own_state(tmp_path: Path) -> None:
    # Its rows' KV stays small beside it, however far they get between the two measurements.
    shape = {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1536, "vocab_size": 12_288}
    outbox = Outbox()
    folder = write_model(tmp_path / "model", QWEN3 | shape)
    engine = EngineThread(EngineConfig(str(folder)), outbox.on_step, outbox.on_death, SlotConfig())
    loaded = engine.start()

    def call(function: Callable[[], Any]) -> Any:
        def work() -> Work:
            return function()
            yield

        return engine.run_between_steps(work).result(HANG_S)

    engine.send(Submit([RowRequest(spec(f"s{i}", prompt_of(8), max_tokens=1800)) for i in range(4)]))
    outbox.wait(lambda: len(outbox.events) > 20)
    alone = call(mx.get_active_memory)
    students = [call(lambda: learner(loaded))]
    for step in range(2):
        work = engine.run_between_steps(lambda step=step: students[0].train(batch()[:1], step, step, [(1, 2)]))
        assert work.result(HANG_S).report.updated
    hosted, state = call(mx.get_active_memory), call(students[0].snapshot)
    own = sum(value.nbytes for part in (state.adapter, state.optimizer) for value in part.values())
    assert not outbox.finished("s0"), "both were measured while rows decode"
    call(students.clear)
    assert engine.stop() and outbox.death is None
    assert alone > 50e6 and (hosted - own) / alone < 1.10


@pytest.mark.long
def test_smaller_microbatches_make_more_units(served: LoadedModel) -> None:
    def units(student: PolicyLearner) -> int:
        return sum(1 for _ in student.train(batch(), 0, 0, []))

    whole, divided = learner(served), learner(served, microbatch_s=0.001)
    divided.optimizer._size.positions = 1
    assert units(divided) >= units(whole) + 15, "16 samples, one at a time"


def test_rows_finish_while_an_endless_guest_works(llama_folder: Path) -> None:
    outbox = Outbox()
    engine = EngineThread(EngineConfig(str(llama_folder), max_rows=4), outbox.on_step, outbox.on_death)
    engine.start()

    def endless() -> Work:
        while True:
            mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
            yield

    future = engine.run_between_steps(endless)
    engine.send(Submit([RowRequest(spec("s", prompt_of(5)))]))
    outbox.wait(lambda: outbox.finished("s"))
    assert not future.done()
    future.cancel()
    assert engine.stop()


@pytest.mark.long
def test_made_up_train_steps_leave_the_served_model_as_it_was(served: LoadedModel) -> None:
    settings = TrainSettings(max_tokens=8, microbatch_s=0.05, lora_rank=4)
    before = mx.array(served.model(mx.array([[1, 2, 3]])))
    work = rehearse(served, settings, None)
    assert sum(1 for _ in work) > 2
    assert mx.array_equal(before, served.model(mx.array([[1, 2, 3]])))
