"""Long bodies are read in a process apart, which is killed when it takes too long or its client has left."""

import asyncio
import os
import re
import time
from pathlib import Path

import msgspec
import pytest

from api.callers import caller
from api.callers.caller import Client
from api.checks.body_readers import BodyReaders
from api.tinker.wire import check_items
from shared.errors import InvalidRequestError, RequestCancelledError, TokenOutOfRangeError
from tests.waiting import wait_until

LONG = b"a" * 100


def pid(body: bytes, asked: bytes) -> bytes:
    return msgspec.msgpack.encode((os.getpid(), len(body), msgspec.msgpack.decode(asked)))


def refuse(body: bytes, _: bytes) -> bytes:
    raise TokenOutOfRangeError(f"{len(body)} are too many", param="data[0]")


def compute(_: bytes, __: bytes) -> bytes:
    while True:
        pass


def sleep(_: bytes, path: bytes) -> bytes:
    Path(msgspec.msgpack.decode(path)).write_text(str(os.getpid()))
    time.sleep(1000)
    return b""


async def test_a_short_body_is_read_here_and_a_long_one_in_a_process_which_stays() -> None:
    readers = BodyReaders(short_bytes=50)
    async with readers.reading(b"a" * 50) as reading:
        assert msgspec.msgpack.decode(await reading.call(pid, 3)) == [os.getpid(), 50, 3]
    seen = set()
    for _ in range(2):
        async with readers.reading(LONG) as reading:
            for asked in ("x", "y"):
                process, length, said = msgspec.msgpack.decode(await reading.call(pid, asked))
                assert (length, said) == (100, asked)
                seen.add(process)
    assert len(seen) == 1 and os.getpid() not in seen
    readers.close()


async def test_errors_come_back_as_they_are_and_the_process_stays() -> None:
    readers = BodyReaders(short_bytes=50)
    with pytest.raises(TokenOutOfRangeError, match="100 are too many") as caught:
        async with readers.reading(LONG) as reading:
            first = msgspec.msgpack.decode(await reading.call(pid, 0))[0]
            await reading.call(refuse, None)
    assert caught.value.param == "data[0]"
    async with readers.reading(LONG) as reading:
        assert msgspec.msgpack.decode(await reading.call(pid, 0))[0] == first
    readers.close()


async def test_what_takes_too_much_computing_is_refused_and_the_next_body_gets_a_new_process() -> None:
    readers = BodyReaders(short_bytes=50, computing_s=0.2)
    with pytest.raises(InvalidRequestError, match="send less"):
        async with readers.reading(LONG) as reading:
            await reading.call(compute, None)
    async with readers.reading(LONG) as reading:
        assert msgspec.msgpack.decode(await reading.call(pid, 0))[1] == 100
    readers.close()


async def test_a_process_whose_client_has_left_is_killed(tmp_path: Path) -> None:
    readers, left, noted = BodyReaders(short_bytes=50), asyncio.Event(), tmp_path / "pid"

    async def receive() -> dict[str, object]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def ask() -> None:
        caller.client.set(Client("10.0.0.1", receive))
        async with readers.reading(LONG) as reading:
            await reading.call(sleep, str(noted))

    asking = asyncio.create_task(ask())
    await wait_until(lambda: noted.exists() and bool(noted.read_text()))
    left.set()
    with pytest.raises(RequestCancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
    async with readers.reading(LONG) as reading:
        assert msgspec.msgpack.decode(await reading.call(pid, 0))[1] == 100
    readers.close()


KINDS = {"Top": {1: "*Part", 2: "*int64", 3: "bytes"}, "Part": {1: "?Part", 2: "string"}}


@pytest.mark.parametrize(
    ("body", "items"),
    [
        (b"", 0),
        (b"\x0a\x00" * 3, 3),
        (b"\x0a\x04\x0a\x02\x12\x00", 3),
        (b"\x12\x03\x01\x01\x01", 4),
        (b"\x1a\x03\x0a\x00\x00", 1),
        (b"\x7a\x02\x0a\x00" + b"\x08\x05" + b"\x15\x00\x00\x00\x00" + b"\x11" + bytes(8), 4),
    ],
    ids=["nothing", "messages", "nested", "a packed list", "bytes", "what is not described"],
)
def test_items_of_a_protobuf_message_are_counted_at_any_depth(body: bytes, items: int) -> None:
    check_items(body, "Top", KINDS, items)
    if items:
        with pytest.raises(InvalidRequestError, match=f"more than {items - 1} items"):
            check_items(body, "Top", KINDS, items - 1)


@pytest.mark.parametrize("body", [b"\x0a", b"\x0a\x05\x00", b"\xff" * 12, b"\x0b\x0c", b"\x08", b"\x15\x00"])
def test_what_is_no_protobuf_message_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape("no protobuf message")):
        check_items(body, "Top", KINDS, 100)
