"""Errors as Ollama's object: `{"error": "..."}`, from a route and from a guard before all routes."""

import msgspec
from starlette.types import Scope

from shared.errors import ParallmError

PATHS = frozenset(
    f"/api/{name}"
    for name in (
        *("chat", "generate", "embed", "embeddings", "tags", "show", "ps", "version"),
        *("pull", "push", "create", "copy", "delete"),  # which there are none of: models come with workers
    )
)


def speaks_ollama(scope: Scope) -> bool:
    """True if a request's path is one of Ollama's."""
    return scope["path"] in PATHS


def ollama_error(error: ParallmError) -> bytes:
    """JSON of the object. It has no place for the field to blame, so the message names it."""
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return msgspec.json.encode({"error": message.encode(errors="replace").decode()})
