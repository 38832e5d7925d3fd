"""How a trainer joins its ring: by its Redis (`--redis`), or by an api of it (`--connect-to`, trainer/discovery.py)."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from shared.errors import SetupError
from shared.redis.client import connect
from shared.redis.trajectory_queue import TrajectoryQueue
from shared.redis.worker_registry import WorkerRegistry
from shared.sequences import ModelCard
from shared.text import CodecCache, TextCodec
from trainer.board import Board, RingBoard
from trainer.discovery import find_redis
from trainer.live import LiveQueue
from trainer.mailbox import Mailbox, RingMailbox
from trainer.publish import AdapterSink
from trainer.ring import RingSource, StoreSink
from trainer.rollouts import RolloutSource
from trainer.settings import TrainSettings


@dataclass(frozen=True)
class JoinedRing:
    """A ring that a trainer may use."""

    card: ModelCard
    codec: TextCodec
    source: RolloutSource
    sink: AdapterSink
    board: Board
    live: LiveQueue
    mailbox: Mailbox


async def ring_url(settings: TrainSettings) -> str:
    """Where the ring is; SetupError when the settings do not say it, or say it twice."""
    if settings.redis and settings.connect_to:
        raise SetupError("--redis and --connect-to both name a ring: give one of them")
    if settings.redis:
        return settings.redis
    if not settings.connect_to:
        raise SetupError("a trainer joins a ring: give its Redis (--redis redis://HOST:PORT) or an api (--connect-to)")
    key, password = settings.api_key.get_secret_value(), settings.redis_password.get_secret_value()
    return await find_redis(settings.connect_to, api_key=key, password=password)


@contextlib.asynccontextmanager
async def joined(url: str, settings: TrainSettings, mine: ModelCard) -> AsyncIterator[JoinedRing]:
    """The ring at `url`; SetupError unless it serves the base model `mine`."""
    redis, blocking = connect(url), connect(url, blocking=True)
    try:
        registry = WorkerRegistry(redis)
        cards = [card for card in await registry.models() if card.base_sha256 == mine.base_sha256]
        card = next((card for card in cards if card.name == mine.name), cards[0] if cards else None)
        if card is None:
            raise SetupError(f"no worker of this ring has ever served {settings.model}: start one first")
        codec = await CodecCache(registry).codec(card)
        async with (
            RingBoard(redis, settings.adapter) as board,
            RingSource(redis, card, codec, settings.run_name) as source,
            RingMailbox(redis, blocking, settings.adapter) as mailbox,
        ):
            live = TrajectoryQueue(redis, settings.adapter, blocking=blocking)
            yield JoinedRing(card, codec, source, StoreSink(redis, settings.adapter, card), board, live, mailbox)
    finally:
        await redis.aclose()
        await blocking.aclose()
