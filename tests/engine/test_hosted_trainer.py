"""The trainer in a worker's engine thread: the same run as elsewhere, and troubles that stay its own."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_model.config import EngineConfig, SlotConfig
from shared.errors import ParallmError, SetupError
from shared.process.worker_settings import WorkerSettings
from tests.engine.conftest import prompt_of, spec
from tests.engine.test_thread import Outbox
from tests.engine.test_trainer_loop import settings
from tests.training.in_process import InProcessSource, MemorySink
from tests.training.run import train
from tests.waiting import HANG_S
from trainer import hosted
from trainer.hosted import HostedTrainer, hosted_settings
from trainer.learn.compute import EngineHost
from worker.__main__ import main
from worker.engine.messages import RowRequest, StepOutput
from worker.engine.orders import Submit
from worker.engine.thread import EngineThread
from worker.guest import invited


class EndlessRows(Outbox):
    """Rows that are followed by others, so that the engine decodes until it is stopped."""

    engine: EngineThread

    def begin(self, rows: int) -> None:
        for at in range(rows):
            self._submit(str(at))

    def _submit(self, seq: str) -> None:
        prompt = prompt_of(20, seed=int(seq.partition("-")[0]), vocab=400)
        self.engine.send(Submit([RowRequest(spec(seq, prompt, max_tokens=400))]))

    def on_step(self, output: StepOutput) -> None:
        super().on_step(output)
        for event in output.events:
            if event.finish is not None:
                self._submit(f"{event.seq}-")


@pytest.mark.long
async def test_both_hosts_make_the_same_weights_of_the_same_run(tmp_path: Path) -> None:
    separate = settings(tmp_path / "separate", max_lag=0, steps=2)
    await train(separate)
    outbox = EndlessRows()
    engine = EngineThread(EngineConfig("models/tiny", guest_share=0.5), outbox.on_step, outbox.on_death, SlotConfig())
    outbox.engine, loaded = engine, engine.start()
    outbox.begin(4)
    sink, host = MemorySink(), EngineHost(engine)
    inside = settings(tmp_path / "inside", max_lag=0, steps=2)
    source = InProcessSource(host, loaded.model, inside.adapter_shape(), sink, loaded.card.eos_token_ids)
    await train(inside, sink, host=host, source=source, model=loaded.model)
    stats = engine.stats().guests
    outbox.wait(lambda: outbox.finished("0"))
    assert engine.stop() and outbox.death is None
    assert stats.units_beside_rows > 3
    name = "policy/checkpoints/step-000002/adapters.safetensors"
    assert (tmp_path / "inside" / name).read_bytes() == (tmp_path / "separate" / name).read_bytes()


class Loop:
    """Stands for a TrainLoop."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(train_step=0, ring="")
        self.cycle = self  # as tasks and tracebacks make them

    def stop(self) -> None:
        """Does not listen."""


class Run:
    """Stands for a run of the trainer that does what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: Callable[[int, Any], None]) -> None:
        self.tries = 0
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.done: list[bool] = []
        self.resumed: list[str] = []
        self.loops: list[weakref.ref[Any]] = []
        self._each = each
        monkeypatch.setattr(hosted, "train", self._train)
        monkeypatch.setattr(hosted, "FIRST_PAUSE_S", 0.001)

    async def _train(self, settings: Any, host: Any, load: Any, begun: Callable[[Any], None]) -> None:
        self.tries += 1
        self.resumed.append(settings.resume)
        loop = Loop()
        assert not any(each() for each in self.loops), "the arrays of an earlier try are still there"
        self.loops.append(weakref.ref(loop))
        begun(loop)
        self.begun.set()
        await asyncio.sleep(0)
        self._each(self.tries, loop)
        if self._each is forever:
            await asyncio.Event().wait()

    def left(self, done: bool) -> None:
        self.done.append(done)
        self.ended.set()

    def start(self, config: Path | None = None) -> HostedTrainer:
        trainer = HostedTrainer(WorkerSettings(redis="redis://127.0.0.1:1", train_config=config))
        trainer.start(SimpleNamespace(engine=None, loaded=None, others=None), self.left)  # type: ignore[arg-type]
        return trainer


def forever(tries: int, loop: Any) -> None:
    """A run that does not end."""


def out_of_memory(tries: int, loop: Any) -> None:
    raise RuntimeError("out of memory")


def out_of_memory_twice(tries: int, loop: Any) -> None:
    if tries < 3:
        raise RuntimeError("out of memory")


def out_of_memory_after_a_train_step(tries: int, loop: Any) -> None:
    loop.state.train_step = tries
    if tries < 6:
        raise RuntimeError("out of memory")


def refused(tries: int, loop: Any) -> None:
    raise ParallmError("5 train steps in a row failed the gate")


@pytest.mark.long
@pytest.mark.parametrize(
    ("each", "tries", "done"),
    [
        (out_of_memory, hosted.TRIES, False),
        (out_of_memory_twice, 3, True),
        (out_of_memory_after_a_train_step, 6, True),
        (refused, 1, False),
    ],
)
def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch, each: Any, tries: int, done: bool) -> None:
    run = Run(monkeypatch, each)
    trainer = run.start()
    assert run.ended.wait(HANG_S)
    trainer.stop(5)
    assert (run.tries, run.done) == (tries, [done])
    assert not any(loop() for loop in run.loops), "a trainer that has ended holds no memory"


def test_another_try_goes_on_from_the_last_checkpoint_however_the_run_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("resume: no\n")
    run = Run(monkeypatch, out_of_memory_twice)
    trainer = run.start(path)
    assert run.ended.wait(HANG_S)
    trainer.stop(5)
    assert run.resumed == ["no", "latest", "latest"]


def test_a_run_that_does_not_end_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, forever)
    trainer = run.start()
    assert run.begun.wait(HANG_S)
    trainer.stop(0.01)
    assert run.ended.wait(HANG_S) and run.done == [False]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model: another", "model: another, but the worker has models/tiny"),
        ("redis: redis://elsewhere", "redis: redis://elsewhere"),
        ("connect_to: redis://elsewhere", "belongs to its worker's ring"),
        ("task: gsm8k", "needs a dataset"),
        ("learning_rat: 1", "learning_rat"),
    ],
)
def test_a_configuration_that_cannot_be_hosted_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(SetupError, match=complaint):
        HostedTrainer(WorkerSettings(redis="redis://127.0.0.1:1", train_config=path))


def test_model_ring_and_pause_are_the_workers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nmodel: models/tiny\n")
    worker = WorkerSettings(redis="redis://127.0.0.1:1", train_config=path, training_pause_ms=20)
    made = hosted_settings(worker)
    assert (made.steps, made.model, made.redis, made.microbatch_s) == (7, "models/tiny", worker.redis, 0.02)


@pytest.mark.parametrize("name", ["trainer", "trainer.hosted:Nobody", "no.such.module:Guest"])
def test_a_guest_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(SetupError, match=name.replace(".", r"\.")):
        invited(WorkerSettings(guest=name))


def test_a_worker_whose_guest_cannot_work_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: no.such.module:Task")
    guest = ["--guest", "trainer.hosted:HostedTrainer", "--train-config", str(path)]
    assert main(["--redis", "redis://127.0.0.1:1", *guest]) == 2, "which a supervisor does not try again"
    assert "no.such.module" in capsys.readouterr().err
