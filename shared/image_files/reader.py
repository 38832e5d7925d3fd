"""Asks a few processes about image files, one file at a time each; one that takes too long is ended with its process.

Tenants take turns by the time that their files have taken.

Invariants. No file is decoded in this process. A process that was given up, or has died over a file, answers nobody
again, and the file is refused.
"""

import asyncio

import msgspec

from shared.errors import InvalidRequestError
from shared.image_files.pixels import ImageSize, Tiles
from shared.image_files.process import ImageAnswer, ImageQuestion
from shared.images.refs import Detail, VisionSpec
from shared.process.call_process import CallProcess, LostProcessError
from shared.turns import FairTurns

PLACES = 2
LIMIT_S = 20.0  # that one file may take, on a machine with little time to spare
MEMORY_BYTES = 2 << 30  # of one process: 40 million pixels take 160 MB in each of a few copies

_answer = msgspec.msgpack.Decoder(ImageAnswer)


class ImageReader:
    """The processes of one api or worker; they start with the first file."""

    def __init__(self, places: int = PLACES, limit_s: float = LIMIT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._turns = FairTurns(places)
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self.idle: list[CallProcess] = []

    async def size(self, data: bytes) -> ImageSize:
        """Size of an image that can be decoded; InvalidRequestError states what is wrong with any other file."""
        answer = await self._ask(ImageQuestion(data))
        return ImageSize(answer.width, answer.height)

    async def tiles(self, data: bytes, vision: VisionSpec, detail: Detail, tenant: str = "") -> Tiles:
        """The tiles that the model sees, in the tenant's turn; errors as in `size`."""
        answer = await self._ask(ImageQuestion(data, vision, detail), tenant)
        return Tiles(answer.width, answer.height, answer.tiles)

    async def thumbnail(self, data: bytes, side: int) -> bytes:
        """A PNG of at most so many pixels on a side; errors as in `size`."""
        return (await self._ask(ImageQuestion(data, thumbnail=side))).thumbnail

    def close(self) -> None:
        """Kill all processes that decode images."""
        while self.idle:
            self.idle.pop().kill()

    async def _ask(self, question: ImageQuestion, tenant: str = "") -> ImageAnswer:
        async with self._turns.turn(tenant):
            process = await self._process()
            try:
                async with asyncio.timeout(self._limit_s):
                    await process.send(msgspec.msgpack.encode(question))
                    answer = _answer.decode(await process.receive())
            except (TimeoutError, LostProcessError) as error:
                process.kill()
                took = f"takes more than {self._limit_s:g} s to decode" if isinstance(error, TimeoutError) else ""
                raise InvalidRequestError(f"the image {took or 'ends the process that decodes it'}") from None
            except BaseException:
                process.kill()
                raise
            self.idle.append(process)
        if answer.complaint:
            raise InvalidRequestError(answer.complaint)
        return answer

    async def _process(self) -> CallProcess:
        while self.idle:
            process = self.idle.pop()
            if process.alive:
                return process
            process.kill()
        return await CallProcess.start("shared.image_files.process", [str(self._memory_bytes)])
