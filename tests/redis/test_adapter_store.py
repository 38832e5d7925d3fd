"""The adapter store on a real Redis: what is published is whole, numbered once, held while used, and heard of."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.adapters import AdapterEvent, AdapterManifest, GateCheck
from shared.errors import AdapterDamagedError, AdapterRejectedError, ConflictError, UnknownAdapterError
from shared.owners import Asker
from shared.redis import keys
from shared.redis.adapters import store as store_module
from shared.redis.adapters.store import AdapterStore
from shared.redis.adapters.watch import watch
from shared.redis.chunks import Chunks
from shared.redis.training.board import TrainingBoard
from tests.redis.adapter_versions import prepared, publish
from tests.redis.scripted_worker import CARD
from tests.unit.adapter_files import lora, mlx_config, write
from tests.waiting import wait_until
from trainer.ring.over_redis import StoreSink
from trainer.ring.ring import Candidate
from worker.adapters.cache import DiskCache

GATE = (GateCheck("finite", False, "nan"),)


@pytest.fixture
def store(redis: Redis) -> AdapterStore:
    return AdapterStore(redis)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 512)


async def fetched(store: AdapterStore, manifest: AdapterManifest) -> bytes:
    return b"".join([chunk async for chunk in store.fetch(manifest)])


@pytest.mark.cluster
async def test_what_was_published_is_fetched(store: AdapterStore, tmp_path: Path) -> None:
    adapter = prepared(tmp_path)
    manifest = await store.publish("policy", adapter, base_sha256="b", train_step=3, metrics={"kl": 0.1})
    assert (manifest.id, manifest.parent, manifest.train_step, manifest.metrics) == ("policy@1", 0, 3, {"kl": 0.1})
    assert await store.manifest("policy") == await store.manifest("policy", 1) == manifest
    assert await fetched(store, manifest) == adapter.path.read_bytes()
    resolved = await store.resolve("policy")
    assert (resolved.id, resolved.follows, (await store.resolve("policy@1")).follows) == ("policy@1", True, False)


async def test_a_torn_publish_is_invisible(store: AdapterStore, redis: Redis, tmp_path: Path) -> None:
    await publish(store)
    adapter = prepared(tmp_path, seed=1)
    data = bytearray(adapter.path.read_bytes())
    data[-1] ^= 1
    adapter.path.write_bytes(data)  # altered after it was checked
    with pytest.raises(AdapterDamagedError):
        await store.publish("policy", adapter, base_sha256="base")
    assert (await store.latest("policy"), await store.versions("policy")) == (1, [1])
    with pytest.raises(UnknownAdapterError):
        await store.manifest("policy", 2)
    assert 0 < await redis.ttl(keys.adapter_bytes("policy", 2)) <= keys.ADAPTER_UPLOAD_TTL_S
    assert (await publish(store, seed=2)).version == 3


async def test_bytes_that_went_missing_before_the_flip_are_refused(
    store: AdapterStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = store_module.upload

    async def expiring(chunks: Chunks, *arguments: object) -> int:
        count = await whole(chunks, *arguments)  # type: ignore[arg-type]
        await redis.delete(keys.adapter_bytes("policy", 1))
        return count

    monkeypatch.setattr(store_module, "upload", expiring)
    with pytest.raises(ConflictError, match="took too long"):
        await publish(store)
    assert await store.names() == []


@pytest.mark.parametrize("altered", ["flipped", "missing"])
async def test_altered_chunks_are_detected(
    store: AdapterStore, redis: Redis, small_chunks: None, tmp_path: Path, altered: str
) -> None:
    manifest = await publish(store)
    assert manifest.chunks == 3
    key = keys.adapter_bytes("policy", 1)
    chunk = await redis.hget(key, "1")
    await (redis.hdel(key, "1") if altered == "missing" else redis.hset(key, "1", bytes([chunk[0] ^ 1]) + chunk[1:]))
    with pytest.raises(AdapterDamagedError):
        await fetched(store, manifest)
    cache = DiskCache(tmp_path / "cache", 2**20)
    with pytest.raises(AdapterDamagedError):
        async with cache.hold(store, manifest):
            pass
    assert list((tmp_path / "cache").iterdir()) == []


async def test_concurrent_publishers_get_distinct_versions(store: AdapterStore, tmp_path: Path) -> None:
    adapters = [prepared(tmp_path, seed) for seed in range(8)]
    manifests = await asyncio.gather(*(store.publish("policy", adapter, base_sha256="b") for adapter in adapters))
    assert sorted(manifest.version for manifest in manifests) == list(range(1, 9))
    assert (await store.latest("policy"), await store.versions("policy")) == (8, list(range(1, 9)))
    for manifest, adapter in zip(manifests, adapters, strict=True):
        assert await fetched(store, manifest) == adapter.path.read_bytes()


@pytest.mark.cluster
async def test_only_one_of_two_compare_and_set_publishers_wins(store: AdapterStore, tmp_path: Path) -> None:
    await publish(store)
    tries = [store.publish("policy", prepared(tmp_path, seed), base_sha256="base", if_latest=1) for seed in (1, 2)]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sorted(isinstance(outcome, ConflictError) for outcome in outcomes) == [False, True]
    assert len(await store.versions("policy")) == 2


async def test_another_base_is_refused(store: AdapterStore) -> None:
    await publish(store)
    with pytest.raises(AdapterRejectedError):
        await publish(store, base="another")
    assert await store.versions("policy") == [1]


async def test_numbers_survive_deletion(store: AdapterStore) -> None:
    await publish(store)
    await store.delete("policy")
    assert await store.names() == []
    assert (await publish(store)).version == 2


async def test_what_is_pinned_or_latest_is_not_deleted(store: AdapterStore) -> None:
    for seed in range(3):
        await publish(store, seed=seed)
    await store.pin("policy", 1, "w1", 60)
    for version in (1, 3):
        with pytest.raises(ConflictError):
            await store.delete("policy", version)
    with pytest.raises(ConflictError, match="w1"):
        await store.delete("policy")
    await store.delete("policy", 2)
    await store.unpin("policy", 1, "w1")
    await store.delete("policy", 1)
    assert await store.versions("policy") == [3]
    with pytest.raises(UnknownAdapterError):
        await store.pin("policy", 1, "w1", 60)


async def test_latest_best_and_what_others_pin_lasts(store: AdapterStore) -> None:
    for seed in range(5):
        await publish(store, seed=seed)
    await store.set_best("policy", 2, 0.9)
    for version, owner in ((1, "w1"), (3, "job:with:colons"), (3, "w1"), (5, "w2")):
        await store.pin("policy", version, owner, 60)
    assert await store.lasting("policy", {"w1", "w2"}) == {2, 3, 5}
    assert await store.lasting("policy", {"w2"}) == {1, 2, 3, 5}
    assert await store.lasting("nobody", ()) == set()


async def test_a_pin_ends_by_itself(store: AdapterStore) -> None:
    await publish(store)
    await publish(store, seed=1)
    await store.pin("policy", 1, "w1", 0.05)

    async def deleted() -> bool:
        with contextlib.suppress(ConflictError):
            await store.delete("policy", 1)
            return True
        return False

    await wait_until(deleted)


async def test_keep_n_spares_latest_best_and_pinned(redis: Redis) -> None:
    store = AdapterStore(redis)
    for seed in range(4):
        await publish(store, seed=seed)
    await store.set_best("policy", 2, 0.9)
    await store.pin("policy", 1, "w1", 60)
    keeping = AdapterStore(redis, keep_n=1)
    await publish(keeping, seed=4)
    assert await store.versions("policy") == [1, 2, 5]
    assert not await redis.exists(keys.adapter_bytes("policy", 3))
    await store.rollback("policy", 2)
    await publish(keeping, seed=5, set_latest=False)
    assert await store.versions("policy") == [1, 2, 5, 6], "a candidate takes no served version's place"
    assert (await store.summary("policy")).latest == 2


async def test_candidates_are_promoted_or_rejected(store: AdapterStore) -> None:
    await publish(store)
    for seed in (1, 2):
        await publish(store, seed=seed, set_latest=False)
    rejected = await store.reject("policy", 2, GATE)
    assert (rejected.status, (await store.manifest("policy", 2)).gate) == ("rejected", GATE)
    for refused in (store.promote("policy", 2), store.rollback("policy", 2), store.resolve("policy@2")):
        with pytest.raises(ConflictError):
            await refused
    await store.promote("policy", 3)
    with pytest.raises(ConflictError):
        await store.reject("policy", 3, GATE)
    with pytest.raises(ConflictError):
        await store.promote("policy", 1)
    assert await store.rollback("policy", reason="worse") == 1
    assert [(flip.version, flip.previous, flip.reason) for flip in await store.history("policy")] == [
        (1, 3, "worse"), (3, 1, "promoted"), (1, 0, "published")
    ]  # fmt: skip


async def test_a_rollback_without_a_version_goes_to_none_that_was_never_served(store: AdapterStore) -> None:
    """A trainer that is killed amid its checks leaves a candidate that looks like any published version."""
    await publish(store)
    await publish(store, seed=1, set_latest=False)
    await publish(store, seed=2)
    assert await store.rollback("policy") == 1
    with pytest.raises(ConflictError, match="no published version before"):
        await store.rollback("policy")


async def test_a_promotion_writes_down_which_checks_were_passed(store: AdapterStore) -> None:
    await publish(store, set_latest=False, gate=(GateCheck("shapes", True),))
    await store.promote("policy", 1)
    assert [check.name for check in (await store.manifest("policy")).gate] == ["shapes"]
    await publish(store, seed=1, set_latest=False)
    await store.promote("policy", 2, gate=(GateCheck("shapes", True), GateCheck("reload_parity", True, "0.01")))
    manifest = await store.manifest("policy")
    assert (manifest.version, manifest.gate[1]) == (2, GateCheck("reload_parity", True, "0.01"))


async def test_a_trainers_older_versions_make_room(redis: Redis, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", mlx_config(), lora())
    sink = StoreSink(redis, "policy", CARD, keep_n=2)
    passed = (GateCheck("reload_parity", True, "0"),)
    for step in range(4):
        version = await sink.stage(Candidate(folder, step, step, CARD.base_sha256))
        await sink.promote(version, passed)
    store = AdapterStore(redis)
    assert await store.versions("policy") == [3, 4]
    assert (await store.manifest("policy")).gate == passed


async def test_rejected_versions_do_not_push_out_good_ones(redis: Redis) -> None:
    """A run of bad train steps used to leave nothing to go back to but the latest and the best."""
    store = AdapterStore(redis, keep_n=2)
    for seed in range(3):
        await publish(store, seed=seed)
    for seed in range(3, 8):
        await publish(store, seed=seed, set_latest=False)
        await store.reject("policy", seed + 1, GATE)
    assert await store.versions("policy") == [2, 3, 7, 8], "two good ones, and of the rejected the newest two"
    assert await store.rollback("policy") == 2


async def test_workers_acknowledge(store: AdapterStore) -> None:
    await publish(store)
    await publish(store, seed=1)
    await store.acknowledge("w1", "policy", 1)
    await store.acknowledge("w2", "policy", 2)
    await store.acknowledge("w1", "policy", 2)
    assert {worker: ack.version for worker, ack in (await store.acks("policy")).items()} == {"w1": 2, "w2": 2}


@contextlib.asynccontextmanager
async def watching(redis: Redis, reread_s: float = 0.05) -> AsyncIterator[list[AdapterEvent]]:
    heard: list[AdapterEvent] = []

    async def listen() -> None:
        async for event in watch(redis, reread_s=reread_s):
            heard.append(event)

    task = asyncio.create_task(listen())
    try:
        yield heard
    finally:
        while not task.done():  # redis-py may lose a cancellation
            task.cancel()
            await asyncio.wait({task}, timeout=0.2)


@pytest.mark.cluster
async def test_a_watcher_hears_every_flip(store: AdapterStore, redis: Redis) -> None:
    await publish(store)
    async with watching(redis, reread_s=60) as heard:  # a reread between a flip and its event would tell of it as well
        await wait_until(lambda: [(event.change, event.latest) for event in heard] == [("seen", 1)])
        await publish(store, seed=1)
        await publish(store, seed=2, set_latest=False)
        await store.promote("policy", 3)
        await store.rollback("policy", 1)
        await store.delete("policy", 2)
        await store.delete("policy")
        expected = [
            ("seen", 1), ("published", 2), ("published", 2), ("promoted", 3), ("rolled_back", 1), ("deleted", 1),
            ("deleted", 0),
        ]  # fmt: skip
        await wait_until(lambda: len(heard) == len(expected))
        assert [(event.change, event.latest) for event in heard] == expected


async def test_a_watcher_finds_what_it_missed(store: AdapterStore, redis: Redis) -> None:
    await publish(store)
    await publish(store, seed=1)
    async with watching(redis) as heard:
        await wait_until(lambda: len(heard) == 1)
        await redis.hset(keys.adapter("policy"), "latest", "1")  # a flip whose event was lost
        await wait_until(lambda: len(heard) == 2)
        assert (heard[1].change, heard[1].latest) == ("seen", 1)


async def test_a_name_belongs_to_who_made_it_until_nothing_of_it_is_left(redis: Redis, store: AdapterStore) -> None:
    acme = AdapterStore(redis, who_asks=lambda: Asker("acme", limited=True))
    bobs = AdapterStore(redis, who_asks=lambda: Asker("bobs", limited=True))
    assert (await publish(acme)).tenant == "acme"
    assert (await publish(store, seed=1)).tenant == "acme", "the operator's own trainer publishes for its owner"
    assert await redis.get(keys.adapter_counter("policy")) == b"2"
    with pytest.raises(ConflictError, match="not free"):
        await publish(bobs)
    assert await redis.get(keys.adapter_counter("policy")) == b"2", "no number was spent, no byte was sent"
    for change in (bobs.rollback("policy", 1), bobs.delete("policy"), bobs.set_best("policy", 1, 0.5)):
        with pytest.raises(UnknownAdapterError):
            await change
    with pytest.raises(UnknownAdapterError):
        await bobs.resolve("policy@1")
    assert (await bobs.pointers(), await bobs.latest("policy")) == ({}, 0)
    await TrainingBoard(redis, "policy").hold("a trainer over Redis")
    await acme.delete("policy")
    with pytest.raises(ConflictError, match="not free"):
        await publish(bobs, seed=2)  # what its trainer told is there yet
    await redis.delete(keys.training("policy"))
    assert (await publish(bobs, seed=2)).id == "policy@3"


async def test_of_two_who_make_one_name_at_a_time_one_gets_it(redis: Redis) -> None:
    tenants = [f"t{number}" for number in range(4)]
    stores = [AdapterStore(redis, who_asks=lambda t=t: Asker(t, limited=True)) for t in tenants]  # type: ignore[misc]
    made = await asyncio.gather(*(publish(each, seed=i) for i, each in enumerate(stores)), return_exceptions=True)
    (won,) = [each for each in made if isinstance(each, AdapterManifest)]
    assert all(isinstance(each, ConflictError) for each in made if each is not won)
    assert await stores[0].owner("policy") == won.tenant
    board = TrainingBoard(redis, "policy")
    for tenant in tenants:
        if tenant != won.tenant:
            with pytest.raises(UnknownAdapterError, match="not free"):
                await board.hold("a", asker=Asker(tenant, limited=True))
    assert await board.hold("a", asker=Asker(won.tenant, limited=True)) == "a"


async def test_a_trainer_that_ends_before_it_has_told_anything_leaves_no_name_taken(redis: Redis) -> None:
    board, store = TrainingBoard(redis, "policy"), AdapterStore(redis)
    assert await board.hold("a", asker=Asker("acme", limited=True)) == "a"
    assert await store.owner("policy") == "acme"
    await board.let_go("somebody else")
    assert await store.owner("policy") == "acme"
    await board.let_go("a")
    assert await store.owner("policy") is None
