"""Rank 0 against followers that a test plays: who is let in, what is compared, what counts as the loss of a rank."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_model.config import EngineConfig, SlotConfig
from ranks import meeting
from ranks.channel import FAILED, ChannelError, OutcomeSum, TurnsIn, TurnsOut
from ranks.followers import MAGIC
from ranks.messages import (
    EngineTurn,
    Fetch,
    Fetched,
    FromLead,
    Hello,
    LoadModel,
    ModelLoaded,
    Read,
    Stopping,
    TurnsTaken,
    Unit,
    UnitFailed,
)  # fmt: skip
from ranks.placement import Host, Placement
from shared.adapters import AdapterManifest
from shared.errors import EngineError, ServiceUnavailableError, SetupError
from shared.frames import TokenEvent
from shared.images.refs import Picture, VisionSpec
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.processes.ring_secret import ring_secret
from shared.sequences import SamplingParams, SequenceSpec
from shared.wire import Channel, Connection, PeerError, greet
from tests.waiting import wait_until
from worker.engine.messages import RowRequest, engine_config
from worker.engine.orders import Cancel, Submit
from worker.engine.thread import EngineThread
from worker.engine.turns import ImagePiece, RankReport, TurnFacts
from worker.group.engine_lead import EngineLead, content_of, engine_turn
from worker.group.opening import started

MODEL = Path(__file__).parents[2] / "models" / "tiny"
MANIFEST = AdapterManifest("a", 1, "lora", 4, 2.0, (), "", 0, "0" * 64, 9, 1 << 20, 0)
VISION = VisionSpec("pixtral", "[IMG]", 1, 16, 64, 1)
OURS = ModelLoaded("weights", "tokenizer", 64, VISION)


class Played:
    """Rank 1, by hand."""

    def __init__(self, redis_url: str, name: str) -> None:
        self.placed = Placement(name, 1, 2, "ring", False, (Host("one", ("127.0.0.1",)), Host("two", ("127.0.0.1",))))
        self.redis = connect(redis_url)
        self._sockets: list[socket.socket] = []

    async def close(self) -> None:
        for each in self._sockets:
            each.close()
        await self.redis.aclose()

    async def meet(self, secret: bytes = b"", **told: str) -> None:
        ours = meeting.own_member(self.placed, "ring", ["127.0.0.1:1"], MODEL)
        ours = msgspec.structs.replace(ours, told={**ours.told, **told})
        place = await meeting.look_for(self.redis, self.placed, ours)
        secret = secret or await ring_secret(self.redis)
        line, channel = await self._connect(place.address, secret, Hello(1, ours.nonce, "turns"))
        self.turns = TurnsIn(line, channel.keys[1])
        _, self.talk = await self._connect(place.address, secret, Hello(1, ours.nonce, "talk"))
        line.setblocking(True)

    async def _connect(self, address: str, secret: bytes, hello: Hello) -> tuple[socket.socket, Channel]:
        host, _, port = address.rpartition(":")
        sock = await asyncio.to_thread(socket.create_connection, (host, int(port)))
        self._sockets.append(sock)
        channel = await greet(Connection(sock), secret, MAGIC)
        await channel.say(hello)
        return sock, channel

    async def hear(self, kind: type[Any]) -> Any:
        """The next message of a kind; signs of life are passed over."""
        decode = msgspec.msgpack.Decoder(FromLead).decode
        while not isinstance(message := decode(await self.talk.receive()), kind):
            pass
        return message


@asynccontextmanager
async def led(
    redis_url: str, name: str, *flags: str, lost: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[EngineLead, Played, list[str]]]:
    """Rank 0 of a group of two, and rank 1; what rank 0 says of losses."""
    line = ["--redis", redis_url, "--model", str(MODEL), "--distributed-silence-s", "1", *flags]
    played, losses = Played(redis_url, name), list[str]()
    placed = Placement(name, 0, 2, "ring", False, played.placed.hosts)
    settings = load(WorkerSettings, line)

    def on_lost(reason: str) -> None:
        losses.append(reason)
        lost()

    lead = EngineLead(settings, placed, on_lost, engine_config(settings), SlotConfig())
    try:
        yield lead, played, losses
    finally:
        await lead.close()
        await played.close()


@asynccontextmanager
async def met(redis_url: str, name: str, *flags: str) -> AsyncIterator[tuple[EngineLead, Played, list[str]]]:
    async with led(redis_url, name, *flags) as (lead, played, losses):
        await asyncio.gather(lead.open(lambda: None), played.meet())
        await played.hear(LoadModel)
        yield lead, played, losses


async def test_a_turn_comes_as_it_was_sent_and_its_end_ends_the_follower(redis_url: str) -> None:
    spec = SequenceSpec("s", "tiny", (1, 2), SamplingParams(4, 0), deadline_ms=7)
    bare = RowRequest(spec, 2, (TokenEvent("s", 1, 0, [5], [-0.5], version="a@1"),), (Picture(b"image", [], 7, 9),))
    shown = replace(bare, pictures=(Picture(b"image", [b"pixels"], 7, 9),))
    seen = RankReport(9, 0.5, ("a@1",), images=(ImagePiece(b"image", 1, 2, 3, "F32", b"123456789012"),))
    async with met(redis_url, "turns") as (lead, played, losses):
        facts = await asyncio.to_thread(lead.turn, [Submit([shown]), Cancel("t", "abort")], seen)
        turn = await asyncio.to_thread(played.turns.next)
        assert (turn.number, *content_of(turn)) == (1, facts, [Submit([bare]), Cancel("t", "abort")])
        assert facts.read == (), "rank 1 has not read it"
        assert facts.images == seen.images
        await played.talk.say(Read(("a@1",)))
        await wait_until(lambda: lead.turn([], RankReport(10)).read == ("a@1",))
        assert not losses
        await lead.close()
        with pytest.raises(ChannelError, match="closed the connection"):
            while True:
                await asyncio.to_thread(played.turns.next)


async def test_only_who_knows_the_secret_is_let_in(redis_url: str) -> None:
    async with led(redis_url, "strangers") as (lead, played, _):
        opening = asyncio.create_task(lead.open(lambda: None))
        with pytest.raises(PeerError):
            await played.meet(secret=b"s" * 32)
        await played.meet()
        await opening


@pytest.mark.parametrize("name", ["mlx", "mlx-parallm", "the model's config.json"])
async def test_a_rank_with_something_else_is_refused_by_name(redis_url: str, name: str) -> None:
    async with led(redis_url, "else") as (lead, played, _):
        meets = asyncio.create_task(played.meet(**{name: "another"}))
        with pytest.raises(SetupError, match=f"rank 1 .* has {name} 'another'"):
            await lead.open(lambda: None)
        meets.cancel()


@pytest.mark.parametrize(("what", "other"), [("weights", "others"), ("vision", None)])
async def test_a_rank_that_has_loaded_something_else_is_refused(redis_url: str, what: str, other: Any) -> None:
    async with met(redis_url, "loaded") as (lead, played, _):
        lead._ours = OURS
        await played.talk.say(msgspec.structs.replace(OURS, **{what: other}))
        await wait_until(lead.all_loaded.done)
        with pytest.raises(SetupError, match=rf"rank 1 .* has loaded other {what}"):
            lead.all_loaded.result()


async def silent(lead: EngineLead, played: Played) -> None:
    await played.talk.say(OURS)


async def cut(lead: EngineLead, played: Played) -> None:
    played.talk._connection.close()


async def cut_before_it_read(lead: EngineLead, played: Played) -> None:
    """The connection is reset then, where it ends otherwise."""
    talk = played.talk._connection._socket

    def is_told() -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(talk.recv(1, socket.MSG_PEEK))
        return False

    await wait_until(is_told)
    talk.close()


async def out_of_step(lead: EngineLead, played: Played) -> None:
    lead.turn([], RankReport(1))
    lead.turned([TokenEvent("s", 1, 0, [5], [-0.5])])
    theirs = OutcomeSum()
    theirs.add(1, [TokenEvent("s", 1, 0, [6], [-0.5])])
    await played.talk.say(TurnsTaken(theirs.turn, theirs.sum))


async def behind(lead: EngineLead, played: Played) -> None:
    lead.turn([], RankReport(1))
    lead.turned([])
    while not lead.lost:  # it lives, and its engine does not
        await played.talk.say(TurnsTaken(0, 0))
        await asyncio.sleep(0.05)


async def learned_otherwise(lead: EngineLead, played: Played) -> None:
    lead.unit(b"work")
    lead.united(b"17")
    theirs = OutcomeSum()
    theirs.add_unit(1, b"18")
    await played.talk.say(TurnsTaken(theirs.turn, theirs.sum))


async def failed_there(lead: EngineLead, played: Played) -> None:
    lead.unit(b"work")  # and we are in it
    await played.talk.say(UnitFailed(1, "no memory"))
    while not lead.lost:
        await played.talk.say(TurnsTaken(1, 0))
        await asyncio.sleep(0.05)


async def failed_alone(lead: EngineLead, played: Played) -> None:
    theirs = OutcomeSum()
    for number, ask in enumerate((b"work", b""), 1):
        lead.unit(ask)
        lead.united(b"")
        await played.talk.say(UnitFailed(number, "no memory" if number == 1 else "nothing is under way"))
        theirs.add_unit(number, FAILED)
    await played.talk.say(TurnsTaken(theirs.turn, theirs.sum))


async def failed_here(lead: EngineLead, played: Played) -> None:
    lead.unit(b"work")
    with pytest.raises(ServiceUnavailableError, match="rank 1"):
        await asyncio.to_thread(lead.failed)


@pytest.mark.parametrize(
    ("misdeed", "said"),
    [
        (silent, "said nothing for 1 s"),
        (cut, "closed"),
        (cut_before_it_read, "closed"),
        (out_of_step, "something else in turn 1"),
        (behind, "not finished turn 1"),
        (learned_otherwise, "something else in turn 1"),
        (failed_there, "no memory"),
        (failed_alone, "no memory"),
        (failed_here, "has not failed where rank 0 has"),
    ],
)
async def test_what_counts_as_the_loss_of_a_rank(redis_url: str, misdeed: Callable[..., Any], said: str) -> None:
    turn_s = "1" if misdeed is behind else "60"  # one limit at a time, so that none comes before another
    async with met(redis_url, misdeed.__name__, "--distributed-turn-s", turn_s) as (lead, played, losses):
        waits = asyncio.create_task(lead.unless_lost(asyncio.Event().wait()))
        with contextlib.suppress(PeerError):  # rank 0 has cut us off
            await misdeed(lead, played)
        with pytest.raises(ServiceUnavailableError, match="rank 1") as raised:
            await waits
        assert said in raised.value.message
        assert len(losses) == 1 and [rank.state for rank in lead.ranks()] == ["lost", "lost"]
        with pytest.raises(ServiceUnavailableError):
            while True:
                lead.turn([], RankReport(2))


async def test_equal_turns_are_no_loss(redis_url: str) -> None:
    async with met(redis_url, "equal") as (lead, played, losses):
        theirs = OutcomeSum()
        for number in (1, 2):
            lead.turn([], RankReport(number))
            events = [TokenEvent("s", 1, number, [5], [-0.5])]
            lead.turned(events)
            theirs.add(number, events)
            await played.talk.say(TurnsTaken(theirs.turn, theirs.sum))
        await wait_until(lambda: lead.followers[0].turn == 2)
        assert lead.ranks()[1].behind == 0 and not losses


async def test_work_comes_whole_however_long_and_may_fail_everywhere(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.lead.LONG_ASK", 4)
    async with met(redis_url, "units") as (lead, played, losses):
        asks = [b"twelve bytes", b"", b"4by4"]
        for number, ask in enumerate(asks, 1):
            lead.unit(ask)
            assert await asyncio.to_thread(played.turns.next) == Unit(number, ask)
            if number < 3:
                lead.united(b"17" if number == 2 else b"")
        await played.talk.say(UnitFailed(3, "bad data"))
        await asyncio.to_thread(lead.failed)
        theirs = OutcomeSum()
        for number, told in enumerate((b"", b"17", FAILED), 1):
            theirs.add_unit(number, told)
        await played.talk.say(TurnsTaken(theirs.turn, theirs.sum))
        await wait_until(lambda: lead.followers[0].turn == 3)
        assert lead.followers[0].sum == lead.sums[3] and not losses, "the group goes on"
        assert not lead.followers[0].failure, "what all have had is no fault of one"


async def test_a_rank_that_is_told_to_end_lets_rank_0_end_in_order(redis_url: str) -> None:
    async with met(redis_url, "stops") as (lead, played, losses):
        told = asyncio.Event()
        lead._on_stopping = told.set
        await played.talk.say(Stopping())
        await told.wait()
        assert not losses


async def test_a_rank_that_cannot_get_an_adapter_says_why(redis_url: str) -> None:
    async with met(redis_url, "adapters") as (lead, played, losses):
        for fault in ("", "its disk is full"):
            bringing = asyncio.create_task(lead.bring(MANIFEST))
            asked = await played.hear(Fetch)
            assert asked.manifest == MANIFEST
            await played.talk.say(Fetched(asked.number, fault))
            if not fault:
                await bringing
        with pytest.raises(EngineError, match=r"rank 1 .* cannot get adapter a@1: its disk is full"):
            await bringing
        assert not losses, "the group goes on"


async def test_a_turn_that_comes_again_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        out, into = TurnsOut(near, b"k" * 32), TurnsIn(far, b"k" * 32)
        data = msgspec.msgpack.encode(engine_turn(1, TurnFacts(5), []))
        out.send(data)
        turn = into.next()
        assert isinstance(turn, EngineTurn) and content_of(turn) == (TurnFacts(5), [])
        TurnsOut(near, b"k" * 32).send(data)  # the same frame, as somebody on the way could send it
        with pytest.raises(ChannelError, match="not authentic"):
            into.next()


async def test_a_rank_0_whose_others_never_come_can_be_told_to_end(redis_url: str) -> None:
    async with led(redis_url, "alone") as (lead, _, losses):
        stop = asyncio.Event()
        waits = asyncio.create_task(started(EngineThread(EngineConfig("unused"), print, print), lead, stop))
        done, _ = await asyncio.wait([waits], timeout=2 * meeting.LOOK_S)
        assert not done
        stop.set()
        assert await waits is None and not losses


async def test_a_rank_whose_process_ends_while_rank_0_waits_is_no_order_to_end(redis_url: str) -> None:
    stop = asyncio.Event()
    async with led(redis_url, "ends early", lost=stop.set) as (lead, _, losses):
        waits = asyncio.create_task(started(EngineThread(EngineConfig("unused"), print, print), lead, stop))
        done, _ = await asyncio.wait([waits], timeout=2 * meeting.LOOK_S)
        assert not done
        lead._on_exit(1, 2)
        with pytest.raises(SetupError, match="rank 1's process has ended with exit code 2"):
            await waits
        assert losses


async def test_nothing_is_left_in_redis(redis_url: str) -> None:
    async with met(redis_url, "keys") as (_, played, _):
        await meeting.leave(played.redis, played.placed)
        left = [key async for key in played.redis.scan_iter(keys.group_member.pattern.replace("*", "keys", 1))]
        assert not left and await played.redis.get(keys.group_meeting("keys")) is None
