"""Batches on the dashboard: what the pages show of them, and the files that they have written."""

import re
from typing import Annotated, NamedTuple

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response, StreamingResponse

from api.batches.batch_routes import job_of, request_counts, status_of
from api.ops.dashboard.render import HEADERS, DashboardRoute, Page, page
from api.ops.dashboard.session import may_look
from api.ops.snapshot import TheSnapshots
from api.ring.ring import Ring, ring_of
from shared.errors import UnknownFileError
from shared.jobs import JobStatus
from shared.redis.files.batch_store import ENDED, BatchRecord
from shared.redis.files.file_store import StoredFile

router = APIRouter(prefix="/dashboard", route_class=DashboardRoute, dependencies=[Depends(may_look)])
TheRing = Annotated[Ring, Depends(ring_of)]

BATCHES_PAGE = 50
LINES_SHOWN = 50
LINE_BYTES = 20_000  # of a line that is shown


class Moment(NamedTuple):
    """When a batch entered a state; milliseconds."""

    name: str
    at_ms: int
    after_ms: int | None  # since the moment before


class LineCounts(NamedTuple):
    """Lines of a batch, by their state."""

    total: int
    completed: int
    failed: int

    @property
    def share(self) -> float:
        """How many have their answer or their refusal, from 0 to 1."""
        return (self.completed + self.failed) / self.total if self.total else 0.0


class BatchLook(NamedTuple):
    """A batch as a list shows it."""

    record: BatchRecord
    status: str
    counts: LineCounts
    job: JobStatus | None
    ended: bool


class BatchView(NamedTuple):
    """Figures of the page of one batch."""

    look: BatchLook
    moments: list[Moment]
    input: StoredFile | None  # the files: None when there is none, or it was deleted
    output: StoredFile | None
    errors: StoredFile | None


class ShownLine(NamedTuple):
    """A line of a file."""

    number: int
    custom_id: str
    said: str  # a status or an error's code; "" for a request
    wrong: bool
    text: str


async def batch_looks(ring: Ring, after: str = "") -> tuple[list[BatchLook], str]:
    """A page of batches, newest first, and the id after which there are more, or ""."""
    records, more = await ring.batches.page(BATCHES_PAGE, after)
    return [await _look(ring, record) for record in records], records[-1].spec.id if more and records else ""


async def batch_view(ring: Ring, batch_id: str) -> BatchView:
    """UnknownBatchError when there is none."""
    record = await ring.batches.find(batch_id)
    spec = record.spec
    look = await _look(ring, record)
    files = [await _file(ring, file_id) for file_id in (spec.input_file_id, spec.output_file_id, spec.error_file_id)]
    return BatchView(look, moments(record, look.status), *files)


async def _look(ring: Ring, record: BatchRecord) -> BatchLook:
    job = await job_of(ring, record)
    counts = LineCounts(**request_counts(record, job))
    return BatchLook(record, status_of(record, job), counts, job, record.state in ENDED)


async def _file(ring: Ring, file_id: str) -> StoredFile | None:
    try:
        return await ring.files.find(file_id)
    except UnknownFileError:
        return None


def moments(record: BatchRecord, status: str) -> list[Moment]:
    """The states that a batch has been in, in order of time."""
    spec = record.spec
    times = [("validating", spec.created_at), ("in progress", record.in_progress_at)]
    times += [("cancelling", record.cancelling_at), ("finalizing", record.finalizing_at)]
    times = sorted((time for time in times if time[1]), key=lambda time: time[1])
    times += [(status, record.ended_at)] if record.ended_at else []
    before = [None, *(at for _, at in times)]
    return [
        Moment(name, 1000 * at, None if since is None else 1000 * max(0, at - since))
        for (name, at), since in zip(times, before, strict=False)
    ]


@router.get("/batches")
async def batches(
    request: Request, ring: TheRing, snapshots: TheSnapshots, after: Annotated[str, Query(max_length=200)] = ""
) -> Response:
    """Page of all batches, the newest ones first."""
    looks, more = await batch_looks(ring, after)
    about = Page("Batches", "batches", "" if after else "/dashboard/events/batches")
    return page(request, "batches.html", about, ring=await snapshots.read(), batches=looks, more=more, after=after)


@router.get("/batches/{batch_id}")
async def batch(request: Request, batch_id: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """One batch: how far it is, what went wrong, its files."""
    about = Page(batch_id, "batches", f"/dashboard/events/batches/{batch_id}")
    return page(request, "batch.html", about, ring=await snapshots.read(), batch=await batch_view(ring, batch_id))


@router.get("/files/{file_id}")
async def file(request: Request, file_id: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Page with the first lines of a file."""
    stored = await ring.files.find(file_id)
    about = Page(stored.filename, "batches")
    lines = await shown_lines(ring, stored)
    return page(request, "file.html", about, ring=await snapshots.read(), file=stored, lines=lines)


@router.get("/files/{file_id}/content")
async def file_content(file_id: str, ring: TheRing) -> Response:
    """The whole file, to be saved."""
    stored = await ring.files.find(file_id)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", stored.filename)
    headers = {"content-length": str(stored.bytes), "content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(ring.files.read(stored), headers={**HEADERS, **headers}, media_type="application/jsonl")


async def shown_lines(ring: Ring, stored: StoredFile) -> list[ShownLine]:
    """The first lines of a file of requests or answers."""
    lines: list[ShownLine] = []
    async for number, raw in ring.files.lines(stored, stored.bytes):
        lines.append(shown_line(number, raw))
        if len(lines) >= LINES_SHOWN:
            break
    return lines


class _Line(msgspec.Struct):
    custom_id: str = ""
    response: "_Response | None" = None
    error: "_Error | None" = None
    result: "_Result | None" = None  # of a Message Batch


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    code: str


class _Result(msgspec.Struct):
    type: str


def shown_line(number: int, raw: bytes) -> ShownLine:
    """A line in words; what is no JSON is shown as it is."""
    text = raw.decode(errors="replace")
    try:
        line = msgspec.json.decode(raw, type=_Line)
        if len(raw) <= LINE_BYTES:
            text = msgspec.json.format(raw, indent=2).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        line = _Line()
    result, wrong = _result_of(line)
    return ShownLine(number, line.custom_id, result, wrong, text[:LINE_BYTES])


def _result_of(line: _Line) -> tuple[str, bool]:
    """Text for the result of a line, and True if the result is not an answer."""
    if line.error is not None:
        return line.error.code, True
    if line.result is not None:
        return line.result.type, line.result.type != "succeeded"
    if line.response is not None:
        return str(line.response.status_code), line.response.status_code != 200
    return "", False
