"""The desk of a trainer without Redis: who holds a policy, what is believed, and how orders change hands."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.redis.training.board import TrainingBoard, ring_id
from shared.training import TrainerStatus
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, Answer, working
from tests.redis.test_api_training import ONE
from tests.waiting import HANG_S

BEAT = "/v1/trainers/policy"


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[Api]:
    async with working(redis_url, lambda spec: Answer()), api(redis_url, request_timeout_s=HANG_S) as serving:
        await publish(serving.ring.adapters)
        yield serving


def status(**fields: Any) -> dict[str, Any]:
    return {"policy": "policy", "run": "r", "owner": "somebody", "train_step": 3, **fields}


async def test_one_trainer_holds_a_policy_and_is_believed(server: Api, redis: Redis) -> None:
    first = await server.http.put(BEAT, json={"owner": "a", "base_sha256": CARD.base_sha256, "status": status()})
    assert first.json() == {"owner": "a", "model": CARD.name, "ring": await ring_id(redis)}
    other = await server.http.put(BEAT, json={"owner": "b", "status": status(train_step=99)})
    assert other.json() == {"owner": "a", "model": "", "ring": ""}
    board = TrainingBoard(redis, "policy")
    told = await board.status()
    assert isinstance(told, TrainerStatus) and (told.owner, told.train_step) == ("a", 3)
    claims = {"ranks": [{"rank": 0, "host": "h", "address": "a", "sums_by": "ring", "state": "lost"}]}
    far = status(train_step=4, heartbeat_ms=1 << 50, **claims)
    await server.http.put(BEAT, json={"owner": "a", "status": far})
    told = await board.status()
    assert told is not None and (told.train_step, told.ranks) == (4, ()), "it has no ranks, and the time is the api's"
    assert 0 < told.heartbeat_ms < 1 << 50
    point = {"train_step": 3, "policy_step": 1, "version": 2, "at_ms": 5, "loss": 0.5}
    await server.http.put(BEAT, json={"owner": "a", "point": point})
    assert [each.loss for each in await board.points()] == [0.5]
    assert (await server.http.put(BEAT, json={"owner": "b", "instead_of": "a"})).json()["owner"] == "b"
    await server.http.delete(BEAT, params={"owner": "a"})
    assert await board.alive() == "b"
    await server.http.delete(BEAT, params={"owner": "b"})
    assert await board.alive() == ""
    await server.post(f"{BEAT}/alerts", {"policy": "policy", "kind": "no_signal", "message": "dull", "at_ms": 1})
    assert (await board.alert_counts())["no_signal"] == 1


async def test_an_order_is_the_holders_until_it_is_done(server: Api) -> None:
    await server.http.put(BEAT, json={"owner": "a"})
    asking = asyncio.create_task(server.post("/v1/training/update", {"trajectories": [ONE]}))
    found: list[dict[str, Any]] = []
    while not found:
        found = (await server.post(f"{BEAT}/orders", {"owner": "a"})).json()
    (order,) = found
    assert order["order"]["type"] == "update" and not order["again"] and not order["too_late"]
    assert (await server.post(f"{BEAT}/orders", {"owner": "a"})).json() == []
    again = (await server.post(f"{BEAT}/orders", {"owner": "a", "after": "0-0"})).json()
    assert [(each["entry"], each["again"]) for each in again] == [(order["entry"], True)]
    assert (await server.post(f"{BEAT}/orders", {"owner": "a", "after": order["entry"]})).json() == []
    thief = await server.post(f"{BEAT}/orders", {"owner": "b"})
    assert (thief.status_code, thief.json()["error"]["code"]) == (409, "conflict")
    answer = {"type": "refused", "code": "conflict", "message": "not now"}
    letter = {"owner": "a", "entry": order["entry"], "id": order["id"], "answer": answer, "done": True}
    assert (await server.post(f"{BEAT}/orders/answers", letter)).status_code == 200
    assert (await asking).json()["error"]["message"] == "not now"
    assert (await server.post(f"{BEAT}/orders", {"owner": "a", "after": "0-0"})).json() == []


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("PUT", BEAT, {}, 400),
        ("PUT", BEAT, {"owner": ""}, 400),
        ("PUT", BEAT, {"owner": "x" * 300}, 400),
        ("PUT", BEAT, {"owner": "a", "colour": 1}, 400),
        ("PUT", BEAT, b'{"owner": "\\ud800"}', 400),
        ("PUT", BEAT, b"\xff", 400),
        ("PUT", BEAT, {"owner": "a", "status": {**status(), "policy": "other"}}, 400),
        ("PUT", BEAT, {"owner": "a", "base_sha256": "none"}, 404),
        ("PUT", "/v1/trainers/no%20name", {"owner": "a"}, 400),
        ("POST", f"{BEAT}/alerts", {"policy": "policy", "kind": "fire", "message": "", "at_ms": 1}, 400),
        ("POST", f"{BEAT}/orders", {"owner": "a", "after": "x"}, 400),
        ("POST", f"{BEAT}/orders/answers", {"owner": "a", "entry": "9" * 30 + "-0", "id": "o"}, 400),
        ("POST", f"{BEAT}/orders/answers", {"owner": "z", "entry": "1-0", "id": "o"}, 409),
    ],
)
async def test_what_is_not_understood_is_refused(
    server: Api, method: str, path: str, body: dict[str, Any] | bytes, code: int
) -> None:
    await server.http.put(BEAT, json={"owner": "a"})
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = await server.http.request(method, path, content=content)
    assert answer.status_code == code, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
