"""The catalogue of models: entries, hosts, leases of loads, orders, demand."""

import asyncio

import msgspec
import pytest
from redis.asyncio import Redis

from shared.catalogue import CatalogueEntry, HeldModel, HostStatus
from shared.errors import ConflictError, InvalidRequestError, UnknownModelError
from shared.redis import keys
from shared.redis.connection.client import ask
from shared.redis.processes import catalogue as catalogue_module
from shared.redis.processes.catalogue import CatalogueStore
from shared.redis.queue.sequence_queue import SequenceQueue
from tests.redis.sequences import LEASE_MS, MODEL, die, plan, spec

BIG = CatalogueEntry("big", "models/big", aliases=("large", "org/big"), pinned=True)
ENTRY = CatalogueEntry(MODEL, "models/m")


@pytest.fixture(autouse=True)
def long_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and leases outlive a test on a busy machine."""
    monkeypatch.setattr(keys, "HOST_TTL_S", 3600)
    monkeypatch.setattr(keys, "LOAD_LEASE_MS", 3_600_000)


@pytest.fixture
def store(redis: Redis) -> CatalogueStore:
    return CatalogueStore(redis)


def host(name: str, *held: HeldModel, offers: tuple[str, ...] = (MODEL,)) -> HostStatus:
    return HostStatus(
        name, "machine", 1, 1, memory_bytes=100, free_bytes=50, offers=dict.fromkeys(offers, 10), held=held
    )


async def test_an_entry_is_known_by_its_name_and_its_aliases(store: CatalogueStore) -> None:
    await store.put(BIG)
    await store.put(ENTRY)
    read = await store.read()
    assert read.entries == {"big": BIG, MODEL: ENTRY}
    assert read.named("large") == read.named("org/big") == read.named("big") == BIG
    assert read.named("other") is None


async def test_no_two_entries_have_a_name_in_common(store: CatalogueStore) -> None:
    await store.put(BIG)
    for other in (CatalogueEntry("large", "x"), CatalogueEntry("o", "x", aliases=("org/big",))):
        with pytest.raises(ConflictError, match="already a name of model 'big'"):
            await store.put(other)
    with pytest.raises(ConflictError, match="already a name"):
        await store.put(CatalogueEntry("o", "x", aliases=("big",)))
    with pytest.raises(ConflictError, match="in the catalogue already"):
        await store.put(BIG, new=True)
    await store.put(msgspec.structs.replace(BIG, aliases=("huge",)))
    await store.put(CatalogueEntry("large", "x"))
    assert await store.remove("big") and not await store.remove("big")
    await store.put(CatalogueEntry("huge", "x"))
    assert set((await store.read()).entries) == {"large", "huge"}


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("name", "a b"),
        ("name", "../x"),
        ("name", ""),
        ("aliases", ("ok", "no\n")),
        ("aliases", ("m",)),
        ("source", " "),
        ("sha256", "12"),
        ("idle_s", -1.0),
        ("ranks", 0),
        ("priority", 10**9),
        ("options", {"--kv-bits": "8"}),
    ],
)
async def test_an_entry_that_no_ring_can_serve_is_refused(store: CatalogueStore, field: str, wrong: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await store.put(msgspec.structs.replace(ENTRY, **{field: wrong}))
    assert refused.value.param == field


async def test_changes_of_one_entry_at_once_all_count(store: CatalogueStore) -> None:
    await store.put(BIG)

    def more(entry: CatalogueEntry) -> CatalogueEntry:
        return msgspec.structs.replace(entry, priority=entry.priority + 1)

    await asyncio.gather(*(store.change("large", more) for _ in range(8)))
    assert (await store.read()).entries["big"].priority == 8
    with pytest.raises(UnknownModelError):
        await store.change("other", more)


async def test_a_host_adds_figures_and_changes_nothing_that_an_operator_has_set(store: CatalogueStore) -> None:
    found = CatalogueEntry("big", "models/big", size_bytes=7, context=99, family="qwen3", sha256="a" * 64)
    await store.put(BIG)
    await store.offer(found)
    assert (await store.read()).entries["big"] == msgspec.structs.replace(
        BIG, size_bytes=7, context=99, family="qwen3", sha256="a" * 64
    )
    await store.put(msgspec.structs.replace(BIG, source="models/another"))
    assert (await store.read()).entries["big"].size_bytes == 0, "figures of other files"
    await store.remove("big")
    await store.offer(found, adds=False)
    assert not (await store.read()).entries, "it was removed while its files were looked at"


async def test_a_host_hears_that_redis_has_lost_the_catalogue(redis: Redis, store: CatalogueStore) -> None:
    await store.put(ENTRY)
    await store.remove(MODEL)
    assert (await store.beat(host("h1"))).has_catalogue, "an empty one is one, too: it offers nothing again"
    await redis.delete(keys.catalogue())
    assert not (await store.beat(host("h1"))).has_catalogue


async def test_hosts_are_there_while_their_hearts_beat(redis: Redis, store: CatalogueStore) -> None:
    held = HeldModel(MODEL, "ready", load_s=1.5, worker="w1")
    await store.beat(host("h2"))
    await store.beat(host("h1", held))
    read = await store.read()
    assert [each.id for each in read.hosts] == ["h1", "h2"]
    assert [(each.id, model) for each, model in read.holding(MODEL)] == [("h1", held)]
    await store.leave("h1")
    await redis.delete(keys.host("h2"))
    assert (await store.read()).hosts == () and await redis.zcard(keys.hosts()) == 0


async def test_one_host_at_a_time_loads_a_model(redis: Redis, store: CatalogueStore) -> None:
    await store.put(ENTRY)
    taken = await asyncio.gather(*(store.take_load(MODEL, f"h{i}", 0) for i in range(8)))
    assert sum(taken) == 1
    winner = f"h{taken.index(True)}"
    assert await store.take_load(MODEL, winner, 0), "said again, as after an answer that was lost"
    read = await store.read()
    assert read.loading == {MODEL: winner} and read.loads == {MODEL: 1}
    await store.end_load(MODEL, "other")
    assert not await store.take_load(MODEL, "other", 1), "the lease is the winner's still"
    await store.end_load(MODEL, winner)
    assert not await store.take_load(MODEL, "other", 0), "decided before the winner has loaded it"
    assert await store.take_load(MODEL, "other", 1)
    assert not await store.take_load("unknown", "other", 0)


@pytest.mark.cluster
async def test_a_load_passes_on_when_its_host_dies_and_its_host_hears_of_it(
    redis: Redis, store: CatalogueStore
) -> None:
    await store.put(ENTRY)
    assert await store.take_load(MODEL, "h1", 0)
    await redis.delete(keys.loading(MODEL))  # as when its time is over
    loading = host("h1", HeldModel(MODEL, "loading", progress=0.4))
    assert (await store.beat(loading)).lost == () and (await store.read()).loading == {MODEL: "h1"}
    await redis.delete(keys.loading(MODEL))
    assert await store.take_load(MODEL, "h2", 1)
    assert (await store.beat(loading)).lost == (MODEL,)


async def test_an_order_stands_until_it_is_fulfilled_or_replaced(store: CatalogueStore) -> None:
    await store.put(ENTRY)
    first = await store.order("load", MODEL)
    unload = await store.order("unload", MODEL, "h1")
    second = await store.order("load", MODEL)
    await store.fulfil(first)
    read = await store.read()
    assert {order.id for order in read.orders} == {unload.id, second.id}
    assert set((await store.demand(read))[MODEL].orders) == {unload, second}
    await store.fulfil(second)
    await store.fulfil(second)
    assert (await store.read()).orders == (unload,)
    await store.remove(MODEL)
    assert (await store.read()).orders == ()


@pytest.mark.cluster
async def test_demand_is_what_waits_and_is_still_wanted(redis: Redis, store: CatalogueStore) -> None:
    queue = SequenceQueue(redis, MODEL, lease_ms=LEASE_MS)
    await store.put(ENTRY)
    await store.put(BIG)
    later = (await store.read()).now_ms + 600_000
    await queue.enqueue([spec("a"), spec("b", deadline_ms=later), spec("late", deadline_ms=1)])
    await queue.enqueue([spec("c", kind="batch"), spec("d", kind="batch", deadline_ms=later + 1)])
    await queue.enqueue([spec("gone")])
    await redis.delete(keys.sequence(MODEL, "gone"))
    demand = await store.demand(await store.read())
    mine = demand[MODEL]
    assert mine.waiting == {"interactive": 2, "batch": 2} and mine.running == {"interactive": 0, "batch": 0}
    assert mine.deadline_ms == later and demand["big"].waiting == {"interactive": 0, "batch": 0}
    claims = await queue.claim("w1", plan(2))
    mine = (await store.demand(await store.read()))[MODEL]
    assert mine.waits("interactive") == 0 and mine.running["interactive"] == len(claims) == 2


async def test_what_a_dead_worker_had_is_waiting_again(
    redis: Redis, store: CatalogueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "LEASE_MS", LEASE_MS)
    queue = SequenceQueue(redis, MODEL, lease_ms=LEASE_MS)
    await store.put(ENTRY)
    await queue.enqueue([spec("a"), spec("b")])
    claims = await queue.claim("w1", plan(2))
    await die(redis, claims)
    mine = (await store.demand(await store.read()))[MODEL]
    assert mine.waits("interactive") == 2 and mine.running["interactive"] == 0


async def test_a_long_queue_is_counted_without_being_read(
    redis: Redis, store: CatalogueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "LOOKED_AT", 3)
    await store.put(ENTRY)
    await SequenceQueue(redis, MODEL).enqueue([spec(f"s{i}", deadline_ms=int(i == 0)) for i in range(9)])
    assert (await store.demand(await store.read()))[MODEL].waits("interactive") == 8


async def test_what_cannot_be_read_is_left_out(redis: Redis, store: CatalogueStore) -> None:
    await store.put(ENTRY)
    await store.beat(host("h1"))
    await ask(redis, "HSET", keys.catalogue(), "bad", "{")
    await redis.set(keys.host("h2"), b'{"id": 3}', ex=10)
    await redis.zadd(keys.hosts(), {"h2": 1})
    read = await store.read()
    assert set(read.entries) == {MODEL} and [each.id for each in read.hosts] == ["h1"]


async def test_a_server_that_has_forgotten_its_scripts_counts_demand_all_the_same(
    redis: Redis, store: CatalogueStore
) -> None:
    await store.put(ENTRY)
    read = await store.read()
    await redis.script_flush()
    assert (await store.demand(read))[MODEL].waits("batch") == 0
