"""How a trainer joins its ring: by its Redis (`--redis`, or `--connect-to` an api that tells it), or by HTTP alone."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from shared.errors import SetupError, UnknownModelError
from shared.process.discovery import api_url, ring_url
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.ring.worker_registry import WorkerRegistry
from shared.redis.training.board import TrainingBoard, ring_id
from shared.redis.training.orders import Orders
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.text.codec import CodecCache, TextCodec
from shared.training import Beat, Holder
from trainer.ring.board import RingBoard
from trainer.ring.http_client import HttpApi
from trainer.ring.mailbox import RingMailbox
from trainer.ring.over_http import HttpBoard, HttpJudges, HttpOrders, HttpSink, HttpSource
from trainer.ring.over_redis import RingSource, StoreSink
from trainer.rollouts.groups import RolloutSource
from trainer.rollouts.live import LiveQueue
from trainer.rollouts.scorers import Judges, ring_judges
from trainer.seams import AdapterSink, Board, Mailbox
from trainer.settings import TrainSettings
from worker.engine.model.loader import LoadedModel


@dataclass(frozen=True)
class JoinedRing:
    """A ring that a trainer may use."""

    id: str  # of its data
    base_sha256: str
    codec: TextCodec
    source: RolloutSource
    sink: AdapterSink
    board: Board
    mailbox: Mailbox
    live: LiveQueue | None


class Way(Protocol):
    """A way to a ring."""

    judges: Judges

    def join(self, mine: LoadedModel) -> AbstractAsyncContextManager[JoinedRing]:
        """The ring, for training `mine`; SetupError unless it serves this base model."""


@contextlib.asynccontextmanager
async def way_to_ring(settings: TrainSettings) -> AsyncIterator[Way]:
    """The way that the settings name; SetupError when they name none, or two."""
    settings.check()
    if settings.over_http:
        url = api_url(settings.connect_to)
        async with HttpApi(url, settings.connect_key.get_secret_value()) as api:
            yield OverHttp(api, settings)
        return
    redis = await ring_url(settings)
    if not redis:
        raise SetupError("a trainer joins a ring: give its Redis (--redis redis://HOST:PORT) or an api (--connect-to)")
    async with ring_judges(redis) as judges:
        yield OverRedis(redis, settings, judges)


class OverRedis:
    """Samples through the sequence queue, versions into the adapter store."""

    def __init__(self, redis: str, settings: TrainSettings, judges: Judges) -> None:
        self._redis = redis
        self._settings = settings
        self.judges = judges

    @contextlib.asynccontextmanager
    async def join(self, mine: LoadedModel) -> AsyncIterator[JoinedRing]:
        """See `Way`."""
        settings = self._settings
        redis, blocking = connect(self._redis), connect(self._redis, blocking=True)
        try:
            registry = WorkerRegistry(redis)
            cards = [card for card in await registry.models() if card.base_sha256 == mine.card.base_sha256]
            card = next((card for card in cards if card.name == mine.card.name), cards[0] if cards else None)
            if card is None:
                raise SetupError(f"no worker of this ring has ever served {settings.model}: start one first")
            codec = await CodecCache(registry).codec(card)
            orders = Orders(redis, keys.training_orders(settings.adapter), blocking=blocking)
            async with (
                RingBoard(TrainingBoard(redis, settings.adapter)) as board,
                SequenceCalls(redis, card.name, f"train-{settings.run_name}") as calls,
                RingMailbox(orders) as mailbox,
            ):
                live = TrajectoryQueue(redis, settings.adapter, blocking=blocking)
                source = RingSource(redis, card, codec, calls)
                sink = StoreSink(redis, settings.adapter, card, settings.versions_kept)
                name = await ring_id(redis)
                yield JoinedRing(name, card.base_sha256, codec, source, sink, board, mailbox, live)
        finally:
            await redis.aclose()
            await blocking.aclose()


class OverHttp:
    """Samples by jobs, versions by uploads; the ring's Redis is out of sight, and so is its live traffic."""

    def __init__(self, api: HttpApi, settings: TrainSettings) -> None:
        self._api = api
        self._settings = settings
        self.judges: Judges = HttpJudges(api)

    @contextlib.asynccontextmanager
    async def join(self, mine: LoadedModel) -> AsyncIterator[JoinedRing]:
        """See `Way`."""
        api, settings = self._api, self._settings
        codec = TextCodec(mine.tokenizer)
        async with RingBoard(HttpBoard(api, settings.adapter)) as board:
            asked = Beat(owner=board.owner, base_sha256=mine.card.base_sha256)
            try:
                held = await api.call("PUT", f"/v1/trainers/{settings.adapter}", Holder, asked)
            except UnknownModelError as error:
                raise SetupError(f"{api.url} does not serve {settings.model}: {error}") from error
            async with RingMailbox(HttpOrders(api, settings.adapter, board.owner)) as mailbox:
                source = HttpSource(api, held.model, settings.run_name, settings.group_deadline_s)
                sink = HttpSink(api, settings.adapter, held.model)
                yield JoinedRing(held.ring, mine.card.base_sha256, codec, source, sink, board, mailbox, None)
