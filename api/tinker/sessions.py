"""Routes that a client begins with: flags, what is served, its session, and its telemetry, which is dropped."""

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import Response

from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.ring.ring import TheRing
from api.tinker.bodies import SessionBody, SessionId
from api.tinker.names import ID, keeper, session_named
from shared.errors import GoneError
from shared.redis.training.tinker_store import TinkerSession

router = APIRouter(tags=["tinker"], prefix="/api/v1", route_class=BodyRoute)
SessionPath = Annotated[str, Path(pattern=ID)]

_FLAGS = {
    "pjwt_auth_enabled": False,
    # In order: of parts at once the SDK sends the first one last, and never when another was refused. Then its client
    # waits for ever for the turn of what comes after them.
    "parallel_fwdbwd_chunks": False,
    "proto_write_fwdbwd": False,  # where an SDK knows both, it writes JSON; newer ones know protobuf alone
    "proto_compress_fwdbwd": False,
    "create_model_via_load_weights": True,
    "custom_loss_server_side": False,  # they run in the client, over log-probabilities
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
}


@router.get("/healthz", summary="Whether the server answers", response_class=Response)
async def healthz() -> Response:
    """Answers as long as the process lives."""
    return json_reply({"status": "ok"})


@router.post("/client/config", summary="What clients may use", response_class=Response)
async def client_config() -> Response:
    """Flags; the body, which says the client's version, is not looked at."""
    return json_reply(_FLAGS)


@router.post("/client/dynamic_config", summary="What clients may use now", response_class=Response)
async def client_dynamic_config() -> Response:
    """Flags that clients ask for again and again."""
    return json_reply({"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 16})


@router.post("/telemetry", summary="Accepted and dropped", response_class=Response)
async def telemetry() -> Response:
    """Nothing of it is read or stored."""
    return json_reply({"status": "accepted"})


@router.get("/get_server_capabilities", summary="What is served", response_class=Response)
async def get_server_capabilities(ring: TheRing) -> Response:
    """Models with a live worker; trainable are those that a training service lives for."""
    models: list[dict[str, Any]] = []
    for card in (await ring.live_models()).values():
        trainable = await ring.learners.service(card.name) is not None
        about = {"model_name": card.name, "max_context_length": card.context_length}
        models.append({**about, "trainable": trainable, "sampleable": True})
    return json_reply({"supported_models": models})


@router.post("/create_session", summary="Begin", response_class=Response, responses=error_responses(400, 503))
async def create_session(body: SessionBody, ring: TheRing) -> Response:
    """A session, which lives 7 days from its last use."""
    metadata = {str(key): str(value) for key, value in (body.user_metadata or {}).items()}
    session = TinkerSession(uuid.uuid4().hex, metadata, body.display_name or "")
    await ring.tinker.put(keeper(), session.id, session)
    return json_reply({"type": "create_session", "session_id": session.id})


@router.post("/session_heartbeat", summary="Go on", response_class=Response, responses=error_responses(400, 404))
async def session_heartbeat(body: SessionId, ring: TheRing) -> Response:
    """410 when the session has finished, so that its client stops."""
    if (await session_named(ring, body.session_id)).finished:
        raise GoneError("the session has finished", param="session_id")
    return json_reply({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish", summary="End", response_class=Response, responses=error_responses(404))
async def finish_session(session_id: SessionPath, ring: TheRing) -> Response:
    """Ends the session. Its learners are stored until their time to live is over."""
    session = await session_named(ring, session_id)
    done = TinkerSession(session.id, session.metadata, session.display_name, True)
    await ring.tinker.put(keeper(), session.id, done)
    return json_reply({"session_id": session.id})


@router.get("/sessions/{session_id}", summary="A session", response_class=Response, responses=error_responses(404))
async def get_session(session_id: SessionPath, ring: TheRing) -> Response:
    """Returns the ids of the session's learners."""
    session = await session_named(ring, session_id)
    runs = [run for run in await ring.tinker.runs(keeper()) if run.startswith(f"{session.id}:")]
    named = {"user_metadata": session.metadata or None, "display_name": session.display_name or None}
    return json_reply({"training_run_ids": runs, "sampler_ids": [], **named})
