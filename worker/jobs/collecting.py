"""From settled sequences of live traffic to scored trajectories of their policies.

    read a model's intake -> decode -> score in the reward pool -> the policy's trajectory queue -> forget the entry

Repeatable at every point: the queue ignores a trajectory that it knows, and an entry is forgotten last. Completions
that did not end by themselves (cancelled, too late, failed) become trajectories without a reward. Answers that may get
feedback are kept for it instead (`verdicts.py`).
"""

import asyncio
import hashlib
import time
from collections import defaultdict

import msgspec
import structlog
from redis.exceptions import RedisError, ResponseError

from shared.errors import ParallmError, QueueFullError
from shared.jobs import RewardSpec
from shared.owners import working_for
from shared.redis import keys
from shared.redis.adapters.splits import count_for_split
from shared.redis.connection.faults import reason
from shared.redis.kept.answer_store import AnswerStore
from shared.redis.kept.kept_things import Terms
from shared.redis.training.trajectory_intake import Settled, TrajectoryIntake
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.rewards.kinds import check
from shared.scoring.pool import RewardSample
from shared.scoring.shares import Share
from shared.sequences import Collection
from shared.text.codec import TextCodec
from shared.trajectories import LiveTrajectory, Reward, trajectory_of
from worker.jobs.context import TickContext
from worker.jobs.outcomes import OUTCOMES

log = structlog.get_logger()

AT_ONCE = 64
LOOK_S = 1.0  # longest wait before a new model, or what a dead runner left, is seen
RETRY_S = 0.5
LIVE = "live traffic"  # takes turns with the keys whose jobs are scored
SHARES_KEPT = 256


class Collecting:
    """Makes trajectories of live traffic, in one runner."""

    def __init__(self, context: TickContext, max_entries: int, max_bytes: int) -> None:
        self._context = context
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._shares: dict[str, Share] = {}

    async def run(self) -> None:
        """Collect until cancelled; while Redis is away, wait."""
        while True:
            try:
                models = [card.name for card in await self._context.registry.models()]
                moved = [await self.collect(model) for model in models]
                if not any(moved):
                    await self._wait(models)
            except (RedisError, OSError) as error:
                log.warning("collect.redis_away", error=reason(error))
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("collect.failed")
                await asyncio.sleep(RETRY_S)

    async def collect(self, model: str) -> int:
        """Make trajectories of settled sequences; returns how many were taken."""
        intake = TrajectoryIntake(self._context.redis, model)
        settled = await intake.read(self._context.runner, AT_ONCE)
        if not settled:
            return 0
        card = await self._context.registry.card(model)
        codec = await self._context.codecs.codec(card) if card is not None else None
        waiting = {
            each.spec.id: each.spec.collect for each in settled if each.spec.collect and each.spec.collect.answer
        }
        for live in await self._scored(settled, codec):
            if live.id in waiting:
                await self._keep(live, waiting[live.id])
                continue
            queue = TrajectoryQueue(
                self._context.redis, live.policy, max_entries=self._max_entries, max_bytes=self._max_bytes
            )
            await count_for_split(self._context.redis, live)
            if await queue.add(live):
                reward = live.trajectory.reward
                log.debug("collect.added", trajectory=live.id, reward=reward.value if reward else None)
        await intake.done(settled)
        return len(settled)

    async def _keep(self, live: LiveTrajectory, collect: Collection) -> None:
        """Keep an answer for feedback; one that did not end by itself nobody has seen whole."""
        if OUTCOMES[live.trajectory.finish_reason] != "succeeded":
            return
        store = AnswerStore(self._context.redis, Terms(collect.answer_ttl_s, collect.answers_bytes))
        choice = live.id.rpartition("-")[2]
        try:
            await store.keep(f"{collect.answer}-{choice}", live)
        except QueueFullError:
            log.warning("collect.too_large", trajectory=live.id, hint="--feedback-store-mb")

    def _share(self, packed: bytes) -> Share:
        """The share of a scoring function, kept between rounds; one that was given up gets one more try a round."""
        digest = hashlib.sha256(packed).hexdigest()
        share = self._shares.pop(digest, None) or Share(LIVE, digest)
        self._shares[digest] = share
        if len(self._shares) > SHARES_KEPT:
            del self._shares[next(iter(self._shares))]
        share.try_again()
        return share

    async def _wait(self, models: list[str]) -> None:
        streams = {keys.collected(model): "$" for model in models}
        if not streams:
            await asyncio.sleep(LOOK_S)
            return
        try:
            await self._context.blocking.xread(streams, count=1, block=int(1000 * LOOK_S))  # type: ignore[arg-type]
        except ResponseError as error:
            log.warning("collect.wait_failed", error=reason(error))
            await asyncio.sleep(LOOK_S)

    async def _scored(self, settled: list[Settled], codec: TextCodec | None) -> list[LiveTrajectory]:
        """Trajectories in the order of `settled`, those with the same scoring function scored together."""
        texts = [_text(each, codec) for each in settled]
        together: defaultdict[bytes, list[int]] = defaultdict(list)
        for i, each in enumerate(settled):
            collect = each.spec.collect
            if collect is not None and collect.scoring and OUTCOMES[each.result.finish.reason] == "succeeded":
                together[msgspec.json.encode([collect.scoring, collect.options, each.spec.tenant])].append(i)
        rewards: dict[int, Reward] = {}

        async def score(packed: bytes, indices: list[int]) -> None:
            first = settled[indices[0]].spec.collect
            assert first is not None
            samples = [_sample(settled[i], texts[i]) for i in indices]
            spec = RewardSpec(first.scoring, first.options)
            try:
                with working_for(settled[indices[0]].spec.tenant):
                    scores = await self._context.rewards.score(check(spec), samples, share=self._share(packed))
            except ParallmError as error:  # a runner that is older than the api that admitted it
                scores = [Reward(spec.name, None, error=error.message)] * len(samples)
            rewards.update(zip(indices, scores, strict=True))

        await asyncio.gather(*(score(packed, indices) for packed, indices in together.items()))
        return [live_trajectory(each, texts[i], rewards.get(i)) for i, each in enumerate(settled) if each.spec.collect]


def live_trajectory(settled: Settled, text: str, reward: Reward | None) -> LiveTrajectory:
    """What the trainer gets of a settled sequence."""
    spec, collect = settled.spec, settled.spec.collect
    assert collect is not None
    trajectory = trajectory_of(spec, settled.result, text, collect.sample, collect.metadata, reward)
    return LiveTrajectory(
        id=spec.id,
        policy=collect.policy,
        model=spec.model,
        trajectory=trajectory,
        group=spec.group,
        group_size=collect.samples,
        temperature=spec.sampling.temperature,
        collected_ms=time.time_ns() // 1_000_000,
        tenant=spec.tenant,
        arm=collect.arm,
    )


def _sample(settled: Settled, text: str) -> RewardSample:
    spec = settled.spec
    return RewardSample(text, spec.collect.reference if spec.collect else None, spec.prompt_ids, spec.model)


def _text(settled: Settled, codec: TextCodec | None) -> str:
    if settled.result.text is not None or codec is None:
        return settled.result.text or ""
    return codec.decode(settled.result.completion_ids)
