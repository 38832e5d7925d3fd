"""GET /v1/ring: where this ring's Redis is, for processes that join it knowing the api alone (`--connect-to`)."""

from typing import Annotated
from urllib.parse import unquote

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from api.ring.ring import Ring, ring_of
from shared.redis.connection.address import RedisUrl

router = APIRouter(tags=["operations"])
TheRing = Annotated[Ring, Depends(ring_of)]


class RingAddress(BaseModel):
    """An address without user and password: secrets do not travel over HTTP."""

    redis: str = Field(description="URL without user and password, as this api reaches it")
    username: str = Field(description="'' for Redis' default user")
    needs_password: bool = Field(description="True if a process that joins needs the password")


@router.get("/v1/ring", summary="Where the ring is")
async def ring_address(ring: TheRing) -> RingAddress:
    """The Redis that joins this api, its workers and its trainer. Needs an API key where the server has keys."""
    return address_of(ring.settings.redis)


def address_of(url: str) -> RingAddress:
    """A Redis URL without its secrets."""
    parts = RedisUrl.of(url)
    plain = f"{parts.scheme}://{parts.hosts}{parts.path}"
    return RingAddress(redis=plain, username=unquote(parts.username), needs_password=bool(parts.password))
