"""A check that posted log-probabilities are those of the version that they name: what is learned from others drifts
unseen.

Each token is compared with the weights of its span: kept by this run, or still in the store. A trajectory whose mean
difference is above `max_logprob_gap` refuses the update, by its index; one whose version is gone cannot be compared,
and is counted. A trajectory that names no version may be the base's or that of the version that is served.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog

from shared.adapters import version_id
from shared.errors import EngineError, LogprobsMismatchError, ParallmError
from shared.trajectories import LiveTrajectory, Trajectory
from trainer.learn.batches import Sample, SampleGroup, loss_mask
from trainer.learners.handle import Handle
from trainer.learners.policy import PolicyLearner
from trainer.settings import TrainSettings
from trainer.state import Arrays
from trainer.versions.publish import Publisher

log = structlog.get_logger()

BASE, UNKNOWN = 0, -1
VERSIONS_AT_ONCE = 16  # each may have to be fetched; of an update that names more, the newest are compared


@dataclass
class _Gap:
    """Differences in one trajectory: their sum over the tokens that could be compared, and how many these are."""

    total: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class LogprobCheck:
    """Compares posted log-probabilities of one update's trajectories with the policy's own."""

    settings: TrainSettings
    learner: Handle[PolicyLearner]
    publisher: Publisher
    served: int

    async def compare(self, trajectories: Sequence[LiveTrajectory]) -> int:
        """LogprobsMismatchError for the first trajectory that is not its version's; how many were not compared."""
        sampled = [live.trajectory for live in trajectories]
        tags = [_versions(trajectory, self.settings.adapter) for trajectory in sampled]
        named = sorted({tag for versions in tags for tag in versions} - {UNKNOWN}, reverse=True)
        gaps = [_Gap() for _ in sampled]
        for version in named[:VERSIONS_AT_ONCE] + ([BASE] if BASE in named[VERSIONS_AT_ONCE:] else []):
            await self._measure(version, sampled, tags, gaps)
        bound = self.settings.max_logprob_gap
        unnamed = [i for i, versions in enumerate(tags) if set(versions) == {BASE} and not gaps[i].mean <= bound]
        if unnamed and self.served:
            await self._measure_unnamed(unnamed, sampled, gaps)
        for index, gap in enumerate(gaps):
            if not gap.mean <= bound:
                raise LogprobsMismatchError(self._complaint(index, gap.mean, tags[index]))
        return sum(gap.tokens < sum(loss_mask(trajectory)) for gap, trajectory in zip(gaps, sampled, strict=True))

    async def _measure_unnamed(self, unnamed: Collection[int], sampled: list[Trajectory], gaps: list[_Gap]) -> None:
        """Again with the version that is served; the nearer one counts."""
        tags = [(self.served if i in unnamed else UNKNOWN,) * len(t.completion_ids) for i, t in enumerate(sampled)]
        again = [_Gap() for _ in sampled]
        await self._measure(self.served, sampled, tags, again)
        for index in unnamed:
            if again[index].tokens and again[index].mean < gaps[index].mean:
                gaps[index] = again[index]

    async def _measure(
        self, version: int, sampled: list[Trajectory], tags: Sequence[Sequence[int]], gaps: list[_Gap]
    ) -> None:
        """Compare the tokens that were posted as sampled by this version."""
        try:
            weights = await self.publisher.any_weights_of(version) if version else None
        except ParallmError as error:
            log.info("posted.not_compared", version=version, reason=error.message)
            return
        by_prompt: dict[tuple[int, ...], list[tuple[int, Sample]]] = {}
        for index, trajectory in enumerate(sampled):
            masked = zip(loss_mask(trajectory), tags[index], strict=True)
            mask = tuple(wrote and tag == version for wrote, tag in masked)
            if any(mask):
                sample = Sample(trajectory.completion_ids, trajectory.logprobs, mask, (0,) * len(mask), 0.0)
                by_prompt.setdefault(trajectory.prompt_ids, []).append((index, sample))
        groups = [
            SampleGroup(str(number), prompt, tuple(sample for _, sample in members))
            for number, (prompt, members) in enumerate(by_prompt.items())
        ]
        means = await self._run(groups, weights)
        members = [member for samples in by_prompt.values() for member in samples]
        for (index, sample), mean in zip(members, means, strict=True):
            gaps[index].total += mean * sum(sample.mask)
            gaps[index].tokens += sum(sample.mask)

    async def _run(self, groups: list[SampleGroup], weights: Arrays | None) -> list[float]:
        """Differences by trajectory; an error in the learner's thread (memory, say) refuses the update, and the run
        goes on.
        """
        try:
            return await self.learner.call(PolicyLearner.gaps, groups, weights)
        except Exception as error:
            log.exception("posted.broken")
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(f"the log-probabilities could not be compared, nothing has changed: {reason}") from error

    def _complaint(self, index: int, gap: float, tags: Sequence[int]) -> str:
        versions = sorted(set(tags) - {UNKNOWN})
        names = ", ".join(version_id(self.settings.adapter, v) if v else "the base" for v in versions)
        if versions == [BASE]:
            names += f" and of {version_id(self.settings.adapter, self.served)} (no version is named)"
        return (
            f"trajectories[{index}].logprobs: {gap:.3g} nats a token, on average, from those of {names} (the bound is "
            f"{self.settings.max_logprob_gap:g}, --max-logprob-gap): name the version that sampled them in "
            "'weight_versions', with its log-probabilities of temperature 1 without filters"
        )


def _versions(trajectory: Trajectory, adapter: str) -> tuple[int, ...]:
    """Version that sampled each token; BASE, or UNKNOWN for another adapter's."""
    tags = [UNKNOWN] * len(trajectory.completion_ids)
    for span in trajectory.spans:
        name, _, number = span.version.rpartition("@")
        known = int(number) if name == adapter and number.isdigit() else UNKNOWN
        tags[span.start : span.end] = [BASE if not span.version else known] * (span.end - span.start)
    return tuple(tags)
