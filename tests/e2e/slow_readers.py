"""Hundreds of clients that ask for a stream and do not read it; others are answered, and nothing of them stays.

`python -m tests.e2e.slow_readers [--readers 300] [--tokens 200]` starts a ring with `--slow-reader-s 5`. A third of the
readers read nothing, a third a few bytes a second, and a third leave without a word. Meanwhile a client that reads asks
one question after another and compares the answers. It prints what the api held, and exits with 1 if one differed, or
if a row, a queue entry or a connection is left at the end.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tests.e2e.rings import MODEL, Ring, ring
from tests.waiting import HANG_S, comes_true, wait_until

SLOW_S = 5.0
ASKED = {"model": MODEL, "prompt": "What is 3 + 4?", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
WIDE = {"stream": True, "logprobs": 20, "return_token_ids": True, "n": 2}  # many bytes a token


class Reader:
    """One connection whose receive buffer is small; `pace_s`: seconds between a few bytes, 0: it reads nothing.

    It goes after four times `patience_s`; one that reads nothing reads all after half of that.
    """

    def __init__(
        self, url: str, body: dict[str, Any], pace_s: float, *, leaves: bool = False, patience_s: float = SLOW_S
    ) -> None:
        self._place, self._body = urlsplit(url), json.dumps(body).encode()
        self._pace_s, self._leaves, self._patience_s = pace_s, leaves, patience_s
        self.end = ""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            # The segments of loopback are so large that the api's kernel would buffer megabytes.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
            sock.setblocking(False)
            assert self._place.hostname is not None and self._place.port is not None
            await loop.sock_connect(sock, (self._place.hostname, self._place.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._place.netloc}\r\nContent-Type: application/json\r\n"
            await loop.sock_sendall(sock, f"{head}Content-Length: {len(self._body)}\r\n\r\n".encode() + self._body)
            if self._leaves:
                await asyncio.sleep(1)
                self.end = "left"
                return
            if not self._pace_s:
                await asyncio.sleep(2 * self._patience_s)
            self.end = await self._read(loop, sock)

    async def _read(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> str:
        """Until the api closes: "cut" without the stream's end, else "ended"."""
        read, until = b"", time.monotonic() + 4 * self._patience_s
        try:
            while data := await loop.sock_recv(sock, 64 if self._pace_s else 65_536):
                read = (read + data)[-200:]
                if b"[DONE]" in read or b"\r\n0\r\n\r\n" in read:
                    return "ended"
                if time.monotonic() > until:
                    return "left"
                await asyncio.sleep(self._pace_s)
        except OSError:
            return "cut"
        return "cut"


def api_of(served: Ring) -> psutil.Process:
    return next(each for each in psutil.Process(served.server.popen.pid).children() if "api" in each.cmdline())


def clients(api: psutil.Process, url: str) -> int:
    """Connections of clients; those to Redis stay in their pool."""
    return sum(each.laddr.port == urlsplit(url).port and bool(each.raddr) for each in api.net_connections())


async def run(served: Ring, readers: int, tokens: int) -> list[str]:
    """What is wrong."""
    api, wide = api_of(served), ASKED | WIDE | {"max_tokens": tokens}
    wrong: list[str] = []
    async with httpx.AsyncClient(base_url=served.openai_url, timeout=HANG_S) as http:
        said = (await http.post("/completions", json=ASKED)).raise_for_status().json()["choices"][0]["text"]
        before, files = api.memory_info().rss, api.num_fds()
        made = [Reader(served.url, wide, (0.0, 1.0)[at % 3 == 1], leaves=at % 3 == 2) for at in range(readers)]
        running = asyncio.gather(*(reader.run() for reader in made))
        most, took, refused = before, list[float](), Counter[int]()
        while not running.done():
            began = time.monotonic()
            answer = await http.post("/completions", json=ASKED)
            if answer.status_code == 200:
                took.append(time.monotonic() - began)
                if answer.json()["choices"][0]["text"] != said:
                    wrong.append(f"another answer: {answer.text[:200]}")
            else:
                refused[answer.status_code] += 1
            most = max(most, api.memory_info().rss)
            await asyncio.sleep(0.2)
            if all(reader.end for reader in made):
                break
        await running

        async def at_rest() -> bool:
            health = (await http.get("/health", headers={"Accept": "application/json"})).json()
            return not any(worker["rows"] for worker in health["workers"]) and not health["queue_depth"]

        http.base_url = httpx.URL(served.url)
        try:
            await wait_until(at_rest)
        except AssertionError:
            wrong.append("rows are left")
        ends = Counter(reader.end for reader in made)
        print(
            f"{readers} readers: {dict(ends)}; meanwhile {len(took)} answers, longest {max(took):.1f} s, refused "
            f"{dict(refused)}; the api held {before / 2**20:.0f} MiB and {files} files, at most {most / 2**20:.0f} MiB"
            f", then {api.memory_info().rss / 2**20:.0f} MiB and {api.num_fds()} files"
        )
    if not await comes_true(lambda: clients(api, served.url) <= 1, HANG_S):  # a slow machine closes them later
        wrong.append(f"{clients(api, served.url)} clients are connected")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    flags = ("--slow-reader-s", str(SLOW_S), "--max-batch-size", "32")
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder), *flags) as served:
        wrong = asyncio.run(run(served, args.readers, args.tokens))
    print("\n".join(wrong) or "nothing wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
