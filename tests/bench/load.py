"""A light load generator: raw asyncio sockets, so that the client costs less than what it measures."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class StreamFigures:
    """One streamed request: seconds to the first token, seconds between events, tokens by `usage`."""

    first_token_s: float = 0.0
    took_s: float = 0.0
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)


@dataclass
class LoadFigures:
    """One round of concurrent streams."""

    streams: list[StreamFigures]
    took_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(stream.tokens for stream in self.streams) / self.took_s

    @property
    def first_token_ms(self) -> list[float]:
        return sorted(1000 * stream.first_token_s for stream in self.streams)


async def stream_once(url: str, path: str, body: dict[str, Any]) -> StreamFigures:
    """POST a streaming request on a connection of its own and read its events to the end."""
    parts = urlsplit(url)
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    figures = StreamFigures()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
            + data
        )
        await _read_events(reader, figures, began)
    finally:
        writer.close()
    figures.took_s = time.perf_counter() - began
    return figures


async def _read_events(reader: asyncio.StreamReader, figures: StreamFigures, began: float) -> None:
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
    last = began
    pending = b""
    while block := await reader.read(65536):
        now = time.perf_counter()
        *lines, pending = (pending + block).split(b"\n")
        events = [line for line in lines if line.startswith(b"data: {")]
        for line in events:
            if b'"usage"' in line and b'"usage":null' not in line.replace(b" ", b""):
                usage = json.loads(line[6:]).get("usage") or {}
                figures.tokens = usage.get("completion_tokens", figures.tokens)
        if events:
            if not figures.first_token_s:
                figures.first_token_s = now - began
            else:
                figures.gaps_s.append(now - last)
            last = now


async def load(url: str, path: str, bodies: list[dict[str, Any]]) -> LoadFigures:
    """All bodies at once, one stream each."""
    began = time.perf_counter()
    streams = await asyncio.gather(*(stream_once(url, path, body) for body in bodies))
    return LoadFigures(list(streams), time.perf_counter() - began)
