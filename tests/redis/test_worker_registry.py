"""Who serves what, as the registry tells it."""

import msgspec
import pytest
from redis.asyncio import Redis

from shared.errors import NotFoundError
from shared.redis import keys
from shared.redis.worker_registry import WorkerRegistry, WorkerStatus
from shared.sequences import ModelCard
from shared.text import TokenizerBundle

BUNDLE = TokenizerBundle("{}", "{{ messages }}", (1, 2), {"eos_token": "</s>"})


def card(name: str) -> ModelCard:
    return ModelCard(name, 1024, 448, (1, 2), BUNDLE.sha256, "base", 96, "float32")


def status(worker: str, model: str, heartbeat_ms: int = 1) -> WorkerStatus:
    return WorkerStatus(
        id=worker,
        model=model,
        host="h",
        pid=1,
        state="ready",
        rows=3,
        max_rows=8,
        waiting=1,
        kv_bytes=10,
        kv_limit_bytes=100,
        tokens_per_s=12.5,
        steps=7,
        started_ms=1,
        heartbeat_ms=heartbeat_ms,
        adapters={"name": 3},
        extra={"load": 0.5},
    )


async def test_a_model_is_live_while_a_worker_beats(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.register_model(card("m"), BUNDLE)
    await registry.heartbeat(status("w1", "m"))
    await registry.heartbeat(status("w2", "m"))
    assert await registry.workers("m") == [status("w1", "m"), status("w2", "m")]
    assert await registry.live("m") == ["w1", "w2"]
    assert await registry.live_models() == {"m"}
    await redis.delete(keys.worker("m", "w1"))  # as its time to live does
    await registry.remove("m", "w2")
    assert await registry.live_models() == set()
    assert await registry.models() == [card("m")], "known, though nobody serves it now"


async def test_heartbeats_end_by_themselves(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.heartbeat(status("w1", "m"))
    assert 0 < await redis.ttl(keys.worker("m", "w1")) <= keys.WORKER_TTL_S


async def test_a_heartbeat_brings_back_what_redis_has_lost(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.register_model(card("m"), BUNDLE)
    await redis.flushall()
    await registry.heartbeat(status("w1", "m"))
    assert await registry.card("m") == card("m")
    assert await registry.tokenizer(BUNDLE.sha256) == BUNDLE


async def test_tokenizers_are_found_by_their_hash(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.register_model(card("m"), BUNDLE)
    assert await registry.tokenizer(BUNDLE.sha256) == BUNDLE
    with pytest.raises(NotFoundError, match="tokenizer 123"):
        await registry.tokenizer("123")


async def test_unknown_models_are_none_and_empty(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    assert await registry.card("m") is None
    assert await registry.workers("m") == []
    assert await registry.models() == []


async def test_names_with_slashes_are_fine(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    named = msgspec.structs.replace(card("m"), name="mlx-community/Qwen3-0.6B-4bit")
    await registry.register_model(named, BUNDLE)
    await registry.heartbeat(status("w1", named.name))
    assert await registry.live_models() == {named.name}
    assert await registry.card(named.name) == named


async def test_a_heartbeat_takes_back_what_an_earlier_one_said(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.heartbeat(msgspec.structs.replace(status("w", "m"), pause="p", versions=("a@1",)))
    await registry.heartbeat(status("w", "m"))
    assert await registry.workers("m") == [status("w", "m")]
