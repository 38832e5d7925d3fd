"""Every error has OpenAI's shape, whatever raised it; bodies are bounded; keys are checked."""

import asyncio
import errno
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI, Request
from pydantic import BaseModel, SecretStr
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError, WatchError

from api.app import create_app
from api.http import errors
from api.http.api_keys import KeyRing
from api.http.auth import OwnOrigin, RequireKey
from api.http.context import RequestContext
from api.http.limits import UPLOADS, BodyLimit
from shared.errors import ParallmError, QueueFullError, UnknownModelError
from shared.process.api_settings import ApiSettings
from shared.telemetry.metrics import Tally


class Body(BaseModel):
    number: int


def app_with(error: BaseException | None = None, key: str = "") -> FastAPI:
    app = FastAPI()
    errors.install(app)

    @app.get("/raise")
    async def fail() -> None:
        assert error is not None
        raise error

    @app.post("/body")
    async def body(body: Body) -> Body:
        return body

    @app.post("/v1/files")
    async def upload(request: Request) -> int:
        async with request.form() as form:
            return len(form)

    @app.get("/livez")
    async def livez() -> str:
        return "ok"

    settings = ApiSettings(max_request_bytes=1024, max_upload_bytes=5000, api_key=SecretStr(key))
    app.add_middleware(BodyLimit, settings)
    if key:
        app.add_middleware(RequireKey, KeyRing.of(settings))
    else:
        app.add_middleware(OwnOrigin, ["https://friend.example"])
    app.add_middleware(RequestContext, Tally())
    return app


async def ask(app: FastAPI, method: str, path: str, **arguments: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.request(method, path, **arguments)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (UnknownModelError("no", param="model"), 404, "invalid_request_error", "model_not_found"),
        (QueueFullError("full", retry_after_s=3), 429, "rate_limit_error", "queue_full"),
        (RedisConnectionError("gone"), 503, "service_unavailable_error", "service_unavailable"),
        (asyncio.CancelledError(), 503, "service_unavailable_error", "service_unavailable"),  # the server ends
        (WatchError("gone"), 503, "service_unavailable_error", "service_unavailable"),
        (ResponseError("WRONGTYPE"), 500, "server_error", None),
        (RuntimeError("secret"), 500, "server_error", None),
    ],
)
async def test_errors_keep_status_type_and_code(error: BaseException, status: int, kind: str, code: str | None) -> None:
    response = await ask(app_with(error), "GET", "/raise")
    detail = error_of(response)
    assert (response.status_code, detail["type"], detail["code"]) == (status, kind, code)
    assert "secret" not in response.text


async def test_a_full_queue_says_when_to_try_again() -> None:
    response = await ask(app_with(QueueFullError("full", retry_after_s=3)), "GET", "/raise")
    assert response.headers["retry-after"] == "3"


async def test_a_fault_of_ours_is_answered_under_a_request_id() -> None:
    response = await ask(app_with(RuntimeError("x")), "GET", "/raise", headers={"x-request-id": "abc"})
    assert response.headers["x-request-id"] == "abc"
    assert error_of(response)["type"] == "server_error"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "param"),
    [
        ("GET", "/nowhere", None, 404, None),
        ("DELETE", "/body", None, 405, None),
        ("POST", "/body", b"{", 400, None),
        ("POST", "/body", b"[]", 400, None),
        ("POST", "/body", b"{}", 400, "number"),
        ("POST", "/body", b'{"number": "x"}', 400, "number"),
        ("POST", "/body", b"\xff\xfe", 400, None),
        ("POST", "/body", None, 400, None),
    ],
)
async def test_requests_that_no_route_takes(
    method: str, path: str, content: bytes | None, status: int, param: str | None
) -> None:
    response = await ask(app_with(), method, path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert error_of(response)["param"] == param


async def test_a_wrong_method_is_answered_with_those_that_the_path_takes() -> None:
    app = app_with()
    app.delete("/body")(lambda: None)
    response = await ask(app, "GET", "/body")
    assert (response.status_code, response.headers["allow"]) == (405, "DELETE, POST")
    assert "takes DELETE and POST" in error_of(response)["message"]


async def test_a_body_that_announces_too_much_is_refused_unread() -> None:
    response = await ask(app_with(), "POST", "/body", content=b"x" * 1025)
    assert response.status_code == 413
    assert "1024" in error_of(response)["message"]


async def test_a_body_of_unknown_length_is_cut_off_while_it_is_read() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1_000_000:
            sent += 100
            yield b" " * 100

    response = await ask(app_with(), "POST", "/body", content=endless(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"
    assert sent < 5000


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
async def test_a_body_whose_type_nobody_said_is_json(headers: dict[str, str]) -> None:
    assert (await ask(app_with(), "POST", "/body", content=b'{"number": 5}', headers=headers)).json() == {"number": 5}
    form = await ask(app_with(), "POST", "/body", content=b"number=5", headers=headers)
    assert form.status_code == 400 and "not valid JSON" in error_of(form)["message"]


async def test_uploads_have_a_bound_of_their_own() -> None:
    fits = await ask(app_with(), "POST", "/v1/files", files={"file": b"x" * 3000})
    assert fits.json() == 1
    too_large = await ask(app_with(), "POST", "/v1/files", files={"file": b"x" * 6000})
    assert too_large.status_code == 413


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "Multipart/Form-Data;boundary=x"])
async def test_only_routes_that_take_uploads_read_so_much(kind: str) -> None:
    """To any other route a body that called itself an upload was read into memory, up to the bound of uploads."""
    refused = await ask(app_with(), "POST", "/body", content=b"x" * 3000, headers={"content-type": kind})
    assert refused.status_code == 413
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%s\r\n--x--\r\n' % (b"x" * 3000)
    taken = await ask(app_with(), "POST", "/v1/files", content=form, headers={"content-type": kind})
    assert taken.json() == 1


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    """The OpenAPI documents of two apps, one made after the other."""
    return [create_app(ApiSettings(redis="redis://127.0.0.1:1")).openapi() for _ in range(2)]


def test_every_route_that_describes_an_upload_has_their_bound(documents: list[dict[str, Any]]) -> None:
    described = {
        path
        for path, operations in documents[0]["paths"].items()
        if "multipart/form-data" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert len(described) >= 6
    assert all(UPLOADS.fullmatch(path) for path in described)


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer right", 200), ("bearer right", 200), ("Bearer wrong", 401), ("right", 401), ("", 401)],
)
async def test_the_api_key_is_asked_for(header: str, status: int) -> None:
    app = app_with(key="right")
    response = await ask(app, "POST", "/body", json={"number": 1}, headers={"authorization": header})
    assert response.status_code == status
    if status == 401:
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


async def test_probes_need_no_key() -> None:
    assert (await ask(app_with(key="right"), "GET", "/livez")).status_code == 200


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("x" * 200, False), ("has space", False), ("", False)])
async def test_request_ids_are_echoed_or_made(given: str, kept: bool) -> None:
    response = await ask(app_with(), "GET", "/nowhere", headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is kept
    assert response.headers["x-request-id"]


async def test_the_request_id_is_on_every_log_line() -> None:
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        await ask(app_with(RuntimeError("x")), "GET", "/raise", headers={"x-request-id": "abc"})
    assert {line["event"] for line in lines} == {"api.fault", "api.request"}
    assert all(line["request_id"] == "abc" for line in lines)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "temporary folder"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found"), "temporary folder"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "Redis cannot be reached"),
        (TimeoutError(), "Redis cannot be reached"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "Redis cannot be reached"),
    ],
)
def test_a_full_folder_is_not_called_a_redis_that_is_away(fault: OSError, said: str) -> None:
    error = errors.from_fault(fault)
    assert error.status == 503 and said in error.message


def test_unknown_faults_are_ours() -> None:
    assert type(errors.from_fault(ValueError("x"))) is ParallmError
    assert json.loads(errors.error_object(ParallmError("x", param="p")))["error"]["param"] == "p"


def test_every_reference_of_the_openapi_document_leads_somewhere(documents: list[dict[str, Any]]) -> None:
    for document in documents:  # what routes describe by constants is there for the next app, too
        named = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
        there = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
        assert named and named <= there, sorted(named - there)
