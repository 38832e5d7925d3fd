"""Who serves what, as the registry tells it."""

import asyncio
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from shared.errors import NotFoundError, SetupError
from shared.redis import keys
from shared.redis.processes import worker_registry
from shared.redis.processes.worker_registry import DifferingWeights, WorkerRegistry, WorkerStatus, weights_of
from shared.sequences import ModelCard
from shared.text.codec import TokenizerBundle
from tests.waiting import HANG_S, wait_until

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


def working(worker: str, of: ModelCard, **fields: Any) -> WorkerStatus:
    return msgspec.structs.replace(status(worker, of.name), weights=weights_of(of), **fields)


OTHERS = [{"base_sha256": "other"}, {"dtype": "bfloat16"}, {"tokenizer_sha256": "0" * 64}, {"kv": "8 bits"}]


@pytest.mark.parametrize("difference", OTHERS)
async def test_a_worker_with_something_else_under_the_name_is_refused_by_name(
    redis: Redis, difference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.processes.worker_registry.PATIENCE_S", 0.0)
    monkeypatch.setattr("shared.redis.processes.worker_registry.LOOK_AGAIN_S", 0.01)
    registry, other = WorkerRegistry(redis), msgspec.structs.replace(card("m"), **difference)
    await registry.admit(card("m"), lambda: working("w1", card("m")))
    await registry.admit(card("m"), lambda: working("w2", card("m")))
    with pytest.raises(SetupError, match=r"worker 'w1' on h has .*--allow-other-weights"):
        await registry.admit(other, lambda: working("w3", other, state="starting"))
    assert await registry.live("m") == ["w1", "w2"]
    renamed = msgspec.structs.replace(other, name="n")
    await registry.admit(renamed, lambda: working("w3", renamed, state="starting"))


async def test_many_of_the_same_weights_that_start_at_once_read_nobodys_heartbeat(redis: Redis) -> None:
    async def start(worker: str) -> None:
        await WorkerRegistry(redis).admit(card("m"), lambda: working(worker, card("m"), state="starting"))

    async def reads() -> int:
        return int((await redis.info("commandstats")).get("cmdstat_hgetall", {"calls": 0})["calls"])

    await asyncio.gather(
        *(WorkerRegistry(redis).heartbeat(working(f"there{i}", card("m"))) for i in range(worker_registry.FEW))
    )
    before = await reads()
    await asyncio.gather(*(start(f"w{i}") for i in range(20)))
    assert await reads() == before
    assert len(await WorkerRegistry(redis).live("m")) == worker_registry.FEW + 20


async def test_a_tokenizer_that_is_there_is_not_sent_again(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.register_model(card("m"), BUNDLE)
    await redis.expire(keys.tokenizer(BUNDLE.sha256), 60)
    sent = (await redis.info("commandstats"))["cmdstat_set"]["calls"]
    await WorkerRegistry(redis).register_model(card("m"), BUNDLE)
    assert (await redis.info("commandstats"))["cmdstat_set"]["calls"] == sent + 1, "the card"
    assert await redis.ttl(keys.tokenizer(BUNDLE.sha256)) > 60


async def test_a_worker_that_died_does_not_keep_other_weights_out(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.processes.worker_registry.LOOK_AGAIN_S", 0.01)
    registry, other = WorkerRegistry(redis), msgspec.structs.replace(card("m"), base_sha256="other")
    await registry.heartbeat(working("w1", card("m")))
    joining = asyncio.create_task(registry.admit(other, lambda: working("w2", other, state="starting")))
    await wait_until(lambda: seen(redis, "w2"))
    assert not joining.done()
    await redis.delete(keys.worker("m", "w1"))  # as its time to live does
    await asyncio.wait_for(joining, HANG_S)


async def seen(redis: Redis, worker: str) -> bool:
    return bool(await redis.exists(keys.worker("m", worker)))


async def test_of_two_that_start_at_once_the_first_may_stay(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.redis.processes.worker_registry.PATIENCE_S", 0.0)
    monkeypatch.setattr("shared.redis.processes.worker_registry.LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr("shared.redis.processes.worker_registry.READY_WITHIN_S", 0.0)
    registry, other = WorkerRegistry(redis), msgspec.structs.replace(card("m"), base_sha256="other")
    first = working("w1", card("m"), state="starting", started_ms=1)
    second = working("w2", other, state="starting", started_ms=2)
    await registry.heartbeat(first)
    await registry.heartbeat(second)
    await registry.admit(card("m"), lambda: first)
    with pytest.raises(SetupError):
        await registry.admit(other, lambda: second)


async def test_what_a_worker_of_an_older_version_has_is_not_known(redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    await registry.heartbeat(status("w1", "m"))
    await registry.admit(card("m"), lambda: working("w2", card("m")))


async def test_the_older_of_two_that_start_at_once_is_refused_when_the_younger_was_let_in_before_it_was_seen(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.processes.worker_registry.PATIENCE_S", 0.0)
    monkeypatch.setattr("shared.redis.processes.worker_registry.LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr("shared.redis.processes.worker_registry.READY_WITHIN_S", 60.0)
    registry, other = WorkerRegistry(redis), msgspec.structs.replace(card("m"), base_sha256="other")
    younger = working("w2", other, state="starting", started_ms=2)
    await registry.admit(other, lambda: younger)
    joining = asyncio.create_task(
        registry.admit(card("m"), lambda: working("w1", card("m"), state="starting", started_ms=1))
    )
    await wait_until(lambda: seen(redis, "w1"))
    await registry.heartbeat(msgspec.structs.replace(younger, state="ready"))
    with pytest.raises(SetupError, match="worker 'w2'"):
        await asyncio.wait_for(joining, HANG_S)
    assert await registry.live("m") == ["w2"]


async def test_a_worker_of_a_version_that_names_its_weights_in_heartbeats_alone_is_noticed(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.processes.worker_registry.PATIENCE_S", 0.0)
    monkeypatch.setattr("shared.redis.processes.worker_registry.LOOK_AGAIN_S", 0.01)
    registry, other = WorkerRegistry(redis), msgspec.structs.replace(card("m"), base_sha256="other")
    await registry.heartbeat(working("w1", card("m")))
    await redis.delete(keys.weights("m"))
    with pytest.raises(SetupError, match="worker 'w1'"):
        await registry.admit(other, lambda: working("w2", other, state="starting"))


async def test_workers_that_a_lost_redis_brought_together_are_told_of_once(redis: Redis) -> None:
    registry, other = WorkerRegistry(redis), msgspec.structs.replace(card("m"), base_sha256="other")
    ours, differing = DifferingWeights("w1", allowed=False), DifferingWeights("w3", allowed=True)
    await registry.heartbeat(working("w2", other))
    with capture_logs() as lines:
        for now in (0.0, worker_registry.REPORT_AFTER_S - 1):
            ours.heard(await registry.heartbeat(working("w1", card("m"))), now)
        assert not lines, "it may be one that tries to join"
        for each in (ours, differing):
            for now in (30.0, 60.0, 90.0):
                each.heard(await registry.heartbeat(working("w1", card("m"))), now)
    assert [(line["event"], line["worker"]) for line in lines] == [("worker.weights_differ", "w1")]
