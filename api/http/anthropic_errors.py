"""Errors as Anthropic's object: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

A request that speaks Anthropic's protocol gets it from a route and from a guard before all routes.
"""

from typing import Literal

import msgspec
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.types import Scope

from shared.errors import ContextLengthExceededError, ParallmError

VERSION_HEADER = "anthropic-version"
TOO_LONG = "prompt is too long"  # by which clients know that they have to shorten the conversation
_OVERLOADED = 529  # their status where OpenAI's and ours is 503
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str = Field(description="such as invalid_request_error, rate_limit_error, overloaded_error")
    message: str = Field(description="what was wrong, where, and what to do")


class AnthropicError(BaseModel):
    """The body of every response of Anthropic's endpoints with a status of 400 and more."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


def speaks_anthropic(scope: Scope) -> bool:
    """True if a request wants Anthropic's shapes: by its path, or, where protocols share one, by its headers."""
    path: str = scope["path"]
    if path.startswith("/v1/messages"):
        return path == "/v1/messages" or path.startswith("/v1/messages/")
    return path.startswith(("/v1/models", "/v1/files")) and VERSION_HEADER in Headers(scope=scope)


def status_of(error: ParallmError) -> int:
    """The HTTP status that stands in Anthropic's table for such an error."""
    return _OVERLOADED if error.status == 503 else error.status


def anthropic_error(error: ParallmError, request_id: str) -> bytes:
    """JSON of the object. It has no place for the field to blame, so the message names it."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == ContextLengthExceededError.code:
        message = message if message.startswith(TOO_LONG) else f"{TOO_LONG}: {message}"  # of a worker's memory
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    detail = {"type": kind, "message": message.encode(errors="replace").decode()}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id or None})
