"""What changes while one looks: server-sent events, each the HTML of one part of the page, sent when it differs.

A page opens one stream. Every stream reads at its own pace and renders what it shows; the snapshot is shared.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from redis.exceptions import RedisError
from starlette.responses import Response

from api.http.sse import EventStream
from api.ops.dashboard.batches import batch_looks, batch_view
from api.ops.dashboard.curves import ring_charts, training_charts
from api.ops.dashboard.parts import RewardsKept, adapter_view, job_view, letters, training_views
from api.ops.dashboard.render import HEADERS, DashboardRoute, part
from api.ops.dashboard.session import may_look
from api.ops.snapshot import Snapshots, TheSnapshots
from api.ring.ring import Ring, ring_of
from shared.errors import ParallmError

router = APIRouter(prefix="/dashboard/events", route_class=DashboardRoute, dependencies=[Depends(may_look)])
TheRing = Annotated[Ring, Depends(ring_of)]

LOOK_EVERY_S = 1.0
STREAM_S = 15 * 60  # then the browser connects anew, and is asked for its session again

Parts = dict[str, str]  # event -> its data
Look = Callable[[], Awaitable[Parts]]


@router.get("/ring")
async def ring_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of the first page."""

    async def look() -> Parts:
        snapshot = await snapshots.read()
        names = ("tiles", "workers", "queues", "jobs", "adapters", "trainings")
        charts = {"curves": _json(ring_charts(snapshot.history))}
        return {**{name: part(name, ring=snapshot, jobs=snapshot.jobs) for name in names}, **charts}

    return _stream(ring, snapshots, look)


@router.get("/jobs")
async def jobs_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of the list of jobs."""

    async def look() -> Parts:
        return {"jobs": part("jobs", ring=await snapshots.read(), jobs=await ring.jobs.list(50))}

    return _stream(ring, snapshots, look)


@router.get("/jobs/{job_id}")
async def job_events(job_id: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of one job."""

    kept = RewardsKept()

    async def look() -> Parts:
        view = await job_view(ring, job_id, kept)
        shown = {name: part(name, job=view) for name in ("rewards", "job_actions")}
        return {"job": part("job", ring=await snapshots.read(), job=view), **shown}

    return _stream(ring, snapshots, look)


@router.get("/batches")
async def batches_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of the list of batches."""

    async def look() -> Parts:
        return {"batches": part("batches", ring=await snapshots.read(), batches=(await batch_looks(ring))[0])}

    return _stream(ring, snapshots, look)


@router.get("/batches/{batch_id}")
async def batch_events(batch_id: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of one batch."""

    async def look() -> Parts:
        view, snapshot = await batch_view(ring, batch_id), await snapshots.read()
        return {name: part(name, ring=snapshot, batch=view) for name in ("batch", "batch_actions", "batch_files")}

    return _stream(ring, snapshots, look)


@router.get("/adapters")
async def adapters_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of the list of adapters."""

    async def look() -> Parts:
        return {"adapters": part("adapters", ring=await snapshots.read())}

    return _stream(ring, snapshots, look)


@router.get("/adapters/{name}")
async def adapter_events(name: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of one adapter."""

    async def look() -> Parts:
        return {"adapter": part("adapter", ring=await snapshots.read(), adapter=await adapter_view(ring, name))}

    return _stream(ring, snapshots, look)


@router.get("/training")
async def training_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of the policies' curves."""

    async def look() -> Parts:
        snapshot, runs = await snapshots.read(), await training_views(ring)
        found = {f"run-{run.view.status.policy}": part("run", ring=snapshot, run=run) for run in runs}
        charts = {f"curves-{run.view.status.policy}": _json(training_charts(run.points)) for run in runs}
        return {**found, **charts}

    return _stream(ring, snapshots, look)


@router.get("/deadletters")
async def letters_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Of the dead letters."""

    async def look() -> Parts:
        return {"letters": part("letters", ring=await snapshots.read(), letters=await letters(ring))}

    return _stream(ring, snapshots, look)


def _stream(ring: Ring, snapshots: Snapshots, look: Look) -> Response:
    async def with_header() -> Parts:
        return {"redis": part("redis", ring=await snapshots.read()), **await look()}

    stream = EventStream(_events(ring, with_header))
    stream.headers.update(HEADERS)
    return stream


async def _events(ring: Ring, look: Look) -> AsyncGenerator[bytes, None]:
    sent: Parts = {}
    yield b"retry: 2000\n\n"
    until = asyncio.get_running_loop().time() + STREAM_S
    while not ring.shutting_down and asyncio.get_running_loop().time() < until:
        try:
            found = await look()
        except (ParallmError, RedisError, OSError):  # gone, or Redis is away: the page keeps what it has
            found = {}
        changed = {name: data for name, data in found.items() if sent.get(name) != data}
        if changed:
            yield b"".join(_event(name, data) for name, data in changed.items())
            sent |= changed
        await asyncio.sleep(LOOK_EVERY_S)


def _event(name: str, data: str) -> bytes:
    """A part may have lines; a name has none, because names of adapters and parts have none."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {name}\n{lines}\n".encode()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
