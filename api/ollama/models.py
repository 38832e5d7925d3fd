"""The served models, as Ollama's clients ask: GET /api/tags and /api/ps, POST /api/show, GET /api/version.

Models come and go with workers, so nothing can be pulled, created or deleted. To pull a model that is served is to have
it already.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import PlainTextResponse, Response

from api.generation.target import find_job_target
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import HistoryModel, rfc3339
from api.ollama.body import bare_name
from api.ollama.lines import to_line
from api.openai.models import Model, served_models
from api.ring.ring import Ring, TheRing
from shared.errors import InvalidRequestError, NotFoundError
from shared.sequences import ModelCard
from shared.text.codec import TextCodec
from shared.text.languages.language import language_of

router = APIRouter(tags=["ollama"], route_class=BodyRoute)

API_VERSION = "0.13.0"  # of Ollama, whose API this is: its clients refuse servers that are too old for them
ARCHITECTURE = "mlx"  # under which the figures of `model_info` stand: clients look there for the context's length
STAYS = timedelta(days=36_500)


class ShowRequest(HistoryModel):
    """Request body of POST /api/show and /api/pull."""

    model: str = Field(default="", description="as in GET /api/tags")
    name: str = Field(default="", description="the older name of `model`")
    stream: bool | None = True
    verbose: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "ShowRequest":
        self.model = bare_name(self.model or self.name)
        return self


@router.get("/", include_in_schema=False)
async def root(request: Request, ring: TheRing) -> Response:
    """The words that Ollama's clients look for, on Ollama's port alone."""
    if (request.scope.get("server") or ("", 0))[1] != ring.settings.ollama_port:
        raise NotFoundError("unknown route: GET /; the dashboard is at /dashboard, the API at /v1")
    return PlainTextResponse("Ollama is running")


@router.get("/api/version", summary="Version of Ollama's API that is spoken")
async def version() -> dict[str, str]:
    """Clients refuse servers whose version is too old for them."""
    return {"version": API_VERSION}


@router.get("/api/tags", summary="List models (Ollama)", responses=error_responses(ok="Models and adapters"))
async def tags(ring: TheRing) -> Response:
    """The models and adapters that a request may name."""
    models = await served_models(ring)
    return json_reply({"models": [await _listed(ring, model) for model in models]})


@router.get("/api/ps", summary="List running models (Ollama)", responses=error_responses(ok="Models and adapters"))
async def running(ring: TheRing) -> Response:
    """The models and adapters that a worker serves now."""
    until = rfc3339((datetime.now(UTC) + STAYS).timestamp())
    shown = [
        {
            **await _listed(ring, model),
            "expires_at": until,
            "size_vram": 0,
            "context_length": model.context_length,
        }
        for model in await served_models(ring)
        if model.state == "ready"
    ]
    return json_reply({"models": shown})


@router.post("/api/show", summary="Describe a model (Ollama)", responses=error_responses(400, 404, ok="Its facts"))
async def show(body: ShowRequest, ring: TheRing) -> Response:
    """Facts about one model: the length of its context, its template, and what it can do."""
    card, codec = await _found(ring, body.model)
    template = codec.bundle.chat_template
    info = {
        "general.architecture": ARCHITECTURE,
        "general.basename": card.name,
        f"{ARCHITECTURE}.context_length": card.context_length,
        f"{ARCHITECTURE}.embedding_length": card.hidden_size,
        f"{ARCHITECTURE}.vocab_size": card.vocab_size,
    }
    return json_reply(
        {
            "modelfile": f"FROM {card.name}\n",
            "parameters": f"num_ctx {card.context_length}",
            "template": template,
            "details": _details(card, ""),
            "model_info": info,
            "capabilities": _capabilities(card, codec),
            "modified_at": rfc3339(card.created),
        }
    )


@router.post("/api/pull", summary="Have a model (Ollama)", responses=error_responses(400, 404, ok="It is there"))
async def pull(body: ShowRequest, ring: TheRing) -> Response:
    """Succeeds for a model that is served; others come with a worker of theirs (404)."""
    await _found(ring, body.model)
    done = {"status": "success"}
    return Response(to_line(done), media_type="application/x-ndjson") if body.stream is not False else json_reply(done)


async def _found(ring: Ring, name: str) -> tuple[ModelCard, TextCodec]:
    if not name:
        raise InvalidRequestError("'model' is required", param="model")
    target = await find_job_target(ring, name, "", "follow")
    return target.card, await target.ring.codecs.codec(target.card)


async def _listed(ring: Ring, model: Model) -> dict[str, Any]:
    card = await ring.live_card(model.parent or model.root)
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": rfc3339(model.created),
        "size": 0,  # of its files, which its workers have
        "digest": "" if card is None else card.base_sha256,
        "details": _details(card, model.parent or ""),
    }


def _details(card: ModelCard | None, parent: str) -> dict[str, Any]:
    return {
        "parent_model": parent,
        "format": "mlx",
        "family": ARCHITECTURE,
        "families": [ARCHITECTURE],
        "parameter_size": "",
        "quantization_level": "" if card is None else card.quantization or card.dtype,
    }


def _capabilities(card: ModelCard, codec: TextCodec) -> list[str]:
    """Capabilities of a model; tools are written into the prompt where its template has no place for them."""
    thinks = language_of(codec).reasoning is not None
    has = {"completion": True, "tools": True, "thinking": thinks, "vision": card.vision is not None}
    return [name for name, there in {**has, "embedding": card.shows_states}.items() if there]
