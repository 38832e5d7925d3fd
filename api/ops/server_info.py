"""Routes for clients of other servers: GET /version, /ping, /load and /server_info (vLLM's)."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from api.http.errors import error_responses, json_reply
from api.ops.health import why_not_ready
from api.ring.choosing import from_each
from api.ring.ring import Ring, ring_of
from shared.errors import ServiceUnavailableError
from shared.process.settings import version

router = APIRouter(tags=["operations"])
TheRing = Annotated[Ring, Depends(ring_of)]

_LIMITS = (
    "default_max_tokens", "max_prompt_tokens", "clamp_max_tokens", "pause_new_requests", "max_queue_size",
    "max_concurrent_requests", "request_timeout_s", "first_token_timeout_s", "max_request_bytes", "max_upload_bytes",
)  # fmt: skip


@router.get("/version", summary="The version of this server (vLLM)")
async def show_version() -> dict[str, str]:
    """Version of ParaLLM that this process runs."""
    return {"version": version()}


@router.get("/ping", summary="Can a request be answered? (SageMaker, vLLM)", responses=error_responses(503))
@router.post("/ping", include_in_schema=False)
async def ping(ring: TheRing) -> Response:
    """An empty answer while /readyz answers 200."""
    if reason := await why_not_ready(ring):
        raise ServiceUnavailableError(reason)
    return Response()


@router.get("/load", summary="Requests under way in this api process (vLLM)")
async def load(ring: TheRing) -> dict[str, int]:
    """Those that begin work; `--max-concurrent-requests` bounds them."""
    return {"server_load": ring.load.under_way}


@router.get("/server_info", summary="What is served, within which limits (vLLM)", response_class=Response)
async def server_info(ring: TheRing) -> Response:
    """Neither secrets nor paths: those are the operator's."""
    models: list[dict[str, Any]] = []
    for each, cards in await from_each(ring, Ring.live_models):
        for name in sorted(cards):
            card = msgspec.structs.asdict(cards[name]) | ({"ring": each.name} if ring.others else {})
            models.append({field: value for field, value in card.items() if field not in ("modules", "sources")})
    limits = {name: getattr(ring.settings, name) for name in _LIMITS}
    return json_reply({"version": version(), "api": ring.api_id, "models": models, "limits": limits})
