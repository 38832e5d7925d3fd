"""The catalogue over HTTP: add, change and remove models, and have hosts load or unload them.

GET /v1/models shows the result (`api/openai/models.py`).
"""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi import Path as PathParameter
from msgspec import structs
from pydantic import Field

from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import RequestModel
from api.openai.models import Model, described
from api.ring.cold_models import obstacle
from api.ring.ring import Ring, TheRing
from shared.catalogue import LONGEST_SOURCE, CatalogueEntry
from shared.errors import ConflictError, InvalidRequestError, ServiceUnavailableError, UnknownModelError
from shared.process.model_aliases import short_name

router = APIRouter(tags=["operations"], route_class=BodyRoute)
Name = Annotated[str, PathParameter(description="name or alias of a model of the catalogue")]


class ModelChange(RequestModel):
    """Request body of PATCH /v1/models/{name}; what is left out stays as it is."""

    aliases: list[str] | None = Field(default=None, description="other names of the model: these replace all it has")
    pinned: bool | None = Field(default=None, description="a host always holds it, and never unloads it for another")
    priority: int | None = Field(default=None, description="the model with the higher number has the memory; else 0")
    idle_s: float | None = Field(
        default=None, description="unload it after so long without a request; 0: host's default"
    )
    ranks: int | None = Field(
        default=None, description="processes that hold it together; more than 1: a group serves it"
    )
    options: dict[str, str] | None = Field(
        default=None, description='flags of its worker without dashes, such as `{"kv-bits": "8"}`'
    )

    def applied(self, entry: CatalogueEntry) -> CatalogueEntry:
        """The entry with the fields that are given."""
        given = {name: value for name in ModelChange.model_fields if (value := getattr(self, name)) is not None}
        if "aliases" in given:
            given["aliases"] = tuple(given["aliases"])
        return structs.replace(entry, **given)


class NewModel(ModelChange):
    """Request body of POST /v1/models."""

    source: str = Field(
        max_length=LONGEST_SOURCE, description="folder, GGUF file or hub name, as a worker's --model takes it"
    )
    name: str = Field(default="", description="name in requests; left out: the last part of the source")
    sha256: str = Field(default="", description="`base_sha256` that its weights must have; left out: any")


class PlaceBody(RequestModel):
    """Request body of POST /v1/models/load and /v1/models/unload."""

    model: str = Field(description="name or alias of a model of the catalogue")
    host: str = Field(default="", description="id or machine of the host; left out: any that can, or all that hold it")


@router.post("/v1/models", summary="Add a model to the catalogue", status_code=201, responses=error_responses(400, 409))
async def add_model(body: NewModel, ring: TheRing) -> Model:
    """Hosts that have its files, or may fetch them, load it when a request needs it; 409 for a name that is taken."""
    name = body.name or short_name(body.source)
    await _check_aliases(ring, body.aliases)
    entry = CatalogueEntry(name, body.source, sha256=body.sha256, added_ms=time.time_ns() // 1_000_000)
    await ring.catalogue.put(body.applied(entry), new=True)
    return await _shown(ring, name)


@router.patch("/v1/models/{name:path}", summary="Change a model", responses=error_responses(400, 404, 409))
async def change_model(name: Name, body: ModelChange, ring: TheRing) -> Model:
    """Aliases, pin, priority, time to unload and options; new options count from the next load on."""
    await _check_aliases(ring, body.aliases)
    entry = await ring.catalogue.change(name, body.applied)
    return await _shown(ring, entry.name)


@router.delete("/v1/models/{name:path}", summary="Remove a model", responses=error_responses(404))
async def remove_model(name: Name, ring: TheRing) -> dict[str, Any]:
    """Hosts that hold it finish what runs and unload it; its files stay."""
    entry = await _entry(ring, name)
    await ring.catalogue.remove(entry.name)
    return {"id": entry.name, "object": "model", "deleted": True}


@router.post("/v1/models/load", summary="Load a model", status_code=202, responses=error_responses(400, 404, 503))
async def load_model(body: PlaceBody, response: Response, ring: TheRing) -> Model:
    """Returns at once, and GET /v1/models/{name} shows how far it is. 200 if the model is loaded there; 503 with the
    reason if no host can load it. A load that has failed is tried again."""
    entry = await _entry(ring, body.model)
    host = _host(ring, body.host)
    held = [each for where, each in ring.models.holding(entry.name) if host in ("", where.id)]
    if any(each.state == "ready" for each in held):
        response.status_code = 200
        return await described(ring, entry)
    why_not = obstacle(ring.models, entry)
    if why_not is not None and not any(each.state == "failed" for each in held):
        raise ServiceUnavailableError(f"no host can load model '{entry.name}': {why_not.reason}")
    await ring.catalogue.order("load", entry.name, host)
    return await _shown(ring, entry.name)


@router.post("/v1/models/unload", summary="Unload a model", status_code=202, responses=error_responses(400, 404, 409))
async def unload_model(body: PlaceBody, response: Response, ring: TheRing) -> Model:
    """Returns at once. The model's rows finish, or are handed back to the queue; requests for it load it again. 200 if
    no host holds it; 409 for a pinned one."""
    entry = await _entry(ring, body.model)
    if entry.pinned:
        raise ConflictError(f"model '{entry.name}' is pinned, so a host would load it again: unpin it first")
    host = _host(ring, body.host)
    holding = [each.id for each, _ in ring.models.holding(entry.name) if host in ("", each.id)]
    for each in holding:
        await ring.catalogue.order("unload", entry.name, each)
    response.status_code = 202 if holding else 200
    return await _shown(ring, entry.name)


async def _check_aliases(ring: Ring, aliases: list[str] | None) -> None:
    """ConflictError for one that is the name of a model that workers serve, or have served: it would change its meaning
    when they come and go."""
    taken = await ring.registry.names() if aliases else []
    for alias in aliases or ():
        if alias in taken:
            raise ConflictError(f"'{alias}' is the name of a model that workers serve, or have served", param="aliases")


async def _entry(ring: Ring, name: str) -> CatalogueEntry:
    await ring.look()
    entry = ring.models.named(name)
    if entry is None:
        known = ", ".join(ring.models.entries) or "nothing"
        raise UnknownModelError(f"model '{name}' is not in the catalogue, which has {known}", param="model")
    return entry


def _host(ring: Ring, name: str) -> str:
    """The id of a live host by its id, or by its machine where that has one; "" for ""."""
    found = [each.id for each in ring.models.hosts if name in (each.id, each.host)]
    if name and len(found) != 1:
        known = ", ".join(f"{each.id} on {each.host}" for each in ring.models.hosts) or "none"
        what = "several hosts run on" if found else "there is no host"
        raise InvalidRequestError(f"{what} '{name[:80]}'; hosts: {known}", param="host")
    return found[0] if name else ""


async def _shown(ring: Ring, name: str) -> Model:
    return await described(ring, await _entry(ring, name))
