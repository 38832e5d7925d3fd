"""From settled sequences of live traffic to scored trajectories of their policies.

    read a model's intake -> decode -> score in the reward pool -> the policy's trajectory queue -> forget the entry

Repeatable at every point: the queue ignores a trajectory that it knows, and an entry is forgotten last. Completions
that did not end by themselves (cancelled, too late, failed) become trajectories without a reward. Answers that may get
feedback are kept for it instead (`verdicts.py`).

Invariant. Nobody waits for somebody else's score: what is scored is scored beside the reading, and a tenant's reward
whose models do not answer takes LANE places at most. What finds none stays in the intake, and is read again later.
"""

import asyncio
import contextlib
import functools
import hashlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
LANE = 2 * AT_ONCE  # samples of one tenant that wait for the same models
SCORED = 8 * AT_ONCE  # samples that wait for their score
PATIENCE_S = 2.0  # that a lane without room is waited for, once, until it moves again
LOOK_S = 1.0  # longest wait before a new model, or what a dead runner left, is seen
RETRY_S = 0.5
LIVE = "live traffic"  # takes turns with the keys whose jobs are scored
SHARES_KEPT = 256


class _Waiting(NamedTuple):
    """Settled sequences with their texts, which the same scoring function is to score."""

    packed: bytes  # that function
    sequences: list[tuple[Settled, str]]


@dataclass(eq=False)
class _Lane:
    """What one tenant has scored by the same models; by functions: by none."""

    tasks: dict[asyncio.Task[None], _Waiting] = field(default_factory=dict)
    is_stuck: bool = False  # nothing was scored lately, or it was waited for in vain

    @property
    def held(self) -> int:
        """Sequences that are scored now."""
        return sum(len(each.sequences) for each in self.tasks.values())


class Collecting:
    """Makes trajectories of live traffic, in one runner."""

    def __init__(self, context: TickContext, max_entries: int, max_bytes: int) -> None:
        self._context = context
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._shares: dict[str, Share] = {}
        self._lanes: dict[tuple[str, ...], _Lane] = {}

    async def run(self) -> None:
        """Collect until cancelled; while Redis is away, wait."""
        try:
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
        finally:
            for task in self.under_way:
                task.cancel()
            await asyncio.gather(*self.under_way, return_exceptions=True)

    @property
    def under_way(self) -> list[asyncio.Task[None]]:
        """What is scored beside the reading; none of it raises."""
        return [task for lane in self._lanes.values() for task in lane.tasks]

    async def collect(self, model: str) -> int:
        """Make trajectories of settled sequences, or begin to score them; returns how many were taken."""
        intake = TrajectoryIntake(self._context.redis, model)
        here = {(each.spec.model, each.entry) for some in self._waiting for each, _ in some.sequences}
        read = await intake.read(self._context.runner, AT_ONCE)
        settled = [each for each in read if (each.spec.model, each.entry) not in here]
        if not settled:
            return 0
        card = await self._context.registry.card(model)
        codec = await self._context.codecs.codec(card) if card is not None else None
        scored: defaultdict[bytes, list[tuple[Settled, str]]] = defaultdict(list)
        ready: list[tuple[Settled, LiveTrajectory | None]] = []
        for each in settled:
            text, collect = _text(each, codec), each.spec.collect
            if collect is not None and collect.scoring and OUTCOMES[each.result.finish.reason] == "succeeded":
                packed = msgspec.json.encode([collect.scoring, collect.options, each.spec.tenant])
                scored[packed].append((each, text))
            else:
                ready.append((each, None if collect is None else live_trajectory(each, text, None)))
        await self._deliver(intake, ready)
        return len(ready) + sum([await self._begin(intake, _Waiting(*each)) for each in scored.items()])

    @property
    def _waiting(self) -> list[_Waiting]:
        return [waiting for lane in self._lanes.values() for waiting in lane.tasks.values()]

    async def _begin(self, intake: TrajectoryIntake, waiting: _Waiting) -> int:
        """Score these beside the reading, if there is room; how many that are."""
        first, count = waiting.sequences[0][0].spec, len(waiting.sequences)
        name = (first.tenant, *_models(first.collect))
        lane = self._lanes.get(name, _Lane())
        if lane.held + count > LANE and not lane.is_stuck:
            done, _ = await asyncio.wait(lane.tasks, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            lane.is_stuck = not done
        if lane.held + count > LANE or sum(each.held for each in self._lanes.values()) + count > SCORED:
            return 0
        self._lanes[name] = lane
        task = asyncio.create_task(self._score(intake, waiting, lane))
        lane.tasks[task] = waiting
        task.add_done_callback(functools.partial(self._leave, name))
        return count

    def _leave(self, name: tuple[str, ...], task: asyncio.Task[None]) -> None:
        lane = self._lanes[name]
        del lane.tasks[task]
        if not lane.tasks:
            del self._lanes[name]

    async def _score(self, intake: TrajectoryIntake, waiting: _Waiting, lane: _Lane) -> None:
        """What all of these earn, and then their trajectories."""
        spec = waiting.sequences[0][0].spec
        assert spec.collect is not None
        reward = RewardSpec(spec.collect.scoring, spec.collect.options)
        samples = [_sample(*each) for each in waiting.sequences]
        try:
            try:
                with working_for(spec.tenant):
                    share = self._share(waiting.packed)
                    scores = await self._context.rewards.score(check(reward), samples, share=share)
            except ParallmError as error:  # a runner that is older than the api that admitted it
                scores = [Reward(reward.name, None, error=error.message)] * len(samples)
            lane.is_stuck = all(score.value is None for score in scores)
            made = [
                (each, live_trajectory(each, text, score))
                for (each, text), score in zip(waiting.sequences, scores, strict=True)
            ]
            await self._deliver(intake, made)
        except (RedisError, OSError) as error:  # they are read again
            log.warning("collect.redis_away", error=reason(error))
        except Exception:
            log.exception("collect.failed")

    async def _deliver(self, intake: TrajectoryIntake, made: Sequence[tuple[Settled, LiveTrajectory | None]]) -> None:
        """Bring trajectories where they belong, then forget their entries."""
        for each, live in made:
            collect = each.spec.collect
            if collect is None or live is None:
                continue
            if collect.answer:
                await self._keep(live, collect)
                continue
            queue = TrajectoryQueue(
                self._context.redis, live.policy, max_entries=self._max_entries, max_bytes=self._max_bytes
            )
            await count_for_split(self._context.redis, live)
            if await queue.add(live):
                reward = live.trajectory.reward
                log.debug("collect.added", trajectory=live.id, reward=reward.value if reward else None)
        if made:
            await intake.done([each for each, _ in made])

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
        """The share of a scoring function, kept; one that was given up gets one more try when it comes anew."""
        digest = hashlib.sha256(packed).hexdigest()
        share = self._shares.pop(digest, None) or Share(LIVE, digest)
        self._shares[digest] = share
        if len(self._shares) > SHARES_KEPT:
            del self._shares[next(iter(self._shares))]
        if sum(waiting.packed == packed for waiting in self._waiting) == 1:  # the caller's own
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


def _models(collect: Collection | None) -> tuple[str, ...]:
    """That the scoring function asks."""
    with contextlib.suppress(ParallmError):  # a runner that is older than the api that admitted it
        return () if collect is None else check(RewardSpec(collect.scoring, collect.options)).served_models
    return ()


def _text(settled: Settled, codec: TextCodec | None) -> str:
    if settled.result.text is not None or codec is None:
        return settled.result.text or ""
    return codec.decode(settled.result.completion_ids)
