"""The pages. Each is whole without scripts; with them its parts go on changing (live.py)."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from api.ops.dashboard.parts import adapter_view, job_view, letters, night_views, ring_views, training_views
from api.ops.dashboard.render import HEADERS, DashboardRoute, Page, page, part
from api.ops.dashboard.samples import (
    SHOWN,
    ListedSample,
    answer_view,
    sample_lines,
    sample_view,
    thumbnail,
    waiting_answers,
)
from api.ops.dashboard.session import keys_of, may_look
from api.ops.snapshot import TheSnapshots
from api.ring.ring import Ring, ring_of
from api.ring.stored_sessions import stored_session
from shared.redis.kept.episode_store import episodes_of

router = APIRouter(prefix="/dashboard", route_class=DashboardRoute, dependencies=[Depends(may_look)])
TheRing = Annotated[Ring, Depends(ring_of)]

JOBS_PAGE = 50


@router.get("")
async def overview(request: Request, snapshots: TheSnapshots) -> Response:
    """Workers, queues, the newest jobs, adapters: the ring at a glance."""
    about = Page("Ring", "ring", "/dashboard/events/ring")
    rings = ring_views(request.app.state.ring)
    return page(request, "ring.html", about, ring=await snapshots.read(), rings=rings)


@router.get("/")
async def with_slash() -> Response:
    """Redirects people who type the address with a slash."""
    return RedirectResponse("/dashboard", 308)


@router.get("/jobs")
async def jobs(
    request: Request, ring: TheRing, snapshots: TheSnapshots, before: Annotated[str, Query(max_length=200)] = ""
) -> Response:
    """Page of all jobs, the newest ones first."""
    shown = await ring.jobs.list(JOBS_PAGE, before)
    more = shown[-1].id if len(shown) == JOBS_PAGE else ""
    live = "" if before else "/dashboard/events/jobs"
    about = Page("Jobs", "jobs", live)
    return page(request, "jobs.html", about, ring=await snapshots.read(), jobs=shown, more=more, before=before)


@router.get("/jobs/{job_id}")
async def job(request: Request, job_id: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """One job: how far it is, its rewards, its samples."""
    about = Page(job_id, "jobs", f"/dashboard/events/jobs/{job_id}")
    snapshot, view = await snapshots.read(), await job_view(ring, job_id)
    lines = await sample_lines(ring, job_id, -1)
    return page(request, "job.html", about, ring=snapshot, job=view, lines=lines, more=_more(lines))


@router.get("/jobs/{job_id}/samples")
async def samples(job_id: str, ring: TheRing, after: Annotated[int, Query(ge=-1)] = -1) -> Response:
    """Further lines of a job's list of samples."""
    lines = await sample_lines(ring, job_id, after)
    return HTMLResponse(part("samples", job_id=job_id, lines=lines, more=_more(lines)), headers=HEADERS)


@router.get("/jobs/{job_id}/images/{sha256}")
async def image(
    ring: TheRing,
    job_id: Annotated[str, Path(max_length=200)],
    sha256: Annotated[str, Path(max_length=64)],
) -> Response:
    """An image of a job's prompts, made small. A hash means the same bytes for ever."""
    headers = {**HEADERS, "cache-control": "private, max-age=86400, immutable"}
    return Response(await thumbnail(ring, job_id, sha256), headers=headers, media_type="image/png")


@router.get("/jobs/{job_id}/samples/{ordinal}")
async def sample(request: Request, job_id: str, ordinal: int, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """One sample, token by token: a piece of the job's page, or a page of its own."""
    view = await sample_view(ring, await ring.jobs.status(job_id), ordinal)
    if request.headers.get("hx-request") == "true":
        return HTMLResponse(part("sample", job_id=job_id, sample=view), headers=HEADERS)
    about = Page(f"{job_id}, sample {ordinal}", "jobs")
    return page(request, "sample.html", about, ring=await snapshots.read(), job_id=job_id, sample=view)


@router.get("/adapters")
async def adapters(request: Request, snapshots: TheSnapshots) -> Response:
    """Page of all adapters and their versions."""
    about = Page("Adapters", "adapters", "/dashboard/events/adapters")
    return page(request, "adapters.html", about, ring=await snapshots.read())


@router.get("/adapters/{name}")
async def adapter(request: Request, name: str, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """One adapter: versions, gate results, who has loaded what, every move of its pointer."""
    about = Page(name, "adapters", f"/dashboard/events/adapters/{name}")
    return page(request, "adapter.html", about, ring=await snapshots.read(), adapter=await adapter_view(ring, name))


@router.get("/training")
async def training(request: Request, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """The curves of every policy."""
    about = Page("Training", "training", "/dashboard/events/training")
    return page(request, "training.html", about, ring=await snapshots.read(), runs=await training_views(ring))


@router.get("/nights")
async def nights(request: Request, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """The last night of every policy: what it learned from, what got better and worse, what it proposes."""
    about = Page("Nights", "nights")
    return page(request, "nights.html", about, ring=await snapshots.read(), nights=await night_views(ring))


@router.get("/feedback")
async def feedback(request: Request, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Answers that wait for a verdict."""
    answers = await waiting_answers(ring, _tenants(request))
    kept = bool(ring.settings.feedback_ttl_s)
    about = Page("Feedback", "feedback")
    return page(request, "feedback.html", about, ring=await snapshots.read(), answers=answers, kept=kept)


@router.get("/sessions")
async def sessions(request: Request, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """The conversations that were used last, of all tenants."""
    found = [(each, of) for of in _tenants(request) for each in await ring.episodes.list(episodes_of(of))]
    found = sorted(found, key=lambda pair: -pair[0].used_ms)[:SHOWN]
    kept = bool(ring.settings.feedback_ttl_s)
    about = Page("Sessions", "sessions")
    return page(request, "sessions.html", about, ring=await snapshots.read(), sessions=found, kept=kept)


@router.get("/sessions/{session_id}")
async def session(
    request: Request,
    session_id: Annotated[str, Path(max_length=160)],
    ring: TheRing,
    snapshots: TheSnapshots,
    tenant: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """One conversation, turn by turn."""
    stored = await stored_session(ring, tenant, session_id)
    numbers = {each.turn.name: number for number, each in enumerate(stored.turns, 1)}
    return page(
        request,
        "session.html",
        Page(session_id, "sessions"),
        ring=await snapshots.read(),
        session_id=session_id,
        tenant=tenant,
        stored=stored,
        numbers=numbers,
    )


@router.get("/turns/{name}")
async def turn(
    request: Request,
    name: Annotated[str, Path(max_length=512)],
    ring: TheRing,
    snapshots: TheSnapshots,
    tenant: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """One turn, token by token: a piece of its session's page, or a page of its own."""
    view = await answer_view(ring, tenant, name)
    if request.headers.get("hx-request") == "true":
        return HTMLResponse(part("sample", job_id="", sample=view), headers=HEADERS)
    about = Page("One turn", "sessions")
    return page(request, "sample.html", about, ring=await snapshots.read(), job_id="", sample=view)


@router.get("/deadletters")
async def dead_letters(request: Request, ring: TheRing, snapshots: TheSnapshots) -> Response:
    """Page of the sequences that were given up, with the reasons."""
    about = Page("Dead letters", "deadletters", "/dashboard/events/deadletters")
    return page(request, "deadletters.html", about, ring=await snapshots.read(), letters=await letters(ring))


def _tenants(request: Request) -> list[str]:
    """The tenants of all keys, and "" for what belongs to none."""
    return sorted({"", *(key.asker.tenant for key in keys_of(request))})


def _more(lines: list[ListedSample]) -> int:
    """The ordinal after which the list goes on; -1: it does not."""
    return lines[-1].ordinal if len(lines) == SHOWN else -1
