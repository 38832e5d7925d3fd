"""KV from another worker: fetched and checked; whatever the other one does, the sequence is computed all the same."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from shared import wire
from shared.errors import SetupError
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.redis import keys
from shared.redis.queue.affinity import WarmNotes
from shared.sequences import ModelCard
from shared.telemetry.metrics import Tally
from shared.wire import Channel, Connection, PeerError
from tests.redis.kv_workers import BLOCK, IDS, WHOLE, Engine, Worker, of, on_disk, tell
from tests.redis.sequences import MODEL, plan, queue, spec
from tests.waiting import HANG_S
from worker.engine.messages import RowRequest
from worker.engine.prefixes.parcels import unpack
from worker.peers import client, listening, server, store
from worker.peers.directory import PeerDirectory
from worker.peers.exchange import KvExchange
from worker.peers.messages import KvRequest, Offer, SendParcels

Answer = Callable[[Channel, Connection], Awaitable[None]]


@pytest.fixture
async def holder(redis: Redis) -> AsyncIterator[Worker]:
    made = Worker(redis, "holder")
    made.engine.read()
    await made.listen()
    yield made
    await made.server.close()
    made.store.close()


@pytest.fixture
async def heir(redis: Redis) -> AsyncIterator[Worker]:
    made = Worker(redis, "heir")
    yield made
    made.store.close()


@contextlib.asynccontextmanager
async def rogue(worker: Worker, answer: Answer, *, proves: bool = True) -> AsyncIterator[None]:
    """Somebody else in the place of a worker; one that `proves` it knows the secret answers what was asked of it."""
    await worker.directory.look()
    loop = asyncio.get_running_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    await tell(worker.redis, "rogue", listening.getsockname()[1])

    async def serve() -> None:
        sock, _ = await loop.sock_accept(listening)
        connection = Connection(sock)
        try:
            secret = worker.directory.secret if proves else b"x" * 32
            with contextlib.suppress(PeerError):
                await answer(await wire.admit(connection, secret), connection)
        finally:
            connection.close()

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listening.close()


async def test_kv_comes_from_the_worker_that_has_it(holder: Worker, heir: Worker) -> None:
    await heir.fetch("holder")
    assert heir.engine.known == WHOLE
    (kv,) = heir.engine.cache.longest(IDS, "", WHOLE).kv
    assert kv.keys[0, 0, :, 0].tolist() == list(IDS[:WHOLE])
    assert heir.outcome("fetched") == 1 and heir.outcome("failed") == 0
    assert heir.tally.fields()[f"mlx_parallm_kv_fetched_tokens_total|{MODEL}"] == WHOLE
    assert heir.tally.fields()[f"mlx_parallm_kv_fetched_bytes_total|{MODEL}"] == holder.server.bytes > 0
    assert holder.server.given == 1 and not holder.engine.cache._offers, "nothing is held for anybody any more"
    await heir.fetch("holder")
    assert holder.server.given == 1, "it is here by now"


@pytest.mark.parametrize(("stored", "given"), [(0, 25), (240, 10), (400, 0)])
async def test_only_what_our_own_disk_lacks_is_asked_for(
    stored: int, given: int, holder: Worker, heir: Worker, tmp_path: Path
) -> None:
    async with on_disk(heir, tmp_path, IDS[:stored]):
        await heir.fetch("holder")
        assert heir.engine.known == WHOLE
    assert holder.server.given == bool(given)
    arrays = given * BLOCK * 2 * 8 * 4  # keys and values of 8 numbers in fp32
    assert arrays <= holder.server.bytes <= arrays + 5000 * bool(given), "with what describes them"


async def test_a_worker_gives_what_its_disk_has(holder: Worker, heir: Worker, tmp_path: Path) -> None:
    async with on_disk(holder, tmp_path, IDS):
        await heir.fetch("holder")
    assert heir.engine.known == WHOLE and holder.server.given == 1
    other = KvRequest("another model", "", list(IDS), 0, 0, WHOLE, 1 << 30)
    number, offer = await holder.store.offer(other)
    assert (number, bool(offer.refusal)) == (0, True)


async def test_a_disk_that_hangs_holds_nobody_up(
    holder: Worker, heir: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who asks nor who is asked: what is in memory by then counts."""
    monkeypatch.setattr(store, "DISK_S", 0.05)
    async with on_disk(heir, tmp_path, IDS):
        monkeypatch.setattr(heir.engine.cache, "work", lambda: None)
        await heir.fetch("holder")
        assert holder.server.given == 1 and heir.engine.known == WHOLE


async def test_who_may_have_it_is_known_by_who_handed_it_back_or_read_the_same_beginning(
    redis: Redis, heir: Worker
) -> None:
    work = queue(redis)
    await work.enqueue([of("s", IDS)])
    (claim,) = await work.claim("holder", plan(1))
    await work.release("holder", [claim])
    (claim,) = await work.claim("heir", plan(1))
    assert await heir.directory.holders([RowRequest(claim.spec, claim.attempt)]) == {"s": "holder"}
    assert await PeerDirectory(redis, MODEL, "holder").holders([RowRequest(claim.spec, claim.attempt)]) == {}
    await WarmNotes(redis, MODEL, "warm").note([of("other", IDS[:300])])
    fresh = [RowRequest(of("new", IDS)), RowRequest(of("short", IDS[:20]))]
    assert await heir.directory.holders(fresh) == {"new": "warm"}


async def test_prompts_that_begin_alike_and_come_together_fetch_it_once(holder: Worker, heir: Worker) -> None:
    await asyncio.gather(*(heir.fetch("holder") for _ in range(3)))
    assert heir.engine.known == WHOLE and holder.server.given == 1 and heir.outcome("fetched") == 1


async def test_computing_is_chosen_where_it_is_quicker(holder: Worker, heir: Worker) -> None:
    heir.token_s = 1e-9
    await heir.fetch("holder")  # the first one shows what a transfer takes
    before = holder.server.bytes
    heir.engine.cache.clear()
    await heir.fetch("holder")
    assert holder.server.bytes == before and heir.engine.known == 0
    assert heir.outcome("computed") >= 1


async def test_a_worker_of_another_model_gives_nothing_and_is_asked_again(redis: Redis, holder: Worker) -> None:
    other = Worker(redis, "other", identity="another model")
    await other.fetch("holder")
    await other.fetch("holder")
    assert other.engine.known == 0 and other.outcome("refused") == 2 and other.outcome("failed") == 0
    other.store.close()


async def test_what_was_asked_for_before_a_reset_is_not_stored_after_it(holder: Worker, heir: Worker) -> None:
    prompt = heir.engine.cache.held(IDS, "", 399)
    offer = holder.engine.cache.offer(IDS, "", 0, 0, 399, 1 << 30)
    assert offer is not None
    packed = await holder.store.parcel(offer.number, 0)
    parcel = unpack(b"".join([packed.head, *packed.parts]), "model")
    heir.engine.cache.clear()
    holder.engine.cache.clear()
    with pytest.raises(PeerError, match="emptied"):
        await heir.store.take(prompt, parcel)
    with pytest.raises(PeerError, match="no longer has it"):
        await holder.store.parcel(offer.number, 0)
    assert heir.engine.known == 0


async def test_nobody_is_asked_about_a_prompt_whose_log_probabilities_are_wanted(redis: Redis, heir: Worker) -> None:
    await WarmNotes(redis, MODEL, "warm").note([of("other", IDS)])
    sampling = msgspec.structs.replace(spec("s").sampling, prompt_logprobs=1)
    assert await heir.directory.holders([RowRequest(of("plain", IDS))]) == {"plain": "warm"}
    assert await heir.directory.holders([RowRequest(msgspec.structs.replace(of("s", IDS), sampling=sampling))]) == {}


async def send_garbage(channel: Channel, connection: Connection) -> None:
    await channel.hear(KvRequest)
    await channel.say(Offer(WHOLE, [1000]))
    await channel.hear(SendParcels)
    await channel.send(b"\x08\0\0\0\0\0\0\0garbage!", [memoryview(bytes(900))])


async def close_midway(channel: Channel, connection: Connection) -> None:
    await channel.hear(KvRequest)
    await channel.say(Offer(WHOLE, [1000]))
    await channel.hear(SendParcels)
    await connection.write(bytes(20))


async def flood(channel: Channel, connection: Connection) -> None:
    await channel.hear(KvRequest)
    await channel.say(Offer(WHOLE, [1000]))
    await channel.hear(SendParcels)
    await channel.send(b"x" * 10, [memoryview(bytes(1 << 22))])


async def stall(channel: Channel, connection: Connection) -> None:
    await channel.hear(KvRequest)
    await asyncio.sleep(60)


async def forge(channel: Channel, connection: Connection) -> None:
    await channel.hear(KvRequest)
    await connection.write(bytes([0, 0, 0, 1, *bytes(8), *bytes(32), 0]))


async def promise_too_much(channel: Channel, connection: Connection) -> None:
    await channel.hear(KvRequest)
    await channel.say(Offer(WHOLE, [1 << 60]))


async def say_what_is_no_message(channel: Channel, connection: Connection) -> None:
    await channel.hear(KvRequest)
    await channel.send(b"\xc1")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (send_garbage, "cannot be used"),
        (close_midway, "closed the connection"),
        (flood, "announced"),
        (stall, "stalled"),
        (forge, "not authentic"),
        (promise_too_much, "are the limit"),
        (say_what_is_no_message, "no Offer"),
    ],
)
async def test_a_peer_that_does_not_do_its_part_costs_one_line(
    heir: Worker, answer: Answer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is stall:  # for the others a slow machine must not look like one
        monkeypatch.setattr(wire, "STALL_S", 0.2)
    async with rogue(heir, answer):
        with capture_logs() as lines:
            await heir.fetch("rogue")
            await heir.fetch("rogue")
    (line,) = [line for line in lines if line["log_level"] != "debug"]
    assert line["event"] == "kv.not_fetched" and why in line["reason"], line
    assert heir.engine.known == 0 and heir.outcome("failed") == 1, "and it is left alone for a while"


async def test_nobody_is_believed_who_does_not_know_the_secret(heir: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL_S", 0.5)
    async with rogue(heir, stall, proves=False):
        with capture_logs() as lines:
            await heir.fetch("rogue")
    assert heir.engine.known == 0 and heir.outcome("failed") == 1
    assert heir.directory.secret.hex() not in str(lines)


async def test_nobody_gets_anything_who_does_not_know_the_secret(
    redis: Redis, holder: Worker, heir: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await heir.directory.look()
    assert heir.directory.secret == holder.directory.secret, "one secret a ring"
    address = await heir.directory.address("holder")
    assert address is not None
    asking = KvRequest("model", "", list(IDS), 0, 0, 399, 1 << 30)
    with pytest.raises(PeerError):
        async with client.asked(*address, b"y" * 32, asking):
            raise AssertionError("it was let in")
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.1)
    reader, writer = await asyncio.open_connection(*address)
    heard = await asyncio.wait_for(reader.read(), HANG_S)
    assert len(heard) == len(wire.MAGIC) + wire.NONCE, "who says nothing hears nothing but a nonce"
    writer.close()
    await heir.fetch("holder")
    assert heir.engine.known == WHOLE, "and others are served on"


async def test_what_came_before_a_peer_died_is_of_use(
    holder: Worker, heir: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.prefixes.sharing.PROBE_BYTES", 1)
    monkeypatch.setattr("worker.engine.prefixes.sharing.PIECE_BYTES", 1)
    pack = listening.Connection.write

    async def dies(self: Connection, data: bytes | memoryview) -> None:
        if holder.server.bytes > 8000:
            raise PeerError("killed")
        await pack(self, data)

    monkeypatch.setattr(listening.Connection, "write", dies)
    await heir.fetch("holder")
    assert 0 < heir.engine.known < WHOLE and heir.outcome("failed") == 1
    assert heir.tally.fields().get(f"mlx_parallm_kv_fetched_tokens_total|{MODEL}", 0) == 0


async def test_a_fetch_ends_when_its_row_has_gone(
    holder: Worker, heir: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await heir.fetch("holder", is_wanted=False)
    assert holder.server.bytes == 0 and heir.engine.known == 0


async def test_the_server_gives_to_so_many_at_once_and_no_more(
    holder: Worker, heir: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_TRANSFERS", 0)
    await heir.fetch("holder")
    assert heir.outcome("refused") == 1 and holder.server.refused == 1


async def test_a_redis_that_has_lost_the_secret_gets_one_that_all_know(redis: Redis, holder: Worker) -> None:
    await redis.delete(keys.peer_secret())
    before, other = holder.directory.secret, PeerDirectory(redis, MODEL, "other")
    await other.look()
    await holder.directory.look()
    assert before != other.secret == holder.directory.secret
    assert 0 < await redis.ttl(keys.peer_secret()) <= keys.PEER_SECRET_TTL_S


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.7", "no.such.host.invalid"])
async def test_an_address_that_others_could_not_be_told_ends_the_start(redis: Redis, host: str) -> None:
    settings = load(WorkerSettings, ["--kv-transfer", "--kv-transfer-host", host])
    engine: Any = Engine()
    card = ModelCard(MODEL, 1000, 300, (1,), "", "", 8, "float32")
    exchange = KvExchange(settings, redis, engine, card, "w")
    with pytest.raises(SetupError, match="kv-transfer-host"):
        exchange.open(Tally())
    await exchange.close()


def test_a_worker_without_a_prefix_cache_has_nothing_to_transfer() -> None:
    with pytest.raises(SetupError, match="prefix-cache-gb"):
        load(WorkerSettings, ["--kv-transfer", "--prefix-cache-gb", "0"])
