"""One run that learns from a data set: read, learn, hold against what is held out, publish through the gate.

Every `evaluate_every` train steps, and at the end, the weights become a candidate. It passes when its numbers are
finite, when what it has right of the held-out items is no less than the last good version's by more than
`reward_margin`, and when a worker that has loaded it says, through the queue, what the trainer says. One that fails is
rejected in the store, and weights and moments go back. Checkpoints are written at the same times, and every
`checkpoint_every` train steps.

Invariants. A worker that does not answer says nothing about the weights: it is asked until it does, and no longer than
`LAST_WAIT_S` once the run is to stop. What has been learned is in a checkpoint before it is offered, and what no worker
has judged is offered again by the next start, before anything else is learned.
"""

import asyncio
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import structlog

from mlx_model.loader import LoadedModel
from shared.adapters import GateCheck, version_id
from shared.errors import SetupError
from shared.training import TrainerState, TrainerStatus, TrainingPoint
from trainer.learn import gate
from trainer.learn.compute import ComputeHost
from trainer.learners.data import DataLearner, DataOptions, Measured
from trainer.learners.handle import HostHandle
from trainer.learners.kinds import Made
from trainer.learners.lines import Data, batch_of
from trainer.ring.join import Way, way_to_ring
from trainer.ring.ring import TrainerRing
from trainer.rollouts.sight import Sight
from trainer.runs.metrics import TimeLeft, append, clock, cut, totals_of
from trainer.runs.run import Run, permitted
from trainer.settings import TrainSettings
from trainer.state import Arrays, OfferedStep, RunState
from trainer.versions.checkpoint import Checkpoint, differences
from trainer.versions.publish import Publisher
from trainer.versions.run_folder import check_home
from trainer.versions.run_lock import run_lock
from trainer.versions.start import check_latest, keep_start, starting_weights

T = TypeVar("T")

log = structlog.get_logger()

ASK_AGAIN_S = 2.0  # a worker that has not answered
LAST_WAIT_S = 10.0  # for a worker's judgement, once the run is to stop
REPORT_S = 10.0  # between two lines of the log


class DataLine(msgspec.Struct, frozen=True):
    """A line of a data run's `metrics.jsonl`."""

    step: int  # 0: before the first one
    loss: float | None
    grad_norm: float | None
    tokens: int = 0  # in the loss, where it is of tokens
    held_out_right: float | None = None  # the share that is right, where it was measured
    held_out_loss: float | None = None
    held_out_margin: float | None = None  # of pairs
    version: int = 0  # that is served


async def train_on_data(
    kind: "type[DataRun[Any]]",
    settings: TrainSettings,
    host: ComputeHost,
    load: Callable[[], Awaitable[LoadedModel]],
    begun: Callable[["DataRun[Any]"], None],
) -> RunState:
    """Train until all steps are done or the run is stopped; `begun` gets the run before its first step."""
    async with AsyncExitStack() as stack:
        way = await stack.enter_async_context(way_to_ring(settings))
        loaded = await load()
        ring = await stack.enter_async_context(way.join(loaded))
        await stack.enter_async_context(permitted(settings, host, ring))
        await stack.enter_async_context(run_lock(settings.folder))
        run = kind(settings, host, way, ring)
        stack.callback(run.close)
        begun(run)
        ring.board.begin(run.status, run.stop)
        await ring.board.show("starting")
        await run.start(loaded)
        return await run.run()


class DataRun(Run[DataLearner[T]], Generic[T]):
    """The run's state and its steps."""

    measures_first: ClassVar[bool] = False  # whether what it begins with has something right

    def __init__(self, settings: TrainSettings, host: ComputeHost, way: Way, ring: TrainerRing) -> None:
        state = RunState(settings.run_name, ring=ring.id, base_sha256=ring.base_sha256)
        super().__init__(settings, host, ring.sink, state)
        self._way, self._ring = way, ring
        self._unanswered = ""  # why no worker has judged the last candidate
        self._saved = 0  # train step of the latest checkpoint
        self._latest = 0  # version that was the latest when this run began or last moved it
        self._reported_at = 0.0
        self._last: DataLine | None = None
        self._since = time.monotonic()  # of the last line
        self._left = TimeLeft()

    # -- for each kind of run

    async def _gather(self, loaded: LoadedModel) -> None:
        """Ask the ring for data, if they come from there; nothing of the run's folder is changed."""

    def _has_gathered(self, kept: Path) -> bool:
        """True if the run continues with the data that it has stored there."""
        return self.settings.resume != "no" and (kept.exists() or bool(self.checkpoints.names()))

    async def _keep_gathered(self) -> None:
        """Write down what was gathered, before anything is learned from it."""

    @abstractmethod
    def _read(self, longest: int) -> Data[T]:
        """The data, of texts with at most `longest` tokens."""

    @abstractmethod
    def _made_with(self) -> Made:
        """Recipe of the run's learner, once the data is read."""

    @property
    def _sight(self) -> Sight | None:
        """Vision tower for the data's images; None: the data has none."""
        return None

    @abstractmethod
    async def _parity(self, version: int) -> list[GateCheck]:
        """Compare outputs of a worker that has loaded the version with our own; `_unanswered` gives the reason without
        an answer.
        """

    def close(self) -> None:
        """End what the run has started besides."""

    # -- the run

    def status(self, now: TrainerState) -> TrainerStatus:
        """Status of the run, as published to the ring."""
        state, settings = self.state, self.settings
        return msgspec.structs.replace(
            totals_of(settings, state, now, self.checkpoints, self._started_ms),
            source=settings.dataset.name if settings.dataset else "", policy_step=state.swaps,
            best_reward=state.best_held_out, loss=self._last.loss if self._last else None,
            trajectories=state.consumed, held_out=None, held_out_right=state.held_out, eta_s=self._eta_s,
            next_version_at=self._next_version_at,
        )  # fmt: skip

    @property
    def _eta_s(self) -> float | None:
        return self._left.of(self.settings.steps, self.state.train_step)

    @property
    def _next_version_at(self) -> int:
        step, every, steps = self.state.train_step, self.settings.evaluate_every, self.settings.steps
        if self.state.offered or not every:
            return step if self.state.offered else steps
        return min(steps, (step // every + 1) * every)

    async def start(self, loaded: LoadedModel) -> None:
        """Read the data, make the learner, and restore a checkpoint if there is one."""
        settings = self.settings
        await self._gather(loaded)
        self._data = await asyncio.to_thread(self._read, loaded.card.context_length)
        self.learner: HostHandle[DataLearner[T]] = await HostHandle.open(
            self._host, self._made_with(), loaded.model, self._sight, loaded.whole
        )
        config = self.learner.config
        base = self._ring.base_sha256
        self._publisher = Publisher(self._sink, settings.folder, settings.adapter, config, base, self._disk)
        checkpoint = self._load(config)
        if checkpoint is not None:
            self.state = checkpoint.state
            self._saved = self.state.train_step
        if not settings.candidate:  # which replaces nothing
            await check_latest(settings, self.state, self._publisher)
        resumed, shapes = checkpoint is not None, self.learner.shapes
        fresh = await self.learner.weights() if settings.start_from and not resumed else {}
        start = await starting_weights(
            settings.start_from, self.state, self._publisher, shapes, resumed=resumed, fresh=fresh
        )
        self._latest = await self._sink.latest_version()
        if resumed and not settings.candidate and self.state.ring in ("", self._ring.id) and self._latest:
            self._check_ours(self._latest, self.state.version)
        self._begin_folder_anew()
        await self._keep_gathered()
        first_line = 0 if not resumed else self._saved if self.state.offered else self._saved + 1
        if settings.candidate and not self._latest:
            await self._serve_start()
        await self._disk.run(cut, settings.folder / "metrics.jsonl", "step", first_line)
        if start is not None:
            await self.learner.call(DataLearner.begin_with, start)
            if not resumed:
                await keep_start(settings.start_from, start, self.state, self._publisher)
        if checkpoint is not None:
            good = await self._good_weights()
            await self.learner.call(DataLearner.restore, checkpoint, good)
        self.state.ring, self.state.base_sha256 = self._ring.id, self._ring.base_sha256
        self.state.mode = settings.mode
        log.info(
            "train.begins", form=self._data.form, examples=len(self._data.learned),
            held_out_examples=len(self._data.held_out), too_long=self._data.too_long, train_step=self.state.train_step,
            first_version_after=self._next_version_at,
        )  # fmt: skip

    async def _serve_start(self) -> None:
        """Serve an adapter that changes nothing as the first version: what a promotion is rolled back to."""
        weights = await self.learner.weights()
        checks = [gate.finite_weights(weights)]
        first = await self._publisher.publish(weights, self.state, checks, {}, if_latest=0)
        self._latest = first.version or await self._sink.latest_version()

    async def _good_weights(self) -> Arrays | None:
        """Weights that a resumed run falls back to before its checkpoint is restored; None: those of the checkpoint."""
        version = self.state.version
        if not self.state.unpublished or (version and version not in self._publisher.on_disk()):
            return None
        return self._publisher.weights_of(version) if version else await self.learner.weights()

    def _load(self, config: bytes) -> Checkpoint | None:
        """Checkpoint to resume from; None: the run begins. SetupError when the folder holds another run."""
        checkpoint = self._checkpoint()
        if checkpoint is None:
            return None
        check_home(self.settings, checkpoint.state, self._ring)
        if differs := differences(checkpoint.adapter_config, config):
            raise SetupError(f"the checkpoint is of another run: {differs}; give another --run, or --resume no")
        return checkpoint

    async def run(self) -> RunState:
        """Run until all train steps are done, or the run is stopped."""
        settings, state = self.settings, self.state
        self._since = time.monotonic()
        if self.measures_first and not state.train_step:
            begins_with = await self._measure()
            state.held_out = begins_with.right
            await self._report(None, begins_with)
        if state.offered or (state.unpublished and state.train_step >= settings.steps):
            await self._publish(state.offered or OfferedStep(None, None, is_finite=True, tokens=0))
        while state.train_step < settings.steps and not self.stopping:
            batch = batch_of(self._data.learned, settings.prompts_per_step, state.train_step, settings.seed)
            step = state.train_step
            async with self._care.step(self._stop):
                report = await self.learner.call(DataLearner.train, batch, step)
            state.train_step += 1
            state.updates += 1
            state.last_update_ms = time.time_ns() // 1_000_000
            state.unpublished += 1
            state.consumed += len(batch)
            state.tokens += report.tokens
            due = settings.evaluate_every and state.train_step % settings.evaluate_every == 0
            stopped = self.stopping and not settings.candidate  # else a stop would decide what is offered
            last = state.train_step == settings.steps or stopped
            trained = OfferedStep(report.loss, report.grad_norm, report.is_finite, report.tokens)
            if due or last:
                await self._publish(trained)
                continue
            await self._report(trained)
            if settings.checkpoint_every and state.train_step - self._saved >= settings.checkpoint_every:
                await self._save()
        if state.train_step != self._saved:  # stopped between two candidates
            await self._save()
        log.info("train.ended", steps=state.train_step, version=state.version, held_out_right=state.held_out)
        return state

    async def _measure(self) -> Measured:
        return await self.learner.call(DataLearner.measure, self._data.held_out)

    # -- versions

    async def _publish(self, trained: OfferedStep) -> None:
        """Offer the weights, and report the train step that made them."""
        settings, state = self.settings, self.state
        state.offered = trained
        if state.train_step != self._saved:
            await self._save()
        measured = await self._measure()
        weights = await self.learner.weights()
        checks = [
            gate.finite_gradients(0 if trained.is_finite else 1),
            gate.reward_floor(measured.right, state.held_out, settings.reward_margin),
        ]
        metrics = {"held_out_right": measured.right, "loss": math.nan if trained.loss is None else trained.loss}
        published = await self._offer(weights, checks, metrics, self._judged, self._latest)
        if not published.version and self._unanswered:
            log.warning("version.not_judged", why=self._unanswered)
            await self._report(trained, measured)
            return
        state.unpublished, state.offered = 0, None
        failed = gate.failures(published.checks)
        if published.version:
            await self._serve(published.version, measured.right)
        else:
            await self._reject(failed)
        await self._report(trained, measured)
        await self._save()
        await self._check_patience(failed)

    async def _judged(self, version: int) -> list[GateCheck]:
        """Checks of a version by a worker; a run that is being stopped waits LAST_WAIT_S for them."""
        asking, stop = asyncio.create_task(self._parity(version)), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({asking, stop}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({asking}, timeout=LAST_WAIT_S)
            if asking.done():
                return asking.result()
            self._unanswered = self._unanswered or "no worker has answered before the run was stopped"
            return [GateCheck("reload_parity", False, self._unanswered)]
        finally:
            for task in (asking, stop):
                task.cancel()
            await asyncio.gather(asking, stop, return_exceptions=True)

    async def _serve(self, version: int, right: float) -> None:
        await self._accept(version)
        self.state.held_out = right
        if not self.settings.candidate:
            self._latest = version
        await self._note_best(version, right)
        event = "version.proposed" if self.settings.candidate else "version.served"
        log.info(event, version=version_id(self.settings.adapter, version), held_out_right=right)

    async def _save(self, name: str = "", state: RunState | None = None) -> str:
        self.state.saves += 1
        self._saved = self.state.train_step
        saved = await super()._save(name, state)
        await self._forget_versions(self.state.version, self.state.best_version)
        return saved

    # -- figures

    async def _report(self, trained: OfferedStep | None, measured: Measured | None = None) -> None:
        """Always before the checkpoint that holds it: a start drops the lines after its checkpoint."""
        line = DataLine(
            self.state.train_step,
            trained.loss if trained else None,
            trained.grad_norm if trained else None,
            trained.tokens if trained else 0,
            measured.right if measured else None,
            measured.loss if measured else None,
            measured.margin if measured else None,
            self.state.version,
        )
        await self._disk.run(append, self.settings.folder / "metrics.jsonl", line)
        now, self._last = time.monotonic(), line
        self.state.seconds += now - self._since
        if trained is not None:
            self._left.add(now - self._since)
        self._since = now
        point = TrainingPoint(
            train_step=line.step, policy_step=self.state.swaps, version=line.version, at_ms=time.time_ns() // 1_000_000,
            source=self.settings.mode, held_out_right=line.held_out_right, held_out_loss=line.held_out_loss,
            loss=line.loss, grad_norm=line.grad_norm, tokens=line.tokens,
        )  # fmt: skip
        await self._ring.board.show("training", point)
        if measured is not None or time.monotonic() - self._reported_at > REPORT_S:
            self._reported_at = time.monotonic()
            eta = {} if self._eta_s is None else {"eta": clock(self._eta_s)}
            known = {name: value for name, value in msgspec.structs.asdict(line).items() if value is not None}
            log.info("train.step", **(known | {"step": f"{line.step}/{self.settings.steps}"} | eta))


def options_of(settings: TrainSettings) -> DataOptions:
    """The constants of a train step, of a LoRA as the settings have it."""
    options = settings.optimize_options()
    return DataOptions(
        schedule=options.schedule,
        shape=settings.adapter_shape(),
        microbatch_tokens=settings.microbatch_tokens,
        max_grad_norm=settings.max_grad_norm,
        weight_decay=settings.weight_decay,
        adam_betas=options.adam_betas,
        seed=settings.seed,
        checkpoint_layers=settings.gradient_checkpointing,
    )
