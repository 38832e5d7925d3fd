"""Checkpoints out of the ring, by addresses that need no key: Tinker's SDK reads them with none.

An address has 256 random bits, of which Redis keeps the digest, for a quarter of an hour; a client with the address may
read that checkpoint, so only its owner gets one. It stands for what had the checkpoint's name when it was asked for.
0.24 downloads an archive of any checkpoint, 0.38 the files of *external weights* one by one.

Invariants. Files are made off the event loop, MOST_MADE at a time, and leave the disk's directory before the first
byte is sent, so that nothing stays of a process that dies; MOST_OPEN of them are sent at once.
"""

import asyncio
import hashlib
import secrets
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path as File
from tempfile import TemporaryDirectory
from typing import IO, Annotated, Literal

from fastapi import APIRouter, Path, Request
from starlette.responses import Response, StreamingResponse

from api.http.auth import OPEN_DOWNLOADS
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import rfc3339
from api.ring.choosing import named_ring, reached
from api.ring.ring import Ring, TheRing
from api.tinker.archive import ARCHIVE, EXTERNAL_FILES, opened, write_state, write_version
from api.tinker.names import ID, KINDS, SAVE_NAME, spec_named
from shared.errors import GoneError, NotFoundError, QueueFullError
from shared.learners import LearnerSpec, SaveInfo
from shared.redis import keys
from shared.redis.training.tinker_store import TinkerDownload

router = APIRouter(tags=["tinker"], prefix="/api/v1", route_class=BodyRoute)
Run = Annotated[str, Path(pattern=ID)]
Name = Annotated[str, Path(pattern=SAVE_NAME)]
Segment = Annotated[str, Path(pattern="^(weights|sampler_weights|external_weights)$")]
Ticket = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{1,64}$")]
RingName = Annotated[str, Path(max_length=80)]
Wanted = Annotated[
    Literal["checkpoint.tar", "adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"], Path()
]

MOST_MADE, MOST_OPEN = 2, 16  # of one api process
PIECE_BYTES = 2**18  # of a file that is sent
_making = asyncio.Semaphore(MOST_MADE)
_open: "weakref.WeakSet[_Sent]" = weakref.WeakSet()


@router.get(
    "/training_runs/{run}/checkpoints/{segment}/{name}/archive",
    summary="An address of its archive",
    response_class=Response,
    responses=error_responses(400, 404),
)
async def archive_address(run: Run, segment: Segment, name: Name, request: Request, ring: TheRing) -> Response:
    """A tar of an adapter of PEFT, of a training checkpoint with AdamW's moments."""
    address, expires = await _address(ring, request, await spec_named(ring, run), segment, name)
    return json_reply({"url": f"{address}/{ARCHIVE}", "expires": expires})


@router.get(
    "/training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls",
    summary="Addresses of its files",
    response_class=Response,
    responses=error_responses(400, 404),
)
async def external_addresses(run: Run, name: Name, request: Request, ring: TheRing) -> Response:
    """The files of an adapter of PEFT."""
    address, expires = await _address(ring, request, await spec_named(ring, run), "external_weights", name)
    return json_reply({"urls": {each: f"{address}/{each}" for each in EXTERNAL_FILES}, "expires": expires})


@router.get(
    f"/{OPEN_DOWNLOADS}/{{ring_name}}/{{ticket}}/{{file}}",
    summary="A checkpoint's file, by its address",
    response_class=Response,
    responses={
        200: {"description": "The bytes", "content": {"application/octet-stream": {}}},
        **error_responses(400, 404, 410, 429),
    },
)
async def download(ring_name: RingName, ticket: Ticket, file: Wanted, ring: TheRing) -> Response:
    """Needs no key; 410 when the address is over or was never one, 404 when the checkpoint is gone."""
    ring = reached(named_ring(ring, ring_name))
    ticketed = await ring.tinker.download(_digest(ticket))
    if ticketed is None:
        minutes = keys.TINKER_DOWNLOAD_TTL_S // 60
        raise GoneError(f"this address is none, or its {minutes} minutes are over: ask for another one", param="ticket")
    if len(_open) >= MOST_OPEN:
        raise QueueFullError(f"this process sends {MOST_OPEN} checkpoints already; try again shortly")
    sent = _Sent()
    _open.add(sent)
    spec = await ring.learners.spec(ticketed.learner)
    info = await ring.learners.save_named(spec.id, ticketed.kind, ticketed.name)
    if (info.bytes_id, info.version) != (ticketed.bytes_id, ticketed.version):
        raise NotFoundError("the checkpoint of this address was saved anew: ask for another address")
    async with _making:
        sent.file = await _made(ring, spec, info, file)
    size = await asyncio.to_thread(sent.size)
    headers = {"content-length": str(size), "content-disposition": f'attachment; filename="{file}"'}
    return StreamingResponse(sent.pieces(), headers=headers, media_type="application/octet-stream")


class _Sent:
    """A file on its way to a client; it has no name on the disk any more."""

    file: IO[bytes]

    def size(self) -> int:
        """Length of the archive in bytes."""
        size = self.file.seek(0, 2)
        self.file.seek(0)
        return size

    async def pieces(self) -> AsyncIterator[bytes]:
        """Bytes of the archive, piece by piece."""
        with self.file:
            while piece := await asyncio.to_thread(self.file.read, PIECE_BYTES):
                yield piece


async def _address(ring: Ring, request: Request, spec: LearnerSpec, segment: str, name: str) -> tuple[str, str]:
    """Where the files of a checkpoint may be read, and until when."""
    info = await ring.learners.save_named(spec.id, KINDS[segment], name)
    ticket = secrets.token_urlsafe(32)
    await ring.tinker.put_download(
        _digest(ticket), TinkerDownload(spec.id, info.kind, name, info.bytes_id, info.version)
    )
    until = rfc3339(int(time.time()) + keys.TINKER_DOWNLOAD_TTL_S)
    return f"{str(request.base_url).rstrip('/')}/api/v1/{OPEN_DOWNLOADS}/{ring.name}/{ticket}", until


async def _made(ring: Ring, spec: LearnerSpec, info: SaveInfo, wanted: str) -> IO[bytes]:
    """A file of a checkpoint, which is on the disk without a name."""
    with TemporaryDirectory(prefix="parallm-checkpoint-") as workdir:
        raw, folder = File(workdir, "saved"), File(workdir, "files")
        await asyncio.to_thread(folder.mkdir)
        if info.version:
            # Whose learner it is was looked at when the address was made; no key comes with this request.
            manifest = await ring.adapters.manifest(spec.adapter, info.version)
            await _kept(ring.adapters.fetch(manifest), raw)
            await asyncio.to_thread(write_version, spec, manifest, raw, folder)
        else:
            await _kept(ring.learners.saved_pieces(spec.id, info), raw)
            await asyncio.to_thread(write_state, spec, raw, folder)
        return await asyncio.to_thread(opened, folder, wanted, info.created_ms)


async def _kept(pieces: AsyncIterator[bytes], path: File) -> None:
    with await asyncio.to_thread(path.open, "wb") as file:
        async for piece in pieces:
            await asyncio.to_thread(file.write, piece)


def _digest(ticket: str) -> str:
    return hashlib.sha256(ticket.encode()).hexdigest()[:32]
