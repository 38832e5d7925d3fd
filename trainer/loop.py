"""The whole of training, from prompts to served adapter versions.

    collect a batch -> advantages -> train step -> gate -> publish -> checkpoint -> again

Generation of the next batch runs in the background while this one trains: asynchronous, one policy step off-policy with
K = 1, strictly on-policy with K = 0 (trainer/pacing.py). The loop runs in an event loop and touches no MLX; the learner
lives in the host's thread (trainer/host.py). Same code in a process of its own and hosted in a worker.

Invariants.
- Every started group is consumed by exactly one train step, or dropped and counted; also across kills, since a
  checkpoint holds weights, moments and books of the same moment.
- The served version is always a good one: a train step that fails the gate is taken back, weights and moments.
"""

import asyncio
import secrets
import time

import msgspec
import numpy as np
import structlog

from shared.adapters import GateCheck, version_id
from shared.errors import ParallmError
from shared.training import TrainerState, TrainerStatus
from trainer import gate
from trainer.batches import sample_groups
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.collect import Collector
from trainer.episodes import EpisodeOptions, Episodes
from trainer.examine import Examiner
from trainer.gate import RewardWatch, Standing
from trainer.host import at_once
from trainer.learner import Learner, Snapshot, Trained
from trainer.metrics import Progress, StepMetrics, Timing, progress, step_metrics, totals
from trainer.pacing import lag_of, oldest_version
from trainer.parts import Parts
from trainer.publish import Published, Publisher
from trainer.reports import StepReport
from trainer.rollouts import RolloutGroup, mean_reward
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.status import point_of, status_of
from trainer.tensorboard import open_logs

__all__ = ["Parts", "TrainLoop"]

log = structlog.get_logger()


class TrainLoop:
    """One run. `state` and `progress()` may be read at any time."""

    def __init__(self, settings: TrainSettings, parts: Parts) -> None:
        self.settings = settings
        self.parts = parts
        self.state = RunState(run=settings.run_name)
        self.checkpoints = CheckpointStore(settings.folder / "checkpoints", settings.keep_checkpoints)
        self._watch = RewardWatch(settings.reward_margin, settings.min_groups)
        self._stop = asyncio.Event()
        self._last: StepMetrics | None = None
        self._rejections = 0  # in a row
        self._started_ms = time.time_ns() // 1_000_000
        self._start_id = secrets.token_hex(3)
        self._held_out: float | None = None  # of this train step
        self._save_as: list[str] = []

    async def run(self) -> RunState:
        """Train until all steps are done or `stop` was called; the last state, which is also saved."""
        await self._start()
        self.parts.board.begin(self.status, self.stop)
        await self.parts.board.show("waiting")
        episodes = Episodes(self.parts.source, self.parts.environment, self.parts.conversation, self._options())
        books = self.state
        collector = Collector(
            episodes,
            self.settings.pace(),
            self.settings.adapter,
            cursor=books.cursor,
            pending=books.pending,
            consumed=books.consumed,
        )
        try:
            async with collector:
                await self._train(collector)
        finally:
            self._metrics.close()
        return self.state

    async def _train(self, collector: Collector) -> None:
        """Train steps until the end, each followed by what is due."""
        settings, state, saved = self.settings, self.state, -1
        while state.train_step < settings.steps and not self._stop.is_set():
            timing = Timing()
            batch = await self._next_batch(collector, timing)
            if batch is None:
                break
            if await self._has_collapsed(batch):
                collector.discard(batch)
                continue
            await self._train_step(batch, collector, timing)
            self._keep_books(collector)
            due = settings.checkpoint_every and state.train_step % settings.checkpoint_every == 0
            if due or self._save_as:
                await self.save(self._save_as.pop() if self._save_as else "")
                saved = state.train_step
        if saved != state.train_step:
            self._keep_books(collector)
            await self.save()

    def stop(self) -> None:
        """End after the train step that runs now."""
        self._stop.set()

    def save_soon(self, name: str = "") -> None:
        """Save a checkpoint after the train step that runs now."""
        self._save_as.append(name)

    def progress(self) -> Progress:
        """Totals for status pages and counters."""
        return totals(self.state, self._last)

    def status(self, now: TrainerState) -> TrainerStatus:
        """What the board shows."""
        return status_of(self.settings, self.state, now, self._last, self.checkpoints, self._started_ms)

    # -- start and resume

    async def _start(self) -> None:
        settings = self.settings
        self._learner: Learner = await self.parts.host.run(at_once(self._build))
        config = await self.parts.host.run(at_once(self._learner.config))
        self._publisher = Publisher(self.parts.sink, settings.folder, settings.adapter, config, self.parts.base_sha256)
        checkpoint = None if settings.resume == "no" else self.checkpoints.load(settings.resume)
        if checkpoint is not None:
            await self._resume(checkpoint)
        self._metrics = open_logs(settings.folder, settings.tensorboard, self.state.train_step)
        self._probes = await self._probe_prompts()
        self._examiner = Examiner(
            settings, self.parts, self._learner, self._probes, f"{self.state.run}-{self._start_id}"
        )
        # A resumed run publishes again: served must be what was saved, and numbers are never used twice.
        await self._publish_start()
        if settings.evaluate_every and self.state.held_out is None:
            served = version_id(settings.adapter, self.state.version)
            self.state.held_out = await self._examiner.evaluate(served, self.state.train_step)
            log.info("run.started", held_out=self.state.held_out)

    def _build(self) -> Learner:
        settings = self.settings
        return Learner(
            self.parts.load_model(),
            settings.adapter_shape(),
            settings.optimize_options(),
            settings.limits(),
            seed=settings.seed,
            checkpoint_layers=settings.gradient_checkpointing,
            remembered=settings.max_lag + 1,
        )

    async def _resume(self, checkpoint: Checkpoint) -> None:
        self.state = checkpoint.state
        self._watch.good = {version: Standing(*earned) for version, earned in checkpoint.state.good.items()}
        snapshot = Snapshot(checkpoint.adapter, checkpoint.optimizer)
        await self.parts.host.run(at_once(lambda: self._learner.restore(snapshot)))
        log.info("run.resumed", train_step=self.state.train_step, pending=len(self.state.pending))

    async def _publish_start(self) -> None:
        weights = await self.parts.host.run(at_once(self._learner.weights))
        published = await self._publisher.publish(weights, self.state, [gate.finite_weights(weights)], {})
        if not published.version:
            raise ParallmError(f"the first version was refused: {gate.failures(published.checks)}")
        self._served(published.version)

    async def _probe_prompts(self) -> list[tuple[int, ...]]:
        environment = self.parts.held_out or self.parts.environment
        observations = [await environment.reset(index) for index in range(self.settings.probe_prompts)]
        return [self.parts.conversation.prompt_ids(observation) for observation in observations]

    def _options(self) -> EpisodeOptions:
        settings = self.settings
        # Ids are new at each start: what a ring still holds of the last one may come from versions that are no more.
        return EpisodeOptions(
            f"{self.state.run}-{self._start_id}",
            settings.group_size,
            settings.sampling(),
            settings.max_turns,
            settings.seed,
        )

    # -- one train step

    async def _next_batch(self, collector: Collector, timing: Timing) -> list[RolloutGroup] | None:
        """A batch, or None when the run was stopped meanwhile."""
        started = time.perf_counter()
        batch = asyncio.create_task(collector.next_batch(self.state.train_step, self._lag))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((batch, stopped), return_when=asyncio.FIRST_COMPLETED)
            timing.wait_s = time.perf_counter() - started
            return batch.result() if batch.done() else None
        finally:
            batch.cancel()
            stopped.cancel()
            await asyncio.gather(batch, stopped, return_exceptions=True)

    async def _train_step(self, batch: list[RolloutGroup], collector: Collector, timing: Timing) -> None:
        """Consume one batch: train, gate, publish, or leave the policy as it is."""
        state, started = self.state, time.perf_counter()
        steps = {version_id(self.settings.adapter, v): s for v, s in state.policy_steps.items()}
        groups, dropped = sample_groups(
            batch, steps, scale=self.settings.advantage_scale, mask_overlong=self.settings.mask_overlong
        )
        trained = Trained(StepReport(updated=False), {}, ())
        await self.parts.board.show("training")
        if groups:
            step, policy_step = state.train_step, state.policy_step
            trained = await self.parts.host.run(lambda: self._learner.train(groups, step, policy_step, self._probes))
        timing.train_s = time.perf_counter() - started
        lags = [self._lag(group) for group in batch]
        self._held_out = None
        failed = await self._publish(trained, batch) if trained.checks else ""
        timing.publish_s = time.perf_counter() - started - timing.train_s
        state.train_step += 1
        collector.pace_on(state.train_step)
        self._count(batch, trained.report, timing)
        stale = collector.take_dropped()
        state.dropped = [*state.dropped, *stale]
        metrics = step_metrics(
            state, batch, trained.report, dropped, timing, lags, stale=len(stale), held_out=self._held_out, gate=failed
        )
        self._last = metrics
        self._metrics.write(metrics)
        await self.parts.board.show("waiting", point_of(metrics))
        log.info("train.step", **progress(metrics, self.settings.steps))

    async def _publish(self, trained: Trained, batch: list[RolloutGroup]) -> str:
        """Serve the new weights, or take the train step back; the failed checks."""
        state = self.state
        metrics = {"reward": mean_reward(batch), "loss": trained.report.loss, "kl": trained.report.kl}

        async def remote(version: int) -> list[GateCheck]:
            checks, self._held_out = await self._examiner.check(version, state.train_step + 1, state.held_out)
            return checks

        published = await self._publisher.publish(trained.weights, state, trained.checks, metrics, remote)
        if published.version:
            if self._held_out is not None:
                await self._judged(published.version, self._held_out)
                state.held_out = self._held_out
            await self.parts.host.run(at_once(self._learner.accept))
            state.policy_step += 1
            state.updates += 1
            state.last_update_ms = time.time_ns() // 1_000_000
            self._rejections = 0
            self._served(published.version)
            return ""
        return await self._take_back(published)

    async def _take_back(self, published: Published) -> str:
        await self.parts.host.run(at_once(self._learner.revert))
        self.state.rejected += 1
        self._rejections += 1
        failed = gate.failures(published.checks)
        log.error("version.rejected", train_step=self.state.train_step, checks=failed)
        if self._rejections >= self.settings.max_rejections:
            raise ParallmError(f"{self._rejections} train steps in a row failed the gate: {failed}")
        return failed

    def _served(self, version: int) -> None:
        state = self.state
        state.version = version
        state.swaps += 1
        state.policy_steps[version] = state.policy_step
        known = sorted(state.policy_steps)[-(self.settings.max_lag + 64) :]
        state.policy_steps = {v: state.policy_steps[v] for v in known}
        self._publisher.forget({version, state.best_version, *self._watch.good, *known[-2:]})

    # -- rollback

    async def _has_collapsed(self, batch: list[RolloutGroup]) -> bool:
        """Judge the versions that sampled this batch; go back to the best one when rewards have collapsed."""
        by_version: dict[int, list[float]] = {}
        for group in batch:
            versions = [oldest_version(t.spans, self.settings.adapter) or 0 for t in group.trajectories]
            if group.rewards:
                by_version.setdefault(min(versions), []).append(float(np.mean(group.rewards)))
        for version, means in sorted(by_version.items()):
            target = self._watch.add(version, means)
            if target is not None:
                await self._roll_back(version, target)
                return True
            if not self.settings.evaluate_every and version in self._watch.good:
                await self._judged(version, self._watch.good[version].mean)
        return False

    async def _roll_back(self, bad: int, target: int) -> None:
        """Serve an old version again and go on from its weights; what newer ones sampled is too old from now on."""
        state = self.state
        reason = f"version {bad} earned less than version {target} by more than {self.settings.reward_margin}"
        log.error("version.rolled_back", bad=bad, to=target, earned=self._watch.good[target].mean)
        await self.parts.sink.roll_back(target, reason)
        await self.parts.sink.alert("reward_collapse", reason)
        weights = self._publisher.weights_of(target)
        await self.parts.host.run(at_once(lambda: self._learner.load(weights)))
        state.policy_step += self.settings.max_lag + 1
        state.policy_steps = {v: s for v, s in state.policy_steps.items() if v != bad}
        state.rollbacks += 1
        self._watch.rolled_back()
        self._served(target)

    async def _judged(self, version: int, reward: float) -> None:
        if self.state.best_reward is None or reward > self.state.best_reward:
            self.state.best_reward, self.state.best_version = reward, version
            await self.parts.sink.set_best(version, reward)

    # -- books

    def _lag(self, group: RolloutGroup) -> int:
        state, adapter = self.state, self.settings.adapter
        return max(
            (
                lag_of(oldest_version(t.spans, adapter), state.policy_steps, state.policy_step)
                for t in group.trajectories
            ),
            default=0,
        )

    def _keep_books(self, collector: Collector) -> None:
        state = self.state
        state.cursor, state.pending, state.consumed = collector.cursor, collector.pending(), collector.consumed
        state.good = {version: (s.mean, s.error) for version, s in self._watch.good.items()}

    def _count(self, batch: list[RolloutGroup], report: StepReport, timing: Timing) -> None:
        state = self.state
        state.trajectories += sum(len(group.trajectories) for group in batch)
        state.tokens += report.tokens
        state.seconds += timing.whole_s

    async def save(self, name: str = "") -> str:
        """Save a checkpoint of this moment; between two train steps only."""
        self.state.saves += 1
        snapshot = await self.parts.host.run(at_once(self._learner.snapshot))
        config = await self.parts.host.run(at_once(self._learner.config))
        state: RunState = msgspec.json.decode(msgspec.json.encode(self.state), type=RunState)
        checkpoint = Checkpoint(snapshot.adapter, config, snapshot.optimizer, state)
        saved = await asyncio.to_thread(self.checkpoints.save, checkpoint, name)
        if self.state.version == self.state.best_version:
            self.checkpoints.set_best(saved)
        log.info("checkpoint.saved", name=saved, train_step=state.train_step)
        return saved
