"""Adapters over HTTP: list, upload, roll back, delete; and the same store under the names that other servers use."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi import Path as PathParameter
from pydantic import ValidationError
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from api.adapters.bodies import (
    BestBody,
    LatestVersion,
    LoadBody,
    LoadLoraBody,
    PromoteBody,
    RejectBody,
    SwitchBody,
    UnloadLoraBody,
    UploadFields,
    VersionBody,
    checks_of,
)
from api.adapters.intake import AdapterFiles, publish, read_folder, receive
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, from_validation, json_reply
from api.ring.choosing import from_each, ring_of_adapter
from api.ring.ring import Ring, ring_of
from shared.adapter_files.formats import inherit_config
from shared.adapters import NAME, AdapterManifest, AdapterRef, check_name
from shared.errors import ConflictError, InvalidRequestError, ParallmError, UnknownAdapterError
from shared.redis.adapters.catalog import AdapterSummary

router = APIRouter(tags=["adapters"], route_class=BodyRoute)
TheRing = Annotated[Ring, Depends(ring_of)]
Name = Annotated[str, PathParameter(pattern=f"^{NAME}$")]
Version = Annotated[int, PathParameter(ge=1)]

_FILES: dict[str, Any] = {
    "adapter_config.json": {"type": "string", "format": "binary", "description": "mlx-lm's or PEFT's"},
    "adapters.safetensors": {"type": "string", "format": "binary", "description": "or adapter_model.safetensors"},
}


def _multipart(**fields: Any) -> dict[str, Any]:
    properties = {**UploadFields.model_json_schema()["properties"], **_FILES, **fields}
    schema = {"type": "object", "required": ["adapters.safetensors"], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


# -- ours


@router.get("/v1/adapters", summary="List adapters", response_class=Response)
async def list_adapters(ring: TheRing) -> Response:
    """Every adapter with its versions and pointers; of another ring with its `ring`."""
    data = []
    for each, summaries in await from_each(ring, _summaries):
        where = {} if each is ring else {"ring": each.name}
        data += [msgspec.structs.asdict(summary) | where for summary in summaries]
    return json_reply({"object": "list", "data": data})


async def _summaries(ring: Ring) -> list[AdapterSummary]:
    summaries = []
    for name in await ring.adapters.names():
        try:
            summaries.append(await ring.adapters.summary(name))
        except UnknownAdapterError:  # deleted just now
            continue
    return summaries


@router.post(
    "/v1/adapters",
    status_code=201,
    summary="Create an adapter",
    response_class=Response,
    openapi_extra=_multipart(),
    responses={201: {"description": "The first version's manifest"}, **error_responses(400, 409, 413, 503)},
)
async def create_adapter(request: Request, ring: TheRing) -> Response:
    """Upload the first version of a new adapter; 409 when it exists."""
    async with _uploaded(request, ring) as (files, fields, workdir):
        name = _name(fields, ring)
        ring, fields = await _placed(ring, name, fields)
        await ring.adapters.next_owner(name)
        if name in await ring.adapters.names():
            raise ConflictError(f"adapter '{name}' exists; POST /v1/adapters/{name}/versions adds to it")
        return _described(await publish(ring, name, fields, files, workdir), 201)


@router.get(
    "/v1/adapters/{name}", summary="Describe an adapter", response_class=Response, responses=error_responses(404)
)
async def describe_adapter(name: Name, ring: TheRing) -> Response:
    """Returns the manifests of all versions, the moves of `latest`, and which workers have loaded which version."""
    summary = await ring.adapters.summary(name)
    manifests = []
    for version in summary.versions:
        try:
            manifests.append(_shown(await ring.adapters.manifest(name, version)))
        except UnknownAdapterError:  # deleted just now
            continue
    history, acks = await ring.adapters.history(name), await ring.adapters.acks(name)
    return json_reply({**msgspec.structs.asdict(summary), "versions": manifests, "history": history, "acks": acks})


@router.post(
    "/v1/adapters/{name}/versions",
    status_code=201,
    summary="Add a version",
    response_class=Response,
    openapi_extra=_multipart(),
    responses={201: {"description": "The version's manifest"}, **error_responses(400, 409, 413, 503)},
)
async def add_version(name: Name, request: Request, ring: TheRing) -> Response:
    """Upload the next version of an adapter; workers load it between two decode steps."""
    async with _uploaded(request, ring) as (files, fields, workdir):
        return _described(await publish(ring, name, fields, files, workdir), 201)


@router.get(
    "/v1/adapters/{name}/versions/{version}",
    summary="Describe a version",
    response_class=Response,
    responses=error_responses(404),
)
async def describe_version(name: Name, version: Version, ring: TheRing) -> Response:
    """Returns the manifest of one version."""
    return _described(await ring.adapters.manifest(name, version))


@router.get(
    "/v1/adapters/{name}/versions/{version}/adapter_config.json",
    summary="Download a version's configuration",
    response_class=Response,
    responses=error_responses(404),
)
async def version_config(name: Name, version: Version, ring: TheRing) -> Response:
    """`adapter_config.json` in mlx-lm's layout, with the version's heads."""
    return Response(inherit_config(await ring.adapters.manifest(name, version)), media_type="application/json")


@router.get(
    "/v1/adapters/{name}/versions/{version}/adapters.safetensors",
    summary="Download a version's weights",
    response_class=Response,
    responses={200: {"description": "The bytes", "content": {"application/octet-stream": {}}}, **error_responses(404)},
)
async def version_weights(name: Name, version: Version, ring: TheRing) -> Response:
    """The bytes that workers load; their sha256 is the manifest's, and the entity tag."""
    manifest = await ring.adapters.manifest(name, version)
    chunks = ring.adapters.fetch(manifest)
    first = await anext(chunks)  # 404 while there still is a status to send

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    headers = {"content-length": str(manifest.size), "etag": f'"{manifest.sha256}"'}
    return StreamingResponse(body(), headers=headers, media_type="application/octet-stream")


@router.post("/v1/adapters/{name}/rollback", summary="Roll back", responses=error_responses(404, 409))
async def roll_back(name: Name, ring: TheRing, body: VersionBody | None = None) -> LatestVersion:
    """Make another version the latest, by default the one before."""
    asked = body or VersionBody()
    version = await ring.adapters.rollback(name, asked.version, reason=asked.reason)
    ring.splits.forget(name)
    return LatestVersion(policy_version=version, message=f"{name}@{version} is the latest version")


@router.post("/v1/adapters/{name}/promote", summary="Promote a candidate", responses=error_responses(400, 404, 409))
async def promote(name: Name, body: PromoteBody, ring: TheRing) -> LatestVersion:
    """Make an uploaded candidate the latest version; 409 when a newer one has been it."""
    await ring.adapters.promote(name, body.version, gate=checks_of(body.gate), if_latest=body.if_latest)
    ring.splits.forget(name)
    return LatestVersion(policy_version=body.version, message=f"{name}@{body.version} is the latest version")


@router.post("/v1/adapters/{name}/reject", summary="Reject a candidate", responses=error_responses(400, 404, 409))
async def reject(name: Name, body: RejectBody, ring: TheRing) -> dict[str, Any]:
    """Write down that a candidate failed its gate: it can be looked at and is never served; 409 for the latest."""
    manifest = await ring.adapters.reject(name, body.version, checks_of(body.gate))
    ring.splits.forget(name)
    return {"id": manifest.id, "object": "adapter.version", "status": manifest.status}


@router.post("/v1/adapters/{name}/best", summary="Point at the best version", responses=error_responses(400, 404))
async def set_best(name: Name, body: BestBody, ring: TheRing) -> dict[str, Any]:
    """Make `best` point at a version; pruning leaves it."""
    await ring.adapters.set_best(name, body.version, body.value)
    return {"id": f"{name}@{body.version}", "object": "adapter.version", "best_value": body.value}


@router.delete("/v1/adapters/{name}", summary="Delete an adapter", responses=error_responses(404, 409))
async def delete_adapter(name: Name, ring: TheRing) -> dict[str, Any]:
    """Delete all versions; 409 while a worker uses one."""
    await ring.adapters.delete(name)
    ring.splits.forget(name)
    return {"id": name, "object": "adapter", "deleted": True}


@router.delete(
    "/v1/adapters/{name}/versions/{version}", summary="Delete a version", responses=error_responses(404, 409)
)
async def delete_version(name: Name, version: Version, ring: TheRing) -> dict[str, Any]:
    """Delete a version; 409 when it is the latest, or while a worker uses it."""
    await ring.adapters.delete(name, version)
    ring.splits.forget(name)
    return {"id": f"{name}@{version}", "object": "adapter.version", "deleted": True}


# -- names from training code


@router.post("/load_adapter", summary="Load an adapter from disk", responses=error_responses(400, 404, 409, 413, 503))
async def load_adapter(body: LoadBody, ring: TheRing) -> LatestVersion:
    """Publish an adapter directory of the api's host as the next version."""
    name = body.name or ring.settings.default_adapter
    manifest = await _load(ring, body.adapter_path, name, body.model)
    return LatestVersion(policy_version=manifest.version, message=f"Loaded {manifest.id} from {body.adapter_path}")


@router.post(
    "/upload_adapter",
    summary="Upload an adapter",
    openapi_extra=_multipart(),
    responses=error_responses(400, 409, 413, 503),
)
async def upload_adapter(request: Request, ring: TheRing) -> LatestVersion:
    """Publish uploaded files as the next version; without a configuration, the latest version's holds."""
    async with _uploaded(request, ring) as (files, fields, workdir):
        name = _name(fields, ring)
        ring, fields = await _placed(ring, name, fields)
        manifest = await publish(ring, name, fields, files, workdir)
    return LatestVersion(policy_version=manifest.version, message=f"Loaded {manifest.id} from the upload")


@router.post(
    "/update_adapter_weights",
    summary="Update an adapter's weights",
    openapi_extra=_multipart(),
    responses=error_responses(400, 404, 409, 413, 503),
)
async def update_adapter_weights(request: Request, ring: TheRing) -> LatestVersion:
    """Publish new tensors of an adapter that exists, with the configuration of its latest version."""
    async with _uploaded(request, ring) as (files, fields, workdir):
        name = _name(fields, ring)
        ring, fields = await _placed(ring, name, fields)
        await ring.adapters.manifest(name)
        manifest = await publish(ring, name, fields, dataclasses.replace(files, config=None), workdir)
    return LatestVersion(policy_version=manifest.version, message=f"Updated {name} to {manifest.id}")


@router.post("/model/switch-lora", summary="Switch to a version", responses=error_responses(400, 404, 409))
async def switch_lora(body: SwitchBody, ring: TheRing) -> LatestVersion:
    """Make any published version the latest, newer or older."""
    name, version = _switch_target(body, ring.settings.default_adapter)
    ring = (await ring_of_adapter(ring, name)).ring
    try:
        await ring.adapters.promote(name, version)
    except ConflictError:  # it is older than another one has been
        await ring.adapters.rollback(name, version, reason="switch")
    ring.splits.forget(name)
    return LatestVersion(policy_version=version, message=f"{name}@{version} is the latest version")


def _switch_target(body: SwitchBody, default: str) -> tuple[str, int]:
    text, name = str(body.version), body.name or default
    ref = AdapterRef.parse(f"{name}@{text}" if text.isdecimal() else text)
    if len(ref.choices) > 1 or ref.choices[0].follows:
        raise InvalidRequestError(f"{text[:80]!r} names no version: a number or name@k", param="version")
    if body.name and ref.choices[0].name != body.name:
        raise InvalidRequestError("'version' and 'name' name different adapters", param="name")
    return ref.choices[0].name, ref.choices[0].version


# -- vLLM's names


@router.post(
    "/v1/load_lora_adapter",
    summary="Load a LoRA adapter (vLLM)",
    response_class=PlainTextResponse,
    responses=error_responses(400, 404, 409, 413, 503),
)
async def load_lora_adapter(body: LoadLoraBody, ring: TheRing) -> str:
    """Publish an adapter directory; one that exists needs `load_inplace`."""
    ring = (await ring_of_adapter(ring, body.lora_name, body.model or body.base_model_name)).ring
    if not body.load_inplace and body.lora_name in await ring.adapters.names():
        raise InvalidRequestError(
            f"The lora adapter '{body.lora_name}' has already been loaded. Set 'load_inplace' to load a new version.",
            param="lora_name",
        )
    if body.model and body.base_model_name and body.model != body.base_model_name:
        raise InvalidRequestError("'model' and 'base_model_name' name different models", param="base_model_name")
    try:
        await _load(ring, body.lora_path, body.lora_name, body.model or body.base_model_name)
    except ParallmError as error:
        error.param = "lora_path" if error.param == "adapter_path" else error.param
        raise
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter (vLLM)",
    response_class=PlainTextResponse,
    responses=error_responses(404, 409),
)
async def unload_lora_adapter(body: UnloadLoraBody, ring: TheRing) -> str:
    """Delete an adapter with all its versions; 409 while a worker uses one."""
    ring = (await ring_of_adapter(ring, body.lora_name)).ring
    await ring.adapters.delete(body.lora_name)
    ring.splits.forget(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


@asynccontextmanager
async def _uploaded(request: Request, ring: Ring) -> AsyncIterator[tuple[AdapterFiles, UploadFields, Path]]:
    """The request's files in a folder that lives as long as the block."""
    with TemporaryDirectory(prefix="parallm-adapter-") as folder:
        files, raw = await receive(request, ring, Path(folder))
        try:
            fields = UploadFields.model_validate(raw)
        except ValidationError as error:
            raise from_validation(error.errors()) from error
        yield files, fields, Path(folder)


async def _load(ring: Ring, path: str, name: str, model: str | None) -> AdapterManifest:
    check_name(name)
    settings = ring.settings
    with TemporaryDirectory(prefix="parallm-adapter-") as folder:
        workdir = Path(folder)
        files = await asyncio.to_thread(read_folder, path, settings.adapter_dirs, workdir, settings.max_adapter_bytes)
        ring, fields = await _placed(ring, name, UploadFields(model=model))
        return await publish(ring, name, fields, files, workdir)


async def _placed(ring: Ring, name: str, fields: UploadFields) -> tuple[Ring, UploadFields]:
    """The ring that an upload is for, and its fields as they are meant there."""
    chosen = await ring_of_adapter(ring, name, fields.model)
    return chosen.ring, fields.model_copy(update={"model": chosen.model})


def _name(fields: UploadFields, ring: Ring) -> str:
    if fields.name and fields.adapter_id and fields.name != fields.adapter_id:
        raise InvalidRequestError("'name' and 'adapter_id' name different adapters", param="name")
    return check_name(fields.name or fields.adapter_id or ring.settings.default_adapter)


def _shown(manifest: AdapterManifest) -> dict[str, Any]:
    return {"id": manifest.id, **msgspec.structs.asdict(manifest)}


def _described(manifest: AdapterManifest, status: int = 200) -> Response:
    return json_reply(_shown(manifest), status)
