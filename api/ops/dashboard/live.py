"""Keeps pages current: server-sent events, each with the HTML of one part of the page, sent when that has changed.

A page opens one stream. Every stream looks once a second and renders its own parts; the snapshot is shared.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from redis.exceptions import RedisError
from starlette.responses import Response

from api.http.sse import EventStream
from api.ops.dashboard.batches import batch_looks, batch_view
from api.ops.dashboard.curves import ring_charts, training_charts
from api.ops.dashboard.parts import RewardsCache, adapter_view, job_view, letters, training_views
from api.ops.dashboard.render import HEADERS, DashboardRoute, part
from api.ops.dashboard.session import may_look
from api.ops.ring_view import RingSnapshot
from api.ops.snapshot import Snapshots, TheSnapshots
from api.ring.ring import Ring, ring_of
from shared.errors import ParallmError

router = APIRouter(prefix="/dashboard/events", route_class=DashboardRoute, dependencies=[Depends(may_look)])
TheRing = Annotated[Ring, Depends(ring_of)]

LOOK_EVERY_S = 1.0
STREAM_S = 15 * 60  # then the browser connects anew, and is asked for its session again

Parts = dict[str, str]  # event -> its data
Look = Callable[[RingSnapshot], Awaitable[Parts]]


@router.get("/ring")
async def ring_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of the first page."""

    async def look(snapshot: RingSnapshot) -> Parts:
        names = ("tiles", "models", "workers", "queues", "jobs", "adapters", "trainings")
        return _parts(names, ring=snapshot, jobs=snapshot.jobs) | {"curves": _json(ring_charts(snapshot.history))}

    return _stream(ring, snapshots, look)


@router.get("/jobs")
async def jobs_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of the list of jobs."""

    async def look(snapshot: RingSnapshot) -> Parts:
        return _parts(("jobs",), ring=snapshot, jobs=await ring.jobs.list(50))

    return _stream(ring, snapshots, look)


@router.get("/jobs/{job_id}")
async def job_events(job_id: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of a job's page."""
    kept = RewardsCache()

    async def look(snapshot: RingSnapshot) -> Parts:
        return _parts(("job", "rewards", "job_actions"), ring=snapshot, job=await job_view(ring, job_id, kept))

    return _stream(ring, snapshots, look)


@router.get("/batches")
async def batches_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of the list of batches."""

    async def look(snapshot: RingSnapshot) -> Parts:
        return _parts(("batches",), ring=snapshot, batches=(await batch_looks(ring))[0])

    return _stream(ring, snapshots, look)


@router.get("/batches/{batch_id}")
async def batch_events(batch_id: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of a batch's page."""

    async def look(snapshot: RingSnapshot) -> Parts:
        names = ("batch", "batch_actions", "batch_files")
        return _parts(names, ring=snapshot, batch=await batch_view(ring, batch_id))

    return _stream(ring, snapshots, look)


@router.get("/adapters")
async def adapters_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of the list of adapters."""

    async def look(snapshot: RingSnapshot) -> Parts:
        return _parts(("adapters",), ring=snapshot)

    return _stream(ring, snapshots, look)


@router.get("/adapters/{name}")
async def adapter_events(name: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of an adapter's page."""

    async def look(snapshot: RingSnapshot) -> Parts:
        return _parts(("adapter",), ring=snapshot, adapter=await adapter_view(ring, name))

    return _stream(ring, snapshots, look)


@router.get("/training")
async def training_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of the policies' curves."""

    async def look(snapshot: RingSnapshot) -> Parts:
        shown: Parts = {}
        for run in await training_views(ring):
            status = run.view.status
            policy = status.policy
            shown[f"run-{policy}"] = part("run", ring=snapshot, run=run)
            shown[f"samples-{policy}"] = part("run_samples", run=run)
            shown[f"curves-{policy}"] = _json(training_charts(status.mode, run.points))
        return shown

    return _stream(ring, snapshots, look)


@router.get("/deadletters")
async def letters_events(ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Live parts of the list of dead letters."""

    async def look(snapshot: RingSnapshot) -> Parts:
        return _parts(("letters",), ring=snapshot, letters=await letters(ring))

    return _stream(ring, snapshots, look)


def _parts(names: Sequence[str], **values: Any) -> Parts:
    return {name: part(name, **values) for name in names}


def _stream(ring: Ring, snapshots: Snapshots, look: Look) -> Response:
    stream = EventStream(_events(ring, snapshots, look))
    stream.headers.update(HEADERS)
    return stream


async def _events(ring: Ring, snapshots: Snapshots, look: Look) -> AsyncGenerator[bytes, None]:
    sent: Parts = {}
    yield b"retry: 2000\n\n"
    until = asyncio.get_running_loop().time() + STREAM_S
    while not ring.shutting_down and asyncio.get_running_loop().time() < until:
        try:
            snapshot = await snapshots.read()
            parts = _parts(("redis",), ring=snapshot) | await look(snapshot)
        except (ParallmError, RedisError, OSError):  # gone, or Redis is away: the page keeps what it has
            parts = {}
        changed = {name: data for name, data in parts.items() if sent.get(name) != data}
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
