"""The dashboard's buttons. They use the same stores as the API, and answer with a line of text.

The events of a page change what it shows. The forms also work without scripts: they lead back to their page.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Form, Request
from starlette.responses import RedirectResponse, Response

from api.batches.batch_routes import cancel
from api.ops.catalogue import PlaceBody, load_model, unload_model
from api.ops.dashboard.render import HEADERS, DashboardRoute, notice
from api.ops.dashboard.samples import SHOWN
from api.ops.dashboard.session import may_act
from api.ring.ring import Ring, ring_of
from shared.errors import ConflictError
from shared.redis.kept.answer_store import Verdict, answers_of
from shared.redis.kept.episode_store import episodes_of
from shared.signals import Signal

router = APIRouter(prefix="/dashboard", route_class=DashboardRoute, dependencies=[Depends(may_act)])
TheRing = Annotated[Ring, Depends(ring_of)]


@router.post("/models/{verb}")
async def order_model(
    request: Request, ring: TheRing, verb: Literal["load", "unload"], model: Annotated[str, Form(max_length=256)]
) -> Response:
    """Have hosts load or unload a model, as the API does."""
    await (load_model if verb == "load" else unload_model)(PlaceBody(model=model), Response(), ring)
    return _done(request, f"{model} is to be {verb}ed", "/dashboard")


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(request: Request, job_id: str, ring: TheRing) -> Response:
    """End a job; what has finished stays."""
    status = await ring.jobs.cancel(job_id)
    said = f"{job_id} is {status.status}" if status.finished_ms else f"{job_id} is being cancelled"
    return _done(request, said, f"/dashboard/jobs/{job_id}")


@router.post("/jobs/{job_id}/retry")
async def retry_job(request: Request, job_id: str, ring: TheRing) -> Response:
    """Submit the job again, as a new one."""
    again = await ring.jobs.submit_again(job_id)
    to = f"/dashboard/jobs/{again}"
    if request.headers.get("hx-request") == "true":
        return Response(headers={**HEADERS, "HX-Redirect": to})
    return RedirectResponse(to, 303, HEADERS)


@router.post("/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str, ring: TheRing) -> Response:
    """End a batch; what has been answered stays."""
    await cancel(ring, batch_id)
    return _done(request, "the batch is being cancelled", f"/dashboard/batches/{batch_id}")


@router.post("/adapters/{name}/rollback")
async def roll_back(request: Request, name: str, ring: TheRing, version: Annotated[int, Form(ge=1)]) -> Response:
    """Make another version the latest."""
    latest = await ring.adapters.rollback(name, version, reason="rolled back from the dashboard")
    ring.splits.forget(name)
    return _done(request, f"{name}@{latest} is the latest version", f"/dashboard/adapters/{name}")


@router.post("/adapters/{name}/promote")
async def promote(request: Request, name: str, ring: TheRing, version: Annotated[int, Form(ge=1)]) -> Response:
    """Make a candidate of a night the latest version."""
    await ring.adapters.promote(name, version)
    ring.splits.forget(name)
    return _done(request, f"{name}@{version} is the latest version", "/dashboard/nights")


@router.post("/feedback")
async def judge_answer(
    request: Request,
    ring: TheRing,
    name: Annotated[str, Form(max_length=512)],
    rating: Annotated[Literal["up", "down"], Form()],
    tenant: Annotated[str, Form(max_length=64)] = "",
    row: Annotated[int, Form(ge=0, le=SHOWN)] = 0,
) -> Response:
    """Give an answer its verdict. It stands where the buttons were, so that nothing moves under a second click."""
    verdict = Verdict(1.0 if rating == "up" else 0.0)
    if not ring.settings.feedback_ttl_s:
        raise ConflictError("this server stores no answers for feedback (--feedback-ttl-days)")
    if not await ring.answers.judge(answers_of(tenant), {name: verdict}):
        raise ConflictError("this answer has another verdict, or is not there any more")
    answer = await ring.answers.find(answers_of(tenant), name)
    if answer is not None and answer.session:
        signal = Signal("verdict", verdict.reward)
        await ring.episodes.signal(episodes_of(tenant), answer.session, name, signal)
    said = f"counted as {'good' if rating == 'up' else 'bad'}"
    return _done(request, said, "/dashboard/feedback", instead_of=f"answer-{row}" if row else "")


@router.post("/deadletters/{letter_id:path}/requeue")
async def requeue(request: Request, letter_id: str, ring: TheRing) -> Response:
    """Run a letter's sequence again, once."""
    sequence, done = await ring.dead_letters.requeue(letter_id)
    said = f"requeued as {sequence}" if done else f"it had been requeued before, as {sequence}"
    return _done(request, said, "/dashboard/deadletters")


@router.post("/deadletters/{letter_id:path}/drop")
async def drop(request: Request, letter_id: str, ring: TheRing) -> Response:
    """Deletes a dead letter and returns to the list."""
    dropped = await ring.dead_letters.drop(letter_id)
    return _done(request, "dropped" if dropped else "it was not there any more", "/dashboard/deadletters")


def _done(request: Request, said: str, back: str, *, instead_of: str = "") -> Response:
    if request.headers.get("hx-request") == "true":
        return notice(said, instead_of=instead_of)
    return RedirectResponse(back, 303, HEADERS)
