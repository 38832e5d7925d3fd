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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import structlog

from shared.adapters import GateCheck, version_id
from shared.errors import ParallmError
from trainer import gate
from trainer.batches import sample_groups
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.collect import Collector
from trainer.conversation import Conversation
from trainer.environments import Environment
from trainer.episodes import EpisodeOptions, Episodes
from trainer.gate import RewardWatch, Standing
from trainer.host import ComputeHost, at_once
from trainer.learner import Learner, Snapshot, Trained
from trainer.metrics import MetricsLog, Progress, StepMetrics, Timing, progress, step_metrics
from trainer.pacing import lag_of, oldest_version
from trainer.publish import AdapterSink, Published, Publisher
from trainer.reports import StepReport
from trainer.rollouts import RolloutGroup, RolloutRequest, RolloutSource, derived_seed
from trainer.settings import TrainSettings
from trainer.state import RunState

log = structlog.get_logger()

_PARITY_SAMPLES = 4


@dataclass(frozen=True)
class Parts:
    """What a run is made of; each is a seam."""

    host: ComputeHost
    load_model: Callable[[], Any]  # called in the host's thread; an mlx-lm model
    base_sha256: str
    conversation: Conversation
    source: RolloutSource
    sink: AdapterSink
    environment: Environment
    held_out: Environment | None = None


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
        self._saves = 0
        self._start_id = secrets.token_hex(3)
        self._held_out: float | None = None  # of this train step
        self._save_as: list[str] = []

    async def run(self) -> RunState:
        """Train until all steps are done or `stop` was called; the last state, which is also saved."""
        await self._start()
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
        state = self.state
        return Progress(
            trajectories=state.trajectories,
            updates=state.policy_step,
            swaps=len(state.policy_steps),
            rejected=state.rejected,
            rollbacks=state.rollbacks,
            checkpoints=self._saves,
            loss=(self._last.loss or 0.0) if self._last else 0.0,
            updates_per_s=state.policy_step / state.seconds if state.seconds else 0.0,
        )

    # -- start and resume

    async def _start(self) -> None:
        settings = self.settings
        self._learner: Learner = await self.parts.host.run(at_once(self._build))
        config = await self.parts.host.run(at_once(self._learner.config))
        self._publisher = Publisher(self.parts.sink, settings.folder, settings.adapter, config, self.parts.base_sha256)
        checkpoint = None if settings.resume == "no" else self.checkpoints.load(settings.resume)
        if checkpoint is not None:
            await self._resume(checkpoint)
        self._metrics = MetricsLog(settings.folder / "metrics.jsonl", first_step=self.state.train_step)
        self._probes = await self._probe_prompts()
        # A resumed run publishes again: what is served must be what was saved, and numbers are never used twice.
        await self._publish_start()
        if settings.evaluate_every and self.state.held_out is None:
            self.state.held_out = await self.evaluate(version_id(settings.adapter, self.state.version))
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
        log.info("train.step", **progress(metrics, self.settings.steps))

    async def _publish(self, trained: Trained, batch: list[RolloutGroup]) -> str:
        """Serve the new weights, or take the train step back; the failed checks."""
        state = self.state
        metrics = {"reward": _mean_reward([batch]), "loss": trained.report.loss, "kl": trained.report.kl}

        async def remote(version: int) -> list[GateCheck]:
            return await self._check_in_worker(version)

        published = await self._publisher.publish(trained.weights, state, trained.checks, metrics, remote)
        if published.version:
            await self.parts.host.run(at_once(self._learner.accept))
            state.policy_step += 1
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
        state.policy_steps[version] = state.policy_step
        known = sorted(state.policy_steps)[-(self.settings.max_lag + 64) :]
        state.policy_steps = {v: state.policy_steps[v] for v in known}
        self._publisher.forget({version, state.best_version, *self._watch.good, *known[-2:]})

    async def _check_in_worker(self, version: int) -> list[GateCheck]:
        """What only a worker that has loaded the staged version can tell, when it is due."""
        settings, step = self.settings, self.state.train_step + 1
        checks: list[GateCheck] = []
        adapter = version_id(settings.adapter, version)
        if settings.parity_every and (step == 1 or step % settings.parity_every == 0):
            samples = await self.parts.source.generate(
                RolloutRequest(
                    id=f"{self.state.run}-{self._start_id}-parity-{version}",
                    prompt_ids=self._probes[step % len(self._probes)],
                    n=_PARITY_SAMPLES,
                    sampling=msgspec.structs.replace(settings.sampling(), seed=derived_seed(settings.seed, version)),
                    adapter=adapter,
                )
            )
            difference = await self.parts.host.run(lambda: self._learner.parity(samples))
            checks.append(gate.reload_parity(difference, settings.max_parity))
        if settings.evaluate_every and step % settings.evaluate_every == 0:
            reward = await self.evaluate(adapter)
            check = gate.reward_floor(reward, self.state.held_out, settings.reward_margin)
            checks.append(check)
            self._held_out = reward
            if check.passed:
                await self._judged(version, reward)
                self.state.held_out = reward
        return checks

    async def evaluate(self, adapter: str) -> float:
        """Mean reward on held-out tasks, decoded greedily with `adapter` (a name, name@k, or "" for the base)."""
        settings = self.settings
        greedy = msgspec.structs.replace(settings.sampling(), temperature=0.0)
        which = adapter.replace("@", "-") or "base"
        name = f"{self.state.run}-{self._start_id}-held-out-{self.state.train_step}-{which}"
        options = EpisodeOptions(name, 1, greedy, settings.max_turns, settings.seed)
        environment = self.parts.held_out or self.parts.environment
        episodes = Episodes(self.parts.source, environment, self.parts.conversation, options)
        played = (episodes.play(index, adapter) for index in range(settings.evaluate_prompts))
        return _mean_reward([await asyncio.gather(*played)])

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
        snapshot = await self.parts.host.run(at_once(self._learner.snapshot))
        config = await self.parts.host.run(at_once(self._learner.config))
        state: RunState = msgspec.json.decode(msgspec.json.encode(self.state), type=RunState)
        checkpoint = Checkpoint(snapshot.adapter, config, snapshot.optimizer, state)
        saved = await asyncio.to_thread(self.checkpoints.save, checkpoint, name)
        if self.state.version == self.state.best_version:
            self.checkpoints.set_best(saved)
        self._saves += 1
        log.info("checkpoint.saved", name=saved, train_step=state.train_step)
        return saved


def _mean_reward(batches: list[list[RolloutGroup]]) -> float:
    rewards = [reward for batch in batches for group in batch for reward in group.rewards]
    return float(np.mean(rewards)) if rewards else 0.0
