"""Saves and published versions as Tinker's checkpoints, and learners as its training runs."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import rfc3339
from api.ring.ring import Ring, TheRing
from api.tinker.bodies import PathBody, TtlBody
from api.tinker.names import ID, KINDS, SAVE_NAME, SEGMENTS, SavePath, keeper, spec_named
from shared.errors import ConflictError, NotFoundError
from shared.learners import LearnerSpec, SaveInfo
from shared.redis import keys

router = APIRouter(tags=["tinker"], prefix="/api/v1", route_class=BodyRoute)
ERRORS = error_responses(400, 404)
Run = Annotated[str, Path(pattern=ID)]
Segment = Annotated[str, Path(pattern="^(weights|sampler_weights|external_weights)$")]
Name = Annotated[str, Path(pattern=SAVE_NAME)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


@router.get("/training_runs", summary="The asker's learners", response_class=Response, responses=ERRORS)
async def training_runs(ring: TheRing, limit: Limit = 20, offset: Offset = 0) -> Response:
    """Returns training runs, the newest ones first."""
    names = (await ring.tinker.runs(keeper()))[::-1]
    shown = []
    for name in names[offset : offset + limit]:
        try:
            spec = await spec_named(ring, name)
        except NotFoundError:
            continue
        shown.append(await _run(ring, spec))
    cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
    return json_reply({"training_runs": shown, "cursor": cursor})


@router.get("/training_runs/{run}", summary="A learner", response_class=Response, responses=ERRORS)
async def training_run(run: Run, ring: TheRing) -> Response:
    """Returns one training run with its last checkpoints."""
    return json_reply(await _run(ring, await spec_named(ring, run)))


@router.get("/training_runs/{run}/checkpoints", summary="Its checkpoints", response_class=Response, responses=ERRORS)
async def checkpoints(run: Run, ring: TheRing) -> Response:
    """Returns the checkpoints of a training run, the oldest ones first."""
    spec = await spec_named(ring, run)
    return json_reply({"checkpoints": [_shown(spec, save) for save in await ring.learners.saves(spec.id)]})


@router.get("/checkpoints", summary="The asker's checkpoints", response_class=Response, responses=ERRORS)
async def all_checkpoints(ring: TheRing, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Those of the 1,000 newest learners, the newest first."""
    shown = []
    for name in (await ring.tinker.runs(keeper()))[:-1001:-1]:
        try:
            spec = await spec_named(ring, name)
        except NotFoundError:
            continue
        shown += [_shown(spec, save) for save in await ring.learners.saves(spec.id)]
    shown.sort(key=lambda checkpoint: str(checkpoint["time"]), reverse=True)
    cursor = {"offset": offset, "limit": limit, "total_count": len(shown)}
    return json_reply({"checkpoints": shown[offset : offset + limit], "cursor": cursor})


@router.delete(
    "/training_runs/{run}/checkpoints/{segment}/{name}", summary="Delete one", response_class=Response, responses=ERRORS
)
async def delete_checkpoint(run: Run, segment: Segment, name: Name, ring: TheRing) -> Response:
    """Deletes a checkpoint. Samplers of it continue until its adapter version is deleted, as unused versions are."""
    spec = await spec_named(ring, run)
    info = await ring.learners.save_named(spec.id, KINDS[segment], name)
    await ring.learners.drop_save(spec.id, info)
    if info.version:
        await ring.adapters.unpin(spec.adapter, info.version, f"save-{name}")
    return json_reply({})


@router.put(
    "/training_runs/{run}/checkpoints/{segment}/{name}/ttl",
    summary="How long it lives",
    response_class=Response,
    responses=ERRORS,
)
async def checkpoint_ttl(run: Run, segment: Segment, name: Name, body: TtlBody, ring: TheRing) -> Response:
    """From now on; at most 30 days."""
    spec = await spec_named(ring, run)
    lives_s = min(body.ttl_seconds or keys.LEARNER_SAVE_TTL_S, keys.LEARNER_SAVE_TTL_S)
    info = await ring.learners.save_named(spec.id, KINDS[segment], name)
    if not await ring.learners.keep_save(spec.id, info, lives_s):
        raise ConflictError(f"the checkpoint {name!r} was saved anew or deleted meanwhile; ask again")
    if info.version:
        await ring.adapters.pin(spec.adapter, info.version, f"save-{name}", lives_s)
    return json_reply({})


@router.post("/weights_info", summary="What a checkpoint is of", response_class=Response, responses=ERRORS)
async def weights_info(body: PathBody, ring: TheRing) -> Response:
    """Returns the base model and the shape of saved weights."""
    path = SavePath.parse(body.tinker_path, "tinker_path")
    spec = await spec_named(ring, path.learner)
    await ring.learners.save_named(spec.id, path.kind, path.name)
    shape = {"lora_rank": spec.rank, "train_unembed": False, "train_mlp": spec.mlp, "train_attn": spec.attention}
    return json_reply({"base_model": spec.model, "is_lora": True, **shape})


async def _run(ring: Ring, spec: LearnerSpec) -> dict[str, Any]:
    saves = await ring.learners.saves(spec.id)
    last = {kind: next((each for each in reversed(saves) if each.kind == kind), None) for kind in SEGMENTS}
    return {
        "training_run_id": spec.id,
        "base_model": spec.model,
        "model_owner": spec.owner,
        "is_lora": True,
        "lora_rank": spec.rank,
        "last_request_time": rfc3339(max((save.created_ms for save in saves), default=spec.created_ms) / 1000),
        "last_checkpoint": None if last["state"] is None else _shown(spec, last["state"]),
        "last_sampler_checkpoint": None if last["sampler"] is None else _shown(spec, last["sampler"]),
        "user_metadata": spec.metadata or None,
    }


def _shown(spec: LearnerSpec, save: SaveInfo) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{SEGMENTS[save.kind]}/{save.name}",
        "checkpoint_type": "training" if save.kind == "state" else save.kind,
        "time": rfc3339(save.created_ms / 1000),
        "tinker_path": str(SavePath(spec.id, save.kind, save.name)),
        "size_bytes": save.size,
        "public": False,
        "user_metadata": save.metadata or None,
        "expires_at": rfc3339(save.expires_ms / 1000),
    }
