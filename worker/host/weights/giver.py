"""Gives the files of this host's models to other hosts of its ring.

Invariants. Given are the files of a model that this host offers itself, with the very hash that is asked for, and of
these only the ones that it has named before. At most MOST_AT_ONCE hosts get files at once.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from shared.wire import Channel, PeerError
from worker.host.weights.files import MAGIC, PIECE_BYTES, SendFile, WeightFiles, WeightsRequest, files_of
from worker.peers.listening import Listener

log = structlog.get_logger()

MOST_AT_ONCE = 2
GIVING_S = 6 * 3600.0


class WeightGiver:
    """Listens for hosts that need weights."""

    def __init__(self, secret: Callable[[], bytes], folder_of: Callable[[WeightsRequest], Path | None]) -> None:
        self._folder_of = folder_of
        self._under_way = 0
        self.bytes = 0  # given
        self._listener = Listener(secret, self._answer, self._failed, answer_s=GIVING_S, magic=MAGIC)

    def listen(self, host: str) -> int:
        """Begin; the port. OSError where this is no address of this machine."""
        return self._listener.listen(host)

    async def close(self) -> None:
        """Stop listening and close all connections."""
        await self._listener.close()

    async def _answer(self, channel: Channel) -> None:
        ask = await channel.hear(WeightsRequest)
        folder = self._folder_of(ask)
        if folder is None or self._under_way >= MOST_AT_ONCE:
            why = "it has no such weights" if folder is None else f"it gives weights to {self._under_way} hosts now"
            await channel.say(WeightFiles(refusal=why))
            return
        self._under_way += 1
        try:
            files = await asyncio.to_thread(files_of, folder)
            sizes = {name: path.stat().st_size for name, path in files.items()}
            await channel.say(WeightFiles(sizes))
            for _ in sizes:
                try:
                    want = await channel.hear(SendFile)
                except PeerError:  # it needs no more
                    return
                if not 0 <= want.begin <= sizes.get(want.name, -1):
                    raise PeerError("it asks for what was not offered")
                await self._send(channel, files[want.name], want.begin, sizes[want.name])
        finally:
            self._under_way -= 1

    async def _send(self, channel: Channel, path: Path, begin: int, size: int) -> None:
        with path.open("rb") as file:
            file.seek(begin)
            while begin < size:
                data = await asyncio.to_thread(file.read, min(PIECE_BYTES, size - begin))
                if not data:
                    raise PeerError(f"{path.name} has become shorter")
                await channel.send(data)
                begin += len(data)
                self.bytes += len(data)

    def _failed(self, peer: str, reason: str) -> None:
        log.warning("weights.not_given", peer=peer, reason=reason)
