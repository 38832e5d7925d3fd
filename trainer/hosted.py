"""The trainer inside a worker: `mlx_parallm_serve --mode inference_and_training`.

Its MLX work runs in the worker's engine thread, between decode steps and over the same base arrays; everything else
runs in a thread of its own with an event loop of its own, so that an environment that blocks delays no token and no
lease. Otherwise it is the run that `mlx_parallm_train` does: samples through the queue, versions through the store.

Invariants. No error of training reaches the worker. What may pass is tried again from the last checkpoint, a few times
in a row; anything else ends training, says why on the board and in the log, and the worker goes on serving.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
import yaml

from mlx_model.device import on_cuda
from mlx_model.loader import LoadedModel
from mlx_model.memory import free_bytes
from ranks.placement import placement
from shared.errors import EngineError, ParallmError, QueueFullError, ServiceUnavailableError, SetupError
from shared.process.nested_config import is_nested
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.compute import EngineHost, LendingWorker, Others, Work
from trainer.learners import placing
from trainer.learners.handle import Local
from trainer.learners.kinds import made_with
from trainer.learners.policy import PolicyLearner
from trainer.learners.ranks import RankLearner
from trainer.rollouts.scorers import ring_judges
from trainer.runs.loop import TrainLoop
from trainer.runs.parts import policy_options
from trainer.runs.rl import tasks, train
from trainer.settings import TrainSettings

log = structlog.get_logger()

TRIES = 4  # in a row, without a train step between them
FIRST_PAUSE_S = 2.0
FREE_PART = 16  # of the free memory, a sixteenth may go for a microbatch
IDLE_WITHIN_S = 300.0  # after which training begins, warm or not
_MAY_PASS = (EngineError, QueueFullError, ServiceUnavailableError)
_OF_THE_WORKER = {"model": "model", "model_path": "model", "dtype": "dtype", "redis": "redis", "redis_url": "redis"}


class HostedTrainer:
    """A guest of a worker (worker/guest.py) that trains one policy."""

    rank = RankLearner  # what the other ranks of the worker's group do in its place

    def __init__(self, worker: WorkerSettings) -> None:
        self._settings = hosted_settings(worker)
        if placement(worker) is not None:
            placing.check(self._settings)
        self._warms_up = worker.warm_up
        asyncio.run(_check(self._settings))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[None] | None = None
        self._training: TrainLoop | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def learner_rank(self) -> int:
        """Rank of the run's adapter."""
        return self._settings.lora_rank

    def resolved(self) -> str:
        """The run's settings as YAML."""
        return self._settings.resolved()

    def start(self, place: LendingWorker, ended: Callable[[bool], None]) -> None:
        """Start training in a thread of its own; `ended` gets True if the run is complete."""
        if not self._settings.microbatch_gb:
            bound = free_bytes() / FREE_PART / 1e9
            self._settings = self._settings.model_copy(update={"microbatch_gb": bound})

        def run() -> None:
            done = False
            try:
                done = asyncio.run(self._train_until_done(place))
            except Exception:
                log.exception("training.failed")
            finally:
                self._forget_run()
                ended(done)

        self._thread = threading.Thread(target=run, name="trainer", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the train step that runs now, or at `timeout_s` in the midst of it: the checkpoint counts."""
        self._stopping.set()
        thread = self._thread
        if thread is None:
            return
        self._call(self._end_in_order)
        thread.join(timeout_s)
        if thread.is_alive():
            self._call(lambda: self._running is not None and self._running.cancel())
            thread.join(2.0)

    def _call(self, function: Callable[[], Any]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)

    def _end_in_order(self) -> None:
        if self._training is not None:
            self._training.stop()
        elif self._running is not None:
            self._running.cancel()

    # -- in the trainer's thread

    async def _train_until_done(self, place: LendingWorker) -> bool:
        """Train, with retries; True if the run is complete."""
        self._loop = asyncio.get_running_loop()
        if self._warms_up and on_cuda():  # others compile little, and have it at once
            await self._warm_up(place)
        failures = 0
        while not self._stopping.is_set():
            before = self._train_steps()
            if self._training is not None and self._training.state.ring:
                # It has found its home: it goes on here also when the ring has lost its data, its name among them.
                self._settings = self._settings.model_copy(update={"move_run": True})
            self._forget_run()
            outcome = await self._try(place)
            if outcome != "again":
                return outcome == "done"
            failures = 1 if self._train_steps() > before else failures + 1
            if failures == TRIES:
                log.error("training.failed", tries=failures)
                return False
            pause_s = FIRST_PAUSE_S * 2 ** (failures - 1)
            log.warning("training.again", in_s=pause_s, tries=failures)
            await self._pause(pause_s)
        return False

    async def _warm_up(self, place: LendingWorker) -> None:
        """Compile what a train step needs while no row is there; where one always is, it is compiled as it trains."""
        began = time.perf_counter()
        work = place.engine.run_between_steps(
            lambda: rehearse(place.loaded, self._settings, place.others), when_idle=True
        )
        self._running = asyncio.create_task(_ended(work))
        await asyncio.wait([self._running], timeout=IDLE_WITHIN_S)
        work.cancel()
        log.info("training.warm", seconds=round(time.perf_counter() - began, 1), all=not work.cancelled())

    async def _try(self, place: LendingWorker) -> Literal["done", "ended", "again"]:
        # Errors end in here: one that passed the loop above would stay in its frame, with all the run's arrays.
        self._running = asyncio.create_task(self._train(place))
        try:
            await self._running
            return "done"
        except asyncio.CancelledError:
            return "ended"
        except Exception as error:
            if self._stopping.is_set():
                return "ended"
            if isinstance(error, ParallmError) and not isinstance(error, _MAY_PASS):
                log.error("training.failed", reason=str(error))
                return "ended"
            log.exception("training.broken")
            return "again"

    async def _train(self, place: LendingWorker) -> None:
        async def loaded() -> LoadedModel:
            return place.loaded

        def begun(training: TrainLoop) -> None:
            self._training = training
            # Begun anew, or from an older checkpoint: only once. Another try goes on from the last one.
            self._settings = self._settings.model_copy(update={"resume": "latest"})
            if self._stopping.is_set():
                training.stop()

        await train(self._settings, EngineHost(place.engine, place.others), loaded, begun)

    async def _pause(self, seconds: float) -> None:
        self._running = asyncio.create_task(asyncio.sleep(seconds))
        await asyncio.gather(self._running, return_exceptions=True)

    def _forget_run(self) -> None:
        """Let go of a run's arrays; its exception and its tasks hold each other."""
        self._training = self._running = None
        gc.collect()

    def _train_steps(self) -> int:
        return self._training.state.train_step if self._training is not None else 0


def hosted_settings(worker: WorkerSettings) -> TrainSettings:
    """The run's settings; model, dtype and ring are the worker's. SetupError when its file has other values."""
    arguments: list[str] = []
    if worker.train_config is not None:
        arguments = ["--config", str(worker.train_config)]
    settings = load(TrainSettings, arguments)
    if worker.train_config is not None:
        _refuse_another_place(worker, worker.train_config)
    if settings.mode != "rl":
        raise SetupError(f"--mode {settings.mode} runs in a process of its own: mlx_parallm_train")
    if settings.learner == "service" or settings.agents is not None or settings.join_run:
        raise SetupError("--learner service, --join-run and --agents are for a process of its own: mlx_parallm_train")
    bound_s = settings.microbatch_s or worker.training_pause_ms / 1000
    ring = {"redis": worker.redis, "connect_to": "", "over_http": False}
    ring["distributed_sharding"] = worker.distributed_sharding
    return settings.model_copy(update={"model": worker.model, "dtype": worker.dtype, "microbatch_s": bound_s, **ring})


async def _ended(work: Future[None]) -> None:
    """Wait for the end of a rehearsal; its error is logged here, and reported by the run, where it occurs again."""
    try:
        await asyncio.wrap_future(work)
    except Exception:
        log.exception("training.not_warm")


async def _check(settings: TrainSettings) -> None:
    """SetupError when tasks or reward are not there: before the model is loaded, not after."""
    async with ring_judges(settings.redis or "redis://") as judges, tasks(settings, judges):  # "": a dry run
        pass


def _refuse_another_place(worker: WorkerSettings, file: Path) -> None:
    given: dict[str, Any] = yaml.safe_load(file.read_bytes()) or {}
    if is_nested(given):  # the server's own file, whose model a flag or a variable may have replaced
        return
    for key, value in given.items():
        if key in ("connect_to", "over_http"):
            raise SetupError(f"{file}: {key}: a hosted trainer belongs to its worker's ring")
        mine = getattr(worker, _OF_THE_WORKER[key]) if key in _OF_THE_WORKER else value
        if value != mine:
            raise SetupError(f"{file}: {key}: {value}, but the worker has {mine or 'none'}: leave it out")


GROUPS, SAMPLES = 8, 4
PROMPT, COMPLETION = 128, 256  # tokens, the second one at most
STEPS = 2  # the first one finds out how large a microbatch may be


def rehearse(loaded: LoadedModel, settings: TrainSettings, others: Others | None) -> Work[None]:
    """Train on made-up samples; runs in the engine's thread, with `others` on all ranks of a group."""
    made = made_with("policy", policy_options(settings))
    local: Local[PolicyLearner] = Local.open(made, loaded.model, whole=loaded.whole, others=others)
    groups = _groups(loaded.card.vocab_size, min(COMPLETION, settings.max_tokens))
    for step in range(STEPS):
        yield from local.work(PolicyLearner.train, groups, step, step, [groups[0].prompt_ids])


def _groups(vocab_size: int, completion: int) -> list[SampleGroup]:
    draw = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in draw.integers(0, vocab_size, count))

    def sample(at: int) -> Sample:
        logprobs = (-float(np.log(vocab_size)),) * completion
        return Sample(ids(completion), logprobs, (True,) * completion, (0,) * completion, 1.0 if at % 2 else -1.0)

    return [SampleGroup(str(at), ids(PROMPT), tuple(map(sample, range(SAMPLES)))) for at in range(GROUPS)]
