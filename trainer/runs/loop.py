"""The whole of training, from prompts to served adapter versions.

    collect a batch -> advantages -> train step -> gate -> publish -> checkpoint -> again

Generation of the next batch runs in the background while this one trains: asynchronous, one policy step off-policy with
K = 1, strictly on-policy with K = 0 (trainer/rollouts/pacing.py). The loop runs in an event loop and touches no MLX;
the learner lives in the host's thread (trainer/learn/compute.py). Same code in a process of its own and in a worker.

Invariants.
- Every started group is consumed by exactly one train step, or dropped and counted; also across kills, since a
  checkpoint holds weights, moments and books of the same moment.
- The served version is always a good one: a train step that fails the gate is taken back, weights and moments.
"""

import secrets
import time
from collections.abc import Sequence

import msgspec
import structlog

from shared.adapters import version_id
from shared.errors import ConflictError, EngineError, ParallmError, SetupError
from shared.redis.training.orders import Received
from shared.telemetry import tracing
from shared.telemetry.spans import Past
from shared.training import Order, Refusal, TrainerState, TrainerStatus
from shared.trajectories import LiveTrajectory
from trainer.learn.batches import DroppedCounts, SampleGroup, sample_groups
from trainer.learn.drawing import uncorrected
from trainer.learn.steps import StepReport
from trainer.learners.policy import PolicyLearner, Trained
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.pacing import lag_of, oldest_version
from trainer.rollouts.shown import SampleLog, shown_samples
from trainer.runs.examine import Examiner
from trainer.runs.foreign import ForeignMoves
from trainer.runs.inbox import AllStale, GroupBatch, Moved, open_curriculum, open_inbox
from trainer.runs.metrics import (
    MetricsLog,
    StepMetrics,
    TimeLeft,
    Timing,
    figures,
    point_of,
    progress,
    status_of,
    step_metrics,
    steps_of,
)
from trainer.runs.orders import TrainedStep, carry_out
from trainer.runs.parts import Parts, open_learner
from trainer.runs.posted import LogprobCheck
from trainer.runs.run import Run
from trainer.runs.served import Serving
from trainer.settings import TrainSettings
from trainer.state import LiveBooks, RunState
from trainer.versions.checkpoint import Checkpoint, differences
from trainer.versions.publish import Publisher
from trainer.versions.run_folder import check_home, learns_from, warn_of_changes
from trainer.versions.start import check_latest, keep_start, starting_weights

log = structlog.get_logger()


class TrainLoop(Run[PolicyLearner]):
    """One run. `state` may be read at any time."""

    def __init__(self, settings: TrainSettings, parts: Parts) -> None:
        super().__init__(settings, parts.host, parts.ring.sink, RunState(run=settings.run_name))
        self.parts = parts
        self._ring = parts.ring
        self._last: StepMetrics | None = None
        self._samples, self._left = SampleLog(), TimeLeft()
        self._start_id = secrets.token_hex(3)
        self._failure = ""  # of the first sample that failed

    async def run(self) -> RunState:
        """Train until all steps are done or `stop` was called; the last state, which is also saved.

        ParallmError when all steps are done and every sample failed.
        """
        await self._start()
        before = self.state.trajectories - self.state.failed
        self._ring.board.begin(self.status, self.stop)
        try:
            if await self._begin():
                await self._ring.board.show("waiting")
                self._inbox = open_inbox(
                    self.settings, self.parts, self.state, self._start_id, self._sampled_from, self._foreign.wait,
                    self._curriculum,
                )  # fmt: skip
                async with self._inbox:
                    self._ring.mailbox.known(self.state.orders)
                    await self._train()
        finally:
            self._metrics.close()
        if self._failure and not self.stopping and self.state.trajectories - self.state.failed == before:
            raise ParallmError(f"nothing was learned: every sample failed, the first one: {self._failure[:500]}")
        return self.state

    async def _begin(self) -> bool:
        """Serve what the run begins with, unless a person has chosen something else meanwhile; False: stopped first."""
        moved = await self._foreign.look()
        if moved is not None:
            self._ring.mailbox.known(self.state.orders)
            await self._foreign.settle(moved, self._stop, self._refuse_while_paused)
            if self._stop.is_set():
                return False
        if not self._serving.begun:
            await self._serving.begin()
        log.info(
            "train.ready", policy=self.settings.adapter, version=self.state.version, source=self.settings.source_shown
        )
        return True

    async def _refuse_while_paused(self, received: Received[Order]) -> None:
        refusal = Refusal.of(ConflictError(f"the run has not begun: {self._foreign.held}"))
        await self._ring.mailbox.answer(received, refusal)

    async def _carry_out(self, received: Received[Order]) -> bool:
        return await carry_out(self, self._ring.mailbox, received, Timing())

    @property
    def held(self) -> str:
        """Why nothing may be learned now; "" when something may."""
        return self._foreign.held

    async def _train(self) -> None:
        """Train steps until the end, each followed by what is due."""
        state, saved = self.state, -1
        while not self._finished():
            timing = Timing()
            started = time.perf_counter()
            work = await self._next()
            timing.wait_s = time.perf_counter() - started
            if work is None:
                break
            if isinstance(work, Received):
                if await carry_out(self, self._ring.mailbox, work, timing):
                    saved = state.train_step
            elif await self._serving.judge(work):
                self._inbox.discard(work)
                await self.save()  # a resume must not serve again what has just been taken back
                await self._serving.check_patience()
            else:
                await self.train_step(work, timing)
                await self._serving.check_patience()
            due = self.settings.checkpoint_every and state.train_step % self.settings.checkpoint_every == 0
            if due and saved != state.train_step:
                await self.save()
                saved = state.train_step
        if saved != state.train_step:
            await self.save()

    async def _next(self) -> GroupBatch | Received[Order] | None:
        """The next piece of work, once any obstacle to learning is reported or settled; None: stopped."""
        while (work := await self._inbox.next(self.state, self._lag, self._stop)) is not None:
            if isinstance(work, AllStale):
                await self._ring.sink.alert("all_stale", work.reason)
                await self._ring.board.show("waiting", problem=work.reason)
                continue
            if not isinstance(work, Moved):
                moved = await self._foreign.look()
                if moved is None:
                    return work
                self._inbox.give_back(work)
                work = moved
            policy_step = self.state.policy_step
            await self._foreign.settle(work, self._stop, self._carry_out)
            if self.state.policy_step != policy_step:
                await self._inbox.adopted()
            await self.save()  # a resume must not take back what a person has chosen
        return None

    def _finished(self) -> bool:
        steps = self.state.train_step - self.state.posted_steps
        return self._stop.is_set() or (self.settings.source != "posted" and steps >= self.settings.steps)

    def status(self, now: TrainerState) -> TrainerStatus:
        """Status of the run for its board."""
        others = self.parts.host.others
        ranks = () if others is None else others.ranks()
        return status_of(
            self.settings, self.state, now, self._last, self.checkpoints, self._started_ms, ranks, self._samples.last,
            self._eta_s,
        )  # fmt: skip

    @property
    def _eta_s(self) -> float | None:
        return self._left.of(steps_of(self.settings), self.state.train_step - self.state.posted_steps)

    # -- start and resume

    async def _start(self) -> None:
        settings = self.settings
        try:
            self.learner = await open_learner(self.parts, settings)
        except ValueError as error:  # a target that the model has not, DoRA on experts
            raise SetupError(f"bad settings: {error}") from error
        config = self.learner.config
        self._publisher = Publisher(
            self._ring.sink, settings.folder, settings.adapter, config, self._ring.base_sha256, self._disk
        )
        if (checkpoint := self._checkpoint()) is not None:
            await self._resume(checkpoint, config)
        await check_latest(settings, self.state, self._publisher)
        resumed, learner = checkpoint is not None, self.learner
        fresh = await learner.weights() if settings.start_from and not resumed else {}
        start = await starting_weights(
            settings.start_from, self.state, self._publisher, learner.shapes, resumed=resumed, fresh=fresh
        )
        self._begin_folder_anew()
        if start is not None:
            await self.learner.call(PolicyLearner.begin_with, start)
            if not resumed:
                await self.learner.call(PolicyLearner.load, start)
                await keep_start(settings.start_from, start, self.state, self._publisher)
        if self.state.ring != self._ring.id:  # another queue of live traffic
            self.state.live = LiveBooks()
        self.state.ring, self.state.base_sha256 = self._ring.id, self._ring.base_sha256
        self.state.mode, self.state.learns_from = settings.mode, learns_from(settings)
        first_step = self.state.train_step
        loggers = self.parts.loggers
        self._metrics = await self._disk.run(
            MetricsLog,
            settings.folder / "metrics.jsonl",
            first_step=first_step,
            tensorboard=settings.tensorboard,
            loggers=loggers,
        )
        loggers.begin(settings.folder, anew=settings.resume == "no")
        self._curriculum = await open_curriculum(settings, self.parts.environment, self.state)
        self._probes = await self._probe_prompts()
        examiner = Examiner(settings, self.parts, self.learner, self._probes, f"{self.state.run}-{self._start_id}")
        self._serving = Serving(settings, self.parts, self.learner, self._publisher, examiner, self.state)
        self._foreign = ForeignMoves(settings, self.parts, self.state, self._serving)

    async def _resume(self, checkpoint: Checkpoint, config: bytes) -> None:
        check_home(self.settings, checkpoint.state, self._ring)
        differs = differences(checkpoint.adapter_config, config)
        try:
            if not differs:
                await self.learner.call(PolicyLearner.restore, checkpoint)
        except ValueError as error:  # another model
            differs = str(error)
        if differs:
            raise SetupError(
                f"{self.settings.folder} holds another run's checkpoints ({differs}): give that run's model and "
                "lora_* settings, another --run, or --resume no"
            )
        self.state = checkpoint.state
        warn_of_changes(self.settings, self.state)
        log.info("run.resumed", train_step=self.state.train_step, pending=len(self.state.pending))

    async def _probe_prompts(self) -> list[tuple[int, ...]]:
        environment = self.parts.held_out or self.parts.environment
        observations = [await environment.reset(index) for index in range(self.settings.probe_prompts)]
        return [(await self.parts.conversation.opening(observation)).ids for observation in observations]

    # -- one train step

    async def train_step(self, batch: GroupBatch, timing: Timing, *, serve: bool = True) -> TrainedStep:
        """Consume one batch: train, gate, publish, or leave the policy as it is."""
        began_ns = time.time_ns() - int(1e9 * timing.wait_s)
        attributes: dict[str, str | int] = {"parallm.policy": self.settings.adapter, "parallm.source": batch.source}
        attributes["parallm.train_step"] = self.state.train_step
        with tracing.span("train step", attributes, start_ns=began_ns):
            tracing.record(Past("collect", began_ns, time.time_ns(), {"parallm.groups": len(batch.groups)}))
            async with self._care.step(self._stop):
                stepped = await self._step(batch, timing, serve=serve)
            tracing.annotate(figures(stepped.metrics))
        return stepped

    async def _step(self, batch: GroupBatch, timing: Timing, *, serve: bool) -> TrainedStep:
        state, started = self.state, time.perf_counter()
        steps = {version_id(self.settings.adapter, v): s for v, s in state.policy_steps.items()}
        scale = None if self.settings.loss == "ppo" else self.settings.advantage_scale
        groups, dropped = sample_groups(batch.groups, steps, scale=scale, mask_overlong=self.settings.mask_overlong)
        if dropped.failed:
            log.warning("train.samples_failed", samples=dropped.failed, first=dropped.problem[:500])
        off = [why for group in batch.groups for t in group.trajectories if (why := uncorrected(t))]
        if off:
            log.warning("train.samples_uncorrected", samples=len(off), first=off[0])
        trained = Trained(StepReport(updated=False), {}, ())
        await self._ring.board.show("training")
        if groups:
            with tracing.span("train"):
                trained = await self._learn(groups, posted=batch.source == "posted")
        timing.train_s = time.perf_counter() - started
        lags = [min(self._lag(group), state.policy_step) for group in batch.groups]  # posted ones may be of any age
        try:
            failed = await self._serving.offer(trained, batch, dropped, serve=serve)
        except (
            ParallmError
        ):  # stopped on a full disk, for example: weights that the gate has not passed are not saved either
            await self.learner.revert()
            raise
        timing.publish_s = time.perf_counter() - started - timing.train_s
        self._count(batch, trained.report, dropped, timing)
        self._inbox.pace_on(state, batch)
        own, stale = self._inbox.take_dropped()
        state.dropped = [*state.dropped, *own]
        metrics = step_metrics(
            state, batch.groups, trained.report, dropped, timing, lags,
            stale=stale, held_out=self._serving.held_out, gate=failed, source=batch.source,
            curriculum=self._curriculum.figures() if self._curriculum and batch.source == "prompts" else None,
        )  # fmt: skip
        self._last = metrics
        self._left.add(timing.whole_s)
        shown = self.settings.show_samples if batch.source == "prompts" else 0
        self._samples.last = shown_samples(batch.groups, shown, self._ring.codec)
        await self._disk.run(self._metrics.write, metrics, self._samples.last)
        await self._ring.board.show("waiting", point_of(metrics))
        log.info("train.step", **progress(metrics, steps_of(self.settings), self._eta_s))
        self._samples.show()
        return TrainedStep(metrics, dropped, sum(len(group.samples) for group in groups), trained.checks != ())

    async def compare(self, trajectories: Sequence[LiveTrajectory]) -> int:
        """Refuse posted log-probabilities that are not their version's; how many could not be compared."""
        check = LogprobCheck(self.settings, self.learner, self._publisher, self.state.version)
        return await check.compare(trajectories)

    async def _learn(self, groups: list[SampleGroup], *, posted: bool) -> Trained:
        """The train step; one on posted trajectories that raises (too large for memory, say) is undone.

        It would end the run otherwise, and every run that gets the order again.
        """
        step, policy_step = self._schedule_step(), self.state.policy_step
        try:
            return await self.learner.call(PolicyLearner.train, groups, step, policy_step, self._probes)
        except Exception as error:
            if not posted:
                raise
            log.exception("order.broken")
            await self.learner.revert()
            raise EngineError(f"the train step failed, nothing has changed: {type(error).__name__}: {error}") from error

    def _schedule_step(self) -> int:
        """Progress of the run for the schedule; updates that users post do not count."""
        posted = 0 if self.settings.source == "posted" else self.state.posted_steps
        return self.state.train_step - posted

    # -- books

    def _sampled_from(self) -> str:
        """Model name that a group which starts now is sampled from: this run's newest version, by its number.

        The bare name would be what anybody has made the latest: samples that this run cannot learn from.
        """
        return version_id(self.settings.adapter, self.state.version)

    def _lag(self, group: RolloutGroup) -> int:
        state, adapter = self.state, self.settings.adapter
        return max(
            (
                lag_of(oldest_version(t.spans, adapter), state.policy_steps, state.policy_step)
                for t in group.trajectories
            ),
            default=0,
        )

    def _count(self, batch: GroupBatch, report: StepReport, dropped: DroppedCounts, timing: Timing) -> None:
        state = self.state
        state.failed += dropped.failed
        self._failure = self._failure or dropped.problem
        state.train_step += 1
        state.posted_steps += batch.source == "posted"
        state.live_steps += batch.source == "live"
        state.trajectories += sum(len(group.trajectories) for group in batch.groups)
        state.tokens += report.tokens
        state.seconds += timing.whole_s

    async def save(self, name: str = "") -> str:
        """Save a checkpoint of this moment; between two train steps only."""
        self.state.saves += 1
        self._inbox.keep_books(self.state)
        self._serving.keep_books()
        state: RunState = msgspec.json.decode(msgspec.json.encode(self.state), type=RunState)
        saved = await self._save(name, state)
        await self._inbox.saved()
        await self._ring.board.show("waiting")
        log.info("checkpoint.saved", name=saved, train_step=state.train_step)
        return saved
