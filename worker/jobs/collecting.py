"""From settled sequences of live traffic to scored trajectories of their policies.

    read a model's intake -> decode -> score in the reward pool -> the policy's trajectory queue -> forget the entry

Repeatable at every point: the queue ignores a trajectory that it knows, and an entry is forgotten last. Completions
that did not end by themselves (cancelled, too late, failed) become trajectories without a reward. Answers that may get
feedback are kept for it instead (`verdicts.py`).

Invariant. No answer waits for another one's score: scoring runs in parallel with reading, and what a tenant asks
of the same models (a lane) has LANE places at most, and half of what other lanes leave, but LEAST. What finds none
stays in the intake; its lane knows it by its entry and goes on with it, oldest first, as soon as it has places.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import structlog
from redis.exceptions import RedisError, ResponseError

from shared.episodes import MOST_TEXT, MOST_TURNS, EpisodePlace, Turn, digest_of_ids, parent_by_ids
from shared.errors import ParallmError, QueueFullError
from shared.jobs import RewardSpec
from shared.owners import working_for
from shared.redis import keys
from shared.redis.adapters.splits import count_for_split
from shared.redis.connection.faults import reason
from shared.redis.kept.answer_store import AnswerStore
from shared.redis.kept.episode_store import EpisodeStore, episodes_of
from shared.redis.kept.kept_things import Terms
from shared.redis.training.trajectory_intake import Settled, TrajectoryIntake
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.rewards.kinds import check
from shared.scoring.pool import RewardSample
from shared.scoring.shares import Share
from shared.sequences import Collection, SequenceSpec
from shared.text.codec import TextCodec
from shared.trajectories import LiveTrajectory, Reward, trajectory_of
from worker.jobs.context import TickContext
from worker.jobs.judging import Judging
from worker.jobs.outcomes import OUTCOMES

log = structlog.get_logger()

AT_ONCE = 64
LANE = 2 * AT_ONCE  # samples of one tenant that wait for the same models
LEAST = 8
SCORED = 8 * AT_ONCE  # samples that wait for their score
LOOK_S = 1.0  # longest wait before a new model, or what a dead runner left, is seen
BACKLOG_LOOK_S = 0.1  # the same while a lane is full
RETRY_S = 0.5
LIVE = "live traffic"  # takes turns with the keys whose jobs are scored
SHARES_KEPT = 256


class _Waiting(NamedTuple):
    """Settled sequences with their texts, which the same scoring function is to score."""

    packed: bytes  # that function
    sequences: list[tuple[Settled, str]]


@dataclass(eq=False)
class _Lane:
    """Trajectories of one tenant that the same models score; functions need no model."""

    tasks: dict[asyncio.Task[None], _Waiting] = field(default_factory=dict)
    later: dict[tuple[str, str], None] = field(default_factory=dict)  # models and entries that found no place, in order

    @property
    def held(self) -> int:
        """Sequences that are scored now."""
        return sum(len(each.sequences) for each in self.tasks.values())


class Collecting:
    """Makes trajectories of live traffic, in one runner."""

    def __init__(self, context: TickContext, max_entries: int, max_bytes: int, judging: Judging | None = None) -> None:
        self.context = context
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.judging = judging or Judging(context)
        self._shares: dict[str, Share] = {}
        self._lanes: dict[tuple[str, ...], _Lane] = {}
        self._intakes: dict[str, TrajectoryIntake] = {}  # by model

    async def run(self) -> None:
        """Collect until cancelled; while Redis is away, wait."""
        try:
            while True:
                try:
                    models = [card.name for card in await self.context.registry.models()]
                    moved = [*[await self.collect(model) for model in models], await self.go_on()]
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
        """Scoring tasks that run in parallel with reading; none of them raises."""
        return [task for lane in self._lanes.values() for task in lane.tasks]

    async def collect(self, model: str) -> int:
        """Make trajectories of settled sequences, or begin to score them; returns how many are new."""
        intake = self._intake(model)
        known = {(each.spec.model, each.entry) for some in self._waiting for each, _ in some.sequences}
        known.update(*(lane.later for lane in self._lanes.values()))
        read = await intake.read(self.context.runner, AT_ONCE)
        settled = [each for each in read if (model, each.entry) not in known]
        ready: list[tuple[Settled, LiveTrajectory | None]] = []
        scored: list[tuple[Settled, str]] = []
        for each, text in await self._with_texts(model, settled):
            collect = each.spec.collect
            if collect is not None and collect.scoring and OUTCOMES[each.result.finish.reason] == "succeeded":
                scored.append((each, text))
            else:
                ready.append((each, None if collect is None else live_trajectory(each, text, None)))
        for waiting in _by_function(scored):
            name = _lane_of(waiting)
            lane = self._lanes.setdefault(name, _Lane())
            room = 0 if lane.later else self._room(lane)
            self._begin(intake, name, _Waiting(waiting.packed, waiting.sequences[:room]))
            lane.later.update(((model, each.entry), None) for each, _ in waiting.sequences[room:])
        await self._deliver(intake, ready)
        return len(settled)

    async def go_on(self) -> int:
        """Begin to score what found no place earlier; returns how many entries were looked at."""
        count = 0
        for name, lane in sorted(self._lanes.items(), key=lambda each: each[1].held):
            entries = list(itertools.islice(lane.later, min(AT_ONCE, self._room(lane))))
            if not entries:
                continue  # it may be closed by now
            for model, some in itertools.groupby(entries, key=lambda each: each[0]):
                intake, these = self._intake(model), list(some)
                settled = await intake.still_held(self.context.runner, [entry for _, entry in these])
                sequences = await self._with_texts(model, settled)
                for each in these:
                    del lane.later[each]
                for waiting in _by_function(sequences):
                    self._begin(intake, name, waiting)
            self._close(name)
            count += len(entries)
        return count

    def _intake(self, model: str) -> TrajectoryIntake:
        if model not in self._intakes:
            self._intakes[model] = TrajectoryIntake(self.context.redis, model)
        return self._intakes[model]

    @property
    def _waiting(self) -> list[_Waiting]:
        return [waiting for lane in self._lanes.values() for waiting in lane.tasks.values()]

    def _room(self, lane: _Lane) -> int:
        """How many more samples a lane has places for: no number of full ones takes the last places."""
        others = sum(each.held for each in self._lanes.values()) - lane.held
        return max(0, min(LANE, max(LEAST, (SCORED - others) // 2)) - lane.held)

    def _begin(self, intake: TrajectoryIntake, name: tuple[str, ...], waiting: _Waiting) -> None:
        """Score these in parallel with the reading."""
        if waiting.sequences:
            task = asyncio.create_task(self._score(intake, waiting))
            self._lanes[name].tasks[task] = waiting
            task.add_done_callback(functools.partial(self._leave, name))

    def _leave(self, name: tuple[str, ...], task: asyncio.Task[None]) -> None:
        del self._lanes[name].tasks[task]
        self._close(name)

    def _close(self, name: tuple[str, ...]) -> None:
        if not self._lanes[name].tasks and not self._lanes[name].later:
            del self._lanes[name]

    async def _with_texts(self, model: str, settled: list[Settled]) -> list[tuple[Settled, str]]:
        card = await self.context.registry.card(model) if settled else None
        codec = await self.context.codecs.codec(card) if card is not None else None
        return [(each, _text(each, codec)) for each in settled]

    async def _score(self, intake: TrajectoryIntake, waiting: _Waiting) -> None:
        """Score these sequences and publish their trajectories."""
        spec = waiting.sequences[0][0].spec
        assert spec.collect is not None
        reward = RewardSpec(spec.collect.scoring, spec.collect.options)
        samples = [_sample(*each) for each in waiting.sequences]
        try:
            try:
                with working_for(spec.tenant):
                    share = self._share(waiting.packed)
                    scores = await self.context.rewards.score(check(reward), samples, share=share)
            except ParallmError as error:  # a runner that is older than the api that admitted it
                scores = [Reward(reward.name, None, error=error.message)] * len(samples)
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
                await self._keep(live, each.spec, collect)
                continue
            queue = TrajectoryQueue(
                self.context.redis, live.policy, max_entries=self._max_entries, max_bytes=self._max_bytes
            )
            await count_for_split(self.context.redis, live)
            if await queue.add(live):
                reward = live.trajectory.reward
                log.debug("collect.added", trajectory=live.id, reward=reward.value if reward else None)
        if made:
            await intake.done([each.entry for each, _ in made])

    async def _keep(self, live: LiveTrajectory, spec: SequenceSpec, collect: Collection) -> None:
        """Keep an answer for feedback; one that did not end by itself was seen by no client as a whole."""
        if OUTCOMES[live.trajectory.finish_reason] != "succeeded":
            return
        terms = Terms(collect.answer_ttl_s, collect.answers_bytes)
        name = f"{collect.answer}-{live.id.rpartition('-')[2]}"
        session = "" if collect.place is None else collect.place.session
        try:
            await AnswerStore(self.context.redis, terms).keep(name, live, session)
        except QueueFullError:
            log.warning("collect.too_large", trajectory=live.id, hint="--feedback-store-mb")
            return
        if collect.place is not None:
            turn = turn_of(name, live, spec, collect.place)
            if await self._join(EpisodeStore(self.context.redis, terms), turn, live) and collect.judged:
                await self.judging.add(live.tenant, terms, turn)

    async def _join(self, episodes: EpisodeStore, turn: Turn, live: LiveTrajectory) -> bool:
        """Add an answer to its episode; a prompt without messages follows the turn whose ids it begins with."""
        keeper, session = episodes_of(live.tenant), turn.place.session
        if not turn.place.mark:
            parent = parent_by_ids((await episodes.read(keeper, session)).turns, live.trajectory.prompt_ids)
            turn = msgspec.structs.replace(turn, parent=parent)
        added = await episodes.add(keeper, turn)
        if not added:
            log.info("collect.episode_full", session=session, turns=MOST_TURNS)
        return added

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
        if any(lane.later for lane in self._lanes.values()):
            if under_way := self.under_way:  # else all have ended since we looked
                await asyncio.wait(under_way, timeout=BACKLOG_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            await self.context.blocking.xread(streams, count=1, block=int(1000 * LOOK_S))  # type: ignore[arg-type]
        except ResponseError as error:
            log.warning("collect.wait_failed", error=reason(error))
            await asyncio.sleep(LOOK_S)


def live_trajectory(settled: Settled, text: str, reward: Reward | None) -> LiveTrajectory:
    """The trajectory that the trainer receives for a settled sequence."""
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


def turn_of(name: str, live: LiveTrajectory, spec: SequenceSpec, place: EpisodePlace) -> Turn:
    """The turn of an episode that an answer is."""
    t = live.trajectory
    ended = t.finish_reason == "stop" and t.stop_match is None  # by a token that need not come back
    ids = (*t.prompt_ids, *(t.completion_ids[:-1] if ended else t.completion_ids))
    return Turn(
        name=name,
        place=place,
        created_ms=spec.enqueued_ms or live.collected_ms,
        model=live.model,
        policy=live.policy,
        ended_ms=live.collected_ms,
        versions=tuple(dict.fromkeys(span.version for span in t.spans)),
        text=t.text[:MOST_TEXT],
        finish_reason=t.finish_reason,
        prompt_tokens=len(t.prompt_ids),
        completion_tokens=len(t.completion_ids),
        ids_digest=digest_of_ids(ids),
        ids_length=len(ids),
    )


def _sample(settled: Settled, text: str) -> RewardSample:
    spec = settled.spec
    return RewardSample(text, spec.collect.reference if spec.collect else None, spec.prompt_ids, spec.model)


def _by_function(sequences: Sequence[tuple[Settled, str]]) -> list[_Waiting]:
    found: defaultdict[bytes, list[tuple[Settled, str]]] = defaultdict(list)
    for each, text in sequences:
        spec = each.spec
        assert spec.collect is not None, "the caller has looked"
        found[msgspec.json.encode([spec.collect.scoring, spec.collect.options, spec.tenant])].append((each, text))
    return [_Waiting(*each) for each in found.items()]


def _lane_of(waiting: _Waiting) -> tuple[str, ...]:
    spec = waiting.sequences[0][0].spec
    return (spec.tenant, *_models(spec.collect))


def _models(collect: Collection | None) -> tuple[str, ...]:
    """That the scoring function asks."""
    with contextlib.suppress(ParallmError):  # a runner that is older than the api that admitted it
        return () if collect is None else check(RewardSpec(collect.scoring, collect.options)).served_models
    return ()


def _text(settled: Settled, codec: TextCodec | None) -> str:
    if settled.result.text is not None or codec is None:
        return settled.result.text or ""
    return codec.decode(settled.result.completion_ids)
