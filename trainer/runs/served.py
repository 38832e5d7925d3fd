"""Which version is served: offers trained weights to the gate, and takes versions back whose rewards have collapsed.

Invariants. What is served is always a good version: a train step that fails the gate is taken back, weights and
moments, and its version stays in the store as rejected. `best` points at the version with the best judged reward,
`latest` at the one that is served.
"""

import contextlib
import time
from collections.abc import Sequence

import numpy as np
import structlog

from shared.adapters import GateCheck, version_id
from shared.errors import ParallmError, UnknownAdapterError
from trainer.learn import gate
from trainer.learn.batches import DroppedCounts
from trainer.learn.gate import RewardWatch, Standing
from trainer.learners.handle import Handle
from trainer.learners.policy import PolicyLearner, Trained
from trainer.rollouts.groups import RolloutGroup, mean_reward
from trainer.rollouts.held_out import Evaluated
from trainer.rollouts.pacing import oldest_version
from trainer.runs.examine import Examiner
from trainer.runs.inbox import GroupBatch
from trainer.runs.parts import Parts
from trainer.settings import TrainSettings
from trainer.state import Arrays, RunState
from trainer.versions.publish import Publisher

log = structlog.get_logger()

WATCHED = 32  # kinds of tasks at most, the ones that were seen last
KEPT_FOR_LIVE = 16  # versions at most: live traffic of an old one may be judged late


class Serving:
    """The served version of one run; writes into its state."""

    def __init__(
        self,
        settings: TrainSettings,
        parts: Parts,
        learner: Handle[PolicyLearner],
        publisher: Publisher,
        examiner: Examiner,
        state: RunState,
    ) -> None:
        self._settings, self._parts, self._state = settings, parts, state
        self._learner, self._publisher, self._examiner = learner, publisher, examiner
        # Rewards of one kind of tasks are no evidence about another: live traffic that gets harder is no collapse.
        self._watches: dict[str, RewardWatch] = {}
        for tasks, standings in state.good_on.items():
            self._watch(tasks).good = {version: Standing(*earned) for version, earned in standings.items()}
        self._rejections = 0  # in a row, of what the run has collected itself
        self.begun = False
        self._rollbacks = 0  # since a version was better than all before
        self._rolled_back = ""  # the last one's reason
        self._posted = False  # whether the last offer was of posted trajectories
        self._failed = ""  # the last one's failed checks
        self._silent = 0  # train steps in a row without anything to learn from
        self._all_failed = 0  # train steps in a row of which every sample failed; and the last one's reason
        self._failure = ""
        self.held_out: Evaluated | None = None  # of the last offer

    async def begin(self) -> None:
        """Publish what the run begins with.

        A resumed run publishes again: served must be what was saved, and numbers are never used twice. Weights that
        were trained with `update_inference` false stay unserved.
        """
        state = self._state
        if state.best_held_out is None:  # of a checkpoint from before this was recorded
            state.best_held_out = state.held_out
        if not state.unpublished:
            weights = await self._learner.weights()
            self._served(await self._publish(weights))
        self.begun = True
        await self._anchor()
        await self._evaluate_first()

    async def _publish(self, weights: Arrays) -> int:
        """Serve weights that have been good before, whatever is served now; their number."""
        published = await self._publisher.publish(weights, self._state, [gate.finite_weights(weights)], {})
        if not published.version:
            raise ParallmError(f"version {self._state.version} was refused: {gate.failures(published.checks)}")
        return published.version

    async def _evaluate_first(self) -> None:
        """Measure what is served, where later versions are measured and it never was."""
        settings, state = self._settings, self._state
        if not settings.evaluate_every or state.held_out is not None:
            return
        log.info("train.evaluating", tasks=settings.evaluate_prompts)
        served = version_id(settings.adapter, state.version)
        state.held_out, state.held_out_true = await self._examiner.evaluate(served, state.train_step)
        state.best_held_out = state.held_out
        log.info("run.started", held_out=state.held_out, held_out_true=state.held_out_true)

    def owns(self, latest: int) -> bool:
        """True if `latest` is what this run serves; before it begins, what an earlier start of it has served."""
        if self.begun:
            return latest == self._state.version
        return not latest or not self._state.version or self._publisher.moved_by_us(latest)

    async def adopt(self, version: int) -> None:
        """Go on from a version that a person has made the latest; what was good before it is no measure any more."""
        settings, state = self._settings, self._state
        weights = await self._publisher.take_over(version)
        await self._publisher.note(version)
        await self._learner.call(PolicyLearner.load, weights)
        state.policy_step += settings.max_lag + 1
        state.policy_steps = {}
        state.best_version, state.best_reward = 0, None
        state.held_out = state.held_out_true = state.best_held_out = None
        for watch in self._watches.values():
            watch.forget()
        self._served(version)
        self.begun = True
        await self._anchor()
        await self._evaluate_first()

    async def override(self, reason: str) -> None:
        """Serve the run's own version again, though a person has chosen another one."""
        state = self._state
        if not self.begun:
            await self.begin()
            return
        weights = self._publisher.weights_of(state.version)
        served = await self._serve_again(state.version, weights, reason)
        if served != state.version:
            self._served(served)

    async def offer(self, trained: Trained, batch: GroupBatch, dropped: DroppedCounts, *, serve: bool = True) -> str:
        """Serve new weights, hold them unserved, or revert the train step; returns the failed checks.

        Nothing is offered when the step had nothing to learn from; several in a row are worth an alert.
        """
        self.held_out = None
        self._posted = batch.source == "posted"
        if not trained.checks:
            await self._count_silence(batch, dropped)
            return ""
        self._silent = self._all_failed = 0
        if not serve:
            return await self._keep(trained)
        state = self._state
        metrics = {"reward": mean_reward(batch.groups), "loss": trained.report.loss, "kl": trained.report.kl}

        async def remote(version: int) -> list[GateCheck]:
            checks, self.held_out = await self._examiner.check(version, state.train_step + 1, state.best_held_out)
            return checks

        published = await self._publisher.publish(
            trained.weights, state, trained.checks, metrics, remote, if_latest=state.version
        )
        if not published.version:
            counts = not (self._posted or published.forestalled)  # what others do must not end the run
            return await self._take_back(gate.failures(published.checks), counts=counts)
        if self.held_out is not None:
            reward, state.held_out_true = self.held_out
            await self._judged(published.version, reward)
            state.held_out = reward
            state.best_held_out = max(reward, state.best_held_out or reward)
        await self._accept()
        self._served(published.version)
        return ""

    async def judge(self, batch: GroupBatch) -> bool:
        """Judge the versions that sampled this batch; True when rewards have collapsed and an older one is served.

        A curriculum's own choice judges nobody: harder tasks earn less, by whatever version.
        """
        earned: dict[tuple[str, int], list[float]] = {}
        for group in batch.groups:
            if group.rewards and group.judges and (version := self._sampled_by(group)):
                earned.setdefault((tasks_of(group, batch), version), []).append(float(np.mean(group.rewards)))
        for (tasks, version), means in sorted(earned.items()):
            watch = self._watch(tasks)
            watch.keep_only(self._publisher.on_disk())
            target = watch.add(version, means)
            if target is not None:
                await self._roll_back(version, target, watch.good[target].mean, float(np.mean(means)))
                return True
            if version in watch.good and self._decides_best(tasks, batch):
                await self._judged(version, watch.good[version].mean)
        return False

    def _sampled_by(self, group: RolloutGroup) -> int:
        """The oldest version that took part; 0, which judges no version, when it was the base or another adapter.

        Who does not say, such as Atropos, samples from what is served.
        """
        versions = [oldest_version(t.spans, self._settings.adapter) for t in group.trajectories]
        return min((version for version in versions if version is not None), default=self._state.version)

    def _watch(self, tasks: str) -> RewardWatch:
        """The watch over these tasks; that of the tasks seen longest ago makes room for it."""
        watch = self._watches.pop(tasks, None) or RewardWatch(self._settings.reward_margin, self._settings.min_groups)
        self._watches[tasks] = watch
        while len(self._watches) > WATCHED:
            del self._watches[next(iter(self._watches))]
        return watch

    def keep_books(self) -> None:
        """Write what a checkpoint needs into the state."""
        self._state.good_on = {
            tasks: {version: (s.mean, s.error) for version, s in watch.good.items()}
            for tasks, watch in self._watches.items()
        }

    def _decides_best(self, tasks: str, batch: GroupBatch) -> bool:
        """True if these tasks decide which version is the best: our own, else the first that judged one."""
        settings, state = self._settings, self._state
        if settings.evaluate_every or (batch.source == "live") != (settings.source == "live"):
            return False
        state.best_on = state.best_on or tasks
        return tasks == state.best_on

    async def _keep(self, trained: Trained) -> str:
        """The local checks alone decide on weights that are not served yet."""
        if not gate.passed(trained.checks):
            failed = gate.failures(trained.checks)
            await self._parts.ring.sink.alert("gate_failed", failed)
            return await self._take_back(failed, counts=not self._posted)
        await self._accept()
        self._state.unpublished += 1
        return ""

    async def _accept(self) -> None:
        state = self._state
        await self._learner.accept()
        state.policy_step += 1
        state.updates += 1
        state.last_update_ms = time.time_ns() // 1_000_000
        self._rejections = 0

    async def _take_back(self, failed: str, *, counts: bool) -> str:
        await self._learner.revert()
        self._state.rejected += 1
        self._rejections += counts
        self._failed = failed
        log.error("version.rejected", train_step=self._state.train_step, checks=failed)
        return failed

    async def check_patience(self) -> None:
        """ParallmError when train steps in a row failed the gate or lost all their samples, or were taken back."""
        gave_up = ""
        if self._rejections >= self._settings.max_rejections:
            gave_up = f"{self._rejections} train steps in a row failed the gate: {self._failed}"
        elif self._rollbacks >= self._settings.max_rollbacks:
            gave_up = f"{self._rollbacks} rollbacks and no better version in between; the last one: {self._rolled_back}"
        elif self._all_failed >= self._settings.no_signal_after:
            gave_up = f"every sample of {self._all_failed} train steps in a row failed: {self._failure}"
        if gave_up:
            await self._parts.ring.sink.alert("gave_up", f"the run ends: {gave_up}")
            raise ParallmError(gave_up)

    async def _count_silence(self, batch: GroupBatch, dropped: DroppedCounts) -> None:
        self._silent += 1
        what = nothing_learned(dropped, batch.groups)
        if batch.source != "posted":  # what others do must not end the run
            failed = dropped.failed == sum(len(group.trajectories) for group in batch.groups)
            self._all_failed, self._failure = (self._all_failed + 1 if failed else 0), what
        if self._silent == self._settings.no_signal_after:
            reason = f"{self._silent} train steps in a row had nothing to learn from; the last one: {what}"
            await self._parts.ring.sink.alert("no_signal", reason)

    def _served(self, version: int) -> None:
        state = self._state
        state.version = version
        state.swaps += 1
        state.unpublished = 0
        state.policy_steps[version] = state.policy_step
        settings = self._settings
        known = sorted(state.policy_steps)[-(max(settings.max_lag, settings.live_max_lag) + 64) :]
        state.policy_steps = {v: state.policy_steps[v] for v in known}
        good = {version for watch in self._watches.values() for version in watch.good}
        late = min(settings.live_max_lag, KEPT_FOR_LIVE) if settings.source in ("live", "both") else 0
        newest = known[-(max(settings.max_lag, late) + 2) :]  # what they sampled is still to be judged
        self._publisher.forget({version, state.best_version, *good, *newest})

    async def _roll_back(self, bad: int, target: int, good: float, earned: float) -> None:
        """Serve an old version again and go on from its weights; what newer ones sampled is too old from now on."""
        state, settings = self._state, self._settings
        reason = f"version {bad} earned less than version {target} by more than {settings.reward_margin}"
        if bad == target:
            reason = (
                f"version {bad}, the best one, earns {earned:.4g} and has earned {good:.4g}: rewards or tasks have "
                f"changed by more than {settings.reward_margin}, and nothing is learned from that"
            )
        log.error("version.rolled_back", bad=bad, to=target, good=good, earned=earned)
        weights = self._publisher.weights_of(target)
        served = await self._serve_again(target, weights, reason)
        await self._parts.ring.sink.alert("reward_collapse", reason)
        await self._learner.call(PolicyLearner.load, weights)
        state.policy_step += settings.max_lag + 1
        state.policy_steps = {v: s for v, s in state.policy_steps.items() if v <= target}
        state.rollbacks += 1
        self._rollbacks, self._rolled_back = self._rollbacks + 1, reason
        for watch in self._watches.values():
            watch.rolled_back(target, served)
        if state.best_version == target:
            state.best_version = served
        self._served(served)

    async def _serve_again(self, target: int, weights: Arrays, reason: str) -> int:
        """Make an older version the latest; published anew where it has been deleted from the store."""
        await self._publisher.note(target, self._state.version)
        try:
            await self._parts.ring.sink.roll_back(target, reason)
        except UnknownAdapterError:
            return await self._publish(weights)
        return target

    async def _judged(self, version: int, reward: float) -> None:
        if self._state.best_reward is None or reward > self._state.best_reward:
            with contextlib.suppress(UnknownAdapterError):  # judged late, and deleted meanwhile
                await self._parts.ring.sink.set_best(version, reward)
                self._state.best_reward, self._state.best_version = reward, version
                self._rollbacks = 0
                await self._anchor()

    async def _anchor(self) -> None:
        """Later versions stay in reach of the best one, as long as its weights are there."""
        best = self._state.best_version
        weights = self._publisher.weights_of(best) if best in self._publisher.on_disk() else None
        await self._learner.call(PolicyLearner.anchor, weights)


def tasks_of(group: RolloutGroup, batch: GroupBatch) -> str:
    """Kind of the group's tasks: live traffic by its reward and environment; all of our own are one kind."""
    if batch.source != "live":
        return batch.source
    first = group.trajectories[0]
    return f"live/{first.reward.name if first.reward else ''}/{first.metadata.get('environment', '')}"[:256]


def nothing_learned(dropped: DroppedCounts, groups: Sequence[RolloutGroup]) -> str:
    """Why a train step taught nothing, for a person."""
    samples = sum(len(group.trajectories) for group in groups)
    counts = [
        (dropped.zero_variance, "groups with equal rewards"),
        (dropped.too_few, "groups without two samples to compare"),
        (dropped.cut_off, "groups that stay out of the loss, all cut off (mask_overlong)"),
        (dropped.overlong, "samples cut off at max_tokens"),
        (dropped.failed, f"samples failed, the first one: {dropped.problem[:500]}"),
    ]
    causes = ", ".join(f"{count} {cause}" for count, cause in counts if count)
    return f"{len(groups)} groups of {samples} samples: {causes}"
