"""What readers that hardly read cost others: the gaps of eight streams with and without hundreds of them.

`python -m tests.bench.slow_readers [--readers 350] [--tokens 150] [--rounds 5]`. In each round, eight streams of known
tokens run alone; while answers are computed for as many readers that read all at once; the same for readers that read
nothing or 64 bytes a second; and beside those, once their answers are computed. No reader is cut off meanwhile, and a
stream that is refused because the api lags comes again after a second. Ratios are of the same round. It exits with 1 if
a stream lacks a token or has another one.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.process.loops import cancel
from shared.process.open_files import raise_file_limit
from tests.bench.overload import at
from tests.e2e.rings import Ring, ring
from tests.e2e.slow_readers import ASKED, WIDE, Reader, api_of, clients
from tests.waiting import wait_until

STREAMS, TOKENS = 8, 400
STAYS_S = 3600.0
ALONE, ALL, LITTLE, COMPUTED = "alone", "while readers read all", "while readers read little", "beside slow readers"


class Stream:
    """A client that reads a stream at once, and what came when."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self._place, self._body = urlsplit(url), json.dumps(body).encode()
        self._read = b""
        self._times: list[float] = []
        self.refused = 0
        self.begun = asyncio.Event()

    async def run(self) -> None:
        await self._ask()
        while self._read.startswith(b"HTTP/1.1 503"):  # the api lags while many requests are under way
            self.refused += 1
            await asyncio.sleep(1)
            await self._ask()
        self.begun.set()  # also where nothing came

    async def _ask(self) -> None:
        self._read = b""
        reader, writer = await asyncio.open_connection(self._place.hostname, self._place.port)
        with contextlib.closing(writer):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._place.netloc}\r\nContent-Type: application/json\r\n"
            rest = f"Connection: close\r\nContent-Length: {len(self._body)}\r\n\r\n"
            writer.write(f"{head}{rest}".encode() + self._body)
            while data := await reader.read(65_536):
                self._read += data
                if b"data: " in data:
                    self._times.append(time.perf_counter())
                    self.begun.set()

    @property
    def size(self) -> int:
        return len(self._read)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self._times)]

    @property
    def ids(self) -> list[int]:
        """All tokens; [] when the stream has no end."""
        *events, end = [line[6:].strip() for line in self._read.split(b"\n") if line.startswith(b"data: ")] or [b""]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return [id for choice in choices for id in choice.get("token_ids") or ()] if end == b"[DONE]" else []


class SlowReaders:
    """Rounds on one ring."""

    def __init__(self, served: Ring, readers: int, tokens: int) -> None:
        self._served, self._readers = served, readers
        self._api, self._wide = api_of(served), ASKED | WIDE | {"max_tokens": tokens}
        self._others = clients(self._api, served.url)  # that have nothing to do with this
        self._expected: list[list[int]] = []
        self.gaps_s: dict[str, list[list[float]]] = {ALONE: [], ALL: [], LITTLE: [], COMPUTED: []}  # of each round
        self.wrong: list[str] = []

    async def run(self, rounds: int) -> None:
        streams = self._streams()
        await asyncio.gather(*(stream.run() for stream in streams))
        self._expected = [stream.ids for stream in streams]
        assert all(len(ids) == TOKENS for ids in self._expected)
        for number in range(rounds):
            await self._measure(ALONE)
            for part in (self._all_read, self._few_read)[:: 1 if number % 2 else -1]:
                await part()
                await wait_until(lambda: clients(self._api, self._served.url) <= self._others)
                await computed(self._served)

    async def _all_read(self) -> None:
        readers = [Stream(self._served.url, self._wide) for _ in range(self._readers)]
        await asyncio.gather(*await self._measure(ALL, readers))
        print(f"each of {self._readers} readers read {readers[0].size / 1e3:.0f} kB", flush=True)

    async def _few_read(self) -> None:
        url, before = self._served.url, self._api.memory_info().rss
        readers = [Reader(url, self._wide, float(i % 2), patience_s=STAYS_S) for i in range(self._readers)]
        running = await self._measure(LITTLE, readers)
        await computed(self._served)
        await self._measure(COMPUTED)
        there, now = clients(self._api, url) - self._others, self._api.memory_info().rss
        print(f"{there} slow readers stayed; the api: {before / 1e6:.0f} -> {now / 1e6:.0f} MB", flush=True)
        await cancel(running)

    async def _measure(self, kind: str, others: Sequence[Stream | Reader] = ()) -> list[asyncio.Task[None]]:
        """Streams, and others that come once these have begun; the tasks of the others."""
        streams = self._streams()
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        beside = [asyncio.create_task(other.run()) for other in others]
        await asyncio.gather(*tasks)
        wrong = sum(stream.ids != ids for stream, ids in zip(streams, self._expected, strict=True))
        if wrong:
            self.wrong.append(f"{kind}: {wrong} streams with tokens that are missing or wrong")
        gaps_s = sorted(gap for stream in streams for gap in stream.gaps_s)
        self.gaps_s[kind].append(gaps_s)
        p50, p99, most = (1000 * at(gaps_s, percent) for percent in (50, 99, 100))
        refused = sum(stream.refused for stream in streams)
        print(f"{kind}: p50 {p50:.1f}, p99 {p99:.1f}, longest {most:.0f} ms; {refused} times refused", flush=True)
        return beside

    def _streams(self) -> list[Stream]:
        body = ASKED | {"max_tokens": TOKENS, "stream": True, "return_token_ids": True}
        return [Stream(self._served.url, body | {"prompt": f"What is {i} + 4?"}) for i in range(STREAMS)]


async def computed(served: Ring) -> None:
    """Wait until no sequence is in a worker's hands."""
    while True:
        await asyncio.sleep(1)
        models: Any = (await asyncio.to_thread(served.health))["models"]
        if not any(
            count for model in models.values() for field in ("waiting", "leased") for count in model[field].values()
        ):
            return


def shown(gaps_s: dict[str, list[list[float]]]) -> None:
    for over, under in ((COMPUTED, ALONE), (LITTLE, ALL), (LITTLE, ALONE)):
        pairs = list(zip(gaps_s[over], gaps_s[under], strict=True))
        for percent in (50, 99):
            ratios = sorted(at(one, percent) / at(other, percent) for one, other in pairs)
            print(f"{over} over {under}, p{percent}: {statistics.median(ratios):.2f} "
                  f"({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.slow_readers", description=__doc__)
    parser.add_argument("--readers", type=int, default=350)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    raise_file_limit()
    stays = ("--slow-reader-s", "--first-token-timeout-s", "--request-timeout-s")
    flags = (*(each for name in stays for each in (name, str(STAYS_S))), "--max-batch-size", "32")
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder), *flags) as served:
        bench = SlowReaders(served, chosen.readers, chosen.tokens)
        asyncio.run(bench.run(chosen.rounds))
    shown(bench.gaps_s)
    print("\n".join(bench.wrong) or f"every stream had its {TOKENS} tokens")
    return int(bool(bench.wrong))


if __name__ == "__main__":
    sys.exit(main())
