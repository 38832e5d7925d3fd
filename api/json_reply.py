"""A value of ours as the JSON answer of a route: msgspec writes it, without pydantic's second look."""

from typing import Any

import msgspec
from starlette.responses import Response


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The answer; `value` is anything that msgspec can write."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")
