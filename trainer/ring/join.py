"""How a trainer joins its ring: by its Redis (`--redis`, or from the api of `--connect-to`), or by HTTP alone."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from redis.asyncio import Redis

from mlx_model.loader import LoadedModel
from mlx_model.memory import memory_status
from shared.errors import SetupError, UnknownModelError
from shared.redis import keys
from shared.redis.connection.client import connect, require
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.queue.sequence_queue import SequenceQueue
from shared.redis.training.board import TrainingBoard, ring_id
from shared.redis.training.learner_store import LearnerStore
from shared.redis.training.orders import Orders
from shared.redis.training.shared_runs import SharedRun
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.sequences import ModelCard
from shared.text.codec import CodecCache, TextCodec
from shared.training import Beat, Holder
from trainer.learners.federation import federation
from trainer.learners.service import ServiceLearners
from trainer.learners.shared_exchange import RunLead
from trainer.ring.board import RingBoard
from trainer.ring.http_client import HttpApi
from trainer.ring.mailbox import RingMailbox
from trainer.ring.over_http import HttpBoard, HttpJudges, HttpOrders, HttpQueue, HttpSink, HttpSource
from trainer.ring.over_redis import RingScorer, RingSource, StoreSink
from trainer.ring.ring import TrainerRing
from trainer.rollouts.scorers import Judges, ring_judges
from trainer.settings import TrainSettings


@dataclass(frozen=True)
class Way:
    """A way to a ring: who judges there, and the ring itself for training a model; SetupError unless it serves it.

    It is joined with the model, or with None where the training service has it.
    """

    judges: Judges
    join: Callable[[LoadedModel | None], AbstractAsyncContextManager[TrainerRing]]


@asynccontextmanager
async def way_to_ring(settings: TrainSettings) -> AsyncIterator[Way]:
    """The way that the settings name; SetupError when they name none, or two."""
    settings.check()
    if settings.over_http:
        async with HttpApi.of(settings) as api:
            yield Way(HttpJudges(api), partial(_over_http, api, settings))
        return
    redis = await settings.ring_url()
    if not redis:
        raise SetupError("a trainer joins a ring: give its Redis (--redis redis://HOST:PORT) or an api (--connect-to)")
    await require(redis)
    async with ring_judges(redis) as judges:
        yield Way(judges, partial(_over_redis, redis, settings))


@asynccontextmanager
async def _over_redis(url: str, settings: TrainSettings, mine: LoadedModel | None) -> AsyncIterator[TrainerRing]:
    """Samples through the sequence queue, versions into the adapter store."""
    redis, blocking = connect(url), connect(url, blocking=True)
    try:
        registry = WorkerRegistry(redis)
        name = settings.model.rstrip("/").rsplit("/", 1)[-1] if mine is None else mine.card.name
        cards = await registry.models()
        if mine is None:
            cards = [card for card in cards if card.name in (name, settings.model)]
        else:
            cards = [card for card in cards if card.base_sha256 == mine.card.base_sha256]
        card = next((card for card in cards if card.name == name), cards[0] if cards else None)
        if card is None:
            raise SetupError(f"no worker of this ring has ever served {settings.model}: start one first")
        codec = await CodecCache(registry).codec(card)
        orders = Orders(redis, keys.training_orders(settings.adapter), blocking=blocking)
        async with (
            RingBoard(
                TrainingBoard(redis, settings.adapter), partial(memory_status, settings.memory_limit_bytes)
            ) as board,
            SequenceCalls(redis, card.name, _owner(settings)) as calls,
            RingMailbox(orders) as mailbox,
            RunLead(SharedRun(redis, settings.run_name, blocking=blocking)) as lead,
            _scorer(redis, settings, card, calls) as scorer,
        ):
            live = TrajectoryQueue(redis, settings.adapter, blocking=blocking)
            source = RingSource(redis, card, codec, calls)
            sink = StoreSink(redis, settings.adapter, card, settings.versions_kept)
            learners = None
            if mine is None:
                learners = ServiceLearners(LearnerStore(redis), card.name, settings.learner_wait_s)
            others = lead if settings.learner == "shared" else None
            id = await ring_id(redis)
            ring = TrainerRing(
                card.base_sha256, codec, source, sink, board, mailbox, live, id, learners, others, model=card.name,
                asked=SequenceQueue(redis, card.name).is_asked, scorer=scorer,
            )  # fmt: skip
            try:
                async with _in_federation(ring, settings, url) as ring:
                    yield ring
            finally:
                if learners is not None:
                    await learners.close()
    finally:
        await redis.aclose()
        await blocking.aclose()


def _owner(settings: TrainSettings) -> str:
    """Name under which a run's samples are gathered: two policies may have runs of one name."""
    return f"train-{settings.adapter}/{settings.run_name}"


@asynccontextmanager
async def _scorer(
    redis: Redis, settings: TrainSettings, card: ModelCard, calls: SequenceCalls
) -> AsyncIterator[RingScorer | None]:
    """Asks the teacher of the run's samples: another model of the ring, or an adapter of the policy's own."""
    if settings.mode != "rl" or not settings.teacher:
        yield None
        return
    cards = await WorkerRegistry(redis).models()
    other = next((each for each in cards if each.name == settings.teacher), None)
    if other is None or other.name == card.name:
        yield RingScorer(redis, card, calls)
        return
    if other.tokenizer_sha256 != card.tokenizer_sha256:
        raise SetupError(f"--teacher {other.name} has another tokenizer than {card.name}: it cannot score its tokens")
    async with SequenceCalls(redis, other.name, f"{_owner(settings)}/teacher") as theirs:
        yield RingScorer(redis, other, theirs)


@asynccontextmanager
async def _over_http(api: HttpApi, settings: TrainSettings, mine: LoadedModel | None) -> AsyncIterator[TrainerRing]:
    """Samples by jobs, versions by uploads; the ring's Redis is out of sight, and so is its live traffic."""
    assert mine is not None, "settings are checked"
    async with RingBoard(
        HttpBoard(api, settings.adapter), partial(memory_status, settings.memory_limit_bytes)
    ) as board:
        asked = Beat(owner=board.owner, base_sha256=mine.card.base_sha256)
        try:
            held = await api.call("PUT", f"/v1/trainers/{settings.adapter}", Holder, asked)
        except UnknownModelError as error:
            raise SetupError(f"{api.url} does not serve {settings.model}: {error}") from error
        async with RingMailbox(HttpOrders(api, settings.adapter, board.owner)) as mailbox:
            source = HttpSource(api, held.model, settings.run_name, settings.group_deadline_s)
            sink = HttpSink(api, settings.adapter, held.model)
            codec = TextCodec(mine.tokenizer)
            queue = HttpQueue(api, held.model)
            ring = TrainerRing(
                mine.card.base_sha256, codec, source, sink, board, mailbox, id=held.ring, asked=queue.is_asked
            )
            async with _in_federation(ring, settings, settings.sync_redis) as ring:
                yield ring


@asynccontextmanager
async def _in_federation(ring: TrainerRing, settings: TrainSettings, url: str) -> AsyncIterator[TrainerRing]:
    """The ring, with the run's place in its federation if it has one; `url`: of the Redis that the ring is in."""
    if not settings.federation:
        yield ring
        return
    async with federation(settings, url, ring.base_sha256, ring.id) as place:
        yield replace(ring, federation=place)
