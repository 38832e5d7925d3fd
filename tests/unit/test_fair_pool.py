"""Work beside the event loop: places are shared between keys, and who leaves gives them back."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from api.callers import caller, fair_pool
from api.callers.caller import Client, acting_for, asker, asking
from api.callers.fair_pool import FairPool, aside
from shared.errors import RateLimitedError, RequestCancelledError
from shared.owners import ANYBODY
from tests.unit.api_texts import codec
from tests.waiting import HANG_S, wait_until


class Turns:
    """Tasks that hold a place until they are told to go."""

    def __init__(self, pool: FairPool) -> None:
        self._pool = pool
        self.began: list[str] = []
        self._go: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, who: str, name: str) -> None:
        self._go[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(who, name))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._go[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def _hold(self, who: str, name: str) -> None:
        await self._pool.enter(who)
        self.began.append(name)
        await self._go[name].wait()
        self._pool.leave(who)


async def test_a_key_with_much_to_do_leaves_a_place_for_others_and_they_take_turns() -> None:
    turns = Turns(FairPool(places=2))
    for name in ("a1", "a2", "a3"):
        await turns.begin("a", name)
    assert turns.began == ["a1"], "the other place is for other keys"
    for who, name in (("b", "b1"), ("b", "b2"), ("c", "c1")):
        await turns.begin(who, name)
    assert turns.began == ["a1", "b1"]
    for name in ("a1", "b1", "a2", "b2", "c1", "a3"):
        await turns.end(name)
    assert turns.began == ["a1", "b1", "a2", "b2", "c1", "a3"]


async def test_who_leaves_while_waiting_takes_no_place() -> None:
    turns = Turns(FairPool(places=1))
    for name in ("a1", "a2", "a3"):
        await turns.begin("a", name)
    turns.tasks["a2"].cancel()
    await turns.end("a1")
    assert turns.began == ["a1", "a3"]
    await turns.end("a3")


async def test_who_leaves_in_the_moment_of_its_turn_gives_the_place_on() -> None:
    turns = Turns(FairPool(places=1))
    for name in ("a1", "a2", "a3"):
        await turns.begin("a", name)
    turns._go["a1"].set()
    await asyncio.sleep(0)  # a1 has left, and a2's turn has come without its knowing
    turns.tasks["a2"].cancel()
    await wait_until(lambda: turns.began == ["a1", "a3"])
    await turns.end("a3")


@pytest.mark.parametrize("order", [("waits", "holds", "waits too"), ("holds", "waits", "waits too")])
async def test_who_holds_and_who_waits_may_leave_in_one_moment(order: tuple[str, ...]) -> None:
    pool = FairPool(places=1)

    async def hold() -> None:
        await pool.enter("a")
        try:
            await asyncio.Event().wait()
        finally:
            pool.leave("a")

    tasks = {}
    for name in ("holds", "waits", "waits too"):
        tasks[name] = asyncio.create_task(hold())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    for name in order:
        tasks[name].cancel()
    ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
    await asyncio.wait_for(pool.enter("a"), HANG_S)
    pool.leave("a")
    assert not pool._turns and not pool.busy


async def test_what_waits_of_one_key_is_bounded() -> None:
    turns = Turns(FairPool(places=1, most_waiting=2))
    for name in ("a1", "a2", "a3", "a4"):
        await turns.begin("a", name)
    with pytest.raises(RateLimitedError):
        await turns.tasks["a4"]
    await turns.begin("b", "b1")  # another key's bound is its own
    for name in ("a1", "a2", "b1", "a3"):
        await turns.end(name)


async def test_a_thread_keeps_its_place_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_pool, "_pool", FairPool(places=1))
    go, left = threading.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def ask(work: Callable[[], object]) -> object:
        caller.client.set(Client("10.0.0.1", receive))
        return await aside(work)

    first = asyncio.create_task(ask(go.wait))
    await wait_until(lambda: fair_pool._pool.busy.total() == 1)
    left.set()
    with pytest.raises(RequestCancelledError):
        await first
    assert fair_pool._pool.busy.total() == 1, "the thread works on"
    left.clear()
    second: Awaitable[object] = asyncio.create_task(ask(lambda: "done"))
    go.set()
    assert await second == "done"
    assert fair_pool._pool.busy.total() == 0


def test_other_threads_go_on_while_a_long_text_is_tokenized() -> None:
    """`Tokenizer.encode` holds the interpreter's lock all along: this thread would turn once, before it began.

    The text is so long (0.2 s) that a thread which waits for a busy machine at every turn has its turns too.
    """
    text, done = "1 23 " * 200_000, threading.Event()
    began = threading.Event()

    def encode() -> None:
        began.set()
        codec().encode(text)
        done.set()

    codec()
    thread = threading.Thread(target=encode)
    thread.start()
    began.wait()
    turns = 0
    while not done.wait(0.0005):
        turns += 1
    thread.join()
    assert turns >= 5


def test_work_for_a_batch_waits_in_the_turn_of_the_key_that_made_it() -> None:
    with acting_for("", "alice"):
        assert (asking(), asker()) == ("alice", ANYBODY)
    with acting_for("team", ""):
        assert (asking(), asker().tenant) == ("tenant:team", "team")
    with acting_for("", ""):
        assert asking() != "host:", "nor in that of clients without a key"
