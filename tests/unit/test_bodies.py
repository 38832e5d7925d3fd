"""Long bodies are read beside the event loop, and come out as short ones do."""

import inspect
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.params import Form
from fastapi.routing import APIRoute
from pydantic import field_validator
from starlette.routing import BaseRoute

from api import app as whole
from api.callers import fair_pool
from api.callers.fair_pool import FairPool
from api.http import errors
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.fields import RequestModel

read_by: list[str] = []
bodies: list[bytes] = []


class Texts(RequestModel):
    texts: list[str]

    @field_validator("texts")
    @classmethod
    def _note(cls, texts: list[str]) -> list[str]:
        read_by.append(threading.current_thread().name)
        return texts


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/texts")
    async def count(body: Texts) -> int:
        return len(body.texts)

    @router.post("/bytes")
    async def keep(request: Request) -> None:
        bodies.extend([await request.body(), await request.body()])

    app = FastAPI()
    errors.install(app)
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        yield client


async def test_a_long_body_is_read_once_in_a_thread_and_a_short_one_at_once(http: httpx.AsyncClient) -> None:
    read_by.clear()
    for count in (3, LONG_BYTES):
        assert (await http.post("/texts", json={"texts": ["a"] * count})).json() == count
    own, other = read_by
    assert own == threading.current_thread().name != other


@pytest.mark.parametrize("count", [3, LONG_BYTES])
async def test_what_is_wrong_is_told_alike_whatever_the_length(http: httpx.AsyncClient, count: int) -> None:
    async def told(content: bytes) -> Any:
        answer = await http.post("/texts", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        return answer.json()["error"]["message"], answer.json()["error"]["param"]

    texts = b'"a",' * count
    assert await told(b'{"texts": [%s1]}' % texts) == (
        f"invalid 'texts[{count}]': Input should be a valid string", f"texts[{count}]"
    )  # fmt: skip
    assert await told(b'{"texts": [%s"a"], "x": 1}' % texts) == ("unknown parameter 'x'", "x")
    assert await told(b'{"texts": [%s' % texts) == ("the body is not valid JSON: Expecting value", None)


async def test_a_full_pool_is_reported_as_such(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_pool, "_pool", FairPool(places=1, most_waiting=0))
    answer = await http.post("/texts", json={"texts": ["a"] * LONG_BYTES})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


async def test_a_body_that_its_route_reads_is_not_copied(http: httpx.AsyncClient) -> None:
    sent = b"a" * LONG_BYTES
    bodies.clear()
    await http.post("/bytes", content=sent)
    assert [body is sent for body in bodies] == [True, True]


def api_routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif (included := getattr(route, "original_router", None)) is not None:
            yield from api_routes(included.routes)


def test_every_route_with_a_long_body_is_one_of_these() -> None:
    routes = [route for module in whole.ROUTED for route in api_routes(module.router.routes)]
    read = [route for route in routes if "await request.body()" in inspect.getsource(route.endpoint)]
    assert len(read) >= 4 and not [route.path for route in read if not isinstance(route, BodyRoute)]
    with_json = [route for route in routes if route.body_field and not isinstance(route.body_field.field_info, Form)]
    assert len(with_json) > 20
    assert not [route.path for route in with_json if not isinstance(route, BodyRoute)]
