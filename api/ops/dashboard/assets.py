"""Scripts and styles, read once; our own carry a hash in their address, so that browsers may keep them."""

import hashlib
from importlib import resources

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(prefix="/dashboard")

_TYPES = {"js": "text/javascript", "css": "text/css", "txt": "text/plain", "svg": "image/svg+xml"}
_FILES = {
    item.name: item.read_bytes()
    for item in resources.files("api.ops.dashboard").joinpath("static").iterdir()
    if item.name.rpartition(".")[2] in _TYPES
}
_VERSIONS = {name: hashlib.sha256(data).hexdigest()[:10] for name, data in _FILES.items()}


def address(name: str) -> str:
    """Where a browser finds a file."""
    return f"/dashboard/static/{name}?v={_VERSIONS[name]}"


@router.get("/static/{name}")
async def static(name: str) -> Response:
    """Returns one of the dashboard's own files."""
    data = _FILES.get(name)
    if data is None:
        raise HTTPException(404)
    headers = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}
    return Response(data, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)
