"""Every error leaves as OpenAI's object: `{"error": {"message", "type", "param", "code"}}`; where a request speaks
Anthropic's protocol or Ollama's, as theirs (api/http/anthropic_errors.py, api/http/ollama_errors.py).

Our own errors carry their status; here pydantic's, Starlette's and Redis's are translated into ours.
"""

import copy
import errno
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, Field
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.http.anthropic_errors import anthropic_error, speaks_anthropic, status_of
from api.http.fields import RequestModel
from api.http.ollama_errors import ollama_error, speaks_ollama
from shared.errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    ParallmError,
    PayloadTooLargeError,
    QueueFullError,
    ServiceUnavailableError,
    UnsupportedParameterError,
)
from shared.redis.connection.faults import is_refusal, reason

log = structlog.get_logger()

_OF_FILES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ENOENT, errno.EACCES})
_BRANCHES = frozenset({"str", "int", "float", "bool", "none"})


class ErrorDetail(BaseModel):
    """OpenAI's fields of an error."""

    message: str = Field(description="what was wrong, where, and what to do")
    type: str = Field(description="such as invalid_request_error, rate_limit_error, server_error")
    param: str | None = Field(description="the field of the request, if one is to blame")
    code: str | None = Field(description="a stable name of the error")


class ErrorBody(BaseModel):
    """The body of every response with a status of 400 and more."""

    error: ErrorDetail


def error_responses(*statuses: int, ok: str = "") -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of the errors that a route may answer with, by default one that begins work; `ok`: of its
    answer."""
    meanings = {
        400: "The request is malformed or asks for something impossible; `error.param` names the field.",
        404: "No such model, job, stream or adapter.",
        409: "The request contradicts the present state.",
        410: "It was there, and its time is over.",
        413: "The body is larger than this server takes.",
        429: "Too much work is waiting; `Retry-After` says when to try again.",
        503: "No live worker serves the model; `Retry-After` says when to try again.",
        504: "The deadline passed before the request was complete.",
    }
    answer: dict[int | str, dict[str, Any]] = {200: {"description": ok}} if ok else {}
    statuses = statuses or (400, 404, 413, 429, 503, 504)
    return answer | {status: described(meanings[status]) for status in statuses}


def described(meaning: str) -> dict[str, Any]:
    """OpenAPI's description of an error. It points to `ErrorBody` itself: FastAPI would make a validator of the model
    for each route and status, which was a fifth of a second of every start."""
    return {
        "description": meaning,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
    }


def error_object(error: ParallmError) -> bytes:
    """JSON of the error object; what is no text, such as half of a surrogate pair that the client sent, becomes `?`."""
    message, param = (v and v.encode(errors="replace").decode() for v in (error.message, error.param))
    detail = {"message": message, "type": error.type, "param": param, "code": error.code}
    return msgspec.json.encode({"error": detail})


def error_response(error: ParallmError) -> Response:
    """The response for an error, with `Retry-After` where it helps, and `Allow`."""
    headers = {}
    if isinstance(error, QueueFullError | ServiceUnavailableError):
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowedError):
        headers["Allow"] = ", ".join(error.allowed)
    return ErrorResponse(error, headers)


class ErrorResponse(Response):
    """An error in the shape of the protocol that its request speaks."""

    def __init__(self, error: ParallmError, headers: dict[str, str]) -> None:
        super().__init__(error_object(error), error.status, headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if speaks_anthropic(scope):
            self.status_code = status_of(self._error)
            self.body = anthropic_error(self._error, scope.get("state", {}).get("request_id", ""))
        elif speaks_ollama(scope):
            self.body = ollama_error(self._error)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class BodyError(HTTPException):
    """An error of ours while a body is read: there FastAPI lets no other kind out.

    `body`: what there is of a body that is not handed on.
    """

    def __init__(self, error: ParallmError, body: bytes = b"") -> None:
        super().__init__(error.status, error.message)
        self.error, self.body = error, body


def install(app: FastAPI) -> None:
    """Make `app` answer all errors in our shape (api/http/context.py does so for those that are unforeseen)."""

    async def handle(request: Request, error: Exception) -> Response:
        ours = translate(request, error)
        if ours.status >= 500:
            cause = reason(error) if isinstance(error, RedisError) else str(error)
            log.error("api.error", status=ours.status, code=ours.code, error=cause, path=request.url.path)
        return error_response(ours)

    for kind in (ParallmError, RequestValidationError, HTTPException, RedisError, OSError):
        app.add_exception_handler(kind, handle)


def translate(request: Request, error: Exception) -> ParallmError:
    """Our error for any exception that a route raises."""
    if isinstance(error, ParallmError):
        return error
    if isinstance(error, RequestValidationError):
        return from_validation(error.errors())
    if isinstance(error, BodyError):
        return error.error
    if isinstance(error, HTTPException):
        return _from_http(request, error)
    return from_fault(error)


def from_fault(error: Exception) -> ParallmError:
    """Our error for what a user cannot help: Redis out of reach or refusing, or a fault of ours."""
    if isinstance(error, ParallmError):
        return error
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        return ServiceUnavailableError("this server's temporary folder is full or cannot be written to (its TMPDIR)")
    if isinstance(error, RedisConnectionError | RedisTimeoutError | WatchError | OSError):
        return ServiceUnavailableError("Redis cannot be reached; try again")
    if is_refusal(error):
        return ServiceUnavailableError(f"Redis refuses to work ({reason(error)}); try again later")
    return ParallmError("internal error; the server's log has the details under this x-request-id")


def _from_http(request: Request, error: HTTPException) -> ParallmError:
    route = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return NotFoundError(f"unknown route: {route}")
    if error.status_code == 405:
        allowed = _allowed_methods(request)
        return MethodNotAllowedError(f"method not allowed: {route}; that path takes {' and '.join(allowed)}", allowed)
    if error.status_code == 413:
        return PayloadTooLargeError(str(error.detail))
    return InvalidRequestError(str(error.detail))


def _allowed_methods(request: Request) -> list[str]:
    """The methods that some route takes at the path of a request."""
    there = (each for each in iter_route_contexts(request.app.routes) if each.path_regex.match(request.url.path))
    return sorted({method for each in there for method in each.methods or ()})


def from_validation(errors: Sequence[Any]) -> InvalidRequestError:
    """The first of pydantic's complaints, with the field's name as a user writes it."""
    first = _meant(errors)
    kind, message = str(first["type"]), str(first["msg"])
    if kind == "json_invalid" and first["loc"][:1] in ((), ("body",)):  # elsewhere it is a field of a form
        reason = first.get("ctx", {}).get("error", message)
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    if kind == "extra_forbidden":  # its name may be any text
        named = ".".join(filter(None, (_path(first["loc"][:-1], ""), str(first["loc"][-1])[:200])))
        return UnsupportedParameterError(f"unknown parameter '{named}'", param=named)
    param = _path(first["loc"], str(first.get("ctx", {}).get("param", "")))
    if kind == "unsupported":
        return UnsupportedParameterError(f"'{param}': {message}", param=param)
    if kind == "missing":
        what = f"'{param}' is required" if param else "a JSON body is required"
        return InvalidRequestError(what, param=param)
    if kind in ("model_type", "model_attributes_type"):
        body = "the body must be a JSON object (Content-Type: application/json)"
        return InvalidRequestError(f"'{param}' must be an object" if param else body, param=param)
    return InvalidRequestError(f"invalid '{param}': {message}" if param else message, param=param)


def _meant(errors: Sequence[Any]) -> Any:
    """The first complaint; where none of a union's branches fits, that of the branch which fits furthest."""
    first = errors[0]
    *place, last = first["loc"] or ("",)
    if first["type"] == "extra_forbidden" or not _is_branch(last):
        return first
    branches = [each for each in errors if list(each["loc"][: len(place)]) == place]
    return max(branches, key=lambda each: len(each["loc"]))


def _is_branch(part: Any) -> bool:
    """True if a part of pydantic's location names a branch of a union, a type or a tag, and no field."""
    return isinstance(part, str) and (not part.isidentifier() or part in _BRANCHES or part in _model_names())


@functools.cache
def _model_names() -> frozenset[str]:
    names: set[str] = set()
    models: list[type[RequestModel]] = [RequestModel]
    while models:
        below = models.pop().__subclasses__()
        names.update(model.__name__ for model in below)
        models += below
    return frozenset(names)


def _path(location: Sequence[Any], field: str) -> str | None:
    """`("body", "messages", 0)` and `role` -> `messages[0].role`; names of union branches are left out."""
    if location[:1] == ("header",):
        return str(location[1])
    path = ""
    for part in location[1:] if location and location[0] in ("body", "query", "path") else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_branch(part):
            path += f".{part}" if path else str(part)
    return ".".join(filter(None, (path, field))) or None


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The answer; `value` is anything that msgspec can write."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


_BAD = described("The request is malformed or asks for something impossible; `error.param` names the field.")
_ANY = described("Any other error: the process is out of its depth, or Redis out of reach.")


def describe_errors(app: FastAPI) -> None:
    """Make the app's OpenAPI document list the errors that it returns, and resolve all that it refers to."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = copy.deepcopy(original())  # the schemas of some bodies are constants of their routes
            for operations in document["paths"].values():
                for operation in operations.values():
                    _correct(operation["responses"])
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            body = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**body.pop("$defs"), ErrorBody.__name__: body}
            _share_definitions(document["paths"], schemas)
            app.openapi_schema = document
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _share_definitions(node: Any, schemas: dict[str, Any]) -> None:
    """Move the `$defs` of bodies that routes read themselves to where a reference in an OpenAPI document finds them."""
    if isinstance(node, dict):
        for name, schema in node.pop("$defs", {}).items():
            _share_definitions(schema, schemas)
            schemas.setdefault(name, schema)
        if str(node.get("$ref", "")).startswith("#/$defs/"):
            node["$ref"] = "#/components/schemas/" + node["$ref"].rpartition("/")[2]
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            _share_definitions(each, schemas)


def _correct(responses: dict[str, Any]) -> None:
    if responses.pop("422", None) is not None:
        responses.setdefault("400", _BAD)
    responses.setdefault("default", _ANY)
