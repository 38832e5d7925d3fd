"""Clients that read or send too slowly: they hold nothing for long, and lose nothing that they do read."""

import asyncio
import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.waiting import HANG_S, wait_until

TEXT = "word " * 45


async def connect(server: Api, receive_buffer: int = 2048) -> socket.socket:
    """A connection whose client side holds little, so that what it does not read stays with the server."""
    parts = urlsplit(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (parts.hostname, parts.port))
    return client


def head(length: int) -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


async def ask(server: Api, client: socket.socket, n: int) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 250, "stream": True, "n": n}).encode()
    await asyncio.get_running_loop().sock_sendall(client, head(len(body)) + body)


async def ended(client: socket.socket) -> bool:
    """Whether the server has let the connection go, whatever it had still to say."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(0.2):
            while await loop.sock_recv(client, 1 << 20):
                pass
            return True
    except TimeoutError:
        return False
    except OSError:
        return True


async def test_a_client_that_does_not_read_is_cut_off_and_its_sequences_are_cancelled(redis_url: str) -> None:
    async with (
        working(redis_url, lambda spec: Answer(TEXT, hold_at=40)) as worker,
        api(redis_url, slow_reader_s=0.3, send_buffer=4096) as server,
    ):
        client = await connect(server)
        await ask(server, client, 64)
        await wait_until(lambda: len(worker.specs) == 64)
        await wait_until(lambda: server.ring.frames.streams == 0)
        await wait_until(lambda: ended(client))
        client.close()
        assert (await server.http.get("/livez")).status_code == 200
        await wait_until(lambda: len(worker.cancelled) == 64)


async def test_a_client_that_falls_behind_and_catches_up_has_every_token(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.redis.tokens.feed.EVENTS_HELD", 8)  # what is beyond comes from the logs
    async with working(redis_url, lambda spec: Answer(TEXT)), api(redis_url, send_buffer=4096) as server:
        client = await connect(server)
        await ask(server, client, 12)
        await wait_until(lambda: server.ring.frames.streams == 12)
        data, loop = b"", asyncio.get_running_loop()
        while b"data: [DONE]" not in data:
            block = await loop.sock_recv(client, 4096)
            assert block, data[-500:]
            data += block
            await asyncio.sleep(0)
        client.close()
    texts: dict[int, str] = {}
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(12), TEXT)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nX: y\r\n"])
async def test_a_client_that_never_says_what_it_wants_is_cut_off(
    sent: bytes, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.connections.HEADERS_WITHIN_S", 0.2)
    async with api(redis_url) as server:
        client = await connect(server)
        await asyncio.get_running_loop().sock_sendall(client, sent)
        await wait_until(lambda: ended(client))
        client.close()


@pytest.mark.parametrize("at_once", [True, False], ids=["in one piece", "in pieces"])
async def test_a_block_of_headers_is_as_long_as_is_said_and_no_longer(redis_url: str, at_once: bool) -> None:
    loop = asyncio.get_running_loop()
    async with api(redis_url) as server:
        for size, status in ((60_000, b"200 OK"), (66_000, b"431 Request"), (100_000, b"431 Request")):
            for line in (b"X-Long: " + b"a" * size, b"\r\n".join([b"X: 123456"] * (size // 11))):
                client = await connect(server)
                sent = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n"
                for piece in (sent,) if at_once else (sent[:30_000], sent[30_000:]):
                    await loop.sock_sendall(client, piece)
                answer = await loop.sock_recv(client, 4096)
                assert answer.startswith(b"HTTP/1.1 " + status), (size, answer)
                assert status == b"200 OK" or b'"code":"headers_too_large"' in answer
                client.close()


async def test_headers_without_end_are_cut_off(redis_url: str) -> None:
    async with api(redis_url) as server:
        client = await connect(server)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"GET /livez HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                await loop.sock_sendall(client, b"X-Filler: " + b"y" * 4000 + b"\r\n")
                await asyncio.sleep(0)
        client.close()


async def test_a_body_that_does_not_come_is_not_waited_for(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.http.limits.BODY_WITHIN_S", 0.2)
    async with api(redis_url) as server:
        client = await connect(server)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, head(100) + b"{")
        async with asyncio.timeout(HANG_S):
            answer = await loop.sock_recv(client, 4096)
        client.close()
    assert b" 408 " in answer.split(b"\r\n")[0] and b"did not arrive" in answer
