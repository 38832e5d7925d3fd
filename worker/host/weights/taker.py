"""Gets the files of a model from another host of the ring.

Invariants. A model's files are in a folder that is named by their hash, and nowhere else. Until all of them are here
its name ends in `.part`; a weight file that was cut off is continued there, whoever gives the rest. That the hash is
right is checked by the process that describes the model, before it is offered or loaded.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import structlog

from shared.wire import Channel, Connection, PeerError, PeerRefusalError, greet
from worker.host.weights.files import MAGIC, PIECE_BYTES, SHA256, SendFile, WeightFiles, WeightsRequest
from worker.peers.listening import connected

log = structlog.get_logger()

LEAST_FREE = 2 << 30  # bytes of the disk that stay free


class WeightTaker:
    """The weights that this host has got from others, in one folder."""

    def __init__(self, folder: Path, secret: Callable[[], bytes], most_bytes: int = 0) -> None:
        """`most_bytes`: of the folder; 0: no bound, and nothing is ever removed."""
        self._folder, self._secret, self._most = folder, secret, most_bytes

    def stored(self, sha256: str) -> Path | None:
        """Folder of the weights with a hash; None while they are not all here."""
        folder = self._folder / sha256
        return folder if SHA256.fullmatch(sha256) and folder.is_dir() else None

    def forget(self, sha256: str) -> None:
        """Remove weights that are others than their name says."""
        if (folder := self.stored(sha256)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def note_use(self, sha256: str) -> None:
        """Let these weights be the ones that were used last."""
        if (folder := self.stored(sha256)) is not None:
            os.utime(folder)

    async def take(
        self,
        ask: WeightsRequest,
        addresses: Mapping[str, str],
        advance: Callable[[float], None],
        in_use: Collection[str] = (),
    ) -> str:
        """Get the files from the first host that gives them; why none has, "" when they are here.

        `addresses`: by name of the host. `in_use`: hashes of weights that stay, however full the folder is.
        """
        reasons = []
        for host, address in addresses.items():
            try:
                await self._take_from(address, ask, advance, in_use)
            except (PeerError, OSError) as error:
                reasons.append(f"{host}: {error}")
                log.warning("weights.not_taken", model=ask.model, host=host, reason=str(error))
            else:
                log.info("weights.taken", model=ask.model, host=host)
                return ""
        return f"no host has given its weights: {'; '.join(reasons)}"

    async def _take_from(
        self, address: str, ask: WeightsRequest, advance: Callable[[float], None], in_use: Collection[str]
    ) -> None:
        if not SHA256.fullmatch(ask.sha256):
            raise PeerError("the hash of its weights is not known")
        host, _, port = address.rpartition(":")
        connection = Connection(await connected(host, int(port)))
        try:
            channel = await greet(connection, self._secret(), MAGIC)
            await channel.say(ask)
            files = await channel.hear(WeightFiles)
            if files.refusal:
                raise PeerRefusalError(files.refusal[:200])
            sizes, done = files.checked().sizes, 0
            whole, part = max(1, sum(sizes.values())), self._folder / f"{ask.sha256}.part"
            await asyncio.to_thread(self._make_room, part, whole, in_use)
            for name, size in sorted(sizes.items()):
                await _file(channel, part / name, size, lambda here, done=done: advance((done + here) / whole))  # type: ignore[misc]
                done += size
            await asyncio.to_thread(part.rename, self._folder / ask.sha256)
        finally:
            connection.close()

    def _make_room(self, part: Path, whole: int, in_use: Collection[str]) -> None:
        """Remove what was used least recently, where the folder has a bound; PeerError where there is no room."""
        part.mkdir(parents=True, exist_ok=True)
        missing, taken = whole - _bytes(part), sum(map(_bytes, self._folder.iterdir()))
        others = [each for each in self._folder.iterdir() if each != part and _hash_of(each) not in ("", *in_use)]
        for oldest in sorted(others, key=lambda each: each.stat().st_mtime):
            if not self._most or (taken + missing <= self._most and _free(part) >= missing + LEAST_FREE):
                break
            log.info("weights.removed", folder=oldest.name)
            taken -= _bytes(oldest)
            shutil.rmtree(oldest, ignore_errors=True)
        if self._most and taken + missing > self._most:
            raise PeerError(f"{missing} bytes are to come, and --weights-cache-gb leaves {self._most - taken}")
        if (free := _free(part)) < missing + LEAST_FREE:
            raise PeerError(f"{missing} bytes are to come, and {free} are free at {self._folder}")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def _hash_of(folder: Path) -> str:
    """The hash by which a folder of weights is named, complete or not; "" for anything else."""
    name = folder.name.removesuffix(".part")
    return name if SHA256.fullmatch(name) and folder.is_dir() else ""


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _begun(path: Path, size: int) -> int:
    """Bytes of a weight file that are here; what no hash covers is small, and got anew."""
    begin = path.stat().st_size if path.suffix == ".safetensors" and path.exists() else 0
    return begin if begin <= size else 0


async def _file(channel: Channel, path: Path, size: int, advance: Callable[[int], None]) -> None:
    """Get one file, from where it was cut off."""
    begin = await asyncio.to_thread(_begun, path, size)
    await channel.say(SendFile(path.name, begin))
    with path.open("r+b" if begin else "wb") as file:
        file.seek(begin)
        while begin < size:
            data = await channel.receive(PIECE_BYTES)
            if not 0 < len(data) <= size - begin:
                raise PeerError(f"it sent {len(data)} bytes of {path.name}, of which {size - begin} are missing")
            await asyncio.to_thread(file.write, data)
            begin += len(data)
            advance(begin)
